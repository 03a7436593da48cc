"""How a model's weights are updated: any optimizer of torch's kind, with a schedule."""

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

_PLANNED = ("one_cycle", "cosine")  # schedules for a known number of steps
_BY_THE_GRADIENT = (optim.SGD, optim.ASGD)  # a step is as long as the gradient; the others divide that out


class Optimizer:
    """An optimizer by its class, with the options of a schedule beside its own.

    Args:
        make: called with parameters and `lr`, returns the optimizer; a class with its options, by `functools.partial`.
        lr: the learning rate; under `one_cycle` its peak. None for the default of the class.
        schedule: `one_cycle` rises to the peak and anneals to almost nothing by the last step, while a momentum falls
            from 0.05 above the given one to 0.05 below it and rises again (Smith & Topin 2018); a single step is at the
            peak. `cosine` falls from `lr` to `min_lr` by the last step (Loshchilov & Hutter 2017); `step` multiplies
            the rate by `factor` after every `step_epochs` epochs; `constant` leaves the rate alone.
        warmup: the fraction of the steps in which one_cycle rises; with 1 it falls in the last step.
        factor: by which step multiplies the rate.
        step_epochs: the epochs between two changes of the schedule `step`.
        min_lr: where cosine ends; it is scaled as `lr` is.
        lr_scaling: how `lr` changes with the batch size: `none` leaves it alone, `linear` multiplies it by
            batch ÷ reference (Goyal et al. 2017, for SGD), `sqrt` by the square root of that (Krizhevsky 2014;
            Malladi et al. 2022 for Adam). `auto` is `linear` for SGD, ASGD and their subclasses, and `sqrt` for others.
        reference_batch_size: the batch size that `lr` was chosen for, in samples an update over all devices.

    Attributes:
        rule: what `lr_scaling` means for this optimizer: `none`, `sqrt` or `linear`.

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
        tried = self._made([torch.zeros(1, 1, requires_grad=True)], **({} if lr is None else {"lr": lr}))
        if "lr" not in tried.defaults:
            raise UserError(f"optimizer: {type(tried).__name__} has no learning rate: an option lr")
        if isinstance(tried, optim.SGD) and tried.defaults.get("fused") and tried.defaults.get("momentum"):
            # Its first step makes the momentum's buffer, and the kernel leaves it unwritten where a GradScaler skips it.
            raise UserError(
                "optimizer.fused: SGD with a momentum may read memory that nobody has written; leave it out"
            )
        self.lr = float(tried.defaults["lr"])
        if min_lr > self.lr:
            raise UserError(f"optimizer.min_lr: got {min_lr:g}, takes at most optimizer.lr, which is {self.lr:g}")
        self.schedule = schedule
        self.warmup = warmup
        self.factor = factor
        self.step_epochs = step_epochs
        self.min_lr = min_lr
        of_class: Rule = "linear" if isinstance(tried, _BY_THE_GRADIENT) else "sqrt"
        self.rule: Rule = of_class if lr_scaling == "auto" else lr_scaling
        self.reference_batch_size = reference_batch_size

    @property
    def interval(self) -> Literal["step", "epoch"]:
        """After what the schedule is stepped: an update or an epoch."""
        return "step" if self.schedule in _PLANNED else "epoch"

    def scaled_to(self, batch_size: int) -> Self:
        """The same recipe with the learning rate for updates of `batch_size` samples."""
        scaled, times = copy.copy(self), factor(self.rule, batch_size, self.reference_batch_size)
        scaled.lr, scaled.min_lr = self.lr * times, self.min_lr * times
        return scaled

    def build(self, parameters: Iterable[Tensor]) -> optim.Optimizer:
        """The optimizer over parameters."""
        return self._made([*parameters], lr=self.lr)

    def build_schedule(self, optimizer: optim.Optimizer, total_steps: float) -> LRScheduler | None:
        """The schedule, to be stepped after every update or epoch, as `interval` says; None for a constant rate.

        UserError if the schedule needs the number of steps, and it is not known beforehand.
        """
        if self.schedule in _PLANNED and not 0 < total_steps < float("inf"):
            raise UserError(
                f"optimizer.schedule: {self.schedule} needs an end: set trainer.max_steps, or trainer.max_epochs where "
                "the data's loader has a length, or write optimizer.schedule=constant"
            )
        match self.schedule:
            case "one_cycle" if total_steps > 1:  # the only step is at the peak, and not at its end
                # OneCycleLR on its own moves every momentum from 0.95 to 0.85, also that of an SGD of none.
                low, high = zip(*map(_around_momentum, optimizer.param_groups), strict=True)
                peaks = [group["lr"] for group in optimizer.param_groups]
                steps, rise = int(total_steps), float(self.warmup)
                if 1 in (rise, rise * steps):  # OneCycleLR divides by the length of a phase, which has no steps here
                    rise *= 1 - 1e-9
                momentum: Any = {"cycle_momentum": any(high), "base_momentum": list(low), "max_momentum": list(high)}
                return lr_scheduler.OneCycleLR(optimizer, peaks, steps, pct_start=rise, **momentum)
            case "cosine":
                return lr_scheduler.CosineAnnealingLR(optimizer, T_max=int(total_steps), eta_min=self.min_lr)
            case "step":
                return lr_scheduler.StepLR(optimizer, step_size=self.step_epochs, gamma=self.factor)
        return None

    def _made(self, parameters: list[Any], **options: Any) -> optim.Optimizer:
        try:
            made = self.make(parameters, **options)
        except (ValueError, TypeError, LookupError, AssertionError, RuntimeError) as error:  # for a wrong option
            raise UserError(f"optimizer: {in_one_line(error)}") from error
        if not isinstance(made, optim.Optimizer):
            raise UserError(f"optimizer: {type(made).__name__} is no torch.optim.Optimizer")
        return made


def _around_momentum(group: dict[str, Any]) -> tuple[float, float]:
    """Between what one_cycle moves the momentum of a group of parameters, and beta 1 of Adam's kind; zeros for none."""
    given = group["betas"][0] if "betas" in group else group.get("momentum", 0)
    return (round(max(0.0, given - 0.05), 10), round(min(given + 0.05, (1 + given) / 2), 10)) if given else (0.0, 0.0)
