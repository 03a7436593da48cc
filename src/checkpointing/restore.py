"""Going on with a run exactly where its last good checkpoint was written.

Lightning's own resumption in the middle of an epoch loses the state of the random generators and the position in the
data, and a checkpoint of an epoch's last batch loses the validation that follows it. Here every checkpoint stands
between a batch and what follows it (see callbacks/checkpoint.py), and the loops below go on from exactly there.
"""

import contextlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from ..data.datamodule import TensorDataModule
from ..distributed.sharding import shard_like
from ..errors import UserError, printable
from ..files import WriteError, is_inside, temporary_name, why
from ..records.read import read
from ..training.task import Task
from .callback import Checkpoints
from .checkpoint_file import load_checkpoint
from .log_files import cut_back, keep_files, on_this_process
from .random_state import restore_random_state
from .validate import check_resumable


@dataclass
class Resumption:
    """Where a run goes on.

    Attributes:
        path: of the checkpoint; None if the run was killed before its first one, and begins anew.
        position: what the checkpoint says of itself under that name.
        provenance: what it is of.
    """

    path: Path | None = None
    position: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """The steps that have been trained."""
        return self.position.get("steps", 0)

    def facts(self, run_dir: Path) -> dict[str, Any]:
        """What the run's record says of it."""
        return {"step": self.steps, "checkpoint": self.path and os.path.relpath(self.path, run_dir)}

    def check(self, trainer: lightning.Trainer, fingerprint: str) -> None:
        """See that the run can go on with these data, this length and these processes, and write its checkpoints.

        Raises:
            UserError: if the data or the number of processes are not those of the run, it is longer than wanted, or the
                folder of its checkpoints cannot be written.
        """
        before = self.provenance.get("fingerprint", fingerprint)
        if before != fingerprint:
            raise UserError(f"resume: the data are not the run's: their fingerprint is {fingerprint}, not {before}")
        epoch = self.position.get("epoch", -1)
        if trainer.max_epochs is not None and 0 <= trainer.max_epochs <= epoch:
            raise UserError(f"trainer.max_epochs: got {trainer.max_epochs}, and the run is in its epoch {epoch + 1}")
        if 0 <= trainer.max_steps < self.steps:
            raise UserError(f"trainer.max_steps: got {trainer.max_steps}, and the run has done {self.steps}")
        processes = len(self.position.get("random", ())) or trainer.world_size
        if processes != trainer.world_size:
            raise UserError(f"trainer.devices: the run was trained by {processes} processes, not {trainer.world_size}")
        if self.path is not None:
            _check_writable(self.path.parent)

    def prepare(self, trainer: lightning.Trainer, data: TensorDataModule) -> None:
        """Have a trainer and its data begin there; the checkpoint itself is for `trainer.fit(ckpt_path=…)`."""
        loggers = on_this_process(trainer)
        to = self.position.get("curves", {})
        trainer.callbacks.insert(0, _CutBack(loggers, keep_files(loggers), to, self.steps))
        if self.path is not None:
            data.begin_at(self.position["epoch"], self.position["batches"])
            trainer.fit_loop = _ResumedFit(trainer, self.position)


def newest_good(
    folder: Path, trainer: lightning.Trainer | None = None, task: Task | None = None, run_dir: Path | None = None
) -> Resumption:
    """Of a folder's checkpoints, the one of the last step from which the run can go on; of bad ones a warning is printed.

    Args:
        folder: where the run keeps them; may be missing.
        trainer, task: of the run, not yet used; without them whether a checkpoint fits the run is not looked at.
        run_dir: of the run; None for the folder above. Outside of it, a checkpoint has to be of this run.

    Raises:
        UserError: if there are checkpoints, and the run can go on from none of them; if there is none, and the record
            says that there was one; or if the folder cannot be read.
    """
    run_dir = run_dir or folder.parent
    best, best_rank = Resumption(), (-1, -1, -1, False)
    refused = []
    for path in _checkpoints_in(folder):
        try:
            checkpoint = load_checkpoint(path)
            check_resumable(checkpoint, path, trainer, task)
            _check_own(checkpoint, path, run_dir)
        except UserError as error:
            refused.append(str(error).removeprefix("ckpt: "))
            continue
        position = checkpoint["position"]
        rank = (position["steps"], position["epoch"], position["batches"], path.name == "last.ckpt")
        if rank > best_rank:
            best, best_rank = Resumption(path, position, checkpoint["batchscope"]), rank
    if refused and best.path is None:
        raise UserError(f"resume: none of the checkpoints can be used, and nothing was changed: {'; '.join(refused)}")
    steps = _recorded_steps(run_dir) if best.path is None else 0
    if steps:
        raise UserError(
            f"resume: {folder} holds no checkpoint, and the run has trained {steps:,} steps; put its checkpoints back, "
            "or start another run"
        )
    for reason in refused:
        warning = printable(f"{reason}; going on from {best.path.name} instead")
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    return best


def checkpoint_folder(trainer: lightning.Trainer, run_dir: Path) -> Path:
    """Where a run keeps its checkpoints: `checkpoints` in its own folder, unless its callback has another `dirpath`."""
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, Checkpoints)]
    return callbacks[0].folder_of(trainer) if callbacks else run_dir / "checkpoints"


