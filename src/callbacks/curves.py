"""TrainCurves: what training steps return, for every step, written without making the device wait."""

from typing import Any

import lightning
import torch
import torch.distributed
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from ..options.types import PositiveInt
from ._deferred_scalars import DeferredScalars
from ._step_writer import write_steps

FLUSH_EVERY = 100  # steps read from the device and written together


class TrainCurves(Callback):
    """Logs every scalar tensor that `training_step` returns, at the step it belongs to.

    | Key | Unit | Meaning |
    | --- | --- | --- |
    | `train/loss` | the loss's own | `loss`, of this step's batch; the mean of all processes |
    | `train/acc` | fraction | `acc`, of this step's batch; other keys likewise |

    `self.log(..., on_step=True)` reads the device at every step; here the numbers of 100 steps are copied together and
    written when the next 100 have been collected, or when an epoch, validation or the run ends.

    Args:
        every_n_steps: log every n-th optimizer step; 1 for all.
    """

    observes_only = True

    def __init__(self, every_n_steps: PositiveInt = 1):
        self.every_n_steps = every_n_steps
        self._steps: list[tuple[int, dict[str, Tensor]]] = []
        self._reads: list[tuple[list[tuple[int, str]], DeferredScalars]] = []
        self._last_step = -1

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Forget what an earlier fit may have left."""
        self._steps, self._reads, self._last_step = [], [], trainer.global_step

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Keep the step's tensors; with accumulated gradients the last batch of an update speaks for it."""
        step = trainer.global_step
        if step == self._last_step or step % self.every_n_steps:
            return
        self._last_step = step
        scalars = outputs if isinstance(outputs, dict) else {"loss": outputs}
        self._steps.append((step, {k: v for k, v in scalars.items() if isinstance(v, Tensor) and v.numel() == 1}))
        if len(self._steps) >= FLUSH_EVERY:
            self._start_read(trainer)
            self._write(only_ready=True, trainer=trainer)

    def on_save_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """As at validation: the curves reach as far as the checkpoint does."""
        self._finish(trainer)

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Write what there is: the device waits for the host here anyway."""
        self._finish(trainer)

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """As at validation."""
        self._finish(trainer)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """As at validation."""
        self._finish(trainer)

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        """Keep the curve up to the step that failed, where the device can still be read.

        Several processes may not all have failed: what they have not yet averaged is left out.
        """
        if trainer.world_size > 1:
            self._steps = []
        try:
            self._finish(trainer)
        except RuntimeError:  # a device that was lost; the run's own error is the one to report
            self._steps, self._reads = [], []

    def _finish(self, trainer: lightning.Trainer) -> None:
        self._start_read(trainer)
        self._write(only_ready=False, trainer=trainer)

    def _start_read(self, trainer: lightning.Trainer) -> None:
        """All processes come here after the same step, and their numbers are averaged together."""
        names = [(step, key) for step, scalars in self._steps for key in scalars]
        if names:
            values = [value for _, scalars in self._steps for value in scalars.values()]
            self._reads.append((names, DeferredScalars(values, _mean_of_all_ranks)))
        self._steps = []

    def _write(self, only_ready: bool, trainer: lightning.Trainer) -> None:
        while self._reads and (not only_ready or self._reads[0][1].ready()):
            names, read = self._reads.pop(0)
            rows: dict[int, dict[str, float]] = {}
            for (step, key), value in zip(names, read.values(), strict=True):
                rows.setdefault(step, {})[f"train/{key}"] = value
            write_steps(trainer, rows.items())


def _mean_of_all_ranks(values: Tensor) -> Tensor:
    """On the device and behind its other work; Lightning's `reduce` has a barrier, at which the host waits for it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(values)
        values /= torch.distributed.get_world_size()
    return values
