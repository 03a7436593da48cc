"""What `batchscope compare` finds: false alarms on runs of the same thing, and slowdowns that were built in.

    python benchmarks/compare.py --root ../shared/data
    python benchmarks/compare.py --kept                # analyse the last runs again

The runs are of the SimpleCNN, for 50 minutes in all, and are started as `compare --rerun` and sweeps start them. A built-in
slowdown is a busy wait at the end of `training_step`, a share of the time of the last steps. It needs Linux.

- Side by side: runs of A, repeated runs of A, and runs that are 10 % slower take turns, each time in new processes. From these
  triples 5 to 15 pairs of A and another run are drawn at random, until it is decided which is slower, as `compare --rerun`
  measures one pair after the other.
- Separate: runs of A and runs that are 50 % slower, one after the other between the triples. A run of A is compared with another
  run of A, and with a slower one; the two are half of the benchmark apart.

A false alarm is exit code 3; "differs" counts comparisons with the verdict slower or faster; "loaded" counts comparisons that
report a load. The last lines give the spread of separate runs of the same code (`SEPARATE_RUNS_SD` in src/analysis/noise.py).
"""

import argparse
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import arguments, folder_of, rows, write_result

from batchscope.analysis.compare import Comparison
from batchscope.analysis.noise import Rates
from batchscope.analysis.read import read_sweep
from batchscope.analysis.windows import window_table
from batchscope.options.command_lines import for_timing
from batchscope.options.compose import check_command_line
from batchscope.records.read import read
from batchscope.sweep import job, process
from batchscope.sweep.loop import Loop
from batchscope.sweep.plans import Job
from batchscope.sweep.rerun import MIN_PAIRS, is_slowdown_decided, pair_plan

# Comparisons of each kind, pairs in a triple, seconds of training of each of its runs, and of a separate run.
FULL, SMALLEST = (20, 5, 2.0, 30.0), (2, 1, 0.3, 0.3)
SIDE_BY_SIDE, SEPARATE = 0.1, 0.5  # built-in slowdowns
MOST, MAX_SLOWDOWN = 15, 0.05  # pairs at most, and the allowed slowdown: the defaults of `compare --rerun`
REMEMBERED = 5  # steps: the wait is a share of their median time, so that a pause in one step does not count
OPTIONS = (
    *("experiment=throughput", "data=mnist", "data.batch_size=32", "trainer.accelerator=cpu"),
    *("callbacks.throughput.calibrate=false", "callbacks.throughput.record_operations=false"),
    *("+callbacks.throughput.verbose=false", "callbacks.device=null"),
    *("logger.tensorboard=null", "logger.csv=null"),
)


class Wait:
    """A busy wait for a share of the time of the last steps, which is measured without the wait."""

    def __init__(self, share: float):
        self._share = share
        self._last = 0.0
        self._without: deque[float] = deque(maxlen=REMEMBERED)

    def __call__(self) -> None:
        now = time.perf_counter()
        if self._last:
            self._without.append(now - self._last)
        end = now + (self._share * statistics.median(self._without) if self._without else 0.0)
        while time.perf_counter() < end:
            pass
        self._last = time.perf_counter()


def slow_down(share: float) -> None:
    """Make every step of this process slower."""
    from batchscope.training.task import Task

    step, wait = Task.training_step, Wait(share)

    def training_step(task: Task, *batch: Any) -> Any:
        result = step(task, *batch)
        wait()
        return result

    Task.training_step = training_step


def side(name: str, root: str, seconds: float, share: float = 0.0) -> Job:
    """The job of a side, whose steps are slower by a share."""
    line = [*OPTIONS, f"data.root={root}"]
    (config,) = check_command_line(line, multirun=False)
    choices = {"model": "cnn", "data": "mnist", "slowed": str(share)}
    config, record = for_timing(config, seconds), {"choices": choices, "overrides": line}
    return Job(Path(name), config, record, name.upper(), seconds=seconds)


def measure(out: Path, args: argparse.Namespace) -> None:
    """Do all runs, in the order of the module's docstring; each runs this file as its program."""
    comparisons, pairs, seconds, separate_seconds = SMALLEST if args.smallest else FULL
    os.environ["PYTHONPATH"], process.PROGRAM = str(Path(__file__).parent), "compare"
    process.PRELOADED.append(process.PROGRAM)
    shutil.rmtree(out, ignore_errors=True)
    sides = [("a", 0.0), ("again", 0.0), ("slower", SIDE_BY_SIDE)]
    paired_jobs = [side(name, args.root, seconds, share) for name, share in sides]
    sides = [("x", 0.0), ("slower", SEPARATE), ("y", 0.0)]
    separate_jobs = [side(name, args.root, separate_seconds, share) for name, share in sides]
    loop = Loop()
    for number in range(comparisons):
        loop.run(pair_plan(paired_jobs, out / "together" / str(number), pairs))
        for separate_job in separate_jobs:
            loop.run(pair_plan([separate_job], out / "separate" / str(number), 1))
        print(f"{number + 1} of {comparisons}", flush=True)


