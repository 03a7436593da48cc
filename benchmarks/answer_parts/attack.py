"""Thousands of simulated sweeps over a grid of noise: how often a claim is false, and what the intervals are worth."""

import itertools
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from batchscope.analysis.answer import Answer, answer
from batchscope.analysis.run import Run

from .claims import Reference, why_false
from .load import cores
from .simulated import METRIC, Noise, Truth, first_windows, group, random_accuracies, random_rates, simulate

SIZES = (8, 32, 64, 128, 256, 512)
_FIRST_LOOK = 6  # passes, of a sweep that looks at its answer while it measures


@dataclass(frozen=True)
class Scenario:
    """Sweeps of one kind."""

    name: str
    noise: Noise = field(default_factory=Noise)
    passes: int = 30
    kinds: tuple[str, ...] = ("rising", "near")  # of true rates
    sizes: tuple[int, ...] = SIZES
    shared: bool = True  # passes; else the runs follow each other
    seeds: int = 1
    samples: int = 0  # of the test set; 0: not trained
    seed_noise: float = 0.0
    looks: bool = False  # ends as soon as the answer is decided, and no rate is vague


QUIET = Noise(window=0.1, alike=0.1)
GRID = (
    Scenario("quiet, 20 passes", QUIET, 20),
    Scenario("quiet, 30 passes", QUIET),
    Scenario("quiet, 60 passes", QUIET, 60),
    Scenario("window 2 %", Noise(0.02)),
    Scenario("window 15 %", Noise(0.15)),
    Scenario("6 passes", QUIET, 6),
    Scenario("10 passes", QUIET, 10),
    Scenario("AR 0.4", Noise(0.1, 0.4)),
    Scenario("AR 0.7", Noise(0.1, 0.7)),
    Scenario("AR 0.7, 10 passes", Noise(0.1, 0.7), 10),
    Scenario("AR 0.7, 60 passes", Noise(0.1, 0.7), 60),
    Scenario("drift 5 % a pass", Noise(0.1, drift=0.05)),
    Scenario("6 equal sizes", QUIET, kinds=("equal",)),
    Scenario("2 equal sizes", QUIET, kinds=("equal",), sizes=(64, 128)),
    Scenario("others at 0.85 to 0.95", QUIET, kinds=("near",)),
    Scenario("10 sizes", QUIET, sizes=(4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)),
    Scenario("bursts 20 %", Noise(0.1, busy=0.2, uneven=True)),
    Scenario("bursts 20 %, unseen", Noise(0.1, busy=0.2, seen=False)),
    Scenario("bursts 50 %", Noise(0.1, busy=0.5, uneven=True)),
    Scenario("bursts 50 %, unseen", Noise(0.1, busy=0.5, seen=False)),
    Scenario("processes differ by 1 %", Noise(0.1, 0.1, mood=0.01)),
    Scenario("processes differ by 3 %", Noise(0.1, 0.1, mood=0.03)),
    Scenario("separate", Noise(0.1), 20, shared=False),
    Scenario("separate, 4 windows", Noise(0.1), 4, shared=False),
    Scenario("separate, drift 3 %", Noise(0.1, drift=0.03), 20, shared=False),
    Scenario("separate, moods 10 %", Noise(0.05, mood=0.1), 20, shared=False),
    Scenario("separate, moods 10 %, 3 runs", Noise(0.05, mood=0.1), 20, shared=False, seeds=3),
    Scenario("trained, 10,000 samples", QUIET, samples=10_000),
    Scenario("trained, seeds differ by 0.3 %", QUIET, samples=10_000, seed_noise=0.003),
    Scenario("trained, 1,000 samples", QUIET, samples=1_000, seed_noise=0.003),
    Scenario("trained, 3 seeds", QUIET, 12, seeds=3, samples=10_000, seed_noise=0.003),
    Scenario("trained, 3 seeds, 1,000 samples", QUIET, 12, seeds=3, samples=1_000, seed_noise=0.003),
    Scenario("quiet, ends when decided", QUIET, 60, looks=True),
    Scenario("AR 0.3 near, ends when decided", Noise(0.1, 0.3), 60, kinds=("near",), looks=True),
)


