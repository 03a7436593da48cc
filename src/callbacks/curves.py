"""TrainCurves: the scalars that training steps return, for every step, without making the device wait."""

import math
from typing import Any

import torch
import torch.distributed
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from ..options.types import NonNegativeInt
from ._batches import own_loss
from ._deferred_scalars import DeferredScalars
from ._timer import pause
from ._writer import StepWriter

FLUSH_EVERY = 100  # steps read from the device and written together


class TrainCurves(Callback):
    """Logs every scalar tensor that `training_step` returns, at its own step.

    | Key | Unit | Meaning |
    | --- | --- | --- |
    | `train/loss` | the loss's own | `loss`, of this step's batch; the mean of all ranks |
    | `train/acc` | fraction | `acc`, of this step's batch; other keys likewise |

    `self.log(..., on_step=True)` reads the device at every step. This callback copies the numbers of 100 steps at once,
    and writes them when the next 100 have been collected, or when an epoch, a validation or the run ends.

    Args:
        every_n_steps: log every n-th optimizer step; 1 for all, 0 for none.
    """

    observes_only = True

    def __init__(self, every_n_steps: NonNegativeInt | None = 1):
        self.every_n_steps = 1 if every_n_steps is None else every_n_steps
        self._steps: list[tuple[int, dict[str, Tensor]]] = []
        self._reads: list[tuple[list[tuple[int, str]], DeferredScalars]] = []
        self._last_step = -1

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps, self._reads, self._last_step = [], [], trainer.global_step
        self._writer = StepWriter(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._last_step or not self.every_n_steps or step % self.every_n_steps:
            return  # of accumulated batches the last one counts
        self._last_step = step
        scalars = dict(outputs) if isinstance(outputs, dict) else {"loss": outputs}
        scalars["loss"] = own_loss(trainer, pl_module, scalars.get("loss"))
        self._steps.append((step, {k: v for k, v in scalars.items() if _is_number(v)}))
        if len(self._steps) >= FLUSH_EVERY:
            self._start_read()  # a part of the step: on MPS it waits for the step's own work
            with pause(trainer, part_of_fit=True):
                self._write(trainer, only_ready=True)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._finish(trainer)  # the curves reach as far as the checkpoint

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer)  # the host waits for the device here anyway

    on_train_epoch_end = on_train_end = on_validation_start

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        try:
            if trainer.world_size > 1:  # other ranks may be gone: nothing more is averaged, and nothing is waited for
                self._steps = []
                self._write(trainer, only_ready=True)
            else:
                self._finish(trainer)
        except RuntimeError:  # the device was lost; the run's own error is the one to report
            self._steps, self._reads = [], []

    def _finish(self, trainer: Trainer) -> None:
        self._start_read()
        self._write(trainer, only_ready=False)

    def _start_read(self) -> None:
        """Average the numbers over the ranks, which all come here after the same step, and start to copy them."""
        names = [(step, key) for step, scalars in self._steps for key in scalars]
        if names:
            values = [value for _, scalars in self._steps for value in scalars.values()]
            self._reads.append((names, DeferredScalars(values, _mean_of_all_ranks)))
        self._steps = []

    def _write(self, trainer: Trainer, only_ready: bool) -> None:
        while self._reads and (not only_ready or self._reads[0][1].ready()):
            names, read = self._reads.pop(0)
            rows: dict[int, dict[str, float]] = {}
            for (step, key), value in zip(names, read.values(), strict=True):
                if key != "acc" or not math.isnan(value):  # of no target that asks for a class
                    rows.setdefault(step, {})[f"train/{key}"] = value
            self._writer.write_rows(rows.items())


def _is_number(value: Any) -> bool:
    """Whether a value is a tensor of one real number."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and value.numel() == 1
        and not value.is_complex()
        and not value.is_meta
    )


def _mean_of_all_ranks(values: Tensor) -> Tensor:
    """The mean, computed behind the device's other work. Lightning's `reduce` has a barrier that the host waits for."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(values)
        values /= torch.distributed.get_world_size()
    return values
