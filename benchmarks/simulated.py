"""Is the named batch size right? Sweeps are simulated, of which the true rates are known, over a grid of noise.

    python benchmarks/simulated.py

A sweep takes its windows in passes, and ends as a timed sweep does: by the rule of choice, with the passes of
src/sweep/passes.py. The log time of a sample in a window is

    -log(true rate) + mood + drift + burst + window noise

The mood is of a whole run, drift and bursts are of the time, and the window noise is of the run (autocorrelated).

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

ENOUGH = 0.9  # of the best rate: the smallest size that has it is the right one
NEARLY = 0.85  # of the best rate, which each named size should have
FIGURES = {  # and whether they should hold
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
# Window noise that was measured for eight sizes beside a process that takes one of two cores.
BESIDE_A_CORE = (1.5, 1.3, 0.6, 1.0, 0.9, 0.5, 0.25, 0.2)
SWEEPS = 600  # of each kind of noise


def judge(chosen: int | None, sure: float | None, shares: Mapping[int, float], margin: float = 0.0) -> dict[str, bool]:
    """The figures of an answer.

    Args:
        chosen: the named size, if there is one.
        sure: the share of the best rate that it surely has, as the answer states; `ENOUGH_SHARE` where it states none.
        shares: the true shares of all sizes.
        margin: how far the true share of the chosen size may be off, as a fraction of it.
    """
    if chosen is None:
        return dict.fromkeys(FIGURES, False)
    smallest = min(size for size, share in shares.items() if share >= ENOUGH)
    most = shares[chosen] * (1 + margin)
    is_small, is_false = chosen < smallest and most < ENOUGH, most < (ENOUGH if sure is None else sure)
    held = (True, shares[chosen] >= NEARLY, chosen <= 2 * smallest, is_small, is_false)
    return dict(zip(FIGURES, held, strict=True))


# --- sweeps


@dataclass(frozen=True)
class Scenario:
    """Sweeps of one kind, and what disturbs their measurement. Standard deviations are in logs."""

    name: str
    sizes: tuple[int, int] = EIGHT
    curves: tuple[str, ...] = ("saturating", "knee", "peak")  # of true rates
    passes: int = 0  # this many; 0: until the rule ends the sweep
    window: float | tuple[float, ...] = 0.1  # of a window, or of a window of each size
    alike: float = 0.1  # autocorrelation of a run's successive windows
    drift: float = 0.0  # of the random walk's step from pass to pass
    mood: float = 0.0  # of whole runs: what separate processes of the same thing differ by
    load: float = 0.02  # what others take of the processor all the time; its mean cost is in the true rates
    busy: float = 0.0  # share of the time in bursts of 0.2 to 3 s, in which steps take twice as long; small ones less
    seen: bool = True  # whether the windows say what others took
    shared: bool = True  # passes; else the runs follow each other
    seeds: int = 1
    samples: int = 0  # of the test set; 0: not trained
    seed_noise: float = 0.0  # standard deviation of the accuracy over seeds


GRID = (
    Scenario("quiet, eight sizes"),
    Scenario("quiet, six sizes", SIX),
    Scenario("quiet, eight large sizes", LARGE),
    Scenario("window noise 20 %", window=0.2),
    Scenario("AR 0.3, window noise 15 %", alike=0.3, window=0.15),
    Scenario("AR 0.7", alike=0.7),
    Scenario("processes differ by 2 %", mood=0.02),
    Scenario("processes differ by 3.5 %", mood=0.035),
    Scenario("drift 5 % a pass", drift=0.05),
    Scenario("six equal sizes", SIX, curves=("equal",)),
    Scenario("others at 0.85 to 0.95", curves=("near",)),
    Scenario("bursts 20 %", busy=0.2),
    Scenario("bursts 20 %, unseen", busy=0.2, seen=False),
    Scenario("bursts 50 %", busy=0.5),
    Scenario("bursts 50 %, unseen", busy=0.5, seen=False),
    Scenario("beside a process that takes a core", window=BESIDE_A_CORE, load=0.5),
    Scenario("separate runs, moods 10 %", passes=20, window=0.05, mood=0.1, shared=False),
    Scenario("trained, 10,000 samples", passes=30, samples=10_000),
    Scenario("trained, 1,000 samples", passes=30, samples=1_000, seed_noise=0.003),
    Scenario("trained, 3 seeds, 1,000 samples", passes=12, seeds=3, samples=1_000, seed_noise=0.003),
)


def most_passes(sizes: int) -> int:
    """The passes of a sweep at most, where a visit takes no longer than it is to take."""
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
    """True accuracies of the mean seed: equal up to some size, and falling beyond it."""
    best, last, fall = rng.uniform(0.6, 0.99), float(rng.choice([*sizes, math.inf])), rng.uniform(0.002, 0.05)
    return {size: float(best - fall * math.log2(max(size / last, 1))) for size in sizes}


def simulate(of: Scenario, truth: Mapping[int, float], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The windows of a sweep by column, each of shape (runs, passes)."""
    count, passes = len(truth) * of.seeds, of.passes or most_passes(len(truth))
    run, number = np.indices((count, passes))
    place = run * passes + number  # in time
    if of.shared:
        place = np.stack([n * count + rng.permutation(count) for n in range(passes)], axis=1)
    drift = np.cumsum(rng.normal(0, of.drift / math.sqrt(count if of.shared else 1), count * passes))[place]
    covered = _bursts(count * passes, of.busy, rng)[place]
    size, rate = (np.repeat([*values], of.seeds)[:, None] for values in (truth, truth.values()))
    strength = np.linspace(0.5, 1, count)[:, None]  # the smallest size suffers half as much of a burst as the largest
    log_s = rng.normal(0, of.mood, (count, 1)) - np.log(rate) + drift + (covered > 0.5) * math.log(2) * strength
    log_s += np.repeat(np.broadcast_to(of.window, len(truth)), of.seeds)[:, None] * _autoregressive(
        count, passes, of.alike, rng
    )
    taken = np.clip(of.load + 0.01 * rng.normal(size=place.shape) + (covered / 2 if of.seen else 0), 0, 1)
    pass_ = number.astype(str).astype(object) if of.shared else np.full(place.shape, None)
    return dict(zip(COLUMNS, (size + 0 * run, run, pass_, log_s, taken, taken > DISTURBED), strict=True))


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


