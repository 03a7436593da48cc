"""ProgressBar: one line with the loss and the samples a second, redrawn by the clock and not by the step."""

import time
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from typing_extensions import override

from ..options.types import PositiveFloat
from ..records.formatting import significant
from ._batches import samples_in
from ._deferred_scalars import DeferredScalars


class ProgressBar(TQDMProgressBar):
    """Lightning's bar with `loss` and `samples/s`, without a redraw at every step, which can double a short step.

    The rate is that of the time since the last redraw. The loss is of the redraw before: it has reached the host by
    then, so nothing waits for it.

    Args:
        interval_s: seconds between redraws.
    """

    observes_only = True

    def __init__(self, interval_s: PositiveFloat = 0.5):
        super().__init__(refresh_rate=1)
        self.interval_s = interval_s
        self._loss: float | None = None
        self._rate: float | None = None
        self._read: DeferredScalars | None = None
        self._start_interval()

    def _start_interval(self) -> None:
        self._samples, self._drawn = 0, time.perf_counter()

    @override
    def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
        super().on_train_epoch_start(trainer, *args)
        self._start_interval()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._samples += samples_in(batch)
        elapsed = time.perf_counter() - self._drawn
        if elapsed < self.interval_s and batch_idx + 1 != self.total_train_batches:
            return
        self._rate = self._samples * trainer.world_size / elapsed if elapsed > 0 else None
        self._update_loss(outputs.get("loss") if isinstance(outputs, dict) else outputs)
        bar = self.train_progress_bar
        bar.n = batch_idx + 1
        bar.set_postfix(self.get_metrics(trainer, pl_module), refresh=False)
        bar.refresh()  # one redraw; Lightning's own bar draws at the count and again at the postfix
        self._start_interval()

    def _update_loss(self, loss: Any) -> None:
        if self._read is not None and self._read.ready():
            self._loss = self._read.values()[0]
            self._read = None
        if self._read is None and loss is not None:
            self._read = DeferredScalars([loss])
            if not loss.is_cuda:
                self._loss = self._read.values()[0]

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        self._start_interval()  # a validation in mid-epoch is not training time

    @override
    def get_metrics(
        self, trainer: Trainer, pl_module: LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        shown = {k: v for k, v in super().get_metrics(trainer, pl_module).items() if k != "v_num"}
        if self._loss is not None:
            shown = {"loss": f"{self._loss:.3g}", **shown}
        if self._rate is not None:
            shown["samples/s"] = significant(self._rate)
        return shown
