"""Passes: a sweep visits its runs in order, then in reverse, and so on, until it can say which batch size is fast enough.

A slow moment of the machine then affects the visits of all runs alike, and rates are compared within passes. This file
decides how long runs are visited; visits.py has the processes.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from ..analysis.noise import PROCESSES_SD, Rates
from ..analysis.selection import ENOUGH_SHARE, select
from ..analysis.windows import COLUMNS
from ..records.formatting import count
from ..records.intervals import TIME_LIMIT

VISIT_S = 0.2  # many short passes tell more than few long ones: a disturbance of a machine often lasts a second
MIN_PASSES = 10  # passes, even if they exceed the time: fewer passes tell too little (benchmarks/log.md)
PASSES_PER_CHECK = 2  # passes from one check for an answer to the next
AT_ONCE = 6  # runs that add to the time of all visits: eight sizes take no longer than six
SETTLED = "the sweep had its answer"  # the reason why the visits end


class WaitingRun:
    """A run that waits to be visited.

    Args:
        size: the batch size.
        goes_on: whether the run goes on after its visits, as a training does.
    """

    def __init__(self, size: int, goes_on: bool = False):
        self.size, self.goes_on = size, goes_on
        self.windows: list[tuple[Any, ...]] = []  # a row for each visit, with the columns COLUMNS

    def visit(self, number: int, seconds: float) -> Mapping[str, Any] | None:
        """Train for `seconds` in pass `number`, and return the measurement; if the run ends, wait and return None."""
        raise NotImplementedError

    def stop(self, reason: str) -> None:
        """End the visits of the run. A timed run ends, too; wait for its end. No run trains meanwhile."""


class Limits(NamedTuple):
    """How long runs are visited.

    Attributes:
        seconds: the time of visits that each run adds; where the answer may end the visits, at most AT_ONCE runs do.
        min_passes: the fewest passes.
        enough: the share of the best rate that is enough, see selection.py.
        settles: whether the answer ends the visits; otherwise only the time does.
    """

    seconds: float = 10.0
    min_passes: int = MIN_PASSES
    enough: float = ENOUGH_SHARE
    settles: bool = True

    def max_seconds(self, runs: Sequence[WaitingRun]) -> float:
        """Return the most seconds that all visits may take."""
        return self.seconds * (min(len(runs), AT_ONCE) if self.settles else len(runs))

    def reason_to_end(self, runs: Sequence[WaitingRun], passes: int, is_over: bool) -> str | None:
        """Return why the visits end after `passes` passes, or None if they go on. `is_over`: the time is over."""
        if passes < self.min_passes:
            return None
        sizes = len({run.size for run in runs})
        if self.settles and sizes > 1 and (passes - self.min_passes) % PASSES_PER_CHECK == 0:
            rates = Rates(collect_windows(runs), processes=PROCESSES_SD, at_equal_load=True)
            selection = select(rates, enough=self.enough)
            if selection is not None and selection.is_settled(sizes):
                return SETTLED
        return TIME_LIMIT if is_over else None


def measure_in_passes(
    runs: Sequence[WaitingRun],
    limits: Limits | None = None,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = lambda line: None,
    first_pass: int = 0,
) -> None:
    """Visit runs, each in every pass, until the limits end the visits or every run has ended.

    The last training is not visited any more once all other runs have ended. `say` gets a line of progress before every
    pass. Passes are numbered from `first_pass` on: passes of an earlier time in the same folder have other numbers.
    """
    limits = limits or Limits()
    waiting, max_s, began, number = list(runs), limits.max_seconds(runs), clock(), 0
    while waiting:
        elapsed_s = clock() - began
        limit = f" of at most {max_s:.0f}" if elapsed_s < max_s else ""
        say(f"measuring {count(len(waiting), 'run')} · pass {number + 1} · {elapsed_s:.0f} s{limit}")
        for run in waiting[:: -1 if number % 2 else 1]:
            if not _visit(run, first_pass + number):
                waiting.remove(run)
        number += 1
        if waiting and (reason := limits.reason_to_end(waiting, number, clock() - began >= max_s)):
            for run in waiting:
                run.stop(reason)
            waiting.clear()
        if len(waiting) == 1 < len(runs) and waiting[0].goes_on:
            waiting.clear()


def collect_windows(runs: Sequence[WaitingRun]) -> pd.DataFrame:
    """Return the windows that the visits of some runs have measured so far, with the columns COLUMNS."""
    return pd.DataFrame([row for run in runs for row in run.windows], columns=list(COLUMNS))


def _visit(run: WaitingRun, number: int) -> bool:
    """Visit a run in pass `number`, and keep the measured window; return whether the run has not ended."""
    measurement = run.visit(number, VISIT_S)
    if measurement is None:
        return False
    step_s, samples = measurement.get("mean_s") or math.nan, measurement.get("samples") or math.nan
    if step_s > 0 and samples > 0:
        others_share, is_disturbed = measurement.get("others_share", 0.0), bool(measurement.get("disturbed"))
        run.windows.append((run.size, id(run), str(number), math.log(step_s / samples), others_share, is_disturbed))
    return True
