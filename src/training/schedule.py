"""The learning rate of an optimizer: its schedule, its scale, and the groups of parameters that have options of their own."""

import copy
import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self

from torch import Tensor, optim
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from ..errors import UserError, did_you_mean
from ..options.types import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

Parameters = Iterable[Tensor | tuple[str, Tensor]]  # with names, as of `named_parameters()`, where there are groups
_PLANNED = ("one_cycle", "cosine")  # schedules for a known number of steps


class Schedule:
    """The learning rate of any optimizer: its schedule, its scale, and the groups of parameters that differ in it.

    Args:
        lr: the learning rate; under `one_cycle` its peak.
        schedule: `one_cycle` rises to the peak and anneals to almost nothing by the last step (Smith & Topin 2018);
            `cosine` falls from `lr` to `min_lr` by the last step (Loshchilov & Hutter 2017); `step` multiplies the rate by
            `factor` after every `step_epochs` epochs; `plateau` does after more than `patience` epochs in a row in which
            `val/loss` has not fallen; `constant` leaves the rate alone.
        warmup: the fraction of the steps in which one_cycle rises.
        factor: by which step and plateau multiply the rate.
        step_epochs: the epochs between two changes of the schedule `step`.
        patience: the epochs without a lower `val/loss` that plateau accepts.
        min_lr: where cosine ends, and below which plateau does not go; it is scaled as `lr` is.
        lr_scaling: how `lr` changes with the batch size: `none` leaves it alone, `linear` multiplies it by
            batch ÷ reference (Goyal et al. 2017, for SGD), `sqrt` by the square root of that (Krizhevsky 2014;
            Malladi et al. 2022 for Adam).
        reference_batch_size: the batch size that `lr` was chosen for, in samples an update over all devices.
        groups: parameters with options of their own, each group a dict: `match`, name patterns as of fnmatch
            (`encoder.*`), and options of the optimizer in place of the main ones, `lr` among them. The first group that
            matches a parameter has it; the others keep the main options.
    """

    elementwise = False  # whether every state of the optimizer is known to have the shape of its parameter

    def __init__(
        self,
        lr: PositiveFloat,
        schedule: Literal["one_cycle", "constant", "cosine", "step", "plateau"] = "one_cycle",
        warmup: Fraction = 0.3,
        factor: Fraction = 0.1,
        step_epochs: PositiveInt = 1,
        patience: NonNegativeInt = 1,
        min_lr: NonNegativeFloat = 0.0,
        lr_scaling: Literal["none", "sqrt", "linear"] = "none",
        reference_batch_size: PositiveInt = 128,
        groups: list[dict] | None = None,
    ):
        self.lr = lr
        given = [{k: v for k, v in group.items() if v is not None} for group in groups or []]
        self.groups = [{**group, "match": _patterns(group, number)} for number, group in enumerate(given)]
        least = min([lr, *(group["lr"] for group in given if "lr" in group)])
        if min_lr > least:
            whose = "optimizer.lr" if least == lr else "the lowest lr of optimizer.groups"
            raise UserError(f"optimizer.min_lr: got {min_lr:g}, takes at most {whose}, which is {least:g}")
        if schedule == "plateau" and factor == 1:
            raise UserError("optimizer.factor: got 1, and optimizer.schedule=plateau takes less")
        self.schedule = schedule
        self.warmup = warmup
        self.factor = factor
        self.step_epochs = step_epochs
        self.patience = patience
        self.min_lr = min_lr
        self.lr_scaling = lr_scaling
        self.reference_batch_size = reference_batch_size

    @property
    def interval(self) -> Literal["step", "epoch"]:
        """After what the schedule is stepped: an update or an epoch."""
        return "step" if self.schedule in _PLANNED else "epoch"

    def scaled_to(self, batch_size: int) -> Self:
        """The same recipe with the learning rate for updates of `batch_size` samples."""
        power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[self.lr_scaling]
        scaled, factor = copy.copy(self), (batch_size / self.reference_batch_size) ** power
        scaled.lr, scaled.min_lr = self.lr * factor, self.min_lr * factor
        scaled.groups = [group | ({"lr": group["lr"] * factor} if "lr" in group else {}) for group in self.groups]
        return scaled

    def build(self, parameters: Parameters) -> optim.Optimizer:
        """The optimizer over parameters, which have their names where there are groups, as in `named_parameters()`.

        Raises:
            UserError: for a pattern of a group that matches no parameter.
        """
        raise NotImplementedError

    def grouped(self, parameters: Parameters) -> list[Any]:
        """The parameters as torch's optimizers take them: a list, or dicts with options, those of the main ones first."""
        named = [one if isinstance(one, tuple) else ("", one) for one in parameters]
        if not self.groups:
            return [parameter for _, parameter in named]
        members: list[list[Tensor]] = [[] for _ in (*self.groups, "the rest")]
        for name, parameter in named:
            found = (i for i, group in enumerate(self.groups) if matches(name, group["match"]))
            members[next(found, -1)].append(parameter)
        for i, group in enumerate(self.groups):
            check_patterns(f"optimizer.groups.{i}.match", group["match"], [name for name, _ in named])
            if not members[i]:
                raise UserError(f"optimizer.groups.{i}.match: an earlier group has every parameter that it matches")
        options = [{key: value for key, value in group.items() if key != "match"} for group in self.groups]
        groups = [{"params": members[-1]}, *({"params": m, **o} for m, o in zip(members, options, strict=False))]
        return [group for group in groups if group["params"]]

    def build_schedule(self, optimizer: optim.Optimizer, total_steps: float) -> LRScheduler | None:
        """The schedule, to be stepped after every update or epoch, as `interval` says; None for a constant rate.

        Raises:
            UserError: if the schedule needs the number of steps, and it is not known beforehand.
        """
        if self.schedule in _PLANNED and not 0 < total_steps < float("inf"):
            raise UserError(
                f"optimizer.schedule: {self.schedule} needs an end: set trainer.max_epochs or trainer.max_steps"
            )
        match self.schedule:
            case "one_cycle":
                # Momentum falls as the rate rises, where there is one: OneCycleLR on its own gives one to an SGD of none.
                has_momentum = bool(optimizer.defaults.get("momentum") or "betas" in optimizer.defaults)
                peaks = [group["lr"] for group in optimizer.param_groups]
                return lr_scheduler.OneCycleLR(
                    optimizer, peaks, int(total_steps), pct_start=self.warmup, cycle_momentum=has_momentum
                )
            case "cosine":
                return lr_scheduler.CosineAnnealingLR(optimizer, T_max=int(total_steps), eta_min=self.min_lr)
            case "step":
                return lr_scheduler.StepLR(optimizer, step_size=self.step_epochs, gamma=self.factor)
            case "plateau":
                return lr_scheduler.ReduceLROnPlateau(
                    optimizer, factor=self.factor, patience=self.patience, min_lr=self.min_lr
                )
        return None


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the name patterns, as of fnmatch, matches a parameter's name."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns(option: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise UserError for the first name pattern, as of fnmatch, that matches none of a model's parameters."""
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            above = {
                f"{'.'.join(parts[:n])}.*"
                for name in names
                for parts in [name.split(".")]
                for n in range(1, len(parts))
            }
            near = did_you_mean(pattern, [*names, *sorted(above)])
            raise UserError(f"{option}: '{pattern}' matches no parameter of the model.{near}")


def _patterns(group: dict[str, Any], number: int) -> list[str]:
    """The name patterns of a group; a single one may stand alone."""
    match = group.get("match")
    patterns = [match] if isinstance(match, str) else match
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise UserError(f"optimizer.groups.{number}.match: got {match!r}, takes name patterns such as ['encoder.*']")
    return list(patterns)