def _check_own(checkpoint: dict[str, Any], path: Path, run_dir: Path) -> None:
    """Raise UserError for a checkpoint of another run, which keeps its own in the same folder outside of both."""
    if is_inside(path, run_dir):
        return
    of, own = checkpoint["batchscope"].get("run"), read(run_dir).get("id")
    if None not in (of, own) and of != own:  # earlier ones do not say
        where = checkpoint["batchscope"]["config"].get("run_dir")
        raise UserError(f"ckpt: {path} is of another run, which began in {where}")


def _checkpoints_in(folder: Path) -> list[Path]:
    """Those of a folder; none if nothing is there by that name."""
    if not os.path.lexists(folder):
        return []
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".ckpt")
    except OSError as error:
        raise UserError(f"resume: {folder} cannot be read, and nothing was changed: {why(error)}") from error


def _recorded_steps(run_dir: Path) -> int:
    """How many steps a run's record says were trained and kept in a checkpoint; 0 where it says nothing of it."""
    record: dict[str, Any] = {}
    with contextlib.suppress(UserError):
        record = read(run_dir)
    resumed = record.get("resumed")
    known = [entry.get("step") for entry in resumed if isinstance(entry, dict)] if isinstance(resumed, list) else []
    return max([0, *(step for step in (record.get("steps"), *known) if isinstance(step, int))])


def _check_writable(folder: Path) -> None:
    """Raise WriteError unless a file can be made in the folder; by its name a later start removes what a kill leaves."""
    probe = temporary_name(folder / "last.ckpt")
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise WriteError(f"resume: {folder} takes no checkpoint, and nothing was changed: {why(error)}") from error


class _CutBack(Callback):
    """Cuts the curves back to where a resumed run begins, once everything has been restored: before the first step.

    Args:
        loggers: those that this process writes.
        earlier, to, step: as `cut_back` takes them.
    """

    def __init__(self, loggers: list[Logger], earlier: list[Path], to: dict[str, int], step: int):
        self.loggers = loggers
        self.earlier = earlier
        self.to = to
        self.step = step

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """The last moment at which nothing has been logged."""
        cut_back(self.loggers, self.earlier, self.to, self.step)


class _ResumedFit(_FitLoop):
    """Lightning's loop over epochs, the first of which is a resumed one.

    Args:
        trainer: whose loop it becomes.
        position: of the checkpoint.
    """

    def __init__(self, trainer: lightning.Trainer, position: dict[str, Any]):
        before = trainer.fit_loop
        super().__init__(trainer, before.min_epochs, before.max_epochs)
        self.epoch_loop = _ResumedEpoch(trainer, position, before.epoch_loop.min_steps, before.epoch_loop.max_steps)

    @property
    def done(self) -> bool:
        """What follows the last batch of all is still to come, even where there are no more steps to be done."""
        return not self.epoch_loop.resumed and super().done

    def load_state_dict(self, state_dict: dict, prefix: str = "") -> None:
        """Take the counters, and none of Lightning's guesses at where between two of its hooks they were saved."""
        super().load_state_dict(state_dict, prefix)
        for loop in (self, self.epoch_loop, self.epoch_loop.val_loop, self.epoch_loop.automatic_optimization):
            loop._restarting = loop._loaded_from_state_dict = False
        batches, epochs = self.epoch_loop.batch_progress, self.epoch_progress
        for counter in (batches.total, batches.current):  # the batch is done
            counter.completed = counter.processed = counter.started = counter.ready
        for counter in (epochs.total, epochs.current):  # the epoch begins anew, but for its first batches
            counter.ready = counter.started = counter.processed = counter.completed


class _ResumedEpoch(_TrainingEpochLoop):
    """Lightning's loop over the batches of an epoch, beginning after the last one that was trained.

    Args:
        trainer: whose loop it becomes.
        position: of the checkpoint.
        min_steps, max_steps: as the trainer has them.
    """

    def __init__(self, trainer: lightning.Trainer, position: dict[str, Any], min_steps: int | None, max_steps: int):
        super().__init__(trainer, min_steps, max_steps)
        self.position = position
        self.resumed = True  # until what follows the last trained batch has been done

    @property
    def done(self) -> bool:
        """As `_ResumedFit.done`."""
        return not self.resumed and super().done

    def reset(self) -> None:
        """Keep the counters of the epoch that is gone on with."""
        if not self.resumed:
            super().reset()

    def advance(self, data_fetcher: Any) -> None:
        """At first nothing: the batch has been trained, and `on_advance_end` does what follows it."""
        if self.resumed:
            self._restore()
            self.resumed = False
        else:
            super().advance(data_fetcher)

    def _restore(self) -> None:
        """What Lightning's checkpoints do not hold; as late as can be, so that nothing comes in between."""
        module = self.trainer.lightning_module
        parameters = dict(module.named_parameters())
        for name, gradient in self.position["gradients"].items():
            parameters[name].grad = shard_like(gradient.to(parameters[name].dtype), parameters[name])
        restore_random_state(self.position["random"][self.trainer.global_rank])
