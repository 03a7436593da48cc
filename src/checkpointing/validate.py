"""Whether a run can go on from a checkpoint whose bytes are good: that all is in it, and fits the run.

Everything is looked at here, before anything of the run is changed; what passes can be restored.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
from packaging.version import Version
from torch import Tensor

from ..errors import UserError
from ..training.task import Task
from .callback import Checkpoints
from .checkpoint_file import is_dense
from .random_state import check_random_state

_OLDEST = Version("2.0")  # of Lightning; it migrates older checkpoints by rules of its own
_MOST = 2**53  # of any count; TensorBoard's steps are in 64 bits


class _InvalidError(Exception):
    """What is wrong, by its place in the checkpoint."""


def check_resumable(
    checkpoint: dict[str, Any], path: Path, trainer: lightning.Trainer | None = None, task: Task | None = None
) -> None:
    """See that a run can go on from a checkpoint.

    Args:
        checkpoint: as `load_checkpoint` returns it.
        path: where it is from, for the message.
        trainer, task: of the run, not yet used; without them the checkpoint is looked at by itself.

    Raises:
        UserError: if it cannot, with what is missing or wrong.
    """
    try:
        _check_structure(checkpoint)
        if trainer is not None and task is not None:
            _check_model(checkpoint["state_dict"], task)
            _check_gradients(checkpoint["position"]["gradients"], task)
            _check_optimizer(checkpoint, task)
            _check_counters(checkpoint, trainer)
    except _InvalidError as error:
        raise UserError(f"ckpt: {path} cannot be resumed from: {error}") from error
    except Exception as error:  # whatever else a strange value leads to
        raise UserError(f"ckpt: {path} cannot be resumed from: {type(error).__name__}: {str(error)[:200]}") from error


def _check_structure(checkpoint: dict[str, Any]) -> None:
    _each(
        checkpoint,
        "",
        {
            "epoch": _count,
            "global_step": _count,
            "pytorch-lightning_version": _version,
            "loops": _dict,
            "callbacks": _dict,
            "optimizer_states": _list,
            "lr_schedulers": _list,
            "position": _dict,
        },
    )
    position = checkpoint["position"]
    kinds = {"epoch": _count, "batches": _count, "steps": _count, "random": _list, "gradients": _dict, "curves": _dict}
    _each(position, "position", kinds)
    for name, length in position["curves"].items():
        _count(length, f"position.curves.{name}")
    if not position["random"]:
        raise _InvalidError("position.random is empty")
    for rank, state in enumerate(position["random"]):
        try:
            check_random_state(state)
        except Exception as error:
            raise _InvalidError(f"position.random.{rank} is no state of random generators") from error
    if position["steps"] != checkpoint["global_step"]:
        raise _InvalidError(f"position.steps is {position['steps']}, and global_step is {checkpoint['global_step']}")


def _check_model(saved: dict[str, Tensor], task: Task) -> None:
    own = task.state_dict()
    for name in dict.fromkeys([*own, *saved]):
        there = tuple(saved[name].shape) if name in saved else "missing"
        here = tuple(own[name].shape) if name in own else "none of the model's"
        if there != here:
            raise _InvalidError(f"its weights are of another model: {name} is {there} there and {here} here")
        if saved[name].is_floating_point() != own[name].is_floating_point():
            raise _InvalidError(f"its weights are of another model: {name} is of {saved[name].dtype}")


def _check_gradients(saved: dict[str, Any], task: Task) -> None:
    parameters = dict(task.named_parameters())
    for name, gradient in saved.items():
        fits = name in parameters and is_dense(gradient) and gradient.shape == parameters[name].shape
        if not fits or not gradient.is_floating_point():
            raise _InvalidError(f"position.gradients.{name} is no gradient of the model's")


def _check_optimizer(checkpoint: dict[str, Any], task: Task) -> None:
    """Restore the states into an optimizer and a schedule that are thrown away, and compare them with new ones."""
    recipe, states, schedules = task.optimizer_recipe, checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
    parameters = list(task.parameters())
    optimizer = recipe.build(parameters)
    schedule = recipe.build_schedule(optimizer, 100)
    if len(states) != 1 or len(schedules) != (schedule is not None):
        raise _InvalidError(f"optimizer_states has {len(states)} entries, and lr_schedulers {len(schedules)}")
    groups = optimizer.state_dict()["param_groups"]
    _like([{**group, "params": _list} for group in groups], states[0]["param_groups"], "optimizer_states.param_groups")
    try:
        optimizer.load_state_dict(states[0])
    except Exception as error:
        raise _InvalidError(f"optimizer_states are of another optimizer: {str(error)[:200]}") from error
    for parameter, state in optimizer.state.items():
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        if not all(is_dense(tensor) and tensor.shape in ((), parameter.shape) for tensor in tensors):
            raise _InvalidError("optimizer_states are of another model")
    if schedule is not None:
        _like(schedule.state_dict(), schedules[0], "lr_schedulers.0")


def _check_counters(checkpoint: dict[str, Any], trainer: lightning.Trainer) -> None:
    position = checkpoint["position"]
    saved = checkpoint["loops"].get("fit_loop")
    _like(trainer.fit_loop.state_dict(), saved, "loops.fit_loop")
    if saved["epoch_loop.batch_progress"]["current"]["ready"] != position["batches"]:
        raise _InvalidError("loops.fit_loop and position do not agree on the batches of the epoch")
    if saved["epoch_progress"]["current"]["completed"] != position["epoch"]:
        raise _InvalidError("loops.fit_loop and position do not agree on the epoch")
    for callback in trainer.callbacks:
        where = f"callbacks.{callback.state_key}"
        if callback.state_key in checkpoint["callbacks"]:
            state = checkpoint["callbacks"][callback.state_key]
            _like(callback.state_dict(), state, where)
            if isinstance(callback, Checkpoints):
                if state["best"] is not None:
                    _number(state["best"], f"{where}.best")
                for key, value in state["metrics"].items():
                    if not isinstance(key, str) or not key.isprintable():
                        raise _InvalidError(f"{where}.metrics has {str(key)[:50]!r}, which is no metric's name")
                    _number(value, f"{where}.metrics.{key}")
    plugin = trainer.precision_plugin
    state = checkpoint.get(type(plugin).__qualname__)
    if state is not None:
        _like(plugin.state_dict(), state, type(plugin).__qualname__)


# --- kinds of values --------------------------------------------------------------------------------------------------


def _each(node: dict[str, Any], where: str, kinds: dict[str, Callable[[Any, str], None]]) -> None:
    for key, check in kinds.items():
        place = f"{where}.{key}" if where else key
        if key not in node:
            raise _InvalidError(f"{place} is missing")
        check(node[key], place)


def _count(value: Any, where: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise _InvalidError(f"{where} is {str(value)[:50]}, no count")


def _dict(value: Any, where: str) -> None:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise _InvalidError(f"{where} is a {type(value).__name__}, no dictionary by names")


def _list(value: Any, where: str) -> None:
    if not isinstance(value, list):
        raise _InvalidError(f"{where} is a {type(value).__name__}, no list")


def _version(value: Any, where: str) -> None:
    if not isinstance(value, str) or Version(value) < _OLDEST:
        raise _InvalidError(f"{where} is {str(value)[:50]}")


def _number(value: Any, where: str) -> None:
    if not isinstance(value, int | float) or (isinstance(value, int) and abs(value) > _MOST):
        raise _InvalidError(f"{where} is {repr(value)[:50]}, no number")


def _like(own: Any, saved: Any, where: str) -> None:
    """Require what a new object's state has: the same names, and values of the same kinds. What is None or empty in a new
    object may have become anything."""
    if callable(own):
        own(saved, where)
    elif isinstance(own, dict):
        if not isinstance(saved, dict):
            raise _InvalidError(f"{where} is a {type(saved).__name__}, no dictionary")
        for key, value in own.items():
            if key not in saved:
                raise _InvalidError(f"{where}.{key} is missing")
            _like(value, saved[key], f"{where}.{key}")
    elif isinstance(own, list | tuple):
        if not isinstance(saved, list | tuple) or (own and len(own) != len(saved)):
            raise _InvalidError(f"{where} is no list of {len(own)}")
        for number, value in enumerate(own):
            _like(value, saved[number], f"{where}.{number}")
    elif isinstance(own, bool | str):
        if not isinstance(saved, type(own)):
            raise _InvalidError(f"{where} is {str(saved)[:50]}")
    elif isinstance(own, int):
        _count(saved, where)
    elif isinstance(own, Tensor):
        if not isinstance(saved, Tensor) or saved.shape != own.shape:
            raise _InvalidError(f"{where} is no tensor {tuple(own.shape)}")
    elif own is not None:
        _number(saved, where)
