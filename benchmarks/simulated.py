"""Thousands of simulated sweeps: how often is a sentence of their answers false?

    python benchmarks/simulated.py

The runs have known true rates and accuracies, and noise like that of real machines. A world has a time axis on which the
runs take their windows. The log time of a sample in a window is

    -log(true rate) + mood + drift + burst + window noise

The mood is of a whole run, drift and bursts are of the time, and the window noise is of the run (autocorrelated). A claim is
false only where the reference contradicts it by more than the reference itself may be off; that of a simulation is exact.
The package's own rules are held against these results (`FEWEST` in src/sweep/passes.py).
"""

import itertools
import math
import multiprocessing
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from harness import arguments, rows, write_result

from batchscope.analysis.answer import Answer, answer
from batchscope.analysis.groups import Group
from batchscope.analysis.run import Run
from batchscope.records.read import SCHEMA
from batchscope.records.step_parts import PARTS
from batchscope.records.step_times import StepTimes
from batchscope.sweep.passes import FEWEST

SHARE_OFF = 0.1  # by which a stated share may be off, as a fraction of it
REACHED = 0.88  # of the best rate, by a size of which 0.9 is claimed
WINDOW_S = 0.25
METRIC = "test/acc"
SIZES = (8, 32, 64, 128, 256, 512)
SWEEPS = 600  # of each kind of noise

# --- claims


@dataclass(frozen=True)
class Reference:
    """What is true. The rates of a simulation are exact; those of a measurement may be off."""

    rates: Mapping[int, float]  # samples/s
    off: Mapping[int, float] = field(default_factory=dict)  # how far a rate may be off, as a fraction
    metrics: Mapping[int, float] = field(default_factory=dict)  # the higher the better

    def share(self, size: int, of: int) -> float:
        """The rate of a size ÷ that of another."""
        return self.rates[size] / self.rates[of]

    def margin(self, size: int, of: int) -> float:
        """How far their ratio may be off, as a fraction."""
        return math.hypot(self.off.get(size, 0.0), self.off.get(of, 0.0))

    def of_best(self, size: int) -> float:
        """The rate of a size ÷ the best one."""
        return self.rates[size] / max(self.rates.values())


def why_false(claim: Mapping[str, Any], truth: Reference) -> str | None:
    """Why a claim is false, in words; None if it is true, or the reference says nothing about it."""
    kind, size, said = claim["kind"], int(claim["batch_size"]), float(claim.get("share", math.nan))
    if kind == "worse":
        good = truth.metrics and truth.metrics[size] >= max(truth.metrics.values())
        return f"worse {size}: its {claim['metric']} is as good as any" if good else None
    for other in set(claim["among"]) - {size} if "among" in claim else [int(claim["of"])]:
        share, margin = truth.share(size, other), truth.margin(size, other)
        is_false = {
            "fastest": share < 1 - margin or (share == 1 and not margin),  # another size is as fast
            "reaches": share < REACHED * (1 - margin),
            "share": abs(said / share - 1) > SHARE_OFF + margin,
            "at_most": share > said * (1 + margin),
            "at_least": share < said * (1 - margin),
        }
        if is_false[kind]:
            return f"{kind} {size}: it has {share:.3f} of the rate of {other}; said: {claim}"
    return None


# --- sweeps


@dataclass(frozen=True)
class Scenario:
    """Sweeps of one kind, and what disturbs their measurement. Standard deviations are in logs."""

    name: str
    passes: int = 30
    kinds: tuple[str, ...] = ("rising", "near")  # of true rates
    sizes: tuple[int, ...] = SIZES
    window: float = 0.1  # of a window
    alike: float = 0.1  # autocorrelation of a run's successive windows
    drift: float = 0.0  # of the random walk's step from pass to pass
    mood: float = 0.0  # of whole runs: what separate processes of the same thing differ by
    busy: float = 0.0  # share of the time in bursts of 0.2 to 3 s, in which steps take twice as long; small ones less
    seen: bool = True  # whether the windows say what others took
    shared: bool = True  # passes; else the runs follow each other
    seeds: int = 1
    samples: int = 0  # of the test set; 0: not trained
    seed_noise: float = 0.0  # standard deviation of the accuracy over seeds
    looks: bool = False  # ends as soon as the answer is decided, and no rate is vague


