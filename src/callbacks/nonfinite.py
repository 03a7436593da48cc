"""StopOnNonFinite: a loss or gradient that is infinite or NaN ends the run in its own step, or the step is skipped."""

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from .._torch import non_finite_check, stored_values, supports_found_inf, without_modes
from ..errors import NonFiniteError, UserError
from ._deferred_scalars import DeferredScalars
from ._setting import own_config

SHOWN = 8  # of a batch's samples, in the message
READ_EVERY = {"cuda": 20, "mps": 512}  # steps whose flags are read together; on MPS reading waits for the device


class _Step(NamedTuple):
    number: int
    epoch: int
    batch: int
    lr: float | None  # None of an optimizer without a rate


class StopOnNonFinite(Callback):
    """Checks the loss and all gradients before every update, in one operation on the device, which no step waits for.

    | Device | The host learns of it | The bad update |
    | --- | --- | --- |
    | CPU | at once | is left out |
    | CUDA, all optimizers fused | 20 to 40 steps later | is left out by the device (by `found_inf`, made for gradient scalers) |
    | CUDA otherwise | 20 to 40 steps later | is in the weights, and in no checkpoint |
    | MPS | at the next checkpoint or the end of the epoch, or 512 steps later | is in the weights, and in no checkpoint |

    On every device it learns of it before a checkpoint is written. What the forward pass writes, such as the statistics of
    batch norm, is left as it is. On other devices, and where a strategy shards the parameters, this callback does nothing.
    Under `16-mixed` precision neither, because the gradient scaler does all of this, and infinite gradients are part of its
    normal work.

    Args:
        action: `stop` ends the run with one line; `skip`, where the update is left out, counts it in `skipped`, and
            continues.
    """

    observes_only = True

    def __init__(self, action: Literal["stop", "skip"] = "stop"):
        self.action = action
        self.skipped = 0
        self._is_checked = False
        self._loss: Tensor | None = None

    def record_facts(self) -> dict[str, Any]:
        """For the run's record: how many updates of the whole run were left out; None for none."""
        return {"skipped_steps": self.skipped or None}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = trainer.strategy.root_device
        scaler = isinstance(trainer.precision_plugin, MixedPrecision) and trainer.precision_plugin.scaler
        self._device = device.type
        is_sharded = isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy)
        self._is_checked = not scaler and not is_sharded and device.type in ("cpu", "cuda", "mps")
        self._parameters = list(pl_module.parameters())
        self._leaves_out = _can_leave_out(device.type, trainer.optimizers)
        if self._is_checked and self.action == "skip" and not self._leaves_out:
            raise UserError(
                f"{_skip(pl_module)}: on {device.type} an update can be left out only by CUDA's fused optimizers; take "
                "another optimizer, or the action stop"
            )
        self._flags: list[tuple[_Step, Tensor]] = []  # of the steps that are not being read yet
        self._reads: deque[tuple[Sequence[_Step], DeferredScalars]] = deque()
        self._one = torch.ones((), device=device)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        # With several ranks only gradients are checked: a rank that stops for its own bad loss would stop alone.
        self._loss = loss.detach() if trainer.world_size == 1 else None

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
            is_bad = self._device == "cpu" and bool(flag)
        if self._device == "cpu":
            if is_bad:
                self._act(trainer, pl_module, _step(trainer, optimizer))
                optimizer.zero_grad(set_to_none=True)  # an optimizer skips parameters without a gradient
            return
        if self._leaves_out:
            vars(optimizer).update(found_inf=flag, grad_scale=None)
        self._flags.append((_step(trainer, optimizer), flag))
        if len(self._flags) >= READ_EVERY[self._device]:
            self._hear(trainer, pl_module)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._hear(trainer, pl_module, wait=True)  # nothing bad gets into a checkpoint unseen

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hear(trainer, pl_module, wait=True)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hear(trainer, pl_module, wait=True)
        self._release(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release(trainer)

    def _release(self, trainer: Trainer) -> None:
        """Leave the optimizers as they were, and check no more."""
        for optimizer in trainer.optimizers:
            for name in ("found_inf", "grad_scale"):
                vars(optimizer).pop(name, None)
        self._is_checked, self._parameters, self._loss = False, [], None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped = state_dict["skipped"]

    def _hear(self, trainer: Trainer, module: LightningModule, wait: bool = False) -> None:
        """Act on the flags that arrive without waiting, or on all of them where training waits for the device anyway."""
        if not self._is_checked:
            return
        if self._flags:
            steps, flags = zip(*self._flags, strict=True)
            self._reads.append((steps, DeferredScalars(flags)))
            self._flags = []
        while self._reads and (wait or self._has_arrived(trainer)):
            steps, read = self._reads.popleft()
            for step, bad in zip(steps, read.values(), strict=True):
                if bad:
                    self._act(trainer, module, step)

    def _has_arrived(self, trainer: Trainer) -> bool:
        """Whether the oldest flags are read now. Several ranks read them in the same step: where the next ones are sent."""
        return len(self._reads) > 1 if trainer.world_size > 1 else self._reads[0][1].ready()

    def _act(self, trainer: Trainer, module: LightningModule, step: _Step) -> None:
        """Stop or count. On a CPU the step is the present one, whose loss and gradients are still there."""
        self.skipped += 1
        if self.action == "skip":
            return
        is_present = self._device == "cpu"
        what = _what_is_bad(module, self._loss) if is_present else "the loss or a gradient is not finite"
        rate = "" if step.lr is None else f", learning rate {step.lr:.4g}"
        where = f"batch {step.batch} of epoch {step.epoch}{_samples(trainer, step)}{rate}"
        weights = "were left as they were" if self._leaves_out else "have this update, no checkpoint has"
        hint = f"; {_skip(module)} leaves such steps out" if self._leaves_out else ""
        raise NonFiniteError(f"step {step.number}: {what}; {where}. The weights {weights}{hint}")


def _can_leave_out(device: str, optimizers: Sequence[Optimizer]) -> bool:
    """Whether a bad update can be left out without a wait for the device in the step."""
    return device == "cpu" or (device == "cuda" and all(map(supports_found_inf, optimizers)))


def _skip(module: LightningModule) -> str:
    return "callbacks.nonfinite.action=skip" if own_config(module) else 'StopOnNonFinite("skip")'


def _step(trainer: Trainer, optimizer: Optimizer) -> _Step:
    batch = trainer.fit_loop.epoch_loop.batch_idx
    return _Step(trainer.global_step + 1, trainer.current_epoch, batch, optimizer.param_groups[0].get("lr"))


def _what_is_bad(module: LightningModule, loss: Tensor | None) -> str:
    """Of the present step; `loss` is None with several ranks."""
    gradients = {name: _values(p.grad) for name, p in module.named_parameters() if p.grad is not None}
    bad = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    what = f"the loss is {float(loss):.4g}" if loss is not None else "the loss is another process's"
    what += f", the gradient of {bad[0]} is not finite" if bad else ", every gradient is finite"
    return what + (f" (of {len(bad)} of {len(gradients)} parameters)" if len(bad) > 1 else "")


def _values(gradient: Tensor) -> Tensor:
    """The real numbers in a gradient."""
    values = stored_values(gradient)
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def _samples(trainer: Trainer, step: _Step) -> str:
    """The indices of the samples in the batch, where the loader knows them."""
    sampler = getattr(trainer.train_dataloader, "batch_sampler", None)
    if not hasattr(sampler, "samples") or step.epoch != trainer.current_epoch:
        return ""
    samples = sampler.samples(step.batch)
    more = f", … ({len(samples)} in all)" if len(samples) > SHOWN else ""
    return f" (samples {', '.join(map(str, samples[:SHOWN]))}{more})"
