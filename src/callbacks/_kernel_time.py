"""KernelTime: for how long kernels run in a training step on CUDA, which is the time that the device needs for it.

A GPU that waits for its host idles between kernels, and the marks of a step do not show it. So in one update the device is
held before each batch is requested, until the host has submitted the whole batch. Then the kernels run without gaps, and the
time between the marks around them is kernel time. The hold makes the update slower, and no rate includes it.

This needs no profiler, whose library takes seconds to start, and works for short runs, for which the driver's utilisation is too
coarse.
"""

import time
from typing import Any

from ._timer import HostClock

# The device is held for this factor × the longest time that the host took to submit a batch, plus the minimum.
_HOLD_FACTOR, _MIN_HOLD_S, _MAX_HOLD_S = 1.5, 0.001, 0.5


class KernelTime:
    """Holds the device in one update of a fit.

    The time is unknown for a step that waits for the device, because it submits its rest after the hold: `.item()` waits, and so
    does a GradScaler with an optimizer that is not fused. It is unknown, too, for a step with more kernels than the device's
    queue holds (about a thousand). Kernels in streams that do not wait for the current stream are not timed.

    Args:
        clock: of the device.
        update: the number of the update, from 1 in the fit; 0 for none. The update before it must take the host no less time.

    Attributes:
        is_active: whether the device is held for the batch that is being submitted.
        samples: the samples of the update that were counted so far.
    """

    def __init__(self, clock: HostClock, update: int):
        self.is_active, self.samples = False, 0.0
        self._clock, self._update = clock, update
        self._submit_start: float | None = None  # when the host began to submit the current batch
        self._max_host_s = 0.0  # to submit a batch, in this update and the one before
        self._batches: list[tuple[Any, Any, bool]] = []  # start mark, end mark, whether the host was ahead

    def start(self, update: int) -> None:
        """Hold the device, if this is the chosen update, before the host requests and submits a batch."""
        if update == self._update:
            self._clock.hold(min(_HOLD_FACTOR * self._max_host_s + _MIN_HOLD_S, _MAX_HOLD_S))
            self.is_active, self._start_mark = True, self._clock.mark()
        self._submit_start = time.perf_counter() if self._update - 1 <= update <= self._update else None

    def stop(self, samples: float) -> None:
        """Mark the end of a batch that the host has submitted, with its samples."""
        if self._submit_start is not None:
            self._max_host_s, self._submit_start = max(self._max_host_s, time.perf_counter() - self._submit_start), None
        if self.is_active:
            self.samples += samples
            is_ahead = not self._clock.ready(self._start_mark)
            self._batches.append((self._start_mark, self._clock.mark(), is_ahead))
            self.is_active = False

    @property
    def seconds(self) -> float | None:
        """Return the seconds of the update in which kernels ran; None if they are unknown, or not known yet."""
        are_valid = [is_ahead and self._clock.ready(end) for _, end, is_ahead in self._batches]
        if not are_valid or not all(are_valid):
            return None
        return sum(self._clock.elapsed_ms(start, end) for start, end, _ in self._batches) / 1e3
