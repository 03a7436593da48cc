"""How a model's weights are updated: one of torch's optimizers or of the user's, and its learning-rate schedule."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import optim
from typing_extensions import override

from ..distributed.sharding import local
from ..errors import UserError, did_you_mean, in_one_line
from ..options.types import Fraction, NonNegativeFloat, PositiveFloat
from .schedule import Parameters, Schedule

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


class Optimizer(Schedule):
    """What an option of `optimizer=` builds; a class of one's own overrides `build`.

    Args:
        name: Adam (Kingma & Ba 2015), AdamW with decoupled weight decay (Loshchilov & Hutter 2019), NAdam with Nesterov
            momentum (Dozat 2016), RAdam with a rectified variance (Liu et al. 2020), RMSprop (Hinton 2012), Adagrad (Duchi
            et al. 2011), Adadelta (Zeiler 2012), or SGD with Nesterov momentum.
        lr: as Schedule. None for the default, as below.
        weight_decay, betas, eps, momentum, alpha, rho: as in torch's optimizer of that name, which may take only some of
            them. None for the default: torch's, except for AdamW and SGD, which have the rates and the weight decay that
            the project's networks learn with.
        **schedule: as Schedule.
    """

    elementwise = True

    def __init__(
        self,
        name: Literal["adam", "adamw", "nadam", "radam", "rmsprop", "adagrad", "adadelta", "sgd"] = "adamw",
        lr: PositiveFloat | None = None,
        weight_decay: NonNegativeFloat | None = None,
        betas: tuple[Fraction, Fraction] | None = None,
        eps: PositiveFloat | None = None,
        momentum: Fraction | None = None,
        alpha: Fraction | None = None,
        rho: Fraction | None = None,
        **schedule: Any,
    ):
        given = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "momentum": momentum}
        options = _options(name, given | {"alpha": alpha, "rho": rho})
        super().__init__(options.pop("lr"), **schedule)
        self.name = name
        self.options = options  # of torch's optimizer, by its own names
        for number, group in enumerate(self.groups):
            of_torch = {key: value for key, value in group.items() if key != "match"}
            _options(name, of_torch, f"optimizer.groups.{number}")

    @override
    def build(self, parameters: Parameters) -> optim.Optimizer:
        """Torch's optimizer over the parameters; it is fused where torch can."""
        each, options = list(parameters), dict(self.options)
        if self.name in _FUSED:  # torch has no fused SGD for sharded parameters
            plain = [one[1] if isinstance(one, tuple) else one for one in each]
            options["fused"] = self.name != "sgd" or all(local(p) is p for p in plain)
        if self.name == "sgd":
            options["nesterov"] = options["momentum"] > 0
        optimizer = _TORCH[self.name][0](self.grouped(each), lr=self.lr, **options)  # pyrefly: ignore[unexpected-keyword]
        if self.name == "sgd" and options["fused"] and options["momentum"]:
            _start_momentum_at_zero(optimizer)
            optimizer.register_load_state_dict_post_hook(_start_momentum_at_zero)
        return optimizer


class AnyOptimizer(Schedule):
    """An optimizer of torch's or of the user's by its class, with the options of a schedule beside its own.

    Args:
        make: called with parameters and `lr`, returns the optimizer.
        lr: as Schedule. None for the default of the class.
        **schedule: as Schedule; the rate is constant by default.

    Raises:
        UserError: if the class refuses its options, or has no learning rate.
    """

    def __init__(self, make: Callable[..., optim.Optimizer], lr: PositiveFloat | None = None, **schedule: Any):
        self.make = make
        tried = self._made([torch.zeros(1, 1, requires_grad=True)], **({} if lr is None else {"lr": lr}))
        if "lr" not in tried.defaults:
            raise UserError(f"optimizer: {type(tried).__name__} has no learning rate: an option lr")
        schedule.setdefault("schedule", "constant")
        super().__init__(float(tried.defaults["lr"]), **schedule)
        for number, group in enumerate(self.groups):
            for key in group:
                if key not in ("match", *tried.defaults):
                    near = did_you_mean(key, tried.defaults)
                    raise UserError(f"optimizer.groups.{number}.{key}: no such option of {type(tried).__name__}.{near}")

    @override
    def build(self, parameters: Parameters) -> optim.Optimizer:
        return self._made(self.grouped(parameters), lr=self.lr)

    def _made(self, parameters: list[Any], **options: Any) -> optim.Optimizer:
        try:
            made = self.make(parameters, **options)
        except (ValueError, TypeError, AssertionError) as error:  # what constructors raise for a wrong option
            raise UserError(f"optimizer: {in_one_line(error)}") from error
        if not isinstance(made, optim.Optimizer):
            raise UserError(f"optimizer: {type(made).__name__} is no torch.optim.Optimizer")
        return made


def _options(name: str, given: dict[str, Any], place: str = "optimizer") -> dict[str, Any]:
    """The options of torch's optimizer; UserError for one that it does not take."""
    defaults, known = _TORCH[name][1], {key: value for key, value in given.items() if value is not None}
    for key, value in known.items():
        if key not in defaults:
            raise UserError(
                f"{place}.{key}: got {value}, and {name} takes {', '.join(defaults)}; write optimizer={name}"
            )
    if "betas" in known:
        known["betas"] = _betas(known["betas"], place)
    return defaults | known


def _betas(betas: Sequence[float], place: str) -> tuple[float, float]:
    """Adam's two factors; UserError unless there are two, both below 1."""
    if len(betas) != 2 or max(betas) >= 1:
        raise UserError(f"{place}.betas: got {list(betas)}, takes a list of two numbers of at least 0 and below 1")
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
