"""Time works on a device, and keep the best rate seen of each.

Every work is timed in many short blocks, and the best block counts, because noise only ever makes a block slower.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, repeat
from typing import NamedTuple

import torch

from .._torch import float32_computed_as

Run = Callable[[], object]
Say = Callable[[str], None]

_FINALISTS = 5
# A rate that others disturbed is far too low, and would end the search for a better one.
_ALWAYS_TRIED = 6  # works of a quantity
_SECOND_LOOKS = 3  # at the best rate
_BLOCK_S = 0.002  # the shorter a block, the more likely that nothing disturbs one of them


class Effort(NamedTuple):
    """How much time a calibration takes."""

    seconds: float  # for the finals, after everything was tried once
    turn_s: float  # of one quantity, before the next one's turn
    slowest_run_s: float  # work that would take longer for one run is left out


def clock() -> float:
    """Seconds by the host's clock, read when the accelerator is idle.

    torch.utils.benchmark has the same clock. Its import takes a third of a second, and warns where there is a CUDA
    toolkit and no GPU.
    """
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def time_runs(run: Run, times: int) -> float:
    """Seconds that a number of runs take one after another, from an idle device to an idle device."""
    start = clock()
    for _ in repeat(None, times):  # costs less than counting
        run()
    return max(clock() - start, 1e-9)


class Work:
    """Something to be timed, and the best rate that was seen of it. `make` allocates what a run needs."""

    def __init__(self, amount: float, make: Callable[[], Run], form: str = "ieee"):
        self.amount = amount  # what one run does, in FLOPs, bytes or operations
        self.rate = 0.0  # amount per second
        self._make = make
        self._form = form  # what float32 is computed as meanwhile: `ieee` or `tf32`
        self._run: Run | None = None
        self._times = 1

    def take_turn(self, seconds: float) -> None:
        """Time blocks of runs for so long. The first run is extra: it may start a library, which takes cuBLAS 30 ms."""
        with float32_computed_as(self._form):
            if self._run is None:
                self._run = self._make()
                self._time_block(self._run)
            spent = 0.0
            while spent < seconds:
                spent += self._time_block(self._run)

    def _time_block(self, run: Run) -> float:
        seconds = time_runs(run, self._times)
        self.rate = max(self.rate, self.amount * self._times / seconds)
        self._times = max(1, round(_BLOCK_S * self.rate / self.amount))
        return seconds


def best_rates(choices: Mapping[str, Iterable[Work]], effort: Effort, say: Say = lambda line: None) -> dict[str, float]:
    """The best rate seen for each quantity; a quantity of which no work runs on this device is left out.

    Everything is tried once, smallest first. Then the fastest works of all quantities take turns until the time is up,
    so that a disturbance of a second costs each of them a turn and none of them its result.
    """
    finalists = {}
    for name, tried in choices.items():
        say(name)
        finalists[name] = _fastest(tried, effort)
    say("all again, for the best of several rounds")
    end = clock() + effort.seconds
    while clock() < end:
        for work in chain.from_iterable(finalists.values()):
            with contextlib.suppress(RuntimeError):  # another process has taken the memory
                work.take_turn(effort.turn_s)
    return {name: max(work.rate for work in works) for name, works in finalists.items() if works}


def _fastest(choices: Iterable[Work], effort: Effort) -> list[Work]:
    found: list[Work] = []
    for number, work in enumerate(choices):
        if number >= _ALWAYS_TRIED and found and _is_too_slow(work, found[0], effort):
            break
        with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):  # no such format here, or no memory
            work.take_turn(effort.turn_s)
            found = sorted([*found, work], key=lambda each: -each.rate)[:_FINALISTS]
    return found


def _is_too_slow(work: Work, fastest: Work, effort: Effort) -> bool:
    """Whether one run would take too long, at a rate that stays as low when it is timed again."""
    for _ in range(_SECOND_LOOKS):
        if work.amount / fastest.rate <= effort.slowest_run_s:
            return False
        fastest.take_turn(effort.turn_s)
    return work.amount / fastest.rate > effort.slowest_run_s
