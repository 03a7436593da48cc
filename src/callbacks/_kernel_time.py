"""KernelTime: for how long kernels run in a training step, on CUDA: all the time that the device needs for it.

A GPU that waits for its host idles between kernels, and the marks of a step do not show it. So in one update the device is
held before each batch is asked for, until the host has submitted the whole of it; then the kernels follow each other without a
gap, and the time between two marks around them is theirs. The update is slower by the hold, and no rate is read from it.

This needs no profiler, whose library takes seconds to start, and knows short runs, for which the driver's utilisation is too
coarse.
"""

import time
from typing import Any

from ._timer import HostClock

# The device is held for so many times what the host took for the batch before, within these limits.
_MORE, _LEAST_S, _MOST_S = 1.5, 0.001, 0.5


class KernelTime:
    """Holds the device in one update of a fit.

    Nothing is known of a step that waits for the device, because it submits its rest after the hold: `.item()` waits, and so does
    a GradScaler beside an optimizer that is not fused. Nor is it of a step of more kernels than the device's queue takes (about a
    thousand). Kernels in streams that do not wait for the current one are not seen.

    Args:
        clock: of the device.
        update: which one, counted from 1 in the fit; 0 for none. The one before must take the host no less time.

    Attributes:
        active: whether the device is held for the batch that is being submitted.
        samples: of the update, as far as they were counted.
    """

    def __init__(self, clock: HostClock, update: int):
        self.active, self.samples = False, 0.0
        self._clock, self._update = clock, update
        self._since: float | None = None  # when the host began to submit a batch
        self._host_s = 0.0  # that it took for one, at most, in this update and the one before
        self._batches: list[tuple[Any, Any, bool]] = []  # the marks around each batch, and whether the host was ahead

    def start(self, update: int) -> None:
        """A batch of this update is asked for."""
        if update == self._update:
            self._clock.hold(min(_MORE * self._host_s + _LEAST_S, _MOST_S))
            self.active, self._began = True, self._clock.mark()
        self._since = time.perf_counter() if self._update - 1 <= update <= self._update else None

    def stop(self, samples: float) -> None:
        """The batch is submitted."""
        if self._since is not None:
            self._host_s, self._since = max(self._host_s, time.perf_counter() - self._since), None
        if self.active:
            self.samples += samples
            is_ahead = not self._clock.ready(self._began)
            self._batches.append((self._began, self._clock.mark(), is_ahead))
            self.active = False

    @property
    def seconds(self) -> float | None:
        """In which kernels ran in the update; None if that is not known, or not yet."""
        known = [is_ahead and self._clock.ready(end) for _, end, is_ahead in self._batches]
        if not known or not all(known):
            return None
        return sum(self._clock.elapsed_ms(start, end) for start, end, _ in self._batches) / 1e3
