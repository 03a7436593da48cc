"""WaitUntilQuiet: delays a training until other programs leave the processor idle, so that its steps are timed undisturbed."""

import time
from typing import Annotated

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from ..errors import UserError, warn
from ..hardware.processor import NoiseMeter
from ..options.types import PositiveFloat, Purpose
from ..records.formatting import duration, percent
from ..records.rates import REPORTED_LOAD
from ..records.terminal import LiveLine

_RANKS_WAIT_MIN = 30  # minutes that ranks wait for each other: the default `timeout` of DDPStrategy
_QUIET_S = 3  # seconds in a row, in each of which other programs take less than a tenth of the processor


class WaitUntilQuiet(Callback):
    """Waits before a fit until other programs take less than a tenth of the processor, or the time is up.

    It stands before the ThroughputMonitor, which may have to measure the device's peak. Rank 0 waits, and the others wait for it.
    The only time of the run that includes the wait is `waiting_seconds` in its record.

    Args:
        minutes: the longest wait; then the training begins beside the other programs, with a warning. With several ranks it
            must be less than 30, because Lightning's ranks wait no longer for each other.

    Raises:
        UserError: when a fit of several ranks begins with 30 minutes or more.
    """

    observes_only = True

    def __init__(self, minutes: Annotated[PositiveFloat, Purpose.OBSERVATION] = 10.0):
        self.minutes = minutes
        self.waited_s = 0.0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if trainer.world_size > 1 and self.minutes >= _RANKS_WAIT_MIN:
            takes = f"takes less than {_RANKS_WAIT_MIN} with several ranks: they wait no longer than that for rank 0"
            raise UserError(f"callbacks.wait_until_quiet.minutes: got {self.minutes:g}, {takes}")
        if not trainer.is_global_zero:
            return
        began, quiet_s, meter, line = time.monotonic(), 0, NoiseMeter(), LiveLine()
        try:
            while quiet_s < _QUIET_S:
                if time.monotonic() - began >= 60 * self.minutes:
                    line.clear()
                    warn(
                        f"other programs still take the processor after {duration(60 * self.minutes)}: training begins"
                    )
                    break
                time.sleep(1)
                share = meter.read().others_share  # NaN where no load can be read: do not wait
                is_loud = share >= REPORTED_LOAD
                quiet_s = 0 if is_loud else quiet_s + 1
                if is_loud:
                    line(f"waiting for a quiet machine: other programs take {percent(share)} of the processor")
        finally:
            line.clear()
            self.waited_s = time.monotonic() - began
