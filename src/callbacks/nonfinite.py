"""StopOnNonFinite: a loss or gradient that is infinite or NaN ends the run in its own step, or the step is skipped."""

from collections import deque
from typing import Any, Literal, NamedTuple

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from .._torch import non_finite_check, stored_values, supports_found_inf
from ..distributed.sharding import local
from ..errors import UserError
from ._deferred_scalars import DeferredFlags
from ._setting import own_config

SHOWN = 8  # of a batch's samples, in the message


class _Step(NamedTuple):
    number: int
    epoch: int
    batch: int
    lr: float


class StopOnNonFinite(Callback):
    """Checks the loss and all gradients before every update, in one operation on the device.

    On CUDA nothing waits for the answer: the device leaves a bad update out (by the optimizer's `found_inf`, made for
    gradient scalers), and the host learns of it a step or so later. Elsewhere the answer is there at once. Either way
    the weights stay as they were before the bad step. Under `16-mixed` precision this callback does nothing, because the
    gradient scaler does all of this, and infinite gradients are part of its normal work.

    Args:
        action: `stop` ends the run with one line; `skip` leaves the update out, counts it in `skipped`, and continues.
    """

    observes_only = True

    def __init__(self, action: Literal["stop", "skip"] = "stop"):
        self.action = action
        self.skipped = 0
        self._loss: Tensor | None = None
        self._flags: DeferredFlags | None = None

    def record_facts(self) -> dict[str, Any]:
        """For the run's record: how many updates of the whole run were left out; None for none."""
        return {"skipped_steps": self.skipped or None}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = trainer.strategy.root_device
        scaler = isinstance(trainer.precision_plugin, MixedPrecision) and trainer.precision_plugin.scaler
        self._active = not scaler and device.type in ("cpu", "cuda")
        self._parameters = list(pl_module.parameters())
        # Each rank checks its shards of the gradients, and an optimizer of shards takes no flag.
        self._sharded = any(local(p) is not p for p in self._parameters)
        deferred = device.type == "cuda" and all(map(supports_found_inf, trainer.optimizers)) and not self._sharded
        self._flags = DeferredFlags(device) if deferred else None
        self._waiting: deque[_Step] = deque()  # steps whose flags have not arrived
        self._found = torch.zeros((), device=device)
        self._one = torch.ones((), device=device)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        # With several ranks only gradients are checked: a rank that stops for its own bad loss would stop alone.
        self._loss = loss.detach() if trainer.world_size == 1 else None

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if not self._active:
            return
        numbers = [_values(p.grad) for p in self._parameters if p.grad is not None]
        if self._loss is not None:
            numbers.append(self._loss)
        if self._flags is None:
            if self._is_bad(numbers):
                self._act(trainer, pl_module, _step(trainer, optimizer), self._loss, at_once=True)
                optimizer.zero_grad(set_to_none=True)  # an optimizer skips parameters without a gradient
            return
        flag = self._flags.next()
        non_finite_check(numbers, flag, self._one)
        vars(optimizer).update(found_inf=flag, grad_scale=None)
        self._flags.send()
        self._waiting.append(_step(trainer, optimizer))
        self._read_flags(self._flags, trainer, pl_module)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._flags is not None:  # nothing bad gets into a checkpoint unseen; it waits for the device anyway
            self._flags.wait()
            self._read_flags(self._flags, trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._flags is not None:
            self._flags.wait()
            self._read_flags(self._flags, trainer, pl_module)
            for optimizer in trainer.optimizers:
                for name in ("found_inf", "grad_scale"):
                    vars(optimizer).pop(name, None)
        self._parameters, self._loss = [], None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped = state_dict["skipped"]

    def _is_bad(self, numbers: list[Tensor]) -> bool:
        non_finite_check(numbers, self._found, self._one)
        if self._sharded:
            torch.distributed.all_reduce(self._found, op=torch.distributed.ReduceOp.MAX)
        if not self._found.item():
            return False
        self._found.zero_()
        return True

    def _read_flags(self, flags: DeferredFlags, trainer: Trainer, module: LightningModule) -> None:
        for bad in flags.arrived():
            step = self._waiting.popleft()
            if bad:
                self._act(trainer, module, step, None, at_once=False)

    def _act(self, trainer: Trainer, module: LightningModule, step: _Step, loss: Tensor | None, at_once: bool) -> None:
        self.skipped += 1
        if self.action == "stop":
            what = _what_is_bad(module, loss, at_once)
            skip = "callbacks.nonfinite.action=skip" if own_config(module) else 'StopOnNonFinite("skip")'
            raise UserError(
                f"step {step.number}: {what}; batch {step.batch} of epoch {step.epoch}{_samples(trainer, step)}, "
                f"learning rate {step.lr:.4g}. The weights were left as they were; {skip} "
                "leaves such steps out"
            )


def _step(trainer: Trainer, optimizer: Optimizer) -> _Step:
    batch = trainer.fit_loop.epoch_loop.batch_idx
    return _Step(trainer.global_step + 1, trainer.current_epoch, batch, optimizer.param_groups[0]["lr"])


def _what_is_bad(module: LightningModule, loss: Tensor | None, at_once: bool) -> str:
    gradients = {name: _values(p.grad) for name, p in module.named_parameters() if p.grad is not None}
    bad = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    if not at_once:  # the present gradients are those of a step or so later
        later = f"; a little later the gradient of {bad[0]} is not" if bad else ""
        return f"the loss or a gradient is not finite{later}"
    what = f"the loss is {float(loss):.4g}" if loss is not None else "the loss is another process's"
    what += f", the gradient of {bad[0]} is not finite" if bad else ", every gradient is finite"
    return what + (f" (of {len(bad)} of {len(gradients)} parameters)" if len(bad) > 1 else "")


def _values(gradient: Tensor) -> Tensor:
    return stored_values(local(gradient))


def _samples(trainer: Trainer, step: _Step) -> str:
    """The indices of the samples in the batch, where the loader knows them."""
    sampler = getattr(trainer.train_dataloader, "batch_sampler", None)
    if not hasattr(sampler, "samples") or step.epoch != trainer.current_epoch:
        return ""
    samples = sampler.samples(step.batch)
    more = f", … ({len(samples)} in all)" if len(samples) > SHOWN else ""
    return f" (samples {', '.join(map(str, samples[:SHOWN]))}{more})"
