"""Simulated sweeps: runs whose true rates and accuracies are known, with noise like that of real machines.

A world has a time axis on which the runs take their windows. The log time of a sample in a window is

    -log(true rate) + mood + drift + burst + window noise

The mood is of a whole run, drift and bursts are of the time, and the window noise is of the run (autocorrelated).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np

from batchscope.analysis.groups import Group
from batchscope.analysis.run import Run
from batchscope.records.read import SCHEMA
from batchscope.records.run_record import close, plan
from batchscope.records.step_parts import PARTS
from batchscope.records.step_times import StepTimes, write_step_times

WINDOW_S = 0.25
STEPS = 3  # of a window in a file: the analysis takes their median
METRIC = "test/acc"
_PER_WINDOW = [one.name for one in fields(StepTimes) if one.name not in ("step_s", "parts_s", "parts_every")]


@dataclass(frozen=True)
class Noise:
    """What disturbs the measurement. Standard deviations are in logs."""

    window: float = 0.1  # of a window
    alike: float = 0.0  # autocorrelation of a run's successive windows
    drift: float = 0.0  # of the random walk's step from pass to pass
    mood: float = 0.0  # of whole runs: what separate processes of the same thing differ by
    busy: float = 0.0  # share of the time in bursts of 0.2 to 3 s, in which steps take `factor` times as long
    factor: float = 2.0
    uneven: bool = False  # the smallest size suffers half as much (in logs) of a burst as the largest
    seen: bool = True  # whether the windows say what others took


@dataclass(frozen=True)
class Truth:
    """What a sweep would find without noise."""

    rates: Mapping[int, float]  # samples/s
    accuracies: Mapping[int, float] = field(default_factory=dict)  # of the mean seed
    samples: int = 10_000  # of the test set
    seed_noise: float = 0.0  # standard deviation of the accuracy over seeds


def simulate(
    truth: Truth, noise: Noise, passes: int, rng: np.random.Generator, shared: bool = True, seeds: int = 1
) -> list[Run]:
    """The runs of a sweep: one a size and seed. With `shared` passes they take turns, else they follow each other."""
    cells = [(size, seed) for size in truth.rates for seed in range(seeds)]
    count = len(cells)
    if shared:  # (run, pass) → its place in time
        place = np.stack([number * count + rng.permutation(count) for number in range(passes)], axis=1)
    else:
        place = np.arange(count * passes).reshape(count, passes)
    steps = rng.normal(0, noise.drift / math.sqrt(count if shared else 1), count * passes)
    drift = np.cumsum(steps)[place]
    covered = _bursts(count * passes, noise.busy, rng)[place]
    sizes = np.array([size for size, _ in cells])
    strength = 0.5 + 0.5 * np.argsort(np.argsort(sizes)) / max(count - 1, 1) if noise.uneven else np.ones(count)
    slowed = np.where(covered > 0.5, math.log(noise.factor), 0.0) * strength[:, None]
    exact = -np.log([truth.rates[size] for size in sizes])[:, None] + rng.normal(0, noise.mood, (count, 1))
    log_s = exact + drift + slowed + noise.window * _autoregressive(count, passes, noise.alike, rng)
    taken = np.clip(0.02 + 0.01 * rng.normal(size=place.shape), 0, 1) + (covered / 2 if noise.seen else 0)
    rounds = np.arange(passes) if shared else np.full(passes, -1)
    return [
        _run(number, *cell, log_s[number], np.clip(taken[number], 0, 1), rounds, truth, rng)
        for number, cell in enumerate(cells)
    ]


def _bursts(windows: int, busy: float, rng: np.random.Generator) -> np.ndarray:
    """The share of each successive window that lies in a burst of 0.2 to 3 s."""
    edges, now, on = np.linspace(0, windows * WINDOW_S, windows + 1), 0.0, rng.random() < busy
    covered = np.zeros(windows)
    while busy and now < edges[-1]:
        length = rng.uniform(0.2, 3) * (1.0 if on else (1 - busy) / busy)
        if on:
            covered += np.clip(np.minimum(edges[1:], now + length) - np.maximum(edges[:-1], now), 0, None)
        now, on = now + length, not on
    return covered / WINDOW_S


def _autoregressive(runs: int, windows: int, alike: float, rng: np.random.Generator) -> np.ndarray:
    """Noise of variance 1 whose neighbours within a run correlate."""
    noise = rng.normal(size=(runs, windows))
    for n in range(1, windows):
        noise[:, n] = alike * noise[:, n - 1] + math.sqrt(1 - alike**2) * noise[:, n]
    return noise


def _run(
    number: int,
    size: int,
    seed: int,
    log_s: np.ndarray,
    taken: np.ndarray,
    rounds: np.ndarray,
    truth: Truth,
    rng: np.random.Generator,
) -> Run:
    """A run with its record and its windows, in memory."""
    seconds, count = np.exp(log_s) * size, len(log_s)
    disturbed = taken > 0.25  # what hardware/contention.py would say of such a window
    median = float(np.median(seconds[~disturbed] if (~disturbed).sum() >= 3 else seconds))
    metrics = {}
    if truth.accuracies:
        accuracy = np.clip(truth.accuracies[size] + rng.normal(0, truth.seed_noise), 0, 1)
        metrics = {METRIC: float(rng.binomial(truth.samples, accuracy)) / truth.samples}
    record = {
        "config": {"data": {"_target_": "…", "batch_size": size}, "model": {"_target_": "…"}, "seed": seed},
        "choices": {"model": "simulated", "data": "simulated"},
        "overrides": [f"data.batch_size={size}"],
        "status": "finished",
        "schema": SCHEMA,
        "hardware": {"device": "cpu", "device_name": "simulated", "torch_threads": 2},
        "throughput": {
            "batch_size": size,
            "samples_per_sec": size / median,
            "step_ms_median": 1e3 * median,
            "step_ms": 1e3 * float(seconds.mean()),
        },
        "metrics": metrics,
        "evaluated": {"test": truth.samples},
        "epochs": 1,
        "seconds": float(seconds.sum()),
    }
    run = Run(str(number), Path("simulated") / str(number), record)
    run.__dict__["steps"] = _step_times(seconds, taken, disturbed, rounds)  # what the property would read
    assert count == len(rounds)
    return run


def _step_times(seconds: np.ndarray, taken: np.ndarray, disturbed: np.ndarray, rounds: np.ndarray) -> StepTimes:
    count = len(seconds)
    return StepTimes(
        step_s=np.repeat(seconds, STEPS).astype(np.float32),
        window=STEPS * np.arange(count),
        pass_=rounds,
        start_unix=WINDOW_S * np.arange(count, dtype=float),
        others_share=taken,
        disturbed=disturbed.astype(float),
        parts_s=np.repeat(seconds, STEPS)[:, None].astype(np.float32) * np.full(len(PARTS), 1 / len(PARTS), np.float32),
        parts_every=1,
    )


def first_windows(run: Run, count: int) -> Run:
    """The run as it was after so many windows."""
    assert isinstance(run.steps, StepTimes)
    rows = {name: getattr(run.steps, name)[:count] for name in _PER_WINDOW}
    steps = {name: getattr(run.steps, name)[: STEPS * count] for name in ("step_s", "parts_s")}
    found = Run(run.name, run.folder, run.record)
    found.__dict__["steps"] = replace(run.steps, **rows, **steps)
    return found


def group(runs: Sequence[Run]) -> Group:
    """The runs as a group, as `find` would give it."""
    return Group("simulated", list(runs))


def write(folder: Path, runs: Sequence[Run]) -> None:
    """The runs as real folders."""
    for run in runs:
        place, facts = folder / run.name, {k: v for k, v in run.record.items() if k not in ("schema", "status")}
        plan(place, **facts)
        close(place, "finished", "")
        assert not isinstance(run.steps, str) and run.steps is not None
        write_step_times(place, run.steps)


def random_rates(kind: str, sizes: Sequence[int], rng: np.random.Generator) -> dict[int, float]:
    """True rates of one kind: `rising` to a plateau, all `equal`, or `near`: others at 0.85 to 0.95 of the best."""
    if kind == "rising":
        floor = rng.uniform(2, 200)
        return {size: 1e4 * size / (size**3 + floor**3) ** (1 / 3) for size in sizes}
    if kind == "equal":
        return dict.fromkeys(sizes, 1e4)
    best = rng.choice(sizes)
    return {size: 1e4 * (1 if size == best else rng.uniform(0.85, 0.95)) for size in sizes}


def random_accuracies(sizes: Sequence[int], rng: np.random.Generator) -> dict[int, float]:
    """True accuracies: equal up to some size, and falling beyond it."""
    best, last, fall = rng.uniform(0.6, 0.99), float(rng.choice([*sizes, math.inf])), rng.uniform(0.002, 0.05)
    return {size: float(best - fall * math.log2(max(size / last, 1))) for size in sizes}
