"""The optimizer of a model's weights: any class like torch's, with a schedule of the learning rate."""

import copy
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, Self

import torch
from torch import Tensor, optim
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from ..errors import UserError, in_one_line
from ..options.types import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Where
from ..records.learning_rate import Rule, factor

_STEP_SCHEDULES = ("one_cycle", "cosine")  # schedules over a known number of steps
_SGD_CLASSES = (optim.SGD, optim.ASGD)  # their steps are proportional to the gradient; other classes normalise it


class Optimizer:
    """A class of optimizers with its options, and a schedule of the learning rate.

    Args:
        make: called with parameters and `lr`, returns the optimizer; a class with its options, by `functools.partial`.
        lr: the learning rate; under `one_cycle` its peak. None for the default of the class.
        schedule: `one_cycle` rises to the peak and anneals to almost nothing by the last step, while a momentum falls
            from 0.05 above its value to 0.05 below it and rises again (Smith & Topin 2018); a single step is at the
            peak. `cosine` falls from `lr` to `min_lr` by the last step (Loshchilov & Hutter 2017); `step` multiplies
            the rate by `factor` after every `step_epochs` epochs; `constant` does not change the rate.
        warmup: the fraction of the steps in which `one_cycle` rises; with 1 the rate falls in the last step.
        factor: the factor of the schedule `step`.
        step_epochs: the epochs between two changes of the schedule `step`.
        min_lr: the last rate of `cosine`; it is scaled like `lr`.
        lr_scaling: how `lr` changes with the batch size: `none` does not change it, `linear` multiplies it by
            batch ÷ reference (Goyal et al. 2017, for SGD), `sqrt` by the square root of this ratio (Krizhevsky 2014;
            Malladi et al. 2022 for Adam). `auto` is `linear` for SGD, ASGD and their subclasses, and `sqrt` for others.
        reference_batch_size: the batch size for which `lr` was chosen, in samples an update over all devices.

    Attributes:
        rule: the rule that `lr_scaling` stands for with this optimizer: `none`, `sqrt` or `linear`.

    Raises:
        UserError: if the class refuses its options, has no learning rate, or is a fused SGD with a momentum.
    """

    def __init__(
        self,
        make: Callable[..., optim.Optimizer] = optim.AdamW,
        lr: PositiveFloat | None = None,
        schedule: Literal["one_cycle", "constant", "cosine", "step"] = "constant",
        warmup: Annotated[Fraction, Where("optimizer.schedule", ("one_cycle",))] = 0.3,
        factor: Annotated[Fraction, Where("optimizer.schedule", ("step",))] = 0.1,
        step_epochs: Annotated[PositiveInt, Where("optimizer.schedule", ("step",))] = 1,
        min_lr: Annotated[NonNegativeFloat, Where("optimizer.schedule", ("cosine",))] = 0.0,
        lr_scaling: Literal["auto", "none", "sqrt", "linear"] = "none",
        reference_batch_size: Annotated[PositiveInt, Where("optimizer.lr_scaling", ("auto", "sqrt", "linear"))] = 128,
    ):
        self.make = make
        trial = self._make_optimizer([torch.zeros(1, 1, requires_grad=True)], **({} if lr is None else {"lr": lr}))
        if "lr" not in trial.defaults:
            raise UserError(f"optimizer: {type(trial).__name__} has no learning rate: an option lr")
        if isinstance(trial, optim.SGD) and trial.defaults.get("fused") and trial.defaults.get("momentum"):
            # The first step allocates the momentum's buffer. If a GradScaler skips that step, nobody writes the buffer.
            raise UserError("optimizer.fused: SGD with a momentum may read uninitialized memory; leave fused out")
        self.lr = float(trial.defaults["lr"])
        if min_lr > self.lr:
            raise UserError(f"optimizer.min_lr: got {min_lr:g}, takes at most optimizer.lr, which is {self.lr:g}")
        self.schedule = schedule
        self.warmup = warmup
        self.factor = factor
        self.step_epochs = step_epochs
        self.min_lr = min_lr
        class_rule: Rule = "linear" if isinstance(trial, _SGD_CLASSES) else "sqrt"
        self.rule: Rule = class_rule if lr_scaling == "auto" else lr_scaling
        self.reference_batch_size = reference_batch_size

    @property
    def interval(self) -> Literal["step", "epoch"]:
        """Whether Lightning steps the schedule after each update or after each epoch."""
        return "step" if self.schedule in _STEP_SCHEDULES else "epoch"

    def scaled_to(self, batch_size: int) -> Self:
        """Return a copy with the learning rate for updates of `batch_size` samples."""
        scaled, ratio = copy.copy(self), factor(self.rule, batch_size, self.reference_batch_size)
        scaled.lr, scaled.min_lr = self.lr * ratio, self.min_lr * ratio
        return scaled

    def build(self, parameters: Iterable[Tensor]) -> optim.Optimizer:
        """Build the optimizer of these parameters."""
        return self._make_optimizer([*parameters], lr=self.lr)

    def build_schedule(self, optimizer: optim.Optimizer, total_steps: float) -> LRScheduler | None:
        """Build the schedule, to be stepped after every update or epoch, as `interval` says; None for a constant rate.

        UserError if the schedule needs the number of steps, and `total_steps` is not finite.
        """
        if self.schedule in _STEP_SCHEDULES and not 0 < total_steps < float("inf"):
            raise UserError(
                f"optimizer.schedule: {self.schedule} needs an end: set trainer.max_steps, or trainer.max_epochs where "
                "the data's loader has a length, or write optimizer.schedule=constant"
            )
        match self.schedule:
            case "one_cycle" if total_steps > 1:  # a single step keeps the peak; OneCycleLR would take its last rate
                # OneCycleLR by default moves every momentum from 0.95 to 0.85, even that of an SGD without momentum.
                low, high = zip(*map(_momentum_range, optimizer.param_groups), strict=True)
                peaks = [group["lr"] for group in optimizer.param_groups]
                steps, rise_fraction = int(total_steps), float(self.warmup)
                if 1 in (rise_fraction, rise_fraction * steps):  # OneCycleLR would divide by a phase of zero steps
                    rise_fraction *= 1 - 1e-9
                momentum: Any = {"cycle_momentum": any(high), "base_momentum": list(low), "max_momentum": list(high)}
                return lr_scheduler.OneCycleLR(optimizer, peaks, steps, pct_start=rise_fraction, **momentum)
            case "cosine":
                return lr_scheduler.CosineAnnealingLR(optimizer, T_max=int(total_steps), eta_min=self.min_lr)
            case "step":
                return lr_scheduler.StepLR(optimizer, step_size=self.step_epochs, gamma=self.factor)
        return None

    def _make_optimizer(self, parameters: list[Any], **options: Any) -> optim.Optimizer:
        try:
            optimizer = self.make(parameters, **options)
        except (ValueError, TypeError, LookupError, AssertionError, RuntimeError) as error:  # for a wrong option
            raise UserError(f"optimizer: {in_one_line(error)}") from error
        if not isinstance(optimizer, optim.Optimizer):
            raise UserError(f"optimizer: {type(optimizer).__name__} is no torch.optim.Optimizer")
        return optimizer


def _momentum_range(group: dict[str, Any]) -> tuple[float, float]:
    """Return the range of `one_cycle` for a parameter group's momentum, or beta 1 as in Adam; zeros without either."""
    value = group["betas"][0] if "betas" in group else group.get("momentum", 0)
    return (round(max(0.0, value - 0.05), 10), round(min(value + 0.05, (1 + value) / 2), 10)) if value else (0.0, 0.0)
