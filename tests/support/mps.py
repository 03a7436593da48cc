"""torch.mps without a Mac: the calls that this package uses, with the answers of the real ones.

After pytorch's aten/src/ATen/mps/MPSEvent.mm and MPSAllocator.mm: `record` submits what was encoded and does not wait.
`synchronize` of an event waits for that event alone. The driver keeps what tensors have freed. Here the device is a
timeline in seconds, on the clock of a test.
"""

from types import SimpleNamespace
from typing import Any

import torch


class Mps:
    """An MPS device and the host before it.

    Attributes:
        now: the host's time in seconds.
        free_at: the time at which the device has done all that was submitted.
        waits: how often the host has waited for all of the device.
    """

    def __init__(self) -> None:
        self.now = self.free_at = 0.0
        self.waits = 0
        self.tensors = self.driver = 0  # bytes

    def submit(self, seconds: float, host_s: float = 0.0) -> None:
        """Have the device work for so long, after what it has to do; the host takes `host_s` to say so."""
        self.now += host_s
        self.free_at = max(self.free_at, self.now) + seconds

    def perf_counter(self) -> float:
        """The host's clock."""
        return self.now

    def allocate(self, size: int) -> None:
        """Tensors of so many bytes, negative where they are freed: the driver keeps those in its pool."""
        self.tensors += size
        self.driver = max(self.driver, self.tensors)

    def module(self) -> SimpleNamespace:
        """In place of `torch.mps`."""
        return SimpleNamespace(
            Event=lambda enable_timing=False: _Event(self, enable_timing),
            synchronize=self._synchronize,
            current_allocated_memory=lambda: self.tensors,
            driver_allocated_memory=lambda: self.driver,
            recommended_max_memory=lambda: 12 * 2**30,
            empty_cache=lambda: setattr(self, "driver", self.tensors),
        )

    def torch(self) -> Any:
        """In place of `torch` in a module that asks for events and devices."""
        return SimpleNamespace(mps=self.module(), device=torch.device, cuda=torch.cuda)

    def _synchronize(self) -> None:
        self.waits += 1
        self.now = max(self.now, self.free_at)


class _Event:
    def __init__(self, mps: Mps, enable_timing: bool):
        self._mps, self._timed, self._read = mps, enable_timing, False
        self._at: float | None = None

    def record(self) -> None:
        self._at = max(self._mps.free_at, self._mps.now)

    def query(self) -> bool:
        return self._at is not None and self._at <= self._mps.now

    def synchronize(self) -> None:
        if self._at is not None:
            self._mps.now = max(self._mps.now, self._at)

    def elapsed_time(self, end: "_Event") -> float:
        """It waits for the whole device, and for ever where `end` was the end of an interval before."""
        self._mps._synchronize()
        assert not end._read, "the real one would never return"
        end._read = True
        if self._at is None or end._at is None or not (self._timed and end._timed):
            raise RuntimeError("Events were not created with argument 'enable_timing=True'")
        if end._at <= self._at:
            raise RuntimeError("End event was not recorded after start event")
        return 1e3 * (end._at - self._at)
