"""For tests of callbacks: a quiet monitor, modules that fail or are slow, and a world whose time a test moves."""

import time
from typing import Any

from torch import Tensor

from batchscope.callbacks._timer import HostClock
from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.hardware.nvml_readings import ENERGY
from batchscope.hardware.probes import RSS
from batchscope.hardware.sampler import Sampler
from tests.support.third_party_modules import Stranger


def monitoring(**options: Any) -> ThroughputMonitor:
    """A monitor that says nothing, measures no peak, and records no operations unless it is asked to."""
    return ThroughputMonitor(**{"calibrate": False, "verbose": False, "record_operations": False, **options})


class Failing(Stranger):
    """Fails in the update after so many; None: before the first one."""

    def __init__(self, after: int | None) -> None:
        super().__init__()
        self.after = after

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == self.after:
            raise ConnectionError("the user's own")
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        if self.after is None:
            raise ConnectionError("the user's own")
        return super().configure_optimizers()


class Slow(Stranger):
    """Each step takes 5 ms."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(0.005)
        return super().training_step(batch, batch_idx)


class Unseen(Stranger):
    """Steps its optimizer behind Lightning's back, which counts no update."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx).backward()
        self.optimizers(use_pl_optimizer=False).step()


class World(HostClock):
    """The clock of steps and samples, in seconds, and the energy counter of the device. The device may lag behind.

    A device that lags has passed no moment before somebody waits for it.
    """

    def __init__(self, lags: bool = False) -> None:
        self.now, self.joules, self.waited, self.lags = 0.0, 0.0, 0, lags
        self.sampler: Sampler | None = None

    def mark(self) -> float:
        return self.now

    def ready(self, mark: float) -> bool:
        return not self.lags or self.waited > 0

    def wait(self, mark: float) -> None:
        self.waited += 1

    def move(self, seconds: float, watts: float = 1.0) -> None:
        self.now += seconds
        self.joules += seconds * watts
        if self.sampler is not None:
            self.sampler.sample()  # while the power is constant, energy is interpolated exactly

    def sample(self, read: Any, interval_s: float) -> Sampler:
        """In place of a DeviceMonitor's sampler."""
        self.sampler = Sampler(lambda: {ENERGY: self.joules, RSS: 1.0}, 60, lambda: self.now)
        return self.sampler
