"""ResumePoint: which checkpoint a run is resumed from, and whether the run may continue there.

What is checked here is found before anything of the run is changed, so that an earlier checkpoint can take its place.
The states of optimizers, callbacks, loops and precision are checked where they are loaded (restore.py).
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from torch import Tensor
from torch.nn.parameter import is_lazy

from .._system import relative
from ..errors import UserError, cut, warn
from ..files import why
from ..records.read import read
from .callback import Checkpoints
from .checkpoint_file import load_checkpoint, makes_layers

_LAZY = "not made yet"
_MAX_COUNT = 2**53  # TensorBoard's steps are in 64 bits
_OF_OTHERS = "is ModelCheckpoint's, which lacks the random states; init={} starts another run from its weights"


@dataclass
class ResumePoint:
    """The checkpoint from which a run continues; without a path the run was killed before its first, and starts again."""

    path: Path | None = None
    loop_state: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)  # the checkpoint's entry `batchscope`
    epoch: int = -1  # that the run is in
    batches: int = 0  # of that epoch that were trained
    steps: int = 0  # that were trained
    is_within_epoch: bool = False  # whether batches of that epoch are left

    def facts(self, run_dir: Path) -> dict[str, Any]:
        """What the run's record says about it."""
        return {"step": self.steps, "checkpoint": self.path and relative(self.path, run_dir)}

    def cannot_be_restored(self, error: Exception) -> UserError:
        """What to raise for a value in the checkpoint that nothing can be restored from."""
        return UserError(f"resume: {self.path} cannot be resumed from: {type(error).__name__}: {cut(str(error), 200)}")

    def check(self, trainer: Trainer, fingerprint: str) -> None:
        """UserError if the data or the number of ranks differ from the run's, or it has trained more than is asked."""
        before = self.provenance.get("fingerprint", fingerprint)
        if before != fingerprint:
            raise UserError(f"resume: the data have changed: their fingerprint is {fingerprint}, and was {before}")
        if trainer.max_epochs is not None and 0 <= trainer.max_epochs <= self.epoch:
            number = self.epoch + 1
            raise UserError(f"trainer.max_epochs: got {trainer.max_epochs}, and the run is in its epoch {number}")
        if 0 <= trainer.max_steps < self.steps:
            raise UserError(f"trainer.max_steps: got {trainer.max_steps}, and the run has done {self.steps}")
        ranks = len(self.loop_state.get("random", ())) or trainer.world_size
        if ranks != trainer.world_size:
            raise UserError(
                f"trainer.devices: {ranks} processes trained the run, and this would be {trainer.world_size}"
            )
        if self.path is None:
            warn("resume: the run had ended before it wrote a checkpoint; it starts again from its first step")


def find_resume_point(folder: Path, module: LightningModule, run_dir: Path) -> ResumePoint:
    """The last checkpoint of a run or, where that is missing or not valid, the best one, with a warning that says why.

    UserError if none is valid, if one that was written is gone, or if the folder cannot be read.
    """
    found = _checkpoints_in(folder)
    last = folder / "last.ckpt"  # written before any other
    refused = [f"{last} is missing"] if found and last not in found else []
    for path in found:
        try:
            point = check_resumable(load_checkpoint(path), path, module)
        except UserError as error:
            refused.append(str(error).removeprefix("ckpt: "))
            continue
        for reason in refused:
            warn(f"{reason}; resuming from {path.name} instead")
        return point
    if refused:
        raise UserError(f"resume: no checkpoint is valid, and nothing was changed: {'; '.join(refused)}")
    if kept := _recorded_checkpoint(run_dir):
        if os.path.isfile(path := run_dir / kept):
            raise UserError(f"resume: {path} {_OF_OTHERS.format(path)}")
        raise UserError(f"resume: the run has written {kept}, and it is gone; put it back, or start another run")
    return ResumePoint()


def check_resumable(checkpoint: dict[str, Any], path: Path, module: LightningModule | None = None) -> ResumePoint:
    """The point that a loaded checkpoint holds; UserError if it is none, or does not fit the run's unused module."""
    try:
        if "loop_state" not in checkpoint:
            raise ValueError(f"it {_OF_OTHERS.format(path)}")
        state, batches = checkpoint["loop_state"], checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        counts = checkpoint["epoch"], batches["current"]["ready"], checkpoint["global_step"]
        for count in counts:
            if type(count) is not int or not 0 <= count <= _MAX_COUNT:
                raise ValueError(f"its counters hold {str(count)[:30]}, which is no count")
        if not state["random"] or len(state["random"]) != len(state["gradients"]):
            raise ValueError("loop_state.random and loop_state.gradients are not those of all processes")
        if not all(isinstance(name, str) for name in state["frozen"]):
            raise ValueError("loop_state.frozen holds something else than names")
        if module is not None and not makes_layers(module):
            _check_weights(checkpoint["state_dict"], module)
        # Lightning says with the last batch that was trained whether it ends the epoch, on any rank.
        is_within_epoch = batches.get("is_last_batch") is not True
        return ResumePoint(path, state, checkpoint["batchscope"], *counts, is_within_epoch)
    except Exception as error:  # whatever a missing or strange value leads to
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise UserError(f"ckpt: {path} cannot be resumed from: {kind}{cut(str(error), 200)}") from error


def _check_weights(saved: dict[str, Any], module: LightningModule) -> None:
    own = module.state_dict()
    names = dict.fromkeys([*own, *saved]) if module.strict_loading else own.keys() & saved.keys()
    for name in names:
        there = _shape(saved[name]) if name in saved else "missing"
        here = _shape(own[name]) if name in own else "unknown"
        if there != here and not (here == _LAZY and name in saved):
            raise ValueError(f"its weights are of another model: {name} is {there} there and {here} here")


def _shape(value: Any) -> tuple[int, ...] | str:
    """Of a tensor; what else a `state_dict` holds is a module's extra state, or a lazy layer's, without a shape yet."""
    if not isinstance(value, Tensor):
        return "extra state"
    return _LAZY if is_lazy(value) else tuple(value.shape)


def checkpoint_folder(trainer: Trainer, run_dir: Path) -> Path:
    """Where a run keeps its checkpoints: `checkpoints` in its folder, unless its callback has another `dirpath`."""
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, Checkpoints)]
    return callbacks[0].folder_of(trainer) if callbacks else run_dir / "checkpoints"


def _checkpoints_in(folder: Path) -> list[Path]:
    """The last checkpoint and the best one, if they are there."""
    last, best = folder / "last.ckpt", folder / "best.ckpt"
    try:
        there = {path.name for path in folder.iterdir()} if os.path.lexists(folder) else set()
        return [path for path in (last, best) if path.name in there]
    except OSError as error:
        raise UserError(f"resume: {folder} cannot be read, and nothing was changed: {why(error)}") from error


def _recorded_checkpoint(run_dir: Path) -> str | None:
    """The checkpoint that the run has written last, as its record says."""
    try:
        kept = read(run_dir).get("checkpoints")
    except UserError:
        return None
    return str(kept.get("last") or kept.get("best") or "") if isinstance(kept, dict) else None