GRID = (
    Scenario("quiet, 30 passes"),
    Scenario("quiet, 60 passes", 60),
    Scenario("6 passes", 6),
    Scenario("10 passes", 10),
    Scenario("window 2 %", window=0.02),
    Scenario("AR 0.7", alike=0.7),
    Scenario("AR 0.7, 10 passes", 10, alike=0.7),
    Scenario("drift 5 % a pass", drift=0.05),
    Scenario("6 equal sizes", kinds=("equal",)),
    Scenario("others at 0.85 to 0.95", kinds=("near",)),
    Scenario("10 sizes", sizes=(4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)),
    Scenario("bursts 20 %", busy=0.2),
    Scenario("bursts 20 %, unseen", busy=0.2, seen=False),
    Scenario("bursts 50 %", busy=0.5),
    Scenario("processes differ by 3 %", mood=0.03),
    Scenario("separate", 20, shared=False),
    Scenario("separate, drift 3 %", 20, drift=0.03, shared=False),
    Scenario("separate, moods 10 %", 20, window=0.05, mood=0.1, shared=False),
    Scenario("separate, moods 10 %, 3 runs", 20, window=0.05, mood=0.1, shared=False, seeds=3),
    Scenario("trained, 10,000 samples", samples=10_000),
    Scenario("trained, 1,000 samples", samples=1_000, seed_noise=0.003),
    Scenario("trained, 3 seeds, 1,000 samples", 12, seeds=3, samples=1_000, seed_noise=0.003),
    Scenario("quiet, ends when decided", 60, looks=True),
    Scenario("AR 0.3 near, ends when decided", 60, kinds=("near",), alike=0.3, looks=True),
)


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
    """True accuracies of the mean seed: equal up to some size, and falling beyond it."""
    best, last, fall = rng.uniform(0.6, 0.99), float(rng.choice([*sizes, math.inf])), rng.uniform(0.002, 0.05)
    return {size: float(best - fall * math.log2(max(size / last, 1))) for size in sizes}


@dataclass(frozen=True)
class Windows:
    """What is measured of runs, one a size and seed."""

    cells: Sequence[tuple[int, int]]  # (runs,) size and seed
    step_s: np.ndarray  # (runs, passes) median step of each window
    taken: np.ndarray  # (runs, passes) share of the processor that others took
    metrics: Sequence[dict[str, float]]  # (runs,)


def simulate(of: Scenario, truth: Reference, rng: np.random.Generator) -> Windows:
    """The windows of a sweep."""
    cells, passes = [(size, seed) for size in truth.rates for seed in range(of.seeds)], of.passes
    count = len(cells)
    place = np.arange(count * passes).reshape(count, passes)  # (run, pass) → its place in time
    if of.shared:
        place = np.stack([number * count + rng.permutation(count) for number in range(passes)], axis=1)
    drift = np.cumsum(rng.normal(0, of.drift / math.sqrt(count if of.shared else 1), count * passes))[place]
    covered = _bursts(count * passes, of.busy, rng)[place]
    strength = np.linspace(0.5, 1, count)[:, None]  # the smallest size suffers half as much of a burst as the largest
    sizes = np.array([size for size, _ in cells])[:, None]
    exact = -np.log([truth.rates[size] for size, _ in cells])[:, None] + rng.normal(0, of.mood, (count, 1))
    log_s = exact + drift + np.where(covered > 0.5, math.log(2), 0.0) * strength
    log_s += of.window * _autoregressive(count, passes, of.alike, rng)
    taken = np.clip(0.02 + 0.01 * rng.normal(size=place.shape) + (covered / 2 if of.seen else 0), 0, 1)
    metrics = [_tested(of, truth.metrics[size], rng) if of.samples else {} for size, _ in cells]
    return Windows(cells, np.exp(log_s) * sizes, taken, metrics)


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


def _tested(of: Scenario, mean: float, rng: np.random.Generator) -> dict[str, float]:
    """The measured accuracy of a seed."""
    accuracy = np.clip(mean + rng.normal(0, of.seed_noise), 0, 1)
    return {METRIC: float(rng.binomial(of.samples, accuracy)) / of.samples}


