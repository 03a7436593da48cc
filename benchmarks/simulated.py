"""Is the named batch size right? Simulates sweeps with known true rates, over a grid of noise.

    python benchmarks/simulated.py

A sweep takes its windows in passes, and ends as a timed sweep does: by the rule of choice, with the passes of
src/sweep/passes.py. The log time of a sample in a window is

    -log(true rate) + mood + drift + burst + window noise

The mood is constant within a run. Drift and bursts depend on the time. The window noise is autocorrelated within a run.

A third of the true rates saturate slowly, as b / (b + h); a third have a sharp knee; and a third fall after a peak.
"""

import math
import multiprocessing
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from harness import arguments, rows, write_result

from batchscope.analysis.noise import PROCESSES_SD, SEPARATE_RUNS_SD, Rates
from batchscope.analysis.quality import Quality, find_quality
from batchscope.analysis.run import Run
from batchscope.analysis.selection import Selection, select
from batchscope.analysis.windows import COLUMNS
from batchscope.sweep.passes import AT_ONCE, MIN_PASSES, PASSES_PER_CHECK, VISIT_S, Limits

ENOUGH = 0.9  # of the best rate: the smallest size that reaches it is the right one
NEARLY = 0.85  # of the best rate: each named size should reach it
FIGURES = {  # each figure, and whether it should hold
    "named": True,
    f"≥ {NEARLY} of the best": True,
    "at most one doubling too large": True,
    "too small": False,
    "sure share false": False,
}
DISTURBED = (
    0.25  # of the processor, taken by others; `is_disturbed` also asks for more than was left idle, not simulated
)
METRIC = "test/acc"
SIX, EIGHT, LARGE = ((32, 1024), (4, 512), (16, 2048))  # the smallest and the largest size
# Measured window noise of eight sizes beside a process that takes one of two cores.
BESIDE_A_CORE = (1.5, 1.3, 0.6, 1.0, 0.9, 0.5, 0.25, 0.2)
SWEEPS = 600  # of each kind of noise


def judge(chosen: int | None, sure: float | None, shares: Mapping[int, float], margin: float = 0.0) -> dict[str, bool]:
    """Which figures hold for an answer.

    Args:
        chosen: the named size, if there is one.
        sure: the sure share of the best rate that the answer states; None counts as `ENOUGH`.
        shares: the true shares of all sizes.
        margin: by what fraction the true share of the chosen size may be wrong.
    """
    if chosen is None:
        return dict.fromkeys(FIGURES, False)
    smallest = min(size for size, share in shares.items() if share >= ENOUGH)
    upper = shares[chosen] * (1 + margin)
    is_small, is_false = chosen < smallest and upper < ENOUGH, upper < (ENOUGH if sure is None else sure)
    held = (True, shares[chosen] >= NEARLY, chosen <= 2 * smallest, is_small, is_false)
    return dict(zip(FIGURES, held, strict=True))


# --- sweeps


@dataclass(frozen=True)
class Scenario:
    """Sweeps of one kind, and what disturbs their measurement. Standard deviations are in logs."""

    name: str
    sizes: tuple[int, int] = EIGHT
    curves: tuple[str, ...] = ("saturating", "knee", "peak")  # of true rates
    passes: int = 0  # number of passes; 0: until the rule ends the sweep
    window: float | tuple[float, ...] = 0.1  # noise of a window, or by size
    autocorrelation: float = 0.1  # of a run's successive windows
    drift: float = 0.0  # of the random walk's step from pass to pass
    mood: float = 0.0  # of whole runs: the spread of separate processes of the same code
    load: float = 0.02  # constant share of other programs in the processor; its mean cost is in the true rates
    busy: float = 0.0  # share of the time in bursts of 0.2 to 3 s, which double the step time, less for small sizes
    reported: bool = True  # whether the windows report the share of other programs
    shared: bool = True  # whether the runs share passes; otherwise they follow each other
    seeds: int = 1
    samples: int = 0  # of the test set; 0: not trained
    seed_noise: float = 0.0  # standard deviation of the accuracy over seeds


