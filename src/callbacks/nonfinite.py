"""StopOnNonFinite: a loss or gradient that is infinite or NaN ends the run, before a checkpoint has it."""

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
from ._batches import own_loss
from ._deferred_scalars import DeferredScalars

READ_EVERY = {"cuda": 20, "mps": 512}  # steps whose flags are read together; on MPS reading waits for the device


class StopOnNonFinite(Callback):
    """Checks the loss and all gradients before every update, in one operation on the device, which no step waits for.

    On a CPU the run ends before the bad update. On CUDA the host learns of it 20 to 40 steps later, on MPS 512 to 1,024
    steps later, and before a checkpoint is written or an epoch ends: the update is in the weights, and in no checkpoint.
    All ranks end after the same step. On other devices, and where a strategy shards the parameters, this callback does
    nothing. Under `16-mixed` precision neither, because infinite gradients are part of a gradient scaler's normal work.
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
        self._flags: list[tuple[str, Tensor]] = []  # of the steps that are not being read yet
        self._reads: deque[tuple[Sequence[str], DeferredScalars]] = deque()
        self._one = torch.ones((), device=device)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        # With several ranks only gradients are checked: a rank that stops for its own bad loss would stop alone.
        # A loss may have been computed on the host, as of an operation that a device lacks.
        self._loss = loss.detach().to(self._one.device, non_blocking=True) if trainer.world_size == 1 else None

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not self._is_checked:
            return
        with without_modes():  # who records the step records nothing of the check
            numbers = [_values(p.grad) for p in self._parameters if p.grad is not None]
            if self._loss is not None:
                numbers.append(self._loss)
            flag = torch.zeros_like(self._one)
            non_finite_check(numbers, flag, self._one)
            is_bad = not self._is_late and bool(flag)
        if is_bad:
            what = f"{_name(trainer, optimizer)}: {_what_is_bad(pl_module, own_loss(trainer, pl_module, self._loss))}"
            raise NonFiniteError(f"{what}. The weights were left as they were")
        if self._is_late:
            self._flags.append((_name(trainer, optimizer), flag))
        if len(self._flags) >= self._read_every:
            self._hear()

    @override
    def on_train_epoch_end(self, *_: Any, **__: Any) -> None:
        self._hear(wait=True)

    on_save_checkpoint = on_train_epoch_end  # nothing bad gets into a checkpoint unseen

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hear(wait=True)
        self._release()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    def _release(self) -> None:
        self._is_checked, self._parameters, self._loss = False, [], None

    def _hear(self, wait: bool = False) -> None:
        """Send the flags to the host, and read those that were sent before; with `wait` all of them."""
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
                    what = f"{step}: the loss or a gradient is not finite"
                    raise NonFiniteError(f"{what}. The weights have this update, no checkpoint has")


def _name(trainer: Trainer, optimizer: Optimizer) -> str:
    """Of the present step."""
    rate = optimizer.param_groups[0].get("lr")  # None of an optimizer without a rate
    batch = f"batch {trainer.fit_loop.epoch_loop.batch_idx} of epoch {trainer.current_epoch}"
    return f"step {trainer.global_step + 1} ({batch}{'' if rate is None else f', learning rate {rate:.4g}'})"


def _what_is_bad(module: LightningModule, loss: Tensor | None) -> str:
    """Of the present step; `loss` is None with several ranks."""
    gradients = ((name, p.grad) for name, p in module.named_parameters() if p.grad is not None)
    bad = next((name for name, gradient in gradients if not _values(gradient).isfinite().all()), None)
    found = [] if loss is None else [f"the loss is {float(loss):.4g}"]
    found += [] if bad is None else [f"the gradient of {bad} is not finite"]
    return ", ".join(found) or "another process's gradient is not finite"


def _values(gradient: Tensor) -> Tensor:
    """The real numbers in a gradient."""
    values = (
        gradient._values() if gradient.layout == torch.sparse_coo else gradient
    )  # the first may have several of one element
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
