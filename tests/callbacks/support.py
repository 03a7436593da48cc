"""For tests of callbacks: a quiet monitor, modules that fail or are slow, and a clock that stands still."""

import time
from typing import Any

from torch import Tensor

from batchscope.callbacks._timer import HostClock
from batchscope.callbacks.throughput import ThroughputMonitor
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


class World(HostClock):
    """A clock of steps that stands still until somebody moves it; in seconds."""

    now = 0.0

    def mark(self) -> float:
        return self.now