GRID = (
    Scenario("quiet, eight sizes"),
    Scenario("quiet, six sizes", SIX),
    Scenario("quiet, eight large sizes", LARGE),
    Scenario("window noise 20 %", window=0.2),
    Scenario("AR 0.3, window noise 15 %", autocorrelation=0.3, window=0.15),
    Scenario("AR 0.7", autocorrelation=0.7),
    Scenario("processes differ by 2 %", mood=0.02),
    Scenario("processes differ by 3.5 %", mood=0.035),
    Scenario("drift 5 % a pass", drift=0.05),
    Scenario("six equal sizes", SIX, curves=("equal",)),
    Scenario("others at 0.85 to 0.95", curves=("near",)),
    Scenario("bursts 20 %", busy=0.2),
    Scenario("bursts 20 %, unseen", busy=0.2, reported=False),
    Scenario("bursts 50 %", busy=0.5),
    Scenario("bursts 50 %, unseen", busy=0.5, reported=False),
    Scenario("beside a process that takes a core", window=BESIDE_A_CORE, load=0.5),
    Scenario("separate runs, moods 10 %", passes=20, window=0.05, mood=0.1, shared=False),
    Scenario("trained, 10,000 samples", passes=30, samples=10_000),
    Scenario("trained, 1,000 samples", passes=30, samples=1_000, seed_noise=0.003),
    Scenario("trained, 3 seeds, 1,000 samples", passes=12, seeds=3, samples=1_000, seed_noise=0.003),
)


def most_passes(sizes: int) -> int:
    """The largest number of passes of a sweep, if no visit takes longer than planned."""
    return round(min(sizes, AT_ONCE) * Limits().seconds / VISIT_S / sizes)


def random_rates(curve: str, sizes: Sequence[int], rng: np.random.Generator) -> dict[int, float]:
    """True rates: a `saturating` curve; one with a `knee`, or that and a `peak`, after which it falls by 3 to 30 % a doubling;
    all `equal`; or `near`: others at 0.85 to 0.95 of the best.
    """
    half, floor, best, fall = rng.uniform(5, 120), rng.uniform(2, 200), rng.choice(sizes), rng.uniform(0.03, 0.3)

    def knee(size: int) -> float:
        return size / (size**3 + floor**3) ** (1 / 3)

    share = {
        "saturating": lambda size: size / (size + half),
        "knee": knee,
        "peak": lambda size: knee(min(size, best)) * (1 - fall) ** max(0.0, math.log2(size / best)),
        "equal": lambda size: 1.0,
        "near": lambda size: 1.0 if size == best else rng.uniform(0.85, 0.95),
    }[curve]
    return {size: 1e4 * share(size) for size in sizes}


def random_accuracies(sizes: Sequence[int], rng: np.random.Generator) -> dict[int, float]:
    """True accuracies of the mean seed: equal up to a random size, and falling beyond it."""
    best, last, fall = rng.uniform(0.6, 0.99), float(rng.choice([*sizes, math.inf])), rng.uniform(0.002, 0.05)
    return {size: float(best - fall * math.log2(max(size / last, 1))) for size in sizes}


