"""What measuring a step costs in a long run: time and memory after 1,000, 100,000 and 1,000,000 updates.

    python benchmarks/long_run.py
    python benchmarks/long_run.py --updates 100 1000     # a look; writes no result

No network is trained: a timer is marked as Lightning's hooks mark it in a step, and every hundred steps the marks become
rows of the table, the rows curves in TensorBoard and CSV. So nothing but the measurement takes time. Windows are by the
clock, as in a real run.
"""

import argparse
import itertools
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import psutil
from harness import machine, write_result
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from batchscope.callbacks._cost import cost_of, metrics_of, stalls_among
from batchscope.callbacks._step_monitor import FLUSH_EVERY
from batchscope.callbacks._table import UpdateTable
from batchscope.callbacks._timer import HostClock, StepTimer
from batchscope.callbacks._windows import Windows
from batchscope.callbacks._writer import StepWriter
from batchscope.records.step_parts import StepPart

UPDATES = (1_000, 100_000, 1_000_000)
PARTS = (StepPart.DATA_WAIT, StepPart.TRANSFER, StepPart.FORWARD, StepPart.BACKWARD, StepPart.OPTIMIZER)


class Trainer(SimpleNamespace):
    """A trainer as far as a writer needs one; unlike a SimpleNamespace it can be referred to weakly."""

    __slots__ = ("__weakref__",)
    __hash__ = object.__hash__


class Measurement:
    """What ThroughputMonitor does with the steps of a fit."""

    def __init__(self, folder: str):
        loggers = [CSVLogger(folder, name="csv", version=""), TensorBoardLogger(folder, name="tb", version="")]
        self.windows = Windows(5)
        self.timer, self.table = StepTimer(HostClock()), UpdateTable(5, self.windows)
        self.writer = StepWriter(Trainer(is_global_zero=True, loggers=loggers))

    def step(self, number: int) -> None:
        """One update of 32 samples."""
        timer = self.timer
        if self.windows.is_due(timer.updates):
            with timer.pause():
                self.windows.begin(timer.updates)
        timer.begin_batch()
        for part in PARTS:
            timer.enter(part)
            timer.leave(part)
        timer.current.samples = 32
        timer.end_batch(number)
        if len(timer.finished) >= FLUSH_EVERY:
            with timer.pause():
                batches = [timer.finished.popleft() for _ in range(len(timer.finished))]
                rows = self.table.add(batches, timer.clock)
                self.writer.write(metrics_of(rows, 1, 1e6, 1e12), always=stalls_among(rows, 1.0))


def measured(updates: list[int]) -> list[dict[str, Any]]:
    """At each number of updates: µs a step since the last one, MiB beyond the start, and seconds for the summary."""
    process, found = psutil.Process(), []
    with tempfile.TemporaryDirectory() as folder:
        fit = Measurement(folder)
        for number in range(1, 201):  # what is done once
            fit.step(number)
        rss, last = process.memory_info().rss, 200
        for first, end in itertools.pairwise([last, *updates]):
            began = time.perf_counter()
            for number in range(first + 1, end + 1):
                fit.step(number)
            us = 1e6 * (time.perf_counter() - began) / (end - first)
            grown = (process.memory_info().rss - rss) / 2**20
            began = time.perf_counter()
            assert cost_of(fit.table)
            found.append({"updates": end, "us": us, "mib": grown, "summary_s": time.perf_counter() - began})
            print(f"\r{end:,} updates", end="", flush=True)
    print()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, nargs="+", default=UPDATES)
    args = parser.parse_args()
    found = measured(list(args.updates))
    lines = ["| updates | µs a step, since the row before | memory grown, MiB | the summary, s |"]
    lines += ["| ---: | ---: | ---: | ---: |"]
    lines += [f"| {r['updates']:,} | {r['us']:.0f} | {r['mib']:.0f} | {r['summary_s']:.3f} |" for r in found]
    table = "\n".join(lines)
    if tuple(args.updates) == UPDATES:
        write_result("long_run", table, {"rows": found})
    else:
        print(f"{table}\n\n{machine()}")


if __name__ == "__main__":
    main()
