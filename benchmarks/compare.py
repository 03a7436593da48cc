"""What `batchscope compare` finds: false alarms on runs of the same thing, and slowdowns that were built in.

    python benchmarks/compare.py --root ../shared/data
    python benchmarks/compare.py --root ../shared/data --comparisons 2 --rounds 3     # a short look; writes no result

Short runs of the SimpleCNN follow each other, each in a process of its own that is forked from one that has imported torch
and computed nothing. A built-in slowdown is a busy wait in `training_step`: a share of the time of the last steps.

- In turns: each round has a run of A, another one of A, and one with 10 % more, in changing order. A few rounds are a comparison.
- Separate: two runs of A that lie half of the benchmark apart, and a run of A and one with 30 % more, as far apart.

A false alarm is exit code 3; `any row` counts a part or rate that is said to differ, too. The last lines say what separate runs
of the same thing differed by here (`BETWEEN_RUNS` in src/analysis/ratios.py), and whether the machine's probe explains it.
Runs that have finished are kept, so that an interrupted benchmark continues.
"""

import argparse
import math
import os
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import write_result

import batchscope.training.run  # noqa: F401 - imports torch and Lightning once, for all runs
from batchscope.analysis.compare import Comparison, compare
from batchscope.analysis.ratios import FIT, STEP, median_time, probe_seconds
from batchscope.analysis.read import find
from batchscope.errors import UserError
from batchscope.options.compose import check_command_line
from batchscope.records.read import read
from batchscope.records.run_record import plan
from batchscope.records.step_parts import PARTS
from batchscope.training.run import train
from batchscope.training.task import Task

ROOT = Path(__file__).resolve().parent.parent
IN_TURNS, SEPARATE = 0.1, 0.3  # built-in slowdowns
_REMEMBERED = 5  # steps, of whose time the wait is a share


class Slowed:
    """A `training_step` that waits, busily, for a share of the time that the last steps took without waiting."""

    def __init__(self, share: float):
        self.share, self.step = share, Task.training_step
        self.last, self.waited = 0.0, 0.0
        self.without: deque[float] = deque(maxlen=_REMEMBERED)

    def install(self) -> None:
        def training_step(task: Task, *batch: Any) -> Any:
            result = self.step(task, *batch)
            self.wait()
            return result

        Task.training_step = training_step

    def wait(self) -> None:
        now = time.perf_counter()
        if self.last:
            self.without.append(now - self.last)
        end = now + (self.share * statistics.median(self.without) if self.without else 0.0)
        while time.perf_counter() < end:
            pass
        self.last = time.perf_counter()


def run(folder: Path, words: list[str], share: float, turn: dict[str, Any] | None = None) -> None:
    """One run in a forked process; a finished one is kept."""
    if (folder / "run.json").exists() and read(folder).get("status") == "finished":
        return
    (config,) = check_command_line(words, multirun=False, run_dir=os.path.relpath(folder))
    plan(folder, config=config, choices={"model": "cnn", "data": "mnist"}, overrides=words, turn=turn)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            if share:
                Slowed(share).install()
            train(config, folder, {"model": "cnn", "data": "mnist"}, words)
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f"{folder} did not finish: see {folder / 'log.txt'}")


def measure(out: Path, words: list[str], comparisons: int, rounds: int) -> None:
    """All runs, in the order of the docstring."""
    shuffle = random.Random(0)
    for number in range(comparisons):
        began = time.perf_counter()
        for turn in range(rounds):
            sides = [("a", 0.0), ("again", 0.0), ("slower", IN_TURNS)]
            shuffle.shuffle(sides)
            for name, share in sides:
                place = out / "turns" / str(number) / name / str(turn)
                run(place, words, share, {"of": str(number), "round": turn})
        for extra in "xy":
            run(out / "separate" / f"{number}{extra}", words, SEPARATE)
        print(f"{number + 1} of {comparisons}: {time.perf_counter() - began:.0f} s", flush=True)


def comparisons_in_turns(out: Path, comparisons: int, name: str) -> list[Comparison]:
    return [compare(out / "turns" / str(n) / "a", out / "turns" / str(n) / name) for n in range(comparisons)]


def unchanged_runs(out: Path, comparisons: int, rounds: int) -> list[Path]:
    """All runs of A in the order of their time, roughly."""
    places = [(n, t, name) for n in range(comparisons) for t in range(rounds) for name in ("a", "again")]
    return [out / "turns" / str(n) / name / str(t) for n, t, name in places]


