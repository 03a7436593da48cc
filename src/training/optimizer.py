"""How a model's weights are updated: one of torch's optimizers, and its learning-rate schedule."""

import copy
from collections.abc import Iterable
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from ..distributed.sharding import local
from ..errors import UserError
from ..options.types import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt


class Optimizer:
    """What an option of `optimizer=` builds; a subclass builds one of torch's optimizers in `build`.

    Args:
        lr: the learning rate; under `one_cycle` its peak.
        schedule: `one_cycle` rises to the peak and anneals to almost nothing by the last step (Smith & Topin 2018);
            `constant` leaves the rate alone.
        warmup: the fraction of the steps in which one_cycle rises.
        lr_scaling: how `lr` changes with the batch size: `none` leaves it alone, `linear` multiplies it by
            batch ÷ reference (Goyal et al. 2017, for SGD), `sqrt` by the square root of that (Krizhevsky 2014;
            Malladi et al. 2022 for Adam).
        reference_batch_size: the batch size that `lr` was chosen for, in samples an update over all devices.
    """

    def __init__(
        self,
        lr: PositiveFloat,
        schedule: Literal["one_cycle", "constant"] = "one_cycle",
        warmup: Fraction = 0.3,
        lr_scaling: Literal["none", "sqrt", "linear"] = "none",
        reference_batch_size: PositiveInt = 128,
    ):
        self.lr = lr
        self.schedule = schedule
        self.warmup = warmup
        self.lr_scaling = lr_scaling
        self.reference_batch_size = reference_batch_size

    def scaled_to(self, batch_size: int) -> Self:
        """The same recipe with the learning rate for updates of `batch_size` samples."""
        power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[self.lr_scaling]
        scaled = copy.copy(self)
        scaled.lr = self.lr * (batch_size / self.reference_batch_size) ** power
        return scaled

    def build(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Torch's optimizer over the parameters."""
        raise NotImplementedError

    def build_schedule(self, optimizer: torch.optim.Optimizer, total_steps: float) -> LRScheduler | None:
        """The schedule, to be stepped after every update; None for a constant rate.

        Raises:
            UserError: if the schedule needs the number of steps, and it is not known beforehand.
        """
        if self.schedule == "constant":
            return None
        if not 0 < total_steps < float("inf"):
            raise UserError("optimizer.schedule: one_cycle needs an end: set trainer.max_epochs or trainer.max_steps")
        return OneCycleLR(optimizer, max_lr=self.lr, total_steps=int(total_steps), pct_start=self.warmup)


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019). Arguments as Optimizer and torch.optim.AdamW."""

    def __init__(self, lr: PositiveFloat = 4e-3, weight_decay: NonNegativeFloat = 0.01, **kwargs: Any):
        super().__init__(lr, **kwargs)
        self.weight_decay = weight_decay

    def build(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Fused: one kernel for all parameters, on every device that Lightning trains on."""
        return torch.optim.AdamW(parameters, lr=self.lr, weight_decay=self.weight_decay, fused=True)


class SGD(Optimizer):
    """Stochastic gradient descent with Nesterov momentum. Arguments as Optimizer and torch.optim.SGD."""

    def __init__(
        self, lr: PositiveFloat = 0.1, momentum: Fraction = 0.9, weight_decay: NonNegativeFloat = 5e-4, **kwargs: Any
    ):
        super().__init__(lr, **kwargs)
        self.momentum = momentum
        self.weight_decay = weight_decay

    def build(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """Fused, as AdamW, except over sharded parameters: torch has no fused SGD for them."""
        parameters = list(parameters)
        optimizer = torch.optim.SGD(
            parameters,
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.momentum > 0,
            fused=all(local(p) is p for p in parameters),
        )
        if self.momentum and optimizer.defaults["fused"]:
            _start_momentum_at_zero(optimizer)
            optimizer.register_load_state_dict_post_hook(_start_momentum_at_zero)
        return optimizer


def _start_momentum_at_zero(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter a momentum buffer of zeros, now and where a loaded checkpoint has none.

    Torch's fused SGD allocates the buffers uninitialised in its first step, for the kernel to fill. A kernel that skips
    the update (`found_inf`, which a gradient scaler sets in its first steps) fills nothing, and the next step would
    accumulate onto arbitrary memory. From zeros the first step gives the same numbers, `momentum · 0 + gradient`,
    because there is no dampening. An optimizer that is not fused needs the host to read `found_inf` at every step.
    """
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
        if optimizer.state[parameter].get("momentum_buffer") is None:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
