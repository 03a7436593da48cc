"""Whether a run can be resumed from a checkpoint whose bytes are intact: its counters agree, and it fits the run.

What is checked here is found before anything of the run is changed, so that an earlier checkpoint can take its place. The
states of callbacks, loops and precision are checked where they are loaded (restore.py).
"""

import math
from pathlib import Path
from typing import Any, cast

from lightning import LightningModule
from torch import Tensor

from ..errors import UserError
from .checkpoint_file import is_dense

_MAX_COUNT = 2**53  # TensorBoard's steps are in 64 bits


class _InvalidError(Exception):
    """What is wrong, in words."""


def check_resumable(checkpoint: dict[str, Any], path: Path, module: LightningModule | None = None) -> None:
    """Raise UserError, with what is missing or wrong, unless a run can be resumed from a checkpoint.

    Args:
        checkpoint: as `load_checkpoint` returns it.
        path: of the checkpoint, for the message.
        module: of the run, not yet used; without it the checkpoint is checked by itself.
    """
    try:
        _check_counters(checkpoint)
        if module is not None:
            _check_weights(checkpoint["state_dict"], module)
            _check_optimizer(checkpoint, module)
    except _InvalidError as error:
        raise UserError(f"ckpt: {path} cannot be resumed from: {error}") from error
    except Exception as error:  # whatever a missing or strange value leads to
        raise UserError(f"ckpt: {path} cannot be resumed from: {type(error).__name__}: {str(error)[:200]}") from error


def _check_counters(checkpoint: dict[str, Any]) -> None:
    """Compare what `loop_state` counts with Lightning's counters, by which the training loop goes on."""
    state, loop = checkpoint["loop_state"], checkpoint["loops"]["fit_loop"]
    updates = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
    updates = updates or loop["epoch_loop.manual_optimization.optim_step_progress"]["total"]["completed"]
    counters = {
        "epoch": [checkpoint["epoch"], loop["epoch_progress"]["current"]["completed"]],
        "batches": [loop["epoch_loop.batch_progress"]["current"]["ready"]],
        "steps": [checkpoint["global_step"], updates],
    }
    for name, others in counters.items():
        if not _is_count(state[name]) or any(type(other) is not int or other != state[name] for other in others):
            numbers = ", ".join(str(other)[:30] for other in others)
            raise _InvalidError(f"loop_state.{name} is {str(state[name])[:30]}, and Lightning's counters say {numbers}")
    if not all(map(_is_count, state["log_positions"].values())):
        raise _InvalidError("loop_state.log_positions are not counts")
    if not state["random"] or len(state["random"]) != len(state["gradients"]):
        raise _InvalidError("loop_state.random and loop_state.gradients are not those of all processes")


def _check_weights(saved: dict[str, Tensor], module: LightningModule) -> None:
    own = module.state_dict()
    for name in dict.fromkeys([*own, *saved]):
        there = tuple(saved[name].shape) if name in saved else "missing"
        here = tuple(own[name].shape) if name in own else "unknown"
        if there != here:
            raise _InvalidError(f"its weights are of another model: {name} is {there} there and {here} here")
        if saved[name].is_floating_point() != own[name].is_floating_point():
            raise _InvalidError(f"its weights are of another model: {name} is of {saved[name].dtype}")


def _check_optimizer(checkpoint: dict[str, Any], module: LightningModule) -> None:
    """Load the states into an optimizer and a schedule that are thrown away.

    A LightningModule of the user's own has no recipe for them: Lightning loads their states when the fit begins.
    """
    task = cast(Any, module)
    recipe = getattr(task, "optimizer_recipe", None)
    if recipe is None:
        return
    optimizer = recipe.build(task.named())
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    schedule = recipe.build_schedule(optimizer, 100)
    (saved,), schedules = checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
    groups, own = saved["param_groups"], optimizer.state_dict()["param_groups"]
    names = [name for group in groups for name in group["params"]]  # numbers, or names of a sharded model's
    if len(names) != len(parameters) or not _fits(groups, [{**group, "params": None} for group in own]):
        raise _InvalidError("the options in its optimizer_states are of another optimizer, or no finite numbers")
    for name, parameter in zip(names, parameters, strict=True):
        for value in (value for value in saved["state"].get(name, {}).values() if isinstance(value, Tensor)):
            has_shape = value.is_floating_point() and value.shape in ((), parameter.shape)
            if not is_dense(value) or (recipe.elementwise and not has_shape):
                raise _InvalidError("its optimizer_states are of another model")
    optimizer.load_state_dict(saved)
    if not _fits(schedules, [] if schedule is None else [schedule.state_dict()]):
        raise _InvalidError("its lr_schedulers are of another schedule, or no finite numbers")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _fits(saved: Any, own: Any) -> bool:
    """Whether a saved value can stand where a new object's state has `own`. None may have become anything."""
    if isinstance(own, dict):
        return isinstance(saved, dict) and all(key in saved and _fits(saved[key], own[key]) for key in own)
    if isinstance(own, list | tuple):
        return isinstance(saved, list | tuple) and len(saved) == len(own) and all(map(_fits, saved, own))
    if isinstance(own, bool | str):
        return type(saved) is type(own)
    if isinstance(own, int | float):  # a plateau has seen nothing better than infinity
        return type(saved) in (int, float) and (math.isfinite(saved) or math.isinf(own))
    return True
