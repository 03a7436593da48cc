"""Time microbenchmarks on a device, and keep the best rate seen of each.

A microbenchmark is timed in many short blocks, and the best block counts, because noise only ever makes a block slower.

`torch.utils.benchmark.Timer.blocked_autorange` does not replace this. It lengthens a block tenfold until reading the clock
takes less than 1e-4 of it: to 0.1 s for launches on a CPU, and further where the clock waits for an accelerator. Few such
blocks are undisturbed on a shared machine, and a calibration with its hundred candidates takes much longer.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, repeat

import torch

from .._torch import float32_computed_as

Run = Callable[[], object]

_BLOCK_S = 0.002  # the shorter a block, the more likely that nothing disturbs one of them
_PASS_S = 0.02  # of blocks, before the next microbenchmark
_FINALISTS = 5  # of a quantity
_SLOWEST_RUN_S = 0.06  # a candidate of which one run would take longer is left out
# Where others use all cores, the threads of a small run wait 50 ms for each other. A rate from such runs is 50 times too low,
# and would leave out all larger candidates. So several are tried in any case, and the best is timed again before.
_ALWAYS_TRIED = 6
_SECOND_LOOKS = 3


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


class Microbenchmark:
    """A run to be timed, and the best rate that was seen of it.

    Args:
        amount: what one run does, in FLOPs, bytes or operations.
        make: allocates what a run needs, and returns the run.
        float32: what torch computes float32 products in meanwhile: `ieee` or `tf32`.
    """

    def __init__(self, amount: float, make: Callable[[], Run], float32: str = "ieee"):
        self.amount = amount
        self.rate = 0.0  # amount per second
        self._make = make
        self._float32 = float32
        self._run: Run | None = None
        self._times = 1

    def time_for(self, seconds: float) -> None:
        """Time blocks for so long. The very first run is extra: it may start a library, which takes cuBLAS 30 ms."""
        with float32_computed_as(self._float32):
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


def best_rates(candidates: Mapping[str, Iterable[Microbenchmark]], seconds: float) -> dict[str, float]:
    """The best rate of each quantity, in its amount per second; a quantity that the device does not support is left out.

    Each candidate is timed once, in the given order. Then the fastest of all quantities are timed in passes, so that a
    disturbance of a second costs each of them a pass and none of them its result.

    Args:
        candidates: the microbenchmarks of each quantity, smallest amount first.
        seconds: for the passes.
    """
    fastest = {name: _fastest(group) for name, group in candidates.items()}
    end = clock() + seconds
    while clock() < end:
        for each in chain.from_iterable(fastest.values()):
            with contextlib.suppress(RuntimeError):  # another process has taken the memory
                each.time_for(_PASS_S)
    return {name: max(each.rate for each in group) for name, group in fastest.items() if group}


def _fastest(candidates: Iterable[Microbenchmark]) -> list[Microbenchmark]:
    """The finalists, best first. A candidate that is not among them is freed with its tensors."""
    found: list[Microbenchmark] = []
    for number, each in enumerate(candidates):
        if number >= _ALWAYS_TRIED and found and _is_too_slow(each, found[0]):
            break
        with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):  # no such format here, or no memory
            each.time_for(_PASS_S)
            found = sorted([*found, each], key=lambda one: -one.rate)[:_FINALISTS]
    return found


def _is_too_slow(candidate: Microbenchmark, fastest: Microbenchmark) -> bool:
    """Whether one run would take too long, at a rate that stays as low when it is timed again."""
    for _ in range(_SECOND_LOOKS):
        if candidate.amount / fastest.rate <= _SLOWEST_RUN_S:
            return False
        fastest.time_for(_PASS_S)
    return candidate.amount / fastest.rate > _SLOWEST_RUN_S