def _autoregressive(runs: int, windows: int, alike: float, rng: np.random.Generator) -> np.ndarray:
    """Noise of variance 1 whose neighbours within a run correlate."""
    noise = rng.normal(size=(runs, windows))
    for n in range(1, windows):
        noise[:, n] = alike * noise[:, n - 1] + math.sqrt(1 - alike**2) * noise[:, n]
    return noise


def tested(of: Scenario, accuracies: Mapping[int, float], rng: np.random.Generator) -> Quality:
    """What independent tests of each seed show of the sizes."""
    record, runs = {"status": "finished", "evaluated": {"test": of.samples}}, {}
    for size, mean in accuracies.items():
        seeds = np.clip(mean + rng.normal(0, of.seed_noise, of.seeds), 0, 1)
        shares = [{METRIC: float(rng.binomial(of.samples, seed)) / of.samples} for seed in seeds]
        runs[size] = [Run("", Path(), record | {"metrics": metrics}) for metrics in shares]
    quality = find_quality(runs, METRIC)
    assert quality is not None
    return quality


# --- answers


def judged_sweep(scenario: Scenario, seed: int) -> dict[str, Any]:
    """Simulate a sweep, and judge its answer by the truth."""
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
    """What the rule finds after so many passes."""
    table = pd.DataFrame({name: values[:, :passes].ravel() for name, values in windows.items()})
    return select(Rates(table, SEPARATE_RUNS_SD, PROCESSES_SD, at_equal_load=True), among)


def row(name: str, sweeps: pd.DataFrame) -> list[str]:
    """How often the figures hold in the sweeps of a scenario, their passes, and sizes that train much worse and are candidates."""
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
