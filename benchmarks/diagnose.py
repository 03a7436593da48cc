"""What `experiment=diagnose` finds: a change that gives 10 %, and changes that do nothing.

    python benchmarks/diagnose.py --root ../shared/data
    python benchmarks/diagnose.py --kept                # the runs of the last time, analysed again

The runs are of the SimpleCNN on MNIST, for 11 minutes in all, and are visited side by side as the runs of a diagnosis are. It
needs Linux. The baseline waits, busily, at the end of `training_step`, for a tenth of the time that its last steps took
without (`compare.py`). One change removes the wait; others are further processes of the same thing.

20 diagnoses of nine changes, as many as a real one has, are drawn from five groups of 16 runs, which share passes. Each
diagnosis has a baseline and a faster run of its own. The eight runs of its group that do nothing are its other changes, so that
no two diagnoses have the same pair of a baseline and a change, but those of a group are not independent. A change is shown to
help where the interval of its `÷ first` in the report lies above 1.
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
FULL, SMALLEST = (5, 4, 8), (1, 1, 2)  # sixteen runs are visited at once at most
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
        choices = {"model": name, "data": "mnist", "slowed": str(slowed)}  # by their models a report tells runs apart
        group = Job(folder, config, {"choices": choices, "overrides": line}, "diagnosis", seconds=seconds)
        jobs.append(group.below(name, {}, name))
    return jobs


def measure(out: Path, args: argparse.Namespace) -> None:
    """All runs; compare.py is the program of each, and slows it down."""
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


def row(title: str, ratios: list[Ratio], wanted: str) -> list[object]:
    """A line of the table."""
    known = [ratio for ratio in ratios if ratio.span]
    helps = sum(ratio.low > 1 for ratio in known)
    ends = [statistics.median([getattr(ratio, end) for ratio in known] or [0.0]) for end in ("value", "low", "high")]
    cells = [title, len(ratios), helps, wanted, len(ratios) - len(known)]
    return [*cells, f"{ends[0]:.3f}", f"{ends[1]:.2f} to {ends[2]:.2f}"]


def page(out: Path, args: argparse.Namespace) -> None:
    """Diagnose what was run, and write the table."""
    groups, diagnoses, nothings = SMALLEST if args.smallest else FULL
    found = [ratios for number in range(groups) for ratios in diagnoses_of(out / str(number), args)]
    ratios: dict[str, list[Ratio]] = {FASTER: [], NOTHING: []}
    for name, ratio in (pair for of in found for pair in of.items()):
        ratios[name.partition("-")[0]].append(ratio)
    fastest = [max(of, key=lambda name: (of[name].low > 1) * of[name].value) for of in found]
    right = sum(name.startswith(FASTER) and of[name].low > 1 for name, of in zip(fastest, found, strict=True))
    head = [
        "changes",
        "number",
        "shown to help",
        "wanted",
        "not compared",
        "÷ baseline, median",
        "its interval, median",
    ]
    found_rows = [
        row(f"{SIDE_BY_SIDE:.0%} faster", ratios[FASTER], "≥ 15 of 20"),
        row("that do nothing", ratios[NOTHING], "in ≤ 1 of 20 diagnoses"),
    ]
    said = f"In {right} of {len(found)} diagnoses the fastest change that is shown to help is the faster one; "
    said += f"in {mistaken(found)}, a change that does nothing is shown to help."
    table = f"{rows(head, found_rows)}\n\n{said}\n\n{extent(groups, diagnoses, nothings)}"
    write_result("diagnose", table, {"diagnoses": [_numbers(of) for of in found]}, args)


def mistaken(found: Sequence[Ratios]) -> int:
    """In how many diagnoses a change that does nothing is shown to help."""
    return sum(any(ratio.low > 1 for name, ratio in of.items() if name.startswith(NOTHING)) for of in found)


def extent(groups: int, diagnoses: int, nothings: int) -> str:
    """From how many runs the ratios are drawn."""
    own, idle = groups * diagnoses, groups * nothings
    return (
        f"The {own * (1 + nothings)} ratios are drawn from {2 * own + idle} runs in {groups} groups: {own} baselines, {own} faster "
        f"runs, and {idle} that do nothing. The diagnoses of a group share the last, so their ratios are not independent."
    )


def _numbers(ratios: Ratios) -> dict[str, list[float]]:
    return {name: [ratio.value, ratio.low, ratio.high] for name, ratio in ratios.items() if ratio.span}


def main() -> None:
    """The benchmark."""
    parser = arguments(__doc__)
    parser.add_argument("--kept", action="store_true", help="analyse the runs of the last time again")
    args = parser.parse_args()
    out = folder_of("bench-diagnose", args)
    if not args.kept:
        measure(out, args)
    page(out, args)


if __name__ == "__main__":
    main()
