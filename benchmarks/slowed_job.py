"""A run of compare.py: a sweep's run with a built-in slowdown, which is the choice `slowed` in its record.

The slowdown is a busy wait at the end of `training_step`, a share of the time of the last steps.
"""

import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from batchscope.records.read import read
from batchscope.sweep import fork_server, job

_REMEMBERED = 5  # steps, of whose time the wait is a share: one that held a pause does not count


class Wait:
    """Waits, busily, for a share of the time that the last steps took without waiting."""

    def __init__(self, share: float):
        self._share = share
        self._last = 0.0
        self._without: deque[float] = deque(maxlen=_REMEMBERED)

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


if __name__ == "__main__":
    if sys.argv[1] == fork_server.SERVE:
        fork_server.serve()
    if share := float(read(Path(sys.argv[1]))["choices"].get("slowed", 0)):
        slow_down(share)
    job.main()
