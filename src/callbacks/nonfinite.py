"""StopOnNonFinite: a loss or a gradient that is infinite or not a number ends the run, or is skipped, in its own step."""

from collections import deque
from typing import Any, Literal, NamedTuple

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from ..distributed.sharding import local
from ..errors import UserError

POOL = 1024  # steps whose flags may be on their way from the device
SHOWN = 8  # of a batch's samples, in the message
_UNKNOWN = -1.0


class _Step(NamedTuple):
    """What is said of a step, should its numbers turn out to be bad."""

    number: int
    epoch: int
    batch: int
    lr: float


class StopOnNonFinite(Callback):
    """Looks at the loss and all gradients before every update, in one operation on the device.

    On CUDA nobody waits for the answer: the device itself leaves a bad update out (by the optimizer's `found_inf`, made
    for gradient scalers), and the host hears of it a step or so later. Elsewhere the answer is there at once. Either
    way the weights stay as they were before the bad step. Under `16-mixed` precision the gradient scaler does all
    that, and infinite gradients are its everyday business: this callback then does nothing.

    Args:
        action: `stop` ends the run with one line; `skip` leaves the update out, counts it in `skipped`, and goes on.
    """

    observes_only = True

    def __init__(self, action: Literal["stop", "skip"] = "stop"):
        self.action = action
        self.skipped = 0
        self._loss: Tensor | None = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Find out which way the answer comes."""
        device = trainer.strategy.root_device
        scaler = isinstance(trainer.precision_plugin, MixedPrecision) and trainer.precision_plugin.scaler
        self._active = not scaler and device.type in ("cpu", "cuda")
        fused = all(getattr(o, "_step_supports_amp_scaling", False) for o in trainer.optimizers)
        self._parameters = list(pl_module.parameters())
        # A sharded parameter's gradient is looked at by the process that has it, and its optimizer knows no flag.
        self._sharded = any(local(p) is not p for p in self._parameters)
        self._flags = _DeferredFlags(device) if device.type == "cuda" and fused and not self._sharded else None
        self._waiting: deque[_Step] = deque()
        self._found = torch.zeros((), device=device)
        self._one = torch.ones((), device=device)

    def on_before_backward(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, loss: Tensor
    ) -> None:
        """Keep the loss for the check; that of one process alone would have it stop alone."""
        self._loss = loss.detach() if trainer.world_size == 1 else None

    def on_before_optimizer_step(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check, and see what has become known of the steps before."""
        if not self._active:
            return
        numbers = [local(p.grad) for p in self._parameters if p.grad is not None]
        if self._loss is not None:
            numbers.append(self._loss)
        if self._flags is None:
            if self._is_bad(numbers):
                self._act(trainer, pl_module, _step(trainer, optimizer), at_hand=True)
                optimizer.zero_grad(set_to_none=True)  # an optimizer leaves alone what has no gradient
            return
        flag = self._flags.next()
        _check(numbers, flag, self._one)
        optimizer.found_inf, optimizer.grad_scale = flag, None
        self._flags.send()
        self._waiting.append(_step(trainer, optimizer))
        self._hear(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Nothing bad gets into a checkpoint unseen; the device is waited for here anyway."""
        if getattr(self, "_flags", None) is not None:
            self._flags.wait()
            self._hear(trainer, pl_module)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Hear of the last steps; leave the optimizers as they were."""
        if self._flags is not None:
            self._flags.wait()
            self._hear(trainer, pl_module)
            for optimizer in trainer.optimizers:
                optimizer.__dict__.pop("found_inf", None)
                optimizer.__dict__.pop("grad_scale", None)
        self._parameters, self._loss = [], None

    def state_dict(self) -> dict[str, Any]:
        """The count goes on in a resumed run."""
        return {"skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As saved."""
        self.skipped = state_dict["skipped"]

    def _is_bad(self, numbers: list[Tensor]) -> bool:
        _check(numbers, self._found, self._one)
        if self._sharded:
            torch.distributed.all_reduce(self._found, op=torch.distributed.ReduceOp.MAX)
        if not self._found.item():
            return False
        self._found.zero_()
        return True

    def _hear(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        for bad in self._flags.arrived():
            step = self._waiting.popleft()
            if bad:
                self._act(trainer, module, step, at_hand=False)

    def _act(self, trainer: lightning.Trainer, module: lightning.LightningModule, step: _Step, at_hand: bool) -> None:
        self.skipped += 1
        if self.action == "stop":
            raise UserError(_message(trainer, module, step, self._loss if at_hand else None, at_hand))


class _DeferredFlags:
    """Flags that a device sets, one a step, read by the host without waiting: it sees when one has arrived.

    Args:
        device: of CUDA.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._flags = torch.zeros(POOL, device=device)
        self._host = torch.full((POOL,), _UNKNOWN, pin_memory=device.type == "cuda")
        self._views = list(self._flags.unbind())
        self._host_views = list(self._host.unbind())
        self._read = self._host.numpy()  # the same memory
        self._sent = self._seen = 0

    def next(self) -> Tensor:
        """The flag of the next step, 0."""
        if self._sent == POOL:
            if self._seen < POOL:  # the host is a thousand steps ahead
                raise RuntimeError("arrived() was not called")
            self._flags.zero_()
            self._read.fill(_UNKNOWN)
            self._sent = self._seen = 0
        return self._views[self._sent]

    def send(self) -> None:
        """The flag is set or not: start its way to the host."""
        self._host_views[self._sent].copy_(self._views[self._sent], non_blocking=True)
        self._sent += 1

    def wait(self) -> None:
        """Until all that were sent have arrived; only where training waits for the device anyway."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def arrived(self) -> list[bool]:
        """The flags that have arrived since the last call, in order; at the pool's end all of them, waited for."""
        if self._sent == POOL and self._read[POOL - 1] == _UNKNOWN:
            self.wait()
        first = self._seen
        while self._seen < self._sent and self._read[self._seen] != _UNKNOWN:
            self._seen += 1
        return [bool(flag) for flag in self._read[first : self._seen]]


def _check(numbers: list[Tensor], flag: Tensor, one: Tensor) -> None:
    """Set the flag to 1 if any of the numbers is not finite: what gradient scalers do, with a scale of 1."""
    if len({number.dtype for number in numbers}) == 1:
        torch._amp_foreach_non_finite_check_and_unscale_(numbers, flag, one)
        return
    for dtype in {number.dtype for number in numbers}:
        torch._amp_foreach_non_finite_check_and_unscale_([n for n in numbers if n.dtype == dtype], flag, one)


def _step(trainer: lightning.Trainer, optimizer: torch.optim.Optimizer) -> _Step:
    batch = trainer.fit_loop.epoch_loop.batch_idx
    return _Step(trainer.global_step + 1, trainer.current_epoch, batch, optimizer.param_groups[0]["lr"])


def _message(
    trainer: lightning.Trainer, module: lightning.LightningModule, step: _Step, loss: Tensor | None, at_hand: bool
) -> str:
    named = [(name, p) for name, p in module.named_parameters() if p.grad is not None]
    bad = [name for name, p in named if not local(p.grad).isfinite().all()]
    if not at_hand:  # the gradients that are there now are those of a step or so later
        what = "the loss or a gradient is not finite"
        what += f"; a little later the gradient of {bad[0]} is not" if bad else ""
    else:
        what = f"the loss is {float(loss):.4g}" if loss is not None else "the loss is another process's"
        what += f", the gradient of {bad[0]} is not finite" if bad else ", every gradient is finite"
        what += f" (of {len(bad)} of {len(named)} parameters)" if len(bad) > 1 else ""
    return (
        f"step {step.number}: {what}; batch {step.batch} of epoch {step.epoch}{_samples(trainer, step)}, learning rate "
        f"{step.lr:.4g}. The weights were left as they were; callbacks.nonfinite.action=skip leaves such steps out"
    )


def _samples(trainer: lightning.Trainer, step: _Step) -> str:
    """Which samples the batch is of, where the loader can tell."""
    sampler = getattr(trainer.train_dataloader, "batch_sampler", None)
    if not hasattr(sampler, "samples") or step.epoch != trainer.current_epoch:
        return ""
    samples = sampler.samples(step.batch)
    more = f", … ({len(samples)} in all)" if len(samples) > SHOWN else ""
    return f" (samples {', '.join(map(str, samples[:SHOWN]))}{more})"
