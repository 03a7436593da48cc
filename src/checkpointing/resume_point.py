"""ResumePoint: which checkpoint a run is resumed from, and whether the run may continue there."""

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer

from ..errors import UserError, warn
from ..files import WriteError, is_inside, temporary_name, why
from ..records.read import read
from .callback import Checkpoints
from .checkpoint_file import load_checkpoint
from .validate import check_resumable


@dataclass
class ResumePoint:
    """The checkpoint from which a run continues; without a path the run was killed before its first, and starts again."""

    path: Path | None = None
    loop_state: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)  # the checkpoint's entry `batchscope`

    @property
    def steps(self) -> int:
        """The number of trained steps."""
        return self.loop_state.get("steps", 0)

    def facts(self, run_dir: Path) -> dict[str, Any]:
        """What the run's record says about it."""
        return {"step": self.steps, "checkpoint": self.path and os.path.relpath(self.path, run_dir)}

    def check(self, trainer: Trainer, fingerprint: str) -> None:
        """Check that the run can continue.

        Raises:
            UserError: if the data or the number of ranks differ from the run's, the run has trained more than is asked
                for, or the checkpoint folder cannot be written.
        """
        before = self.provenance.get("fingerprint", fingerprint)
        if before != fingerprint:
            raise UserError(f"resume: the data have changed: their fingerprint is {fingerprint}, and was {before}")
        epoch = self.loop_state.get("epoch", -1)
        if trainer.max_epochs is not None and 0 <= trainer.max_epochs <= epoch:
            raise UserError(f"trainer.max_epochs: got {trainer.max_epochs}, and the run is in its epoch {epoch + 1}")
        if 0 <= trainer.max_steps < self.steps:
            raise UserError(f"trainer.max_steps: got {trainer.max_steps}, and the run has done {self.steps}")
        ranks = len(self.loop_state.get("random", ())) or trainer.world_size
        if ranks != trainer.world_size:
            raise UserError(
                f"trainer.devices: {ranks} processes trained the run, and this would be {trainer.world_size}"
            )
        if self.path is not None:
            _check_writable(self.path.parent)


def find_resume_point(
    folder: Path, trainer: Trainer | None = None, module: LightningModule | None = None, run_dir: Path | None = None
) -> ResumePoint:
    """The valid checkpoint of the last step in a folder; a warning names each invalid one.

    Args:
        folder: where the run keeps its checkpoints; may be missing.
        trainer, module: of the run, not yet used; without them only the checkpoints themselves are validated.
        run_dir: of the run; `folder`'s parent by default. A checkpoint outside of it has to be this run's.

    Raises:
        UserError: if there are checkpoints and none is valid; if there is none and the record says that there was one; or
            if the folder cannot be read.
    """
    run_dir = run_dir or folder.parent
    found: list[tuple[tuple[int, int, int, bool], ResumePoint]] = []
    refused = []
    for path in _checkpoints_in(folder):
        try:
            checkpoint = load_checkpoint(path)
            check_resumable(checkpoint, path, trainer, module)
            _check_same_run(checkpoint, path, run_dir)
        except UserError as error:
            refused.append(str(error).removeprefix("ckpt: "))
            continue
        state = checkpoint["loop_state"]
        age = (state["steps"], state["epoch"], state["batches"], path.name == "last.ckpt")
        found.append((age, ResumePoint(path, state, checkpoint["batchscope"])))
    if found:
        newest = max(found, key=lambda one: one[0])[1]
        for reason in refused:
            warn(f"{reason}; resuming from {newest.path and newest.path.name} instead")
        return newest
    if refused:
        raise UserError(f"resume: no checkpoint is valid, and nothing was changed: {'; '.join(refused)}")
    if steps := _recorded_steps(run_dir):
        raise UserError(
            f"resume: {folder} holds no checkpoint, and the run has trained {steps:,} steps; put its checkpoints back, "
            "or start another run"
        )
    return ResumePoint()


def checkpoint_folder(trainer: Trainer, run_dir: Path) -> Path:
    """Where a run keeps its checkpoints: `checkpoints` in its folder, unless its callback has another `dirpath`."""
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, Checkpoints)]
    return callbacks[0].folder_of(trainer) if callbacks else run_dir / "checkpoints"


def _check_same_run(checkpoint: dict[str, Any], path: Path, run_dir: Path) -> None:
    """Refuse another run's checkpoint in a folder that two runs share."""
    if is_inside(path, run_dir):
        return
    of, own = checkpoint["batchscope"].get("run"), read(run_dir).get("id")
    if None not in (of, own) and of != own:  # older ones have no id
        where = checkpoint["batchscope"]["config"].get("run_dir")
        raise UserError(f"ckpt: {path} is of another run, which began in {where}")


def _checkpoints_in(folder: Path) -> list[Path]:
    if not os.path.lexists(folder):
        return []
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".ckpt")
    except OSError as error:
        raise UserError(f"resume: {folder} cannot be read, and nothing was changed: {why(error)}") from error


def _recorded_steps(run_dir: Path) -> int:
    """The number of steps that were trained and kept in a checkpoint, as the record says; 0 if it does not say."""
    record: dict[str, Any] = {}
    with contextlib.suppress(UserError):
        record = read(run_dir)
    resumed = record.get("resumed")
    known = [entry.get("step") for entry in resumed if isinstance(entry, dict)] if isinstance(resumed, list) else []
    return max([0, *(step for step in (record.get("steps"), *known) if isinstance(step, int))])


def _check_writable(folder: Path) -> None:
    probe = temporary_name(folder / "last.ckpt")  # a name that a later start removes, should a kill leave it
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise WriteError(f"resume: {folder} cannot be written, and nothing was changed: {why(error)}") from error
