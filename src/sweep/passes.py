"""Passes: a sweep visits its runs in order, then in reverse, and so on, until it can say which batch size is fast enough.

A slow moment of the machine is then in the visits of all runs alike, and rates are compared within passes. This file
decides how long runs are visited; visits.py has the processes.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from ..analysis.noise import PROCESSES, Rates
from ..analysis.selection import ENOUGH, select
from ..analysis.windows import COLUMNS
from ..records.formatting import count
from ..records.intervals import TIME_LIMIT

VISIT_S = 0.2  # many short passes say more than few long ones: what disturbs a machine often lasts for a second
FEWEST = 10  # passes, also where they take longer than the time: with fewer, too little is known (benchmarks/log.md)
EVERY = 2  # passes from one look to the next
AT_ONCE = 6  # runs that bring time of their own: so eight sizes take no longer than six
SETTLED = "the sweep had its answer"  # why a run has ended


class WaitingRun:
    """A run that waits to be visited.

    Args:
        size: its batch size.
        goes_on: whether it goes on after its visits, as a training does.
    """

    def __init__(self, size: int, goes_on: bool = False):
        self.size, self.goes_on = size, goes_on
        self.windows: list[tuple[Any, ...]] = []  # what its visits have measured, as COLUMNS

    def visit(self, number: int, seconds: float) -> Mapping[str, Any] | None:
        """Train for so many seconds in this pass, and say what was measured; None if the run has ended, and is waited for."""
        raise NotImplementedError

    def stop(self, reason: str) -> None:
        """End the visits of the run, and the run if it is timed: wait for that end. No run trains meanwhile."""


class Limits(NamedTuple):
    """How long runs are visited.

    Attributes:
        seconds: of visits for each run, six of them at most where the answer may end the visits.
        min_passes: that there are in any case.
        enough: of the best rate, see selection.py.
        settles: whether the answer ends the visits; otherwise the time alone does.
    """

    seconds: float = 10.0
    min_passes: int = FEWEST
    enough: float = ENOUGH
    settles: bool = True

    def time_of(self, runs: Sequence[WaitingRun]) -> float:
        """Seconds of all visits at most."""
        return self.seconds * (min(len(runs), AT_ONCE) if self.settles else len(runs))

    def reason_to_end(self, runs: Sequence[WaitingRun], passes: int, is_over: bool) -> str | None:
        """Why the visits end after so many passes; None if they go on."""
        if passes < self.min_passes:
            return None
        sizes = len({run.size for run in runs})
        if self.settles and sizes > 1 and (passes - self.min_passes) % EVERY == 0:
            rates = Rates(windows_of(runs), processes=PROCESSES, at_equal_load=True)
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
    """Visit runs until each has ended, by itself or with the others. All that go on are in every pass.

    A training that is left alone, because the others have ended, is visited no more. `say` is told what happens, before
    every pass. Passes are numbered from `first_pass` on: those of another time in the same folder have other numbers.
    """
    limits = limits or Limits()
    waiting, most, began, number = list(runs), limits.time_of(runs), clock(), 0
    while waiting:
        spent = clock() - began
        limit = f" of at most {most:.0f}" if spent < most else ""
        say(f"measuring {count(len(waiting), 'run')} · pass {number + 1} · {spent:.0f} s{limit}")
        for run in waiting[:: -1 if number % 2 else 1]:
            if not _visit(run, first_pass + number):
                waiting.remove(run)
        number += 1
        if waiting and (reason := limits.reason_to_end(waiting, number, clock() - began >= most)):
            for run in waiting:
                run.stop(reason)
            waiting.clear()
        if len(waiting) == 1 < len(runs) and waiting[0].goes_on:
            waiting.clear()


def windows_of(runs: Sequence[WaitingRun]) -> pd.DataFrame:
    """What the visits of some runs have measured so far."""
    return pd.DataFrame([row for run in runs for row in run.windows], columns=list(COLUMNS))


def _visit(run: WaitingRun, number: int) -> bool:
    """Visit a run, and keep what it has measured; whether the run goes on."""
    facts = run.visit(number, VISIT_S)
    if facts is None:
        return False
    seconds, samples = facts.get("mean_s") or math.nan, facts.get("samples") or math.nan
    if seconds > 0 and samples > 0:
        taken = facts.get("others_share", 0.0)
        row = (run.size, id(run), str(number), math.log(seconds / samples), taken, bool(facts.get("disturbed")))
        run.windows.append(row)
    return True
