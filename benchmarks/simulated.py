"""Thousands of simulated sweeps and diagnoses: how often is a sentence of their answers false?

    python benchmarks/simulated.py
    python benchmarks/simulated.py --sweeps 600

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
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import arguments, rows, write_result

from batchscope.analysis.answer import Answer, answer
from batchscope.analysis.diagnose import AGAIN, BASELINE, CHANGE, find_findings
from batchscope.analysis.groups import Group
from batchscope.analysis.run import Run
from batchscope.records.read import SCHEMA
from batchscope.records.run_record import close, plan
from batchscope.records.step_parts import PARTS
from batchscope.records.step_times import StepTimes, write_step_times

SHARE_OFF = 0.1  # by which a stated share may be off, as a fraction of it
REACHED = 0.88  # of the best rate, by a size of which 0.9 is claimed
WINDOW_S = 0.25
STEPS = 3  # of a window in a file: the analysis takes their median
METRIC = "test/acc"
SIZES = (8, 32, 64, 128, 256, 512)
FASTER = 1.4  # the change of a diagnosis that helps
_FIRST_LOOK = 6  # passes, of a sweep that looks at its answer while it measures
_PER_WINDOW = [one.name for one in fields(StepTimes) if one.name not in ("step_s", "parts_s", "parts_every")]

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
    """Why a claim is false, in words; None if it is true, or the reference says nothing about it.

    Raises:
        ValueError: for a kind of claim that nobody can judge.
    """
    kind, size = claim["kind"], int(claim["batch_size"])
    if kind == "worse":
        good = truth.metrics and truth.metrics[size] >= max(truth.metrics.values())
        return f"worse {size}: its {claim['metric']} is as good as any" if good else None
    if kind in ("fastest", "reaches"):
        found = _among(kind, size, claim["among"], truth)
    elif kind in ("share", "at_most", "at_least"):
        found = _share(kind, size, int(claim["of"]), float(claim["share"]), truth)
    else:
        raise ValueError(f"{kind}: no such kind of claim")
    return f"{kind} {size}: {found}" if found else None


def _among(kind: str, size: int, among: list[int], truth: Reference) -> str | None:
    """`fastest` is false where another size is as fast, if the rates are exact; `reaches` of a size below 0.88."""
    for other in set(among) - {size}:
        share, margin = truth.share(size, other), truth.margin(size, other)
        as_fast = share < 1 - margin or (share == 1 and not margin)
        if as_fast if kind == "fastest" else share < REACHED * (1 - margin):
            return f"it has {share:.3f} of the rate of {other}"
    return None


def _share(kind: str, size: int, of: int, said: float, truth: Reference) -> str | None:
    share, margin = truth.share(size, of), truth.margin(size, of)
    wrong = {
        "share": abs(said / share - 1) > SHARE_OFF + margin,
        "at_most": share > said * (1 + margin),
        "at_least": share < said * (1 - margin),
    }
    return f"it has {share:.3f} of the rate of {of}, not {kind.replace('_', ' ')} {said:.3f}" if wrong[kind] else None


# --- runs


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
    place = np.arange(count * passes).reshape(count, passes)  # (run, pass) → its place in time
    if shared:
        place = np.stack([number * count + rng.permutation(count) for number in range(passes)], axis=1)
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


# --- sweeps


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


# --- diagnoses


def simulated_diagnosis(place: Path, number: int) -> dict[str, Any]:
    """A diagnosis of four changes; the first of every other one helps. Says which change is recommended."""
    rng = np.random.default_rng(10_000 + number)
    roles = [(BASELINE, []), *((CHANGE, [f"data.num_workers={n}"]) for n in range(1, 5)), (AGAIN, [])]
    helps = number % 2 == 1
    rates = {n + 1: 1e4 * (FASTER if helps and n == 1 else 1.0) for n in range(len(roles))}
    noise = Noise(window=rng.uniform(0.03, 0.12), alike=rng.uniform(0, 0.4), drift=rng.uniform(0, 0.02), mood=0.02)
    runs = simulate(Truth(rates), noise, 30, rng, shared=number % 4 < 2)
    for minute, (run, (role, options)) in enumerate(zip(runs, roles, strict=True)):
        _as_batch_size(run.record, 64)
        run.record.update(diagnosis={"role": role, "options": options}, overrides=options)
        run.record["started"] = f"2026-01-01T00:{minute:02}:00+00:00"
        run.record["config"]["data"]["num_workers"] = minute
    shutil.rmtree(place, ignore_errors=True)
    write(place, runs)
    best = find_findings(place).best
    options = list(best.options) if best else None
    false = options is not None and (not helps or options != roles[1][1])
    return {"recommended": options, "helps": helps, "false": [f"recommends {options}"] if false else []}


def _as_batch_size(record: dict[str, Any], size: int) -> None:
    """The same rate and steps, called another batch size: the runs of a diagnosis have the same."""
    record["config"]["data"]["batch_size"] = record["throughput"]["batch_size"] = size


def diagnoses(count: int) -> list[object]:
    """A line of the table: diagnoses of which half have a change that helps."""
    with tempfile.TemporaryDirectory() as folder:
        found = [simulated_diagnosis(Path(folder) / str(number), number) for number in range(count)]
    false, helped = sum(bool(each["false"]) for each in found), [each for each in found if each["helps"]]
    shown = sum(bool(each["recommended"]) for each in helped)
    return ["diagnoses", f"{false / count:.1%}", "", f"{shown} of {len(helped)} changes found", "", "", ""]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sweeps", type=int, default=600, help="of each kind of noise")
    args = parser.parse_args()
    grid, args.sweeps = (GRID[:1], 4) if args.smallest else (GRID, args.sweeps)
    data, lines = {}, []
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with multiprocessing.get_context("spawn").Pool(1 if args.smallest else os.cpu_count()) as pool:
        for scenario in grid:
            each = pool.starmap(one, [(scenario, seed) for seed in range(args.sweeps)], chunksize=8)
            found = data[scenario.name] = summary(each)
            false, stated = found["false_kinds"], found["stated_kinds"]
            kinds = ", ".join(f"{kind} {false[kind]} of {stated[kind]}" for kind in sorted(false)) or "–"
            least = f"{found['least_of_best']:.2f}" if found["least_of_best"] else "–"
            cells = [
                scenario.name,
                f"{found['false']:.1%}",
                kinds,
                f"{found['decided']:.0%}",
                f"{found['covered']:.0%}",
            ]
            lines.append([*cells, f"{found['reach']:.1%}", least])
            print(*lines[-1], sep=" | ", flush=True)
    lines.append(diagnoses(4 if args.smallest else 40))
    head = [
        "noise",
        "with a false claim",
        "of which",
        "decided",
        "90 % intervals that hold",
        "half-width",
        "least share",
    ]
    text = f"{rows(head, lines)}\n\n{args.sweeps} sweeps of each kind. A claim is false by the exact rates."
    write_result("answers_attack", text, {"sweeps": args.sweeps, "scenarios": data}, args)


if __name__ == "__main__":
    main()
