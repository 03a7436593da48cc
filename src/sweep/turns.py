"""Turns: the runs of a sweep train for a fifth of a second each, in rounds of changing order, until their rates are known.

A slow moment of the machine is then in the rounds of all runs alike, and rates are compared within rounds. This file
decides whose turn it is and who is done; turn_processes.py has the processes.
"""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ..records.intervals import TIME_WAS_UP, drifting_interval, known_to, ratio_interval

TURN_S = 0.2  # many short rounds say more than few long ones: what disturbs the machine often lasts for a second
MIN_ROUNDS = 6
PATIENCE = 1.0  # of the time of all turns: what disturbed turns, and waiting for a quiet machine, may take in addition
FEWEST = 3  # undisturbed turns that the disturbed ones are left out for
CLOSER = 0.4  # of the precision: for a run that competes
COMPETES = 0.9  # of the best rate
ENOUGH = 0.7  # of the seconds a run, for one that does not compete; the others share what is left


class Run(Protocol):
    """A run that waits for its turns."""

    def turn(self, number: int, seconds: float) -> Mapping[str, Any] | None:
        """Train for so many seconds in this round, and say what was measured; None if the run has ended."""
        ...

    def stop(self, reason: str) -> None:
        """End the run and wait for it; no run trains meanwhile."""
        ...


@dataclass(eq=False)
class _Measured:
    """A run and what its turns have measured."""

    run: Run
    rounds: list[tuple[float, bool]] = field(default_factory=list)  # seconds of a step, and whether it was disturbed
    samples: float = math.nan  # of a step
    seconds: float = 0.0  # of its turns, without those that were repeated

    @property
    def medians(self) -> list[float]:
        """Seconds of a step, of each round; NaN for a disturbed one, unless hardly any other is left."""
        enough = sum(not disturbed for _, disturbed in self.rounds) >= FEWEST
        return [math.nan if disturbed and enough else median for median, disturbed in self.rounds]

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / drifting_interval(self.medians)[0]

    @property
    def reach(self) -> float:
        """How far the interval of the median step reaches, as a fraction."""
        return _reach(*drifting_interval(self.medians))


class Limits(NamedTuple):
    """When a run is done."""

    precision: float = 0.05  # of a median step: how far its interval may reach
    seconds: float = 3.0  # of turns, a run on average


USUAL = Limits()


def take_turns(
    runs: Sequence[Run],
    limits: Limits = USUAL,
    clock: Callable[[], float] = time.monotonic,
    wait: Callable[[float], Any] = lambda seconds: None,
    shuffle: Callable[[list[Any]], None] | None = None,
    say: Callable[[str], None] = lambda line: None,
    first_round: int = 0,
) -> None:
    """Give turns until every run has ended, by itself or because its rate is known or the time is up.

    `wait` waits until the machine is quiet, for so many seconds at most. Rounds are numbered from `first_round` on: rounds
    of other times in the same folder have other numbers.
    """
    shuffle = shuffle or random.Random(0).shuffle
    measured = [_Measured(run) for run in runs]  # and not ended by itself
    waiting = list(measured)
    rounds, left_s = 0, limits.seconds * len(runs)
    patience = _Patience(PATIENCE * left_s, clock, wait)
    while waiting:
        order = list(waiting)
        shuffle(order)
        for one in order:
            before = one.seconds
            if not _turn(one, first_round + rounds, patience):
                waiting.remove(one)
                measured.remove(one)
                one.run.stop("")
            left_s -= one.seconds - before
        rounds += 1
        best = max(measured, key=lambda one: one.rate if one.rate > 0 else 0.0, default=None)
        for one in list(waiting):
            reason = _reason(one, best, limits, left_s <= 0) if best and rounds >= MIN_ROUNDS else None
            if reason:
                waiting.remove(one)
                one.run.stop(reason)
        say(f"round {rounds}: {len(runs) - len(waiting)} of {len(runs)} are done")


@dataclass
class _Patience:
    """The seconds that are left for turns that are disturbed, and for waiting until the machine is quiet."""

    seconds: float
    clock: Callable[[], float]
    wait: Callable[[float], Any]


def _turn(one: _Measured, number: int, patience: _Patience) -> bool:
    """Give a run its turn, again where it was disturbed; whether the run goes on."""
    clock = patience.clock
    while True:
        began = clock()
        facts = one.run.turn(number, TURN_S)
        if facts is None:
            return False
        disturbed = bool(facts.get("disturbed"))
        if not disturbed or patience.seconds <= 0:
            one.seconds += clock() - began
            one.rounds.append((facts.get("median_s") or math.nan, disturbed))
            one.samples = facts.get("samples") or math.nan
            return True
        patience.wait(patience.seconds)
        patience.seconds -= clock() - began


def _reason(one: _Measured, best: _Measured, limits: Limits, is_over: bool) -> str | None:
    """Why a run is done; None if it goes on. One that competes is compared with the best within the rounds, too."""
    competes = one.rate >= COMPETES * best.rate
    wanted = (CLOSER if competes else 1.0) * limits.precision
    known = one.reach <= wanted
    if not known and competes and one is not best:
        ratio = ratio_interval(best.medians, one.medians, paired=True)
        known = one.reach <= limits.precision and _reach(*ratio) <= wanted
    if known:
        return known_to(wanted)
    return TIME_WAS_UP if is_over or (not competes and one.seconds >= ENOUGH * limits.seconds) else None


def _reach(middle: float, low: float, high: float) -> float:
    return max(high / middle, middle / low if low > 0 else math.inf) - 1