def simulate(scenario: Scenario, truth: Mapping[int, float], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The windows of a sweep by column, each of shape (runs, passes)."""
    count, passes = len(truth) * scenario.seeds, scenario.passes or most_passes(len(truth))
    run, number = np.indices((count, passes))
    slot = run * passes + number  # in time
    if scenario.shared:
        slot = np.stack([n * count + rng.permutation(count) for n in range(passes)], axis=1)
    drift = np.cumsum(rng.normal(0, scenario.drift / math.sqrt(count if scenario.shared else 1), count * passes))[slot]
    covered = _bursts(count * passes, scenario.busy, rng)[slot]
    size, rate = (np.repeat([*values], scenario.seeds)[:, None] for values in (truth, truth.values()))
    strength = np.linspace(0.5, 1, count)[:, None]  # a burst slows the smallest size half as much as the largest
    log_s = rng.normal(0, scenario.mood, (count, 1)) - np.log(rate) + drift + (covered > 0.5) * math.log(2) * strength
    log_s += np.repeat(np.broadcast_to(scenario.window, len(truth)), scenario.seeds)[:, None] * _autoregressive(
        count, passes, scenario.autocorrelation, rng
    )
    load = np.clip(scenario.load + 0.01 * rng.normal(size=slot.shape) + (covered / 2 if scenario.reported else 0), 0, 1)
    pass_ = number.astype(str).astype(object) if scenario.shared else np.full(slot.shape, None)
    return dict(zip(COLUMNS, (size + 0 * run, run, pass_, log_s, load, load > DISTURBED), strict=True))


def _bursts(windows: int, busy: float, rng: np.random.Generator) -> np.ndarray:
    """The share of each successive window that lies in a burst of 0.2 to 3 s."""
    edges, now, on = np.linspace(0, windows * VISIT_S, windows + 1), 0.0, rng.random() < busy
    covered = np.zeros(windows)
    while busy and now < edges[-1]:
        length = rng.uniform(0.2, 3) * (1.0 if on else (1 - busy) / busy)
        if on:
            covered += np.clip(np.minimum(edges[1:], now + length) - np.maximum(edges[:-1], now), 0, None)
        now, on = now + length, not on
    return covered / VISIT_S


def _autoregressive(runs: int, windows: int, correlation: float, rng: np.random.Generator) -> np.ndarray:
    """Noise of variance 1 whose neighbours within a run correlate."""
    noise = rng.normal(size=(runs, windows))
    for n in range(1, windows):
        noise[:, n] = correlation * noise[:, n - 1] + math.sqrt(1 - correlation**2) * noise[:, n]
    return noise


def tested(scenario: Scenario, accuracies: Mapping[int, float], rng: np.random.Generator) -> Quality:
    """The quality of the sizes from independent tests of each seed."""
    record, runs = {"status": "finished", "evaluated": {"test": scenario.samples}}, {}
    for size, mean in accuracies.items():
        seeds = np.clip(mean + rng.normal(0, scenario.seed_noise, scenario.seeds), 0, 1)
        shares = [{METRIC: float(rng.binomial(scenario.samples, seed)) / scenario.samples} for seed in seeds]
        runs[size] = [Run("", Path(), record | {"metrics": metrics}) for metrics in shares]
    quality = find_quality(runs, METRIC)
    assert quality is not None
    return quality


# --- answers


def judged_sweep(scenario: Scenario, seed: int) -> dict[str, Any]:
    """Simulate a sweep, and judge its answer by the true rates."""
    rng = np.random.default_rng([seed, sum(map(ord, scenario.name))])
    first, last = scenario.sizes
    sizes = [first * 2**n for n in range(round(math.log2(last / first)) + 1)]
    truth = random_rates(scenario.curves[seed % len(scenario.curves)], sizes, rng)
    windows = simulate(scenario, truth, rng)
    accuracies = random_accuracies(sizes, rng) if scenario.samples else {}
    quality = tested(scenario, accuracies, rng) if scenario.samples else None
    among = quality.candidates if quality else sizes
    large = [
        size for size in accuracies if quality and max(accuracies.values()) - accuracies[size] > 3 * quality.margin
    ]
    passes = scenario.passes or MIN_PASSES
    selection = selection_after(windows, passes, among)
    while (
        not scenario.passes
        and passes < most_passes(len(sizes))
        and not (selection and selection.is_settled(len(among)))
    ):
        passes += PASSES_PER_CHECK
        selection = selection_after(windows, passes, among)
    chosen = selection.size if selection and selection.rule != "undecided" else None
    sure = selection.sure[chosen] if selection and chosen else math.nan
    best = max(truth[size] for size in among)
    return {
        **judge(chosen, sure, {size: truth[size] / best for size in among}),
        "passes": passes,
        "sure": sure,
        "worse": bool(large),
        "worse, a candidate": bool({*large} & {*among}),
    }


def selection_after(windows: Mapping[str, np.ndarray], passes: int, among: Collection[int]) -> Selection | None:
    """The selection of the rule after the first `passes` passes."""
    table = pd.DataFrame({name: values[:, :passes].ravel() for name, values in windows.items()})
    return select(Rates(table, SEPARATE_RUNS_SD, PROCESSES_SD, at_equal_load=True), among)


def row(name: str, sweeps: pd.DataFrame) -> list[str]:
    """How often the figures hold in the sweeps of a scenario, the passes, and how often a much worse size is a candidate."""
    worse = f"{sweeps['worse, a candidate'].sum()} of {sweeps['worse'].sum()}" if sweeps["worse"].any() else "–"
    passes = f"{sweeps['passes'].median():.0f}, {sweeps['passes'].quantile(0.9):.0f}"
    return [
        name,
        *(f"{sweeps[figure].mean():.1%}" for figure in FIGURES),
        f"{sweeps['sure'].median():.2f}",
        passes,
        worse,
    ]


def main() -> None:
    args = arguments(__doc__).parse_args()
    grid, count, processes = (GRID[:1], 4, 1) if args.smallest else (GRID, SWEEPS, os.cpu_count())
    lines = []
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for scenario in grid:
            sweeps = pool.starmap(judged_sweep, [(scenario, seed) for seed in range(count)], chunksize=8)
            lines.append(row(scenario.name, pd.DataFrame(sweeps)))
            print(*lines[-1], sep=" | ", flush=True)
    head = [
        "noise",
        *FIGURES,
        "sure share, median",
        "passes, median and 90 %",
        "worse by three margins, and a candidate",
    ]
    text = f"{rows(head, lines)}\n\n{count} sweeps of each kind."
    write_result("answers_attack", text, {"sweeps": count, "head": head, "rows": lines}, args)


if __name__ == "__main__":
    main()
