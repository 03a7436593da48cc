"""Passes: a timed sweep visits its runs in order, then in reverse, again and again, until it can say which batch size to take.

A slow moment of the machine is then in the visits of all runs alike, and rates are compared within passes. This file decides
who is visited, and who is done; visits.py has the processes.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from ..analysis.answer import decide
from ..analysis.noise import SWEEPS_CPU, Rates
from ..analysis.windows import COLUMNS
from ..records.intervals import TIME_LIMIT, known_to

VISIT_S = 0.25  # many short passes say more than few long ones: what disturbs a machine often lasts for a second
FEWEST = 10  # passes; with fewer, answers are wrong too often (benchmarks/results/answers_attack.md)
CLOSER = 0.02  # of a rate: sweeps of different minutes differ by more


class Run(ABC):
    """A run that waits to be visited.

    Args:
        group: the runs that it is compared with.
        size: its batch size.
    """

    def __init__(self, group: str, size: int):
        self.group, self.size = group, size
        self.windows: list[tuple[Any, ...]] = []  # what its visits have measured, as COLUMNS

    @abstractmethod
    def visit(self, number: int, seconds: float) -> Mapping[str, Any] | None:
        """Train for so many seconds in this pass, and say what was measured; None if the run has ended."""

    @abstractmethod
    def stop(self, reason: str) -> None:
        """End the run and wait for it; no run trains meanwhile."""


class Limits(NamedTuple):
    """When a run is done."""

    precision: float = 0.05  # of a rate: how far its interval may reach
    seconds: float = 3.0  # of visits, a run on average
    passes: int = FEWEST  # at least
    decide_s: float = 120.0  # of all visits: so long they may take to decide between sizes


USUAL = Limits()


def measure_in_passes(
    runs: Sequence[Run],
    limits: Limits = USUAL,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = lambda line: None,
    first_pass: int = 0,
) -> None:
    """Visit runs until each has ended, by itself or because it is done.

    A run is done when its rate is known to the precision and its size is not among those between which the answer is
    undecided. After the time that the runs have, only these go on, for at most two minutes in all.

    Args:
        runs: that wait.
        limits: see Limits.
        clock: seconds.
        say: is told what happens, in one line, before every pass.
        first_pass: the number of the first pass; passes of other times in the same folder have other numbers.
    """
    waiting, measured = list(runs), list(runs)
    began, most = clock(), limits.seconds * len(runs)
    at_most = max(most, limits.decide_s)
    number = 0
    while waiting:
        spent = clock() - began
        say(_words(waiting, len(runs), number, most - spent, at_most - spent))
        for one in waiting[:: -1 if number % 2 else 1]:
            if not _visit(one, first_pass + number):
                waiting.remove(one)
                measured.remove(one)
                one.stop("")
        number += 1
        spent = clock() - began
        if number < limits.passes and spent < at_most:
            continue
        vague, contending = _open(measured, limits.precision)
        for one in list(waiting):
            goes_on = spent < at_most and one in contending or spent < most and one in vague
            if not goes_on:
                waiting.remove(one)
                one.stop(TIME_LIMIT if one in vague else known_to(limits.precision))


def _visit(one: Run, number: int) -> bool:
    """Visit a run, and keep what it has measured; whether the run goes on."""
    facts = one.visit(number, VISIT_S)
    if facts is None:
        return False
    seconds, samples = facts.get("median_s") or math.nan, facts.get("samples") or math.nan
    if seconds > 0 and samples > 0:
        taken = facts.get("others_share", 0.0)
        row = (one.size, id(one), str(number), math.log(seconds / samples), taken, bool(facts.get("disturbed")))
        one.windows.append(row)
    return True


def _open(measured: Sequence[Run], precision: float) -> tuple[list[Run], list[Run]]:
    """The runs whose rate is not known to the precision, and those on which an answer still depends."""
    vague: list[Run] = []
    contending: list[Run] = []
    for group in dict.fromkeys(one.group for one in measured):
        members = [one for one in measured if one.group == group]
        windows = pd.DataFrame([row for one in members for row in one.windows], columns=list(COLUMNS))
        rates = Rates(windows)
        known = {size: rates.reach(size, others=False) for size in rates.settings}
        vague += [one for one in members if known.get(one.size, math.inf) > precision]
        if len(known) > 1 and rates.busy is None:
            found = decide(Rates(windows, sweeps=SWEEPS_CPU))
            open_ = {*found.between, found.best} if found and found.between else set()
            # More passes narrow the noise alone: not what sweeps differ by, nor what is allowed for other programs.
            contending += [one for one in members if one.size in open_ and known[one.size] > CLOSER]
    return vague, contending


def _words(waiting: Sequence[Run], runs: int, number: int, left: float, at_most: float) -> str:
    """`measuring 4 settings · pass 2 · at most 20 s left`, or what is measured again."""
    done = f" · {runs - len(waiting)} done" if len(waiting) < runs else ""
    if left > 0 or number < FEWEST:
        return f"measuring {runs} settings · pass {number + 1}{done} · at most {max(left, 1):.0f} s left"
    sizes = " and ".join(f"{size:,}" for size in sorted({one.size for one in waiting}))
    return f"not decided yet: measuring {sizes} again · pass {number + 1} · at most {at_most:.0f} s left"
