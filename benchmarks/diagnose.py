"""What `experiment=diagnose` shows of a change that gives 10 %, and of changes that do nothing.

    python benchmarks/diagnose.py --root ../shared/data
    python benchmarks/diagnose.py --kept                # analyse the last runs again

The runs train the SimpleCNN on MNIST, for 11 minutes in all, and are visited side by side as the runs of a diagnosis are. The
benchmark needs Linux. The baseline has a busy wait at the end of `training_step`, for a tenth of the time of its last steps
(`compare.py`). One change removes the wait; the other changes are further processes of the baseline.

20 diagnoses of nine changes, as many as a real diagnosis has, are drawn from five groups of 16 runs, which share passes. Each
diagnosis has its own baseline and its own faster run; its other changes are the eight runs of its group that do nothing. So no
two diagnoses share a pair of a baseline and a change, but the diagnoses of a group are not independent. A change is shown to
help if the interval of its `÷ first` in the report lies above 1.
"""

import argparse
import os
import random
import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from compare import OPTIONS, SIDE_BY_SIDE
from harness import arguments, folder_of, rows, write_result

from batchscope.analysis.between_groups import rate_ratios_to_first
from batchscope.analysis.groups import group_runs
from batchscope.analysis.noise import Ratio
from batchscope.analysis.read import read_sweep
from batchscope.options.compose import check_command_line
from batchscope.sweep import process
from batchscope.sweep.loop import Loop
from batchscope.sweep.plans import Job

# Groups of runs, diagnoses of each group, runs of each group that do nothing.
FULL, SMALLEST = (5, 4, 8), (1, 1, 2)  # at most sixteen runs are visited at once
BASELINE, FASTER, NOTHING = "baseline", "faster", "nothing"
SHORT_S = 0.3  # of visits of each run, for the smallest case
Ratios = dict[str, Ratio]  # of each change of a diagnosis to its baseline


def jobs_of(folder: Path, args: argparse.Namespace) -> list[Job]:
    """The runs of a group, in a random order."""
    _, diagnoses, nothings = SMALLEST if args.smallest else FULL
    line = ["experiment=diagnose", *OPTIONS[1:], f"data.root={args.root}"]
    (config,) = check_command_line(line, multirun=False)
    seconds = SHORT_S if args.smallest else config["callbacks"]["until_known"]["seconds"]
    names = [f"{kind}-{number}" for kind in (BASELINE, FASTER) for number in range(diagnoses)]
    names += [f"{NOTHING}-{number}" for number in range(nothings)]
    random.Random(folder.name).shuffle(names)
    jobs = []
    for name in names:
        slowed = 0.0 if name.startswith(FASTER) else SIDE_BY_SIDE
        choices = {"model": name, "data": "mnist", "slowed": str(slowed)}  # a report tells runs apart by their models
        group = Job(folder, config, {"choices": choices, "overrides": line}, "diagnosis", seconds=seconds)
        jobs.append(group.below(name, {}, name))
    return jobs


def measure(out: Path, args: argparse.Namespace) -> None:
    """Do all runs; each runs compare.py as its program, which slows it down."""
    groups, _, _ = SMALLEST if args.smallest else FULL
    os.environ["PYTHONPATH"], process.PROGRAM = str(Path(__file__).parent), "compare"
    process.PRELOADED.append(process.PROGRAM)
    shutil.rmtree(out, ignore_errors=True)
    for number in range(groups):
        Loop().do(jobs_of(out / str(number), args))
        print(f"{number + 1} of {groups}", flush=True)


def diagnoses_of(folder: Path, args: argparse.Namespace) -> Iterator[Ratios]:
    """The diagnoses that are drawn from a group."""
    _, diagnoses, nothings = SMALLEST if args.smallest else FULL
    runs = {run.folder.name: run for run in read_sweep([folder]).runs}
    for number in range(diagnoses):
        drawn = [f"{NOTHING}-{nothing}" for nothing in range(nothings)]
        sweep = group_runs([runs[name] for name in (f"{BASELINE}-{number}", f"{FASTER}-{number}", *drawn)])
        yield {sweep.groups[group].runs[0].model: ratio for group, ratio in rate_ratios_to_first(sweep).items()}


def row(title: str, ratios: list[Ratio], target: str) -> list[object]:
    """A line of the table."""
    compared = [ratio for ratio in ratios if ratio.span]
    helps = sum(ratio.low > 1 for ratio in compared)
    ends = [statistics.median([getattr(ratio, end) for ratio in compared] or [0.0]) for end in ("value", "low", "high")]
    cells = [title, len(ratios), helps, target, len(ratios) - len(compared)]
    return [*cells, f"{ends[0]:.3f}", f"{ends[1]:.2f} to {ends[2]:.2f}"]


def page(out: Path, args: argparse.Namespace) -> None:
    """Diagnose the runs, and write the table."""
    groups, diagnoses, nothings = SMALLEST if args.smallest else FULL
    drawn = [ratios for number in range(groups) for ratios in diagnoses_of(out / str(number), args)]
    ratios: dict[str, list[Ratio]] = {FASTER: [], NOTHING: []}
    for name, ratio in (pair for changes in drawn for pair in changes.items()):
        ratios[name.partition("-")[0]].append(ratio)
    fastest = [max(changes, key=lambda name: (changes[name].low > 1) * changes[name].value) for changes in drawn]
    right = sum(name.startswith(FASTER) and changes[name].low > 1 for name, changes in zip(fastest, drawn, strict=True))
    head = [
        "changes",
        "number",
        "shown to help",
        "wanted",
        "not compared",
        "÷ baseline, median",
        "its interval, median",
    ]
    lines = [
        row(f"{SIDE_BY_SIDE:.0%} faster", ratios[FASTER], "≥ 15 of 20"),
        row("that do nothing", ratios[NOTHING], "in ≤ 1 of 20 diagnoses"),
    ]
    summary = f"In {right} of {len(drawn)} diagnoses the fastest change that is shown to help is the faster one; "
    summary += f"in {mistaken(drawn)}, a change that does nothing is shown to help."
    table = f"{rows(head, lines)}\n\n{summary}\n\n{extent(groups, diagnoses, nothings)}"
    write_result("diagnose", table, {"diagnoses": [_numbers(changes) for changes in drawn]}, args)


def mistaken(drawn: Sequence[Ratios]) -> int:
    """In how many diagnoses a change that does nothing is shown to help."""
    return sum(any(ratio.low > 1 for name, ratio in changes.items() if name.startswith(NOTHING)) for changes in drawn)


def extent(groups: int, diagnoses: int, nothings: int) -> str:
    """The sentences that say from how many runs the ratios are drawn."""
    pairs, idle = groups * diagnoses, groups * nothings
    return (
        f"The {pairs * (1 + nothings)} ratios are drawn from {2 * pairs + idle} runs in {groups} groups: {pairs} baselines, {pairs} faster "
        f"runs, and {idle} that do nothing. The diagnoses of a group share the last, so their ratios are not independent."
    )


def _numbers(ratios: Ratios) -> dict[str, list[float]]:
    return {name: [ratio.value, ratio.low, ratio.high] for name, ratio in ratios.items() if ratio.span}


def main() -> None:
    """Run the benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--kept", action="store_true", help="analyse the runs of the last time again")
    args = parser.parse_args()
    out = folder_of("bench-diagnose", args)
    if not args.kept:
        measure(out, args)
    page(out, args)


if __name__ == "__main__":
    main()
