"""The DeviceMonitors of a trainer, which sample only while ThroughputMonitor says that training time runs."""

from typing import Any

from lightning import Trainer

from .._lightning import callbacks_of
from .device import DeviceMonitor


class FollowedDevices:
    """The trainer's monitors, as one; from its making until `release` they sample in training time only."""

    def __init__(self, trainer: Trainer | None = None):
        self._trainer = trainer
        callbacks = callbacks_of(trainer) if trainer is not None else []
        self._monitors = [callback for callback in callbacks if isinstance(callback, DeviceMonitor)]
        for monitor in self._monitors:
            monitor.follow(True)

    def sample(self, running: bool) -> None:
        """Sample from now on, or sample no more."""
        for monitor in self._monitors:
            (monitor.resume if running else monitor.pause)(self._trainer)

    def restart(self) -> None:
        """Leave the samples so far out of the result."""
        for monitor in self._monitors:
            monitor.restart()

    def release(self) -> None:
        """Let the monitors sample on their own."""
        for monitor in self._monitors:
            monitor.follow(False)
        self._monitors = []

    def result(self) -> dict[str, Any]:
        """What the first monitor has sampled; empty without a monitor."""
        return self._monitors[0].result() if self._monitors else {}
