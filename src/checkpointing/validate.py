"""Whether a run can be resumed from a checkpoint whose bytes are intact: its counters agree, and it fits the run.

What is checked here is found before anything of the run is changed, so that an earlier checkpoint can take its place. The
states of optimizers, callbacks, loops and precision are checked where they are loaded (restore.py).
"""

import math
from pathlib import Path
from typing import Any

from lightning import LightningModule
from torch import Tensor

from ..errors import UserError

_MAX_COUNT = 2**53  # TensorBoard's steps are in 64 bits


def check_resumable(checkpoint: dict[str, Any], path: Path, module: LightningModule | None = None) -> None:
    """Raise UserError, with what is missing or wrong, unless a run can be resumed from a checkpoint.

    Args:
        checkpoint: as `load_checkpoint` returns it.
        path: of the checkpoint, for the message.
        module: of the run, not yet used; without it the checkpoint is checked by itself.
    """
    try:
        _check_counters(checkpoint)
        _check_rates(checkpoint)
        if module is not None:
            _check_weights(checkpoint["state_dict"], module)
    except Exception as error:  # whatever a missing or strange value leads to
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise UserError(f"ckpt: {path} cannot be resumed from: {kind}{str(error)[:200]}") from error


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
            raise ValueError(f"loop_state.{name} is {str(state[name])[:30]}, and Lightning's counters say {numbers}")
    if not all(map(_is_count, state["log_positions"].values())):
        raise ValueError("loop_state.log_positions are not counts")
    if not state["random"] or len(state["random"]) != len(state["gradients"]):
        raise ValueError("loop_state.random and loop_state.gradients are not those of all processes")


def _check_weights(saved: dict[str, Tensor], module: LightningModule) -> None:
    own = module.state_dict()
    for name in dict.fromkeys([*own, *saved]):
        there = tuple(saved[name].shape) if name in saved else "missing"
        here = tuple(own[name].shape) if name in own else "unknown"
        if there != here:
            raise ValueError(f"its weights are of another model: {name} is {there} there and {here} here")
        if saved[name].is_floating_point() != own[name].is_floating_point():
            raise ValueError(f"its weights are of another model: {name} is of {saved[name].dtype}")


def _check_rates(checkpoint: dict[str, Any]) -> None:
    """Refuse a learning rate, or another option of an optimizer, that is not a number, and a schedule without a state."""
    if not all(isinstance(state, dict) and state for state in checkpoint["lr_schedulers"]):
        raise ValueError("its lr_schedulers are no states of schedules")
    groups = [group for state in checkpoint["optimizer_states"] for group in state["param_groups"]]
    for key, value in (item for group in groups for item in group.items()):
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"the option {key} in its optimizer_states is {value}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT
