"""TrainCurves: logs the scalars that training steps return, for every step, without waiting for the device."""

import math
from collections.abc import Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
import torch.distributed
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from typing_extensions import override

from .._lightning import logged_in_training
from ..options.types import NonNegativeInt
from ._batches import batch_loss
from ._deferred_scalars import DeferredScalars
from ._timer import pause
from ._updates import Updates
from ._writer import StepWriter

FLUSH_EVERY = 100  # steps that are read from the device and written together
_Entry = tuple[int, str, Tensor | None]  # a step, a key, and this rank's value; None without one


class TrainCurves(Callback):
    """Logs every scalar tensor that `training_step` returns, at its own step.

    | Key | Unit | Meaning |
    | --- | --- | --- |
    | `train/loss` | the loss's own | `loss` of this step's batch, with accumulation the last one; the mean of all ranks |
    | `train/acc` | fraction | `acc`, of this step's batch; other keys likewise |

    `self.log(..., on_step=True)` reads the device at every step. This callback copies the numbers of 100 steps at once,
    and writes them when the next 100 have been collected, or when an epoch, a validation or the run ends.

    A key that the module logs under the same name is not logged here: an average of the epoch is no value of a step.

    For a key that rank 0 returns in the first step the mean of the ranks that return it is logged; for others rank 0's value.

    Args:
        every_n_steps: log every n-th optimizer step; 1 for all, 0 for none.
    """

    observes_only = True

    def __init__(self, every_n_steps: NonNegativeInt | None = 1):
        self.every_n_steps = 1 if every_n_steps is None else every_n_steps
        self._steps: list[tuple[int, dict[str, Tensor]]] = []
        self._reads: list[tuple[list[_Entry], DeferredScalars]] = []  # the entries that are being copied to the host
        self._updates = Updates()
        self._averaged_keys: list[str] | None = None  # over the ranks; None before the first step

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps, self._reads, self._updates, self._averaged_keys = [], [], Updates(trainer.global_step), None
        self._trainer, self._writer, self._device = trainer, StepWriter(trainer), trainer.strategy.root_device

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        self._updates.end_batch(step)  # the last one of accumulated batches counts
        if not self.every_n_steps or not self._updates.has_passed(self.every_n_steps):
            return
        scalars = dict(outputs) if isinstance(outputs, dict) else {"loss": outputs}
        scalars["loss"] = batch_loss(trainer, pl_module, scalars.get("loss"))
        # Copy: a module may update a value in place, and CUDA graphs overwrite it.
        numbers = {
            key: value.detach().clone()
            if isinstance(value, Tensor)
            else torch.tensor(float(value), dtype=torch.float64)
            for key, value in scalars.items()
            if _is_scalar(value, may_be_vector=key == "loss")
        }
        if self._averaged_keys is None:  # ranks may return different keys, but must average the same ones
            self._averaged_keys = trainer.strategy.broadcast([*numbers]) if trainer.world_size > 1 else []
        self._steps.append((step, numbers))
        if len(self._steps) >= FLUSH_EVERY:
            self._start_read()  # a part of the step: on MPS it waits for the step's own work
            with pause(trainer):
                self._write(only_ready=True)

    @override
    def on_validation_start(self, *_: Any, **__: Any) -> None:
        self._finish()  # the host waits for the device here anyway

    # The curves reach as far as a checkpoint.
    on_save_checkpoint = on_train_epoch_end = on_train_end = on_validation_start

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        try:
            if trainer.world_size > 1:  # other ranks may have ended: average nothing, and wait for nothing
                self._steps = []
                self._write(only_ready=True)
            else:
                self._finish()
        except RuntimeError:  # the device was lost; report the run's own error
            self._steps, self._reads = [], []

    def _finish(self) -> None:
        self._start_read()
        self._write(only_ready=False)

    def _start_read(self) -> None:
        """Average the numbers over the ranks, which all call this after the same step, and start to copy them."""
        keys = self._averaged_keys or []
        averaged = [(step, key, row.get(key)) for step, row in self._steps for key in keys]
        local = [(step, key, value) for step, row in self._steps for key, value in row.items() if key not in keys]
        if entries := [*averaged, *local]:
            values = [torch.zeros(()) if value is None else value for *_, value in entries]
            has_value = [value is not None for *_, value in averaged]
            combine = partial(_mean_of_ranks, has_value=has_value, device=self._device)
            self._reads.append((entries, DeferredScalars(values, combine)))
        self._steps = []

    def _write(self, only_ready: bool) -> None:
        logged_by_module = logged_in_training(self._trainer) if self._reads else set()
        while self._reads and (not only_ready or self._reads[0][1].ready()):
            entries, read = self._reads.pop(0)
            rows: dict[int, dict[str, float]] = {}
            for (step, key, value), number in zip(entries, read.values(), strict=True):
                has_no_class = key == "acc" and math.isnan(number)  # all targets of the batch are ignored
                if value is not None and not has_no_class and (name := f"train/{key}") not in logged_by_module:
                    rows.setdefault(step, {})[name] = number
            self._writer.write(sorted(rows.items()))


def _is_scalar(value: Any, may_be_vector: bool) -> bool:
    """Whether a value is a real number, or a scalar tensor of one: `(1,)` may be the labels of a batch of one sample."""
    if isinstance(value, Real):  # NumPy's scalars are
        return not isinstance(value, bool)
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and (value.dim() == 0 or (may_be_vector and value.numel() == 1))
        and not value.is_complex()
        and not value.is_meta
    )


def _mean_of_ranks(values: Tensor, has_value: Sequence[bool], device: torch.device) -> Tensor:
    """Return the first values (`has_value`) as means over the ranks that have them, and the others unchanged; on `device`.

    The means are queued behind the device's other work. Lightning's `reduce` has a barrier that the host waits for.
    """
    if not has_value:
        return values
    values = values.to(device, non_blocking=True)  # NCCL cannot read host memory
    counts = torch.tensor(has_value, dtype=values.dtype).to(values.device, non_blocking=True)
    sums = torch.cat([values[: len(has_value)], counts])
    torch.distributed.all_reduce(sums)
    return torch.cat([sums[: len(has_value)] / sums[len(has_value) :], values[len(has_value) :]])
