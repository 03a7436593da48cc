"""How a model's weights are updated: one of torch's optimizers, and its learning-rate schedule."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, optim
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from ..distributed.sharding import local
from ..errors import UserError
from ..options.types import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

_ADAM = {"weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8}
# By name: torch's class, and the options that it takes, with their defaults.
_TORCH: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "adam": (optim.Adam, {"lr": 1e-3, **_ADAM}),
    "adamw": (optim.AdamW, {"lr": 4e-3, **_ADAM, "weight_decay": 0.01}),
    "nadam": (optim.NAdam, {"lr": 2e-3, **_ADAM}),
    "radam": (optim.RAdam, {"lr": 1e-3, **_ADAM}),
    "rmsprop": (optim.RMSprop, {"lr": 1e-2, "momentum": 0.0, "alpha": 0.99, "weight_decay": 0.0, "eps": 1e-8}),
    "adagrad": (optim.Adagrad, {"lr": 1e-2, "weight_decay": 0.0}),
    "adadelta": (optim.Adadelta, {"lr": 1.0, "rho": 0.9, "weight_decay": 0.0}),
    "sgd": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}),
}
_FUSED = ("adam", "adamw", "sgd")  # one kernel for all parameters, on every device that Lightning trains on
_PLANNED = ("one_cycle", "cosine")  # schedules for a known number of steps


class Optimizer:
    """What an option of `optimizer=` builds; a class of one's own overrides `build`.

    Args:
        name: Adam (Kingma & Ba 2015), AdamW with decoupled weight decay (Loshchilov & Hutter 2019), NAdam with Nesterov
            momentum (Dozat 2016), RAdam with a rectified variance (Liu et al. 2020), RMSprop (Hinton 2012), Adagrad (Duchi
            et al. 2011), Adadelta (Zeiler 2012), or SGD with Nesterov momentum.
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
        weight_decay, betas, eps, momentum, alpha, rho: as in torch's optimizer of that name, which may take only some of
            them. None for the default: torch's, except for AdamW and SGD, which have the rates and the weight decay that
            the project's networks learn with.
    """

    def __init__(
        self,
        name: Literal["adam", "adamw", "nadam", "radam", "rmsprop", "adagrad", "adadelta", "sgd"] = "adamw",
        lr: PositiveFloat | None = None,
        schedule: Literal["one_cycle", "constant", "cosine", "step", "plateau"] = "one_cycle",
        warmup: Fraction = 0.3,
        factor: Fraction = 0.1,
        step_epochs: PositiveInt = 1,
        patience: NonNegativeInt = 1,
        min_lr: NonNegativeFloat = 0.0,
        lr_scaling: Literal["none", "sqrt", "linear"] = "none",
        reference_batch_size: PositiveInt = 128,
        weight_decay: NonNegativeFloat | None = None,
        betas: tuple[Fraction, Fraction] | None = None,
        eps: PositiveFloat | None = None,
        momentum: Fraction | None = None,
        alpha: Fraction | None = None,
        rho: Fraction | None = None,
    ):
        given = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "momentum": momentum}
        self.options = _options(name, given | {"alpha": alpha, "rho": rho})  # of torch's optimizer, by its own names
        self.lr: float = self.options.pop("lr")
        if min_lr > self.lr:
            raise UserError(f"optimizer.min_lr: got {min_lr:g}, takes at most optimizer.lr, which is {self.lr:g}")
        if schedule == "plateau" and factor == 1:
            raise UserError("optimizer.factor: got 1, and optimizer.schedule=plateau takes less")
        self.name = name
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
        return scaled

    def build(self, parameters: Iterable[Tensor]) -> optim.Optimizer:
        """Torch's optimizer over the parameters; it is fused where torch can."""
        parameters, options = list(parameters), dict(self.options)
        if self.name in _FUSED:  # torch has no fused SGD for sharded parameters
            options["fused"] = self.name != "sgd" or all(local(p) is p for p in parameters)
        if self.name == "sgd":
            options["nesterov"] = options["momentum"] > 0
        optimizer = _TORCH[self.name][0](parameters, lr=self.lr, **options)  # pyrefly: ignore[unexpected-keyword]
        if self.name == "sgd" and options["fused"] and options["momentum"]:
            _start_momentum_at_zero(optimizer)
            optimizer.register_load_state_dict_post_hook(_start_momentum_at_zero)
        return optimizer

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
                return lr_scheduler.OneCycleLR(
                    optimizer, self.lr, int(total_steps), pct_start=self.warmup, cycle_momentum=has_momentum
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


def _options(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options of torch's optimizer; UserError for one that it does not take."""
    defaults, known = _TORCH[name][1], {key: value for key, value in given.items() if value is not None}
    for key, value in known.items():
        if key not in defaults:
            raise UserError(
                f"optimizer.{key}: got {value}, and {name} takes {', '.join(defaults)}; write optimizer={name}"
            )
    if "betas" in known:
        known["betas"] = _betas(known["betas"])
    return defaults | known


def _betas(betas: Sequence[float]) -> tuple[float, float]:
    """Adam's two factors; UserError unless there are two, both below 1."""
    if len(betas) != 2 or max(betas) >= 1:
        raise UserError(f"optimizer.betas: got {list(betas)}, takes a list of two numbers of at least 0 and below 1")
    return betas[0], betas[1]


def _start_momentum_at_zero(optimizer: optim.Optimizer) -> None:
    """Give every parameter a momentum buffer of zeros, now and where a loaded checkpoint has none.

    Torch's fused SGD allocates the buffers uninitialised in its first step, for the kernel to fill. A kernel that skips
    the update (`found_inf`, which a gradient scaler sets in its first steps) fills nothing, and the next step would
    accumulate onto arbitrary memory. From zeros the first step gives the same numbers, `momentum · 0 + gradient`,
    because there is no dampening. An optimizer that is not fused needs the host to read `found_inf` at every step.
    """
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad):
        if optimizer.state[parameter].get("momentum_buffer") is None:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
