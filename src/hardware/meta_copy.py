"""A copy of a LightningModule on the meta device: its tensors have shapes and no memory, and its step has no effects."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from lightning import LightningModule
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric, MetricCollection

from .._lightning import compiler_context, trainer_of
from .._torch import drop_compiled_call, hook_dicts
from .flop_formulas import NotCountableError


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor of the same shape, strides and type on the meta device.

    Raises:
        NotCountableError: for a sparse tensor or a subclass of Tensor.
    """
    return empty_copy(tensor, torch.device("meta"))


def empty_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """As `on_meta`, on any device; its values are not set."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        raise NotCountableError(f"a {type(tensor).__name__} of layout {tensor.layout} among the tensors")
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)


def meta_copy(
    module: LightningModule, batch: Any, copy_tensor: Callable[[Tensor], Tensor] = on_meta
) -> tuple[LightningModule, Any]:
    """Copy a module and a batch; every tensor of the copies is on the meta device. The originals stay as they are.

    The copied module logs nothing, steps no optimizer, measures no metric, and sees the plain values of its trainer.
    `copy_tensor` may put the copies elsewhere.

    Raises:
        NotCountableError: for a sparse tensor or a subclass of Tensor; and whatever copying an attribute raises.
    """
    trainer = trainer_of(module)
    stand_in = _TrainerValues(trainer)
    memo: dict[int, Any] = {id(trainer): stand_in} if trainer is not None else {}
    compiled = compiler_context(module)
    if compiled is not None:
        memo[id(compiled)] = {}
    hooks = [hooks for part in module.modules() for hooks in hook_dicts(part)]
    for hook in hooks:
        memo[id(hook)] = OrderedDict()
    optimizers = trainer.optimizers if trainer is not None and not module.automatic_optimization else []
    with CopyTensors(copy_tensor):
        twin, batch, optimizers = copy.deepcopy((module, batch, list(optimizers)), memo)
        for hook in hooks:  # a function only watches; a hook that computes weights is an object with a state
            working = {k: h for k, h in hook.items() if not isinstance(h, FunctionType | MethodType)}
            memo[id(hook)].update(copy.deepcopy(working, memo))
    if compiled is not None:  # trainer.fit(torch.compile(module)) puts the original's methods here
        for name in ("forward", "training_step"):
            vars(twin).pop(name, None)
    if copy_tensor is on_meta:
        twin.to("meta")  # no tensor moves; `self.device` does
    if trainer is not None:
        twin.trainer, stand_in.optimizers = cast(Any, stand_in), optimizers
    _mute(twin, optimizers or [_NoOp()])
    return twin, batch


class CopyTensors(TorchFunctionMode):
    """While it is active, `copy.deepcopy` copies tensors by this function, in place of their values."""

    def __init__(self, copy_tensor: Callable[[Tensor], Tensor] = on_meta):
        super().__init__()
        self._copy_tensor = copy_tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self._copy_tensor(tensor).requires_grad_(tensor.requires_grad)
            return memo[id(tensor)]
        if func is Tensor.clone:  # a Parameter copies itself with it
            return self._copy_tensor(args[0])
        return func(*args, **(kwargs or {}))


def _mute(twin: LightningModule, optimizers: list[Any]) -> None:
    """Have the copy log nothing, step no optimizer and measure no metric."""
    one_or_all = optimizers[0] if len(optimizers) == 1 else optimizers
    for optimizer in optimizers:
        optimizer.step = lambda closure=None: closure() if closure else None
    for part in twin.modules():
        drop_compiled_call(part)  # it would call the original
        if isinstance(part, LightningModule):
            silent = dict.fromkeys(("log", "log_dict", "print", "clip_gradients"), _nothing)
            vars(part).update(silent, lr_schedulers=_NoOp(), manual_backward=part.backward)
            vars(part)["optimizers"] = lambda use_pl_optimizer=True: one_or_all
        elif isinstance(part, MetricCollection):
            vars(part).update(forward=partial(_zeros, list(part.keys())), update=_nothing, compute=_nothing)
        elif isinstance(part, Metric) and not part.is_differentiable:
            # Most check or count values, which meta tensors do not have; no loss is made of them.
            vars(part).update(forward=_zero, update=_nothing, compute=_zero)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _zero(*args: Any, **kwargs: Any) -> Tensor:
    return torch.zeros((), device="meta")


def _zeros(names: list[Any], *args: Any, **kwargs: Any) -> dict[Any, Tensor]:
    return {name: _zero() for name in names}


class _NoOp:
    """Takes any call and does nothing: in place of loggers and schedulers."""

    def __getattr__(self, name: str) -> "_NoOp":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "_NoOp":
        return self


class _TrainerValues:
    """What a step may see of its trainer: plain values (`global_step`, `world_size`, …), and nothing that acts."""

    def __init__(self, trainer: Any):
        self._real = trainer
        self.optimizers: list[Any] = []
        self.logger = _NoOp()
        self.loggers: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._real, name)
        if isinstance(value, bool | int | float | str | None):
            return value
        raise AttributeError(f"trainer.{name}")
