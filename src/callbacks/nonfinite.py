"""StopOnNonFinite: ends the run when a loss or gradient is infinite or NaN, before a checkpoint is written with it."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from .._torch import non_finite_check, without_modes
from ..errors import NonFiniteError
from ._batches import batch_loss
from ._deferred_scalars import DeferredScalars

READ_EVERY = {"cuda": 20, "mps": 512}  # steps whose flags are read together; on MPS a read waits for the device


class StopOnNonFinite(Callback):
    """Checks the loss and all gradients before every update, in one operation on the device that no step waits for.

    On a CPU the run ends before the bad update. On CUDA the host reads the check 20 to 40 steps later, on MPS 512 to 1,024
    steps later, and always before a checkpoint is written or an epoch ends: the update is in the weights, but in no checkpoint.
    All ranks end after the same step. This callback does nothing on other devices, where a strategy shards the parameters,
    and under `16-mixed` precision, because infinite gradients are part of a gradient scaler's normal work.
    """

    observes_only = True

    def __init__(self) -> None:
        self._is_checked = False
        self._loss: Tensor | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = trainer.strategy.root_device
        scaler = isinstance(trainer.precision_plugin, MixedPrecision) and trainer.precision_plugin.scaler
        is_sharded = isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy)
        self._is_checked = not scaler and not is_sharded and device.type in ("cpu", "cuda", "mps")
        self._read_every = READ_EVERY.get(device.type, 1)
        self._is_late = device.type != "cpu"
        self._parameters = list(pl_module.parameters())
        self._flags: list[tuple[str, Tensor]] = []  # of the steps whose flags are not being read yet
        self._reads: deque[tuple[Sequence[str], DeferredScalars]] = deque()
        self._one = torch.ones((), device=device)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        # With several ranks only gradients are checked: a rank that stops for its own bad loss would stop alone.
        # A loss may have been computed on the host, for an operation that the device lacks.
        self._loss = loss.detach().to(self._one.device, non_blocking=True) if trainer.world_size == 1 else None

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not self._is_checked:
            return
        with without_modes():  # a recorder of the step does not record the check
            values = [_values(p.grad) for p in self._parameters if p.grad is not None]
            if self._loss is not None:
                values.append(self._loss)
            flag = torch.zeros_like(self._one)
            non_finite_check(values, flag, self._one)
            is_bad = not self._is_late and bool(flag)
        if is_bad:
            causes = _describe_non_finite(pl_module, batch_loss(trainer, pl_module, self._loss))
            raise NonFiniteError(f"{_describe_step(trainer, optimizer)}: {causes}. The weights were left as they were")
        if self._is_late:
            self._flags.append((_describe_step(trainer, optimizer), flag))
        if len(self._flags) >= self._read_every:
            self._read_flags()

    @override
    def on_train_epoch_end(self, *_: Any, **__: Any) -> None:
        self._read_flags(wait=True)

    on_save_checkpoint = on_train_epoch_end  # check everything before a checkpoint is written

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read_flags(wait=True)
        self._release()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    def _release(self) -> None:
        self._is_checked, self._parameters, self._loss = False, [], None

    def _read_flags(self, wait: bool = False) -> None:
        """Start to copy the flags to the host, and read those that were copied before; with `wait` read all of them."""
        if not self._is_checked:
            return
        if self._flags:
            steps, flags = zip(*self._flags, strict=True)
            self._reads.append((steps, DeferredScalars(flags)))
            self._flags = []
        while len(self._reads) > (0 if wait else 1):
            steps, read = self._reads.popleft()
            for step, bad in zip(steps, read.values(), strict=True):
                if bad:
                    cause = f"{step}: the loss or a gradient is not finite"
                    raise NonFiniteError(f"{cause}. The weights have this update, no checkpoint has")


def _describe_step(trainer: Trainer, optimizer: Optimizer) -> str:
    """Return the number, batch, epoch and learning rate of the current step."""
    rate = optimizer.param_groups[0].get("lr")  # None for an optimizer without a learning rate
    batch = f"batch {trainer.fit_loop.epoch_loop.batch_idx} of epoch {trainer.current_epoch}"
    return f"step {trainer.global_step + 1} ({batch}{'' if rate is None else f', learning rate {rate:.4g}'})"


def _describe_non_finite(module: LightningModule, loss: Tensor | None) -> str:
    """Return what is not finite in the current step; `loss` is None with several ranks."""
    gradients = ((name, p.grad) for name, p in module.named_parameters() if p.grad is not None)
    parameter = next((name for name, gradient in gradients if not _values(gradient).isfinite().all()), None)
    # `manual_backward(loss, gradient=…)` takes a loss of several elements.
    causes = [] if loss is None else [f"the loss is {float(loss.mean()):.4g}"]
    causes += [] if parameter is None else [f"the gradient of {parameter} is not finite"]
    return ", ".join(causes) or "another process's gradient is not finite"


def _values(gradient: Tensor) -> Tensor:
    """Return the values of a gradient as real numbers; those of a sparse one may have several for one element."""
    values = gradient._values() if gradient.layout == torch.sparse_coo else gradient
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
