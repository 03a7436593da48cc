"""Turns: the runs of a sweep train for a second each, in rounds of changing order, until their rates are known.

A slow minute of the machine is then in the rounds of all runs alike, and rates are compared within rounds. This file
decides whose turn it is and who is done; turn_processes.py has the processes.
"""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ..records.formatting import percent
from ..records.intervals import ratio_interval

TURN_S = 1.0
MIN_ROUNDS = 3
REPEATS = 2  # of a disturbed turn; in all, so many a run
PRECISION, CLOSE_PRECISION = 0.05, 0.02  # of a median step, and of one that competes
COMPETES = 0.9  # of the best rate
SECONDS_A_RUN = 10.0  # on average, of turns
TIME_WAS_UP = "time was up"


class Run(Protocol):
    """A run that waits for its turns."""

    def turn(self, number: int, seconds: float) -> Mapping[str, Any] | None:
        """Train for so many seconds in this round, and say what was measured; None if the run has ended."""
        ...

    def stop(self, reason: str) -> None:
        """End the run and wait for it; no run trains meanwhile."""
        ...


def take_turns(
    runs: Sequence[Run],
    clock: Callable[[], float] = time.monotonic,
    shuffle: Callable[[list[Run]], None] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Give turns until every run has ended, by itself or because its rate is known or the time is up."""
    shuffle = shuffle or random.Random(0).shuffle
    waiting = list(runs)
    medians: dict[int, list[float]] = {id(run): [] for run in runs}  # of each round, in seconds
    rates: dict[int, float] = {}  # samples/s
    samples: dict[int, float] = {}
    left_s, repeats, rounds = SECONDS_A_RUN * len(runs), REPEATS * len(runs), 0
    while waiting:
        order = list(waiting)
        shuffle(order)
        for run in order:
            for attempt in range(1 + REPEATS):
                began = clock()
                facts = run.turn(rounds, TURN_S)
                left_s -= clock() - began
                repeats -= attempt > 0
                if facts is None or not facts.get("disturbed") or repeats <= 0 or left_s <= 0:
                    break
            if facts is None:
                waiting.remove(run)
                run.stop("")
                continue
            medians[id(run)].append(facts.get("median_s") or math.nan)
            samples[id(run)] = facts.get("samples") or math.nan
        rounds += 1
        for run in waiting:
            rates[id(run)] = samples[id(run)] * _median(medians[id(run)])[0]
        best = max((rate for rate in rates.values() if rate > 0), default=math.nan)
        leader = next((medians[key] for key, rate in rates.items() if rate == best), [])
        for run in list(waiting):
            own = medians[id(run)]
            reason = _reason(own, leader, rates[id(run)] >= COMPETES * best) if rounds >= MIN_ROUNDS else None
            if reason is None and left_s <= 0:
                reason = TIME_WAS_UP
            if reason:
                waiting.remove(run)
                run.stop(reason)
        say(f"round {rounds}: {len(runs) - len(waiting)} of {len(runs)} are done")


def _reason(own: list[float], leader: list[float], competes: bool) -> str | None:
    """Why a run is done; None if it goes on. One that competes is compared with the best within the rounds, too."""
    wanted = CLOSE_PRECISION if competes else PRECISION
    known = _median(own)[1] <= wanted
    if not known and competes and own is not leader:
        ratio, low, high = ratio_interval(leader, own, paired=True)
        known = _reach(ratio, low, high) <= CLOSE_PRECISION and _median(own)[1] <= PRECISION
    return f"known to ± {percent(wanted, digits=0)}" if known else None


def _median(medians: list[float]) -> tuple[float, float]:
    """Steps per second by the median steps of all rounds, and how far its interval reaches, as a fraction."""
    ratio, low, high = ratio_interval(medians, [1.0] * len(medians), paired=True)
    return ratio, _reach(ratio, low, high)


def _reach(ratio: float, low: float, high: float) -> float:
    return max(high / ratio, ratio / low if low > 0 else math.inf) - 1