def separate(out: Path, number: int, name: str) -> Path:
    """The folder of a separate run."""
    return out / "separate" / str(number) / name


def half_apart(out: Path, comparisons: int, name: str) -> list[Comparison]:
    """Compare each run of A with one that ran half of the benchmark earlier or later."""
    peers = [(number + comparisons // 2) % comparisons for number in range(comparisons)]
    return [Comparison(separate(out, number, "x"), separate(out, peers[number], name)) for number in range(comparisons)]


def side_by_side(out: Path, comparisons: int, name: str) -> list[Comparison]:
    """Compare runs that took turns: pairs in a random order, until it is decided which is slower."""
    pairs = [
        (run, run.parents[1] / name / run.name)
        for number in range(comparisons)
        for run in sorted((out / "together" / str(number) / "a").iterdir())
    ]
    return [drawn(random.Random(number).sample(pairs, len(pairs))) for number in range(comparisons)]


def drawn(pairs: Sequence[tuple[Path, Path]]) -> Comparison:
    """The comparison of as many pairs as decide it."""
    with tempfile.TemporaryDirectory() as folder:
        sides = [Path(folder) / name for name in "ab"]
        for number, pair in enumerate(pairs[:MOST], 1):
            for run, side in zip(pair, sides, strict=True):
                shutil.copytree(run, side / str(number))
            if number >= MIN_PAIRS and is_slowdown_decided(sides, MAX_SLOWDOWN):
                break
        return Comparison(*sides)


def spread(folder: Path, comparisons: int) -> float:
    """The standard deviation of the log step time over separate runs of the same code."""
    runs = [run for n in range(comparisons) for name in "xy" for run in read_sweep([separate(folder, n, name)]).runs]
    return statistics.stdev(math.log(1 / Rates(window_table({0: [run]})).rate(0)) for run in runs)


def row(title: str, comparisons: list[Comparison], target: str) -> list[object]:
    """A line of the table."""
    alarms = sum(comparison.exit_code == 3 for comparison in comparisons)
    differing = sum(comparison.verdict in ("slower", "faster") for comparison in comparisons)
    loaded = sum(comparison.load is not None for comparison in comparisons)
    ratios = [comparison.slowdown for comparison in comparisons]
    low, value, high = (statistics.median(getattr(ratio, end) for ratio in ratios) for end in ("low", "value", "high"))
    cells = [title, len(comparisons), f"{alarms} ({alarms / len(comparisons):.0%})", target, differing, loaded]
    return [*cells, f"{value:.3f}", f"{low:.2f} to {high:.2f}"]


def page(out: Path, args: argparse.Namespace) -> None:
    """Compare the runs, and write the table."""
    comparisons, pairs, seconds, separate_seconds = SMALLEST if args.smallest else FULL
    tables = {
        "unchanged, separate": (half_apart(out, comparisons, "y"), "≤ 5 %"),
        "unchanged, side by side": (side_by_side(out, comparisons, "again"), "≤ 5 %"),
        f"{SIDE_BY_SIDE:.0%} slower, side by side": (side_by_side(out, comparisons, "slower"), "≥ 90 %"),
        f"{SEPARATE:.0%} slower, separate": (half_apart(out, comparisons, "slower"), ""),
    }
    between = spread(out, comparisons)
    head = ["", "comparisons", "exit code 3", "wanted", "differs", "loaded", "B ÷ A, median", "its interval, median"]
    lines = [rows(head, [row(title, results, target) for title, (results, target) in tables.items()])]
    lines += [
        "",
        f"Steps of separate runs of the same thing differ by {between:.1%} (standard deviation of log times).",
    ]
    lines += [f"{pairs} passes of {seconds:g} s, separate runs of {separate_seconds:g} s."]
    short = {title: [_short(comparison) for comparison in results] for title, (results, _) in tables.items()}
    data = {"passes": pairs, "seconds": seconds, "separate_seconds": separate_seconds}
    write_result("compare", "\n".join(lines), data | {"spread": between, "tables": short}, args)


def _short(comparison: Comparison) -> dict[str, Any]:
    """The numbers of a comparison, without its folders."""
    findings = {"verdict": comparison.verdict, "rates": comparison.rates, "slowdown": asdict(comparison.slowdown)}
    return {"passes": comparison.passes, "load": comparison.load, "regression": bool(comparison.exit_code), **findings}


def run_job() -> None:
    """Run the job whose folder is the first argument."""
    if share := float(read(Path(sys.argv[1]))["choices"].get("slowed", 0)):
        slow_down(share)
    job.main()


def main() -> None:
    """Run the benchmark, or one of its jobs."""
    if len(sys.argv) > 1 and Path(sys.argv[1]).is_dir():
        run_job()
        return
    parser = arguments(__doc__)
    parser.add_argument("--kept", action="store_true", help="analyse the runs of the last time again")
    args = parser.parse_args()
    out = folder_of("bench-compare", args)
    if not args.kept:
        measure(out, args)
    page(out, args)


if __name__ == "__main__":
    main()
