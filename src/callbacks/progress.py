"""ProgressBar: one line with the loss and the samples a second, redrawn by the clock and not by the step.

Where standard output is no terminal, a plain line is printed every 30 s instead.
"""

import math
import time
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from typing_extensions import override

from .._lightning import callback_of, callbacks_of
from ..distributed.gather import replica_count
from ..options.types import PositiveFloat
from ..records.formatting import significant
from ..records.terminal import can_redraw, say
from ._batches import SampleCounter, batch_loss
from ._deferred_scalars import DeferredScalars
from ._visits import waiting_seconds
from .throughput import ThroughputMonitor

PLAIN_INTERVAL_S = 30.0


class ProgressBar(TQDMProgressBar):
    """Lightning's bar with `loss` and `samples/s`, without a redraw at every step, which can double a short step.

    The rate is that since the last redraw or the start of the epoch, without validation and waiting. On a GPU the loss is
    that of an earlier redraw: it has reached the host by then, so nothing waits for it. Without a terminal or a notebook
    a plain line every 30 s replaces the bar.

    Args:
        interval_s: seconds between redraws in a terminal.
    """

    observes_only = True

    def __init__(self, interval_s: PositiveFloat = 0.5):
        super().__init__(refresh_rate=1)
        self.interval_s = interval_s
        self._last_output: Any = None  # the output of the last step
        self._shown_values: dict[str, Any] = {}  # the newest loss and rate
        self._loss_read: DeferredScalars | None = None
        self._monitor: ThroughputMonitor | None = None
        self._is_plain = False  # whether plain lines are printed
        self._next_redraw = 0.0  # when the next redraw or line is due
        self._samples, self._began = 0, 0.0
        self._count_samples = SampleCounter(None)

    def _start_interval(self, trainer: Trainer) -> None:
        self._samples, self._began = 0, self._trained_s(trainer)

    def _trained_s(self, trainer: Trainer) -> float:
        """Return the time of a clock that stands still while the run waits."""
        return time.perf_counter() - waiting_seconds(callbacks_of(trainer))

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self.is_enabled and not can_redraw():  # only rank 0 has its bars enabled
            self._is_plain, self.interval_s = True, PLAIN_INTERVAL_S
            self.disable()  # Lightning's bars print nothing then
        self._next_redraw = time.perf_counter() + self.interval_s
        self._monitor = callback_of(trainer, ThroughputMonitor)

    @override
    def enable(self) -> None:
        if not self._is_plain:  # Lightning's finders of a learning rate and of a batch size enable every progress bar
            super().enable()

    @override
    def on_train_start(self, *args: Any) -> None:
        super().on_train_start(*args)
        self._count_samples = SampleCounter(self.trainer.train_dataloader)

    @override
    def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
        super().on_train_epoch_start(trainer, *args)
        self._start_interval(trainer)  # setting up, calibrating and the time between epochs are not training time

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._samples += self._samples_in(batch)
        self._last_output = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if not self._is_plain:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        elif self._is_due():
            total = trainer.num_training_batches
            batches = f" of {total:,}" if math.isfinite(total) else ""
            values = self.get_metrics(trainer, pl_module).items()
            words = (f"{name} {significant(value) if isinstance(value, float) else value}" for name, value in values)
            say(f"epoch {trainer.current_epoch + 1}, batch {batch_idx + 1:,}{batches}: {', '.join(words)}")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_interval(trainer)  # a validation in mid-epoch is not training time
        super().on_validation_end(trainer, pl_module)

    def _samples_in(self, batch: Any) -> int:
        """Return the samples that the monitor has counted before `training_step` could change the batch; else count them."""
        if batch is None:
            return 0
        counted = self._monitor.batch_samples if self._monitor is not None else None
        return self._count_samples(batch) if counted is None else counted

    def _should_update(self, current: int, total: float) -> bool:  # an override of Lightning's bar
        return self.is_enabled and (current == total or self._is_due())

    def _is_due(self) -> bool:
        now = time.perf_counter()
        if now < self._next_redraw:
            return False
        self._next_redraw = now + self.interval_s
        return True

    @override
    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        if self._loss_read is None and self._last_output is not None:
            self._loss_read = DeferredScalars([batch_loss(trainer, pl_module, self._last_output)])
        if self._loss_read is not None and self._loss_read.ready():
            self._shown_values["loss"], self._loss_read = f"{self._loss_read.values()[0]:.3g}", None
        elapsed = self._trained_s(trainer) - self._began
        if self._samples and elapsed > 0:
            self._shown_values["samples/s"] = significant(self._samples * replica_count(trainer) / elapsed)
            self._start_interval(trainer)
        metrics = super().get_metrics(trainer, pl_module)
        return self._shown_values | {key: value for key, value in metrics.items() if key != "v_num"}