def apart(runs: Sequence[Path], most: int) -> Iterator[tuple[Path, Path]]:
    """Pairs that lie half of the benchmark apart, each run in one pair."""
    half = len(runs) // 2
    for n in range(min(most, half)):
        first = n * half // min(most, half)
        yield runs[first], runs[first + half]


def spread(runs: Sequence[Path]) -> dict[str, float]:
    """Standard deviations of log times over separate runs of the same thing, and of the step over the probe's time."""
    read_runs = [found for folder in runs for found in find([folder]).runs]
    found = {}
    for name in (STEP, *PARTS, FIT):
        times = [math.log(t) for one in read_runs if (t := median_time(one, name))]
        found[name] = statistics.stdev(times) if len(times) > 1 else math.nan
    corrected = [math.log((median_time(one, STEP) or math.nan) / p) for one in read_runs if (p := probe_seconds([one]))]
    found["step ÷ probe"] = statistics.stdev(corrected) if len(corrected) > 1 else math.nan
    return found


def row(title: str, found: list[Comparison], wanted: str) -> str:
    alarms = sum(one.exit_code == 3 for one in found)
    differing = sum(any(r.ratio and r.ratio.differs for r in one.compared[0].rows) for one in found)
    ratio = statistics.median(one.compared[0].slowdown.value for one in found)
    reach = statistics.median(one.compared[0].slowdown.high / one.compared[0].slowdown.value - 1 for one in found)
    interval = f"± {reach:.1%}" if math.isfinite(reach) else "unknown"
    return f"| {title} | {len(found)} | {alarms} ({alarms / len(found):.0%}) | {wanted} | {differing} | {ratio:.3f} | {interval} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "bench-compare")
    parser.add_argument("--comparisons", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1.0, help="of training in a run")
    args = parser.parse_args()
    words = ["experiment=throughput", "data=mnist", f"data.root={args.root}", "data.batch_size=32"]
    words += ["callbacks.throughput.calibrate=false", "callbacks.memory=null", "callbacks.until_known=null"]
    words += [
        "logger.tensorboard=null",
        "logger.csv=null",
        "callbacks.progress=null",
        "callbacks.device=null",
        "trainer.accelerator=cpu",
    ]
    words += [f"+trainer.max_time.seconds={args.seconds}", "+trainer.min_steps=15"]
    began = time.perf_counter()
    measure(args.out, words, args.comparisons, args.rounds)
    runs = unchanged_runs(args.out, args.comparisons, args.rounds)
    slower = [args.out / "separate" / f"{n}{extra}" for n in range(args.comparisons) for extra in "xy"]
    far = [runs[(n * len(runs) // len(slower) + len(runs) // 2) % len(runs)] for n in range(len(slower))]
    tables = {
        "unchanged, separate": ([compare(*pair) for pair in apart(runs, 40)], "≤ 5 %"),
        "unchanged, in turns": (comparisons_in_turns(args.out, args.comparisons, "again"), "≤ 5 %"),
        f"{IN_TURNS:.0%} slower, in turns": (comparisons_in_turns(args.out, args.comparisons, "slower"), "≥ 90 %"),
        f"{SEPARATE:.0%} slower, separate": ([compare(*pair) for pair in zip(far, slower, strict=True)], "≥ 95 %"),
    }
    found = spread(runs)
    header = "| | comparisons | exit code 3 | wanted | any row | median B ÷ A | interval |"
    lines = [header, "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    lines += [row(title, comparisons, wanted) for title, (comparisons, wanted) in tables.items()]
    lines += ["", "Separate runs of the same thing differ by (standard deviation of log times): "]
    lines += [", ".join(f"{name.replace('_', ' ')} {value:.1%}" for name, value in found.items()) + "."]
    lines += [f"{args.rounds} rounds of {args.seconds:g} s; {time.perf_counter() - began:.0f} s in all."]
    data = {"spread": found, "rounds": args.rounds, "seconds": args.seconds}
    data["tables"] = {title: [one.as_json() for one in comparisons] for title, (comparisons, _) in tables.items()}
    if args.comparisons < 10:
        print("\n".join(lines))
    else:
        write_result("compare", "\n".join(lines), _short(data))


def _short(data: dict[str, Any]) -> dict[str, Any]:
    """The raw numbers without the folders."""
    keep = ("rounds", "regression", "rows")
    for found in data["tables"].values():
        found[:] = [{key: one["pairs"][0][key] for key in keep} for one in found]
    return data


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