def one(scenario: Scenario, seed: int) -> dict[str, Any]:
    """Simulate a sweep, and judge its answer by the truth."""
    rng = np.random.default_rng([seed, sum(map(ord, scenario.name))])
    rates = random_rates(scenario.kinds[seed % len(scenario.kinds)], scenario.sizes, rng)
    accuracies = random_accuracies(scenario.sizes, rng) if scenario.samples else {}
    truth = Truth(rates, accuracies, scenario.samples or 1, scenario.seed_noise)
    runs = simulate(truth, scenario.noise, scenario.passes, rng, scenario.shared, scenario.seeds)
    passes, found = next((n, a) for n, a in _looks(scenario, runs) if n == scenario.passes or _is_done(a))
    reference = Reference(rates, metrics=accuracies)
    ratios = [(a, b, found.rates.ratio(a, b)) for a, b in itertools.combinations(scenario.sizes, 2)]
    reaches = (
        [ratio.reach for size, ratio in found.overall.ratios.items() if size != found.overall.best]
        if found.overall
        else []
    )
    return {
        "false": [claim["kind"] for claim in found.claims if why_false(claim, reference)],
        "stated": sorted({claim["kind"] for claim in found.claims}),
        "decided": found.size is not None,
        "of_best": found.decision and found.size and rates[found.size] / max(rates[s] for s in found.decision.ratios),
        "covered": [ratio.low <= rates[a] / rates[b] <= ratio.high for a, b, ratio in ratios],
        "reach": float(np.median(reaches)) if reaches else None,
        "passes": passes,
    }


def _looks(scenario: Scenario, runs: Sequence[Run]) -> Iterator[tuple[int, Answer]]:
    """The answers after each pass at which the sweep looks, with the number of passes."""
    for passes in range(_FIRST_LOOK if scenario.looks else scenario.passes, scenario.passes + 1, 2):
        found = answer(group([first_windows(run, passes) for run in runs]), [METRIC] if scenario.samples else [])
        assert found is not None
        yield passes, found


def _is_done(found: Answer) -> bool:
    return found.size is not None and not found.vague


def summary(sweeps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sweeps of a scenario in numbers; shares of the sweeps, and how often each kind of claim was stated and false."""
    shares = [each["of_best"] for each in sweeps if each["of_best"]]
    return {
        "false": sum(bool(each["false"]) for each in sweeps) / len(sweeps),
        "false_kinds": Counter(kind for each in sweeps for kind in set(each["false"])),
        "stated_kinds": Counter(kind for each in sweeps for kind in each["stated"]),
        "decided": sum(each["decided"] for each in sweeps) / len(sweeps),
        "covered": float(np.mean([held for each in sweeps for held in each["covered"]])),
        "reach": float(np.median([each["reach"] for each in sweeps if each["reach"]] or [np.nan])),
        "least_of_best": min(shares, default=None),
        "passes": float(np.mean([each["passes"] for each in sweeps])),
    }


def row(name: str, found: Mapping[str, Any]) -> str:
    """A line of the table."""
    false, stated = found["false_kinds"], found["stated_kinds"]
    kinds = ", ".join(f"{kind} {false[kind]} of {stated[kind]}" for kind in sorted(false)) or "–"
    least = f"{found['least_of_best']:.2f}" if found["least_of_best"] else "–"
    cells = [name, f"{found['false']:.1%}", kinds, f"{found['decided']:.0%}", f"{found['covered']:.0%}"]
    return f"| {' | '.join(cells)} | {found['reach']:.1%} | {least} |"


def run(sweeps: int, grid: Sequence[Scenario] = GRID) -> tuple[str, dict[str, Any]]:
    """The table, and the numbers behind it."""
    lines = [
        "| noise | sweeps with a false claim | of which | decided | 90 % intervals that hold | half-width | least share |"
    ]
    lines += ["| --- | ---: | --- | ---: | ---: | ---: | ---: |"]
    data: dict[str, Any] = {"sweeps": sweeps, "scenarios": {}}
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with multiprocessing.get_context("spawn").Pool(cores()) as pool:
        for number, scenario in enumerate(grid, 1):
            found = pool.starmap(one, [(scenario, seed) for seed in range(sweeps)], chunksize=8)
            data["scenarios"][scenario.name] = summary(found)
            lines.append(row(scenario.name, data["scenarios"][scenario.name]))
            print(f"\rattack: {number} of {len(grid)}", end="", flush=True)
    print()
    return "\n".join([*lines, "", f"{sweeps} sweeps of each kind. A claim is false by the exact rates."]), data
