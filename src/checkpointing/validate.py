"""Whether a run can be resumed from a checkpoint whose bytes are intact: it has what a resume needs, and fits the run.

What is checked here is found before anything of the run is changed, so that an earlier checkpoint can take its place. The
states of optimizers, callbacks, loops and precision are checked where they are loaded (restore.py).
"""

from pathlib import Path
from typing import Any

from lightning import LightningModule
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..errors import UserError, cut

_LAZY = "not made yet"
_MAX_COUNT = 2**53  # TensorBoard's steps are in 64 bits


def check_resumable(checkpoint: dict[str, Any], path: Path, module: LightningModule | None = None) -> None:
    """Raise UserError unless a run can be resumed from a checkpoint, whose weights fit the run's module if it is given."""
    try:
        _check_loop_state(checkpoint)
        if module is not None and not makes_layers(module):
            _check_weights(checkpoint["state_dict"], module)
    except Exception as error:  # whatever a missing or strange value leads to
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise UserError(f"ckpt: {path} cannot be resumed from: {kind}{cut(str(error), 200)}") from error


def progress(checkpoint: dict[str, Any]) -> tuple[int, int, int]:
    """The epoch that the run is in, the batches of it that were trained, and the steps of the run."""
    batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["ready"]
    return checkpoint["epoch"], batches, checkpoint["global_step"]


def is_within_epoch(checkpoint: dict[str, Any]) -> bool:
    """Whether batches of the epoch were left, as Lightning says with the last one that was trained, on any rank."""
    return checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"].get("is_last_batch") is not True


def _check_loop_state(checkpoint: dict[str, Any]) -> None:
    state = checkpoint["loop_state"]
    for count in (*progress(checkpoint), *state["log_positions"].values()):
        if not _is_count(count):
            raise ValueError(f"its counters hold {str(count)[:30]}, which is no count")
    if not state["random"] or len(state["random"]) != len(state["gradients"]):
        raise ValueError("loop_state.random and loop_state.gradients are not those of all processes")
    if not all(isinstance(name, str) for name in state["frozen"]):
        raise ValueError("loop_state.frozen holds something else than names")


def makes_layers(module: LightningModule) -> bool:
    """Whether a module may make layers in a hook of its own, which Lightning calls before it loads weights."""
    hooks = (getattr(type(module), name) for name in ("setup", "configure_model"))
    return any(hook.__module__.partition(".")[0] not in ("lightning", "batchscope") for hook in hooks)


def _check_weights(saved: dict[str, Any], module: LightningModule) -> None:
    own = module.state_dict()
    names = dict.fromkeys([*own, *saved]) if module.strict_loading else own.keys() & saved.keys()
    for name in names:
        there = _shape(saved[name]) if name in saved else "missing"
        here = _shape(own[name]) if name in own else "unknown"
        if there != here and not (here == _LAZY and name in saved):
            raise ValueError(f"its weights are of another model: {name} is {there} there and {here} here")
        if isinstance(own[name], Tensor) and saved[name].is_floating_point() != own[name].is_floating_point():
            raise ValueError(f"its weights are of another model: {name} is of {saved[name].dtype}")


def _shape(value: Any) -> tuple[int, ...] | str:
    """Of a tensor; what else a `state_dict` holds is a module's extra state, or a lazy layer's, without a shape yet."""
    if not isinstance(value, Tensor):
        return "extra state"
    return _LAZY if is_lazy(value) else tuple(value.shape)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT
