"""Whether a run can be resumed from a checkpoint whose bytes are intact: it is complete, and it fits the run.

Everything is checked here, before anything of the run is changed. A checkpoint that passes can be restored.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

from lightning import LightningModule, Trainer
from packaging.version import Version
from torch import Tensor

from .._lightning import callbacks_of
from ..errors import UserError
from .callback import Checkpoints
from .checkpoint_file import is_dense
from .random_state import check_random_state

_OLDEST = Version("2.0")  # of Lightning; it migrates older checkpoints
_MAX_COUNT = 2**53  # TensorBoard's steps are in 64 bits


class _InvalidError(Exception):
    """What is wrong, by its place in the checkpoint."""


def check_resumable(
    checkpoint: dict[str, Any], path: Path, trainer: Trainer | None = None, module: LightningModule | None = None
) -> None:
    """Raise UserError, with what is missing or wrong, unless a run can be resumed from a checkpoint.

    Args:
        checkpoint: as `load_checkpoint` returns it.
        path: of the checkpoint, for the message.
        trainer, module: of the run, not yet used; without them the checkpoint is checked by itself.
    """
    try:
        _check_structure(checkpoint)
        if trainer is not None and module is not None:
            _check_weights(checkpoint["state_dict"], module)
            _check_gradients(checkpoint["loop_state"]["gradients"], module)
            _check_optimizer(checkpoint, module)
            _check_counters(checkpoint, trainer)
            _check_callbacks(checkpoint["callbacks"], trainer)
            _check_precision(checkpoint, trainer)
    except _InvalidError as error:
        raise UserError(f"ckpt: {path} cannot be resumed from: {error}") from error
    except Exception as error:  # whatever else a strange value leads to
        raise UserError(f"ckpt: {path} cannot be resumed from: {type(error).__name__}: {str(error)[:200]}") from error


def _check_structure(checkpoint: dict[str, Any]) -> None:
    _check_like(_STRUCTURE, checkpoint, "")
    state = checkpoint["loop_state"]
    for name, length in state["log_positions"].items():
        _check_like(_COUNT, length, f"loop_state.log_positions.{name}")
    if not state["random"]:
        raise _InvalidError("loop_state.random is empty")
    for rank, random_state in enumerate(state["random"]):
        try:
            check_random_state(random_state)
        except Exception as error:
            raise _InvalidError(f"loop_state.random.{rank} is not the state of random generators") from error
    if state["steps"] != checkpoint["global_step"]:
        raise _InvalidError(f"loop_state.steps is {state['steps']}, and global_step is {checkpoint['global_step']}")


def _check_weights(saved: dict[str, Tensor], module: LightningModule) -> None:
    own = module.state_dict()
    for name in dict.fromkeys([*own, *saved]):
        there = tuple(saved[name].shape) if name in saved else "missing"
        here = tuple(own[name].shape) if name in own else "unknown"
        if there != here:
            raise _InvalidError(f"its weights are of another model: {name} is {there} there and {here} here")
        if saved[name].is_floating_point() != own[name].is_floating_point():
            raise _InvalidError(f"its weights are of another model: {name} is of {saved[name].dtype}")


def _check_gradients(saved: dict[str, Any], module: LightningModule) -> None:
    parameters = dict(module.named_parameters())
    for name, gradient in saved.items():
        fits = name in parameters and is_dense(gradient) and gradient.shape == parameters[name].shape
        if not fits or not gradient.is_floating_point():
            raise _InvalidError(f"loop_state.gradients.{name} is no gradient of the model's")


def _check_optimizer(checkpoint: dict[str, Any], module: LightningModule) -> None:
    """Load the states into an optimizer and a schedule that are thrown away, and compare them with new ones."""
    recipe = cast(Any, module.optimizer_recipe)  # of training/optimizer.py
    states, schedules = checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
    optimizer = recipe.build(list(module.parameters()))
    schedule = recipe.build_schedule(optimizer, 100)
    if len(states) != 1 or len(schedules) != (schedule is not None):
        raise _InvalidError(f"optimizer_states has {len(states)} entries, and lr_schedulers {len(schedules)}")
    groups = [{**group, "params": _LIST} for group in optimizer.state_dict()["param_groups"]]
    _check_like(groups, states[0]["param_groups"], "optimizer_states.param_groups")
    try:
        optimizer.load_state_dict(states[0])
    except Exception as error:
        raise _InvalidError(f"optimizer_states are of another optimizer: {str(error)[:200]}") from error
    for parameter, state in optimizer.state.items():
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        if not all(is_dense(tensor) and tensor.shape in ((), parameter.shape) for tensor in tensors):
            raise _InvalidError("optimizer_states are of another model")
    if schedule is not None:
        _check_like(schedule.state_dict(), schedules[0], "lr_schedulers.0")


def _check_counters(checkpoint: dict[str, Any], trainer: Trainer) -> None:
    state, saved = checkpoint["loop_state"], checkpoint["loops"].get("fit_loop")
    _check_like(trainer.fit_loop.state_dict(), saved, "loops.fit_loop")
    if saved["epoch_loop.batch_progress"]["current"]["ready"] != state["batches"]:
        raise _InvalidError("loops.fit_loop and loop_state do not agree on the batches of the epoch")
    if saved["epoch_progress"]["current"]["completed"] != state["epoch"]:
        raise _InvalidError("loops.fit_loop and loop_state do not agree on the epoch")


def _check_callbacks(saved: dict[str, Any], trainer: Trainer) -> None:
    for callback in callbacks_of(trainer):
        if callback.state_key not in saved:
            continue
        where, state = f"callbacks.{callback.state_key}", saved[callback.state_key]
        _check_like(callback.state_dict(), state, where)
        if isinstance(callback, Checkpoints):
            if state["best"] is not None:
                _check_like(_NUMBER, state["best"], f"{where}.best")
            for key, value in state["metrics"].items():
                if not isinstance(key, str) or not key.isprintable():
                    raise _InvalidError(f"{where}.metrics has {str(key)[:50]!r}, which is no metric's name")
                _check_like(_NUMBER, value, f"{where}.metrics.{key}")


def _check_precision(checkpoint: dict[str, Any], trainer: Trainer) -> None:
    plugin = trainer.precision_plugin
    name = type(plugin).__qualname__
    if checkpoint.get(name) is not None:
        _check_like(plugin.state_dict(), checkpoint[name], name)


class _Kind(NamedTuple):
    name: str
    accepts: Callable[[Any], bool]


_BOOL = _Kind("true or false", lambda value: isinstance(value, bool))
_TEXT = _Kind("a text", lambda value: isinstance(value, str))
_COUNT = _Kind("a count", lambda value: type(value) is int and 0 <= value <= _MAX_COUNT)
_NUMBER = _Kind(
    "a number", lambda value: isinstance(value, float) or (isinstance(value, int) and abs(value) <= _MAX_COUNT)
)
_LIST = _Kind("a list", lambda value: isinstance(value, list))
_DICT = _Kind(
    "a dictionary by names", lambda value: isinstance(value, dict) and all(isinstance(key, str) for key in value)
)
_VERSION = _Kind(f"{_OLDEST} or newer", lambda value: isinstance(value, str) and Version(value) >= _OLDEST)
_KINDS = {bool: _BOOL, str: _TEXT, int: _COUNT, float: _NUMBER}

# What every checkpoint has.
_STRUCTURE = {
    **dict.fromkeys(("epoch", "global_step"), _COUNT),
    "pytorch-lightning_version": _VERSION,
    **dict.fromkeys(("loops", "callbacks"), _DICT),
    **dict.fromkeys(("optimizer_states", "lr_schedulers"), _LIST),
    "loop_state": {
        **dict.fromkeys(("epoch", "batches", "steps"), _COUNT),
        "random": _LIST,
        **dict.fromkeys(("gradients", "log_positions"), _DICT),
    },
}


def _check_like(own: Any, saved: Any, where: str) -> None:
    """Require the structure of a new object's state: the same names, and values of the same kinds.

    A kind may stand in the place of a value. None and empty lists may have become anything.
    """
    if own is None:
        return
    if isinstance(own, _Kind):
        if not own.accepts(saved):
            raise _InvalidError(f"{where} is {repr(saved)[:50]}, not {own.name}")
    elif isinstance(own, dict):
        if not isinstance(saved, dict):
            raise _InvalidError(f"{where} is {repr(saved)[:50]}, not a dictionary")
        for key, value in own.items():
            place = f"{where}.{key}".lstrip(".")
            if key not in saved:
                raise _InvalidError(f"{place} is missing")
            _check_like(value, saved[key], place)
    elif isinstance(own, list | tuple):
        if not isinstance(saved, list | tuple) or (own and len(own) != len(saved)):
            raise _InvalidError(f"{where} is not a list of {len(own)}")
        for number, value in enumerate(own):
            _check_like(value, saved[number], f"{where}.{number}")
    elif isinstance(own, Tensor):
        if not isinstance(saved, Tensor) or saved.shape != own.shape:
            raise _InvalidError(f"{where} is not a tensor of shape {tuple(own.shape)}")
    else:
        _check_like(_KINDS.get(type(own), _NUMBER), saved, where)
