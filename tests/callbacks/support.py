"""Helpers for tests of callbacks: a quiet monitor, modules whose methods call a function first, and a simulated clock."""

import time

from torch import nn

from batchscope.callbacks._timer import HostClock
from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.hardware.nvml_readings import ENERGY
from batchscope.hardware.telemetry import RSS, Telemetry
from tests.support.third_party_modules import Stranger


def monitoring(**options) -> ThroughputMonitor:
    """A monitor that prints nothing, measures no peak and records no operations, unless the options say otherwise."""
    return ThroughputMonitor(**{"calibrate": False, "verbose": False, "record_operations": False, **options})


def stranger(*layers: nn.Module, **before) -> Stranger:
    """A Stranger with these layers; each method that `before` names first calls its function with the module."""

    def method(name: str):
        def call(self, *args):
            before[name](self)
            return getattr(Stranger, name)(self, *args)

        return call

    module = type("Spending", (Stranger,), {name: method(name) for name in before})()
    if layers:
        module.layer = nn.Sequential(*layers)
    return module


def slow() -> Stranger:
    """Each step takes 5 ms."""
    return stranger(training_step=lambda module: time.sleep(0.005))


class Unseen(Stranger):
    """Steps its optimizer without Lightning's wrapper, so that Lightning counts no update."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx: int) -> None:
        super().training_step(batch, batch_idx).backward()
        self.optimizers(use_pl_optimizer=False).step()


class World(HostClock):
    """A simulated clock of steps and samples, in seconds, and the energy counter of a device, which may lag.

    A device that lags has reached no mark before the host waits for it.
    """

    def __init__(self, lags: bool = False) -> None:
        self.now, self.joules, self.waited, self.lags, self.telemetry = 0.0, 0.0, 0, lags, None

    def mark(self) -> float:
        return self.now

    def ready(self, mark: float) -> bool:
        return not self.lags or self.waited > 0

    def wait(self, mark: float) -> None:
        self.waited += 1

    def move(self, seconds: float, watts: float = 1.0) -> None:
        self.now += seconds
        self.joules += seconds * watts
        if self.telemetry is not None:
            self.telemetry.sample()

    def sample(self, read, interval_s: float) -> Telemetry:
        """Replaces the constructor of a DeviceMonitor's telemetry."""
        self.telemetry = Telemetry(lambda: {ENERGY: self.joules, RSS: 1.0}, 60, lambda: self.now)
        return self.telemetry