def runs(of: Scenario, windows: Windows, passes: int) -> list[Run]:
    """The runs as they are after so many passes, with their records and windows in memory."""
    found = []
    for number, (size, seed) in enumerate(windows.cells):
        step_s, taken = windows.step_s[number, :passes].astype(np.float32), windows.taken[number, :passes]
        median = float(np.median(step_s))
        record = {
            "config": {"data": {"_target_": "…", "batch_size": size}, "model": {"_target_": "…"}, "seed": seed},
            "choices": {"model": "simulated", "data": "simulated"},
            "overrides": [f"data.batch_size={size}"],
            "status": "finished",
            "schema": SCHEMA,
            "hardware": {"device": "cpu", "device_name": "simulated", "torch_threads": 2},
            "throughput": {"batch_size": size, "samples_per_sec": size / median, "step_ms_median": 1e3 * median},
            "metrics": windows.metrics[number],
            "evaluated": {"test": of.samples},
            "epochs": 1,
        }
        run = Run(str(number), Path("simulated") / str(number), record)
        run.__dict__["steps"] = StepTimes(  # what the property would read
            step_s=step_s,
            window=np.arange(passes),
            pass_=np.arange(passes) if of.shared else np.full(passes, -1),
            start_unix=WINDOW_S * np.arange(passes, dtype=float),
            others_share=taken,
            disturbed=(taken > 0.25).astype(float),  # what hardware/contention.py would say of such a window
            parts_s=np.zeros((0, len(PARTS)), np.float32),
            parts_every=1,
        )
        found.append(run)
    return found


# --- answers


def one(scenario: Scenario, seed: int) -> dict[str, Any]:
    """Simulate a sweep, and judge its answer by the truth."""
    rng = np.random.default_rng([seed, sum(map(ord, scenario.name))])
    rates = random_rates(scenario.kinds[seed % len(scenario.kinds)], scenario.sizes, rng)
    truth = Reference(rates, metrics=random_accuracies(scenario.sizes, rng) if scenario.samples else {})
    windows, passes = simulate(scenario, truth, rng), FEWEST if scenario.looks else scenario.passes
    found = answered(scenario, windows, passes)
    while passes < scenario.passes and (found.size is None or found.vague):
        passes += 1
        found = answered(scenario, windows, passes)
    ratios = [(a, b, found.rates.ratio(a, b)) for a, b in itertools.combinations(scenario.sizes, 2)]
    overall = found.overall.ratios.items() if found.overall else ()
    reaches = [ratio.reach for size, ratio in overall if size != found.overall.best]
    return {
        "false": [claim["kind"] for claim in found.claims if why_false(claim, truth)],
        "stated": sorted({claim["kind"] for claim in found.claims}),
        "decided": found.size is not None,
        "of_best": found.decision and found.size and rates[found.size] / max(rates[s] for s in found.decision.ratios),
        "covered": [ratio.low <= rates[a] / rates[b] <= ratio.high for a, b, ratio in ratios],
        "reach": float(np.median(reaches)) if reaches else None,
    }


def answered(scenario: Scenario, windows: Windows, passes: int) -> Answer:
    """The answer after so many passes."""
    found = answer(Group("simulated", runs(scenario, windows, passes)), [METRIC] if scenario.samples else [])
    assert found is not None
    return found


def row(name: str, sweeps: Sequence[Mapping[str, Any]]) -> list[str]:
    """The sweeps of a scenario: how many have a false claim, of which kind, and how many are decided."""
    false, stated = (Counter(kind for each in sweeps for kind in set(each[key])) for key in ("false", "stated"))
    shares = [each["of_best"] for each in sweeps if each["of_best"]]
    return [
        name,
        f"{np.mean([bool(each['false']) for each in sweeps]):.1%}",
        ", ".join(f"{kind} {false[kind]} of {stated[kind]}" for kind in sorted(false)) or "–",
        f"{np.mean([each['decided'] for each in sweeps]):.0%}",
        f"{np.mean([held for each in sweeps for held in each['covered']]):.0%}",
        f"{np.median([each['reach'] for each in sweeps if each['reach']] or [np.nan]):.1%}",
        f"{min(shares):.2f}" if shares else "–",
    ]


def main() -> None:
    args = arguments(__doc__).parse_args()
    grid, count, processes = (GRID[:1], 4, 1) if args.smallest else (GRID, SWEEPS, os.cpu_count())
    lines = []
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for scenario in grid:
            sweeps = pool.starmap(one, [(scenario, seed) for seed in range(count)], chunksize=8)
            lines.append(row(scenario.name, sweeps))
            print(*lines[-1], sep=" | ", flush=True)
    head = [
        "noise",
        "with a false claim",
        "of which",
        "decided",
        "90 % intervals that hold",
        "half-width",
        "least share",
    ]
    text = f"{rows(head, lines)}\n\n{count} sweeps of each kind. A claim is false by the exact rates."
    write_result("answers_attack", text, {"sweeps": count, "head": head, "rows": lines}, args)


if __name__ == "__main__":
    main()
