"""What `experiment=diagnose` finds: a change that gives 10 %, and changes that do nothing.

    python benchmarks/diagnose.py --root ../shared/data
    python benchmarks/diagnose.py --kept                # the runs of the last time, analysed again

The runs are of the SimpleCNN on MNIST, for 11 minutes in all, and are visited side by side as the runs of a diagnosis are. It
needs Linux. The baseline waits, busily, at the end of `training_step`, for a tenth of the time that its last steps took
without (`compare.py`). One change removes the wait; others are further processes of the same thing.

20 diagnoses of nine changes, as many as a real one has, are drawn from five groups of 16 runs, which share passes. Each
diagnosis has a baseline and a faster run of its own. The eight runs of its group that do nothing are its other changes, so that
no two diagnoses have the same pair of a baseline and a change, but those of a group are not independent. Their first sentences
are those of real diagnoses.
"""

import argparse
import os
import random
import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from compare import OPTIONS, SIDE_BY_SIDE
from harness import arguments, folder_of, rows, write_result

from batchscope.analysis.diagnose import Findings
from batchscope.analysis.noise import Ratio
from batchscope.analysis.read import find
from batchscope.options.compose import check_command_line
from batchscope.sweep import process
from batchscope.sweep.loop import Loop
from batchscope.sweep.plans import Job

# Groups of runs, diagnoses of each group, runs of each group that do nothing.
FULL, SMALLEST = (5, 4, 8), (1, 1, 2)  # sixteen runs are visited at once at most
BASELINE, FASTER, NOTHING = "baseline", "faster", "nothing"
SHORT_S = 0.3  # of visits of each run, for the smallest case


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
        choices = {"model": "cnn", "data": "mnist", "slowed": str(slowed)}
        group = Job(folder, config, {"choices": choices, "overrides": line}, "diagnosis", seconds=seconds)
        known = {"options": [] if name.startswith(BASELINE) else [name]}
        jobs.append(group.below(name, {}, name, diagnosis=known))
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


def diagnoses_of(folder: Path, args: argparse.Namespace) -> Iterator[Findings]:
    """The diagnoses that are drawn from a group."""
    _, diagnoses, nothings = SMALLEST if args.smallest else FULL
    runs = {run.folder.name: run for run in find([folder]).runs}
    for number in range(diagnoses):
        drawn = [f"{NOTHING}-{nothing}" for nothing in range(nothings)]
        yield Findings([runs[name] for name in (f"{BASELINE}-{number}", f"{FASTER}-{number}", *drawn)])


def row(title: str, ratios: list[Ratio | None], wanted: str) -> list[object]:
    """A line of the table."""
    known = [ratio for ratio in ratios if ratio is not None]
    helps = sum(ratio.low > 1 for ratio in known)
    ends = [statistics.median([getattr(ratio, end) for ratio in known] or [0.0]) for end in ("value", "low", "high")]
    cells = [title, len(ratios), helps, wanted, len(ratios) - len(known)]
    return [*cells, f"{ends[0]:.3f}", f"{ends[1]:.2f} to {ends[2]:.2f}"]


def page(out: Path, args: argparse.Namespace) -> None:
    """Diagnose what was run, and write the table."""
    groups, diagnoses, nothings = SMALLEST if args.smallest else FULL
    findings = [found for number in range(groups) for found in diagnoses_of(out / str(number), args)]
    ratios: dict[str, list[Ratio | None]] = {FASTER: [], NOTHING: []}
    for found in findings:
        for trial in found.changes:
            ratios[trial.name.partition("-")[0]].append(trial.ratio)
    recommended = sum(found.best is not None and found.best.name.startswith(FASTER) for found in findings)
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
    said = f"{recommended} of {len(findings)} diagnoses recommend the faster one; "
    said += f"in {mistaken(findings)}, a change that does nothing is shown to help."
    table = f"{rows(head, found_rows)}\n\n{said}\n\n{extent(groups, diagnoses, nothings)}"
    write_result("diagnose", table, {"diagnoses": [_short(found) for found in findings]}, args)


def mistaken(findings: Sequence[Findings]) -> int:
    """In how many diagnoses a change that does nothing is shown to help."""
    idle = [[trial.ratio for trial in found.changes if trial.name.startswith(NOTHING)] for found in findings]
    return sum(any(ratio is not None and ratio.low > 1 for ratio in ratios) for ratios in idle)


def extent(groups: int, diagnoses: int, nothings: int) -> str:
    """From how many runs the ratios are drawn."""
    own, idle = groups * diagnoses, groups * nothings
    return (
        f"The {own * (1 + nothings)} ratios are drawn from {2 * own + idle} runs in {groups} groups: {own} baselines, {own} faster "
        f"runs, and {idle} that do nothing. The diagnoses of a group share the last, so their ratios are not independent."
    )


def _short(found: Findings) -> dict[str, Any]:
    """The numbers without the folders."""
    ratios = {trial.name: trial.ratio for trial in found.changes}
    known = {name: ratio and [ratio.value, ratio.low, ratio.high] for name, ratio in ratios.items()}
    return {"headline": found.headline, "ratios": known}


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
