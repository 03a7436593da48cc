"""ResumePoint: the checkpoint from which a run is resumed, the checks that the run may continue there, and the resume.

The checks before the fit run before any file of the run is changed, so that the best checkpoint can replace a damaged last
one. The states of optimizers, callbacks, loops and precision are checked when they are loaded.

Lightning alone does not resume exactly. In the middle of an epoch it loses the random states and the position in the
data. From a checkpoint of an epoch's last batch it skips the validation that follows. Here every checkpoint is taken
between a batch and what follows it (callback.py), and training continues from exactly that point.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from torch import Tensor
from torch.nn.parameter import is_lazy

from .._lightning import Hooks, callbacks_of, logged_step, loggers_of_rank, on_restore_error, resume_after_last_batch
from .._system import relative
from ..callbacks.step_file import StepFile
from ..errors import UserError, cut, is_text, warn
from ..files import why
from ..options import trust
from ..random_state import restore_random_state
from ..records.read import read
from ..records.values import positive
from .callback import CHECKPOINTS, Checkpoints
from .checkpoint_file import load_checkpoint, makes_layers
from .resume import recorded_checkpoint, refuse_other_metric

_LAZY = "not made yet"  # stands for the shape of a lazy parameter
_MAX_COUNT = 2**53  # TensorBoard's steps are in 64 bits


@dataclass
class ResumePoint:
    """The checkpoint from which a run continues; without a path the run was killed before its first one, and starts again."""

    path: Path | None = None
    loop_state: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)  # the checkpoint's entry `batchscope`
    epoch: int = -1  # the epoch that continues
    batches: int = 0  # trained batches of this epoch
    steps: int = 0  # trained steps of the run
    is_within_epoch: bool = False  # whether batches of this epoch are left

    @property
    def fit_seconds(self) -> float:
        """The training time of the run up to the checkpoint, over all its processes."""
        return positive(self.provenance.get("fit_seconds")) or 0.0

    def facts(self, run_dir: Path) -> dict[str, Any]:
        """Return the entry of this resume for the run's record."""
        path = self.path and relative(self.path, run_dir)
        return {"step": self.steps, "checkpoint": path, "fit_seconds": self.fit_seconds}

    def check(self, trainer: Trainer, fingerprint: str, config: dict[str, Any]) -> None:
        """Raise UserError if the run cannot continue with these data, number of ranks, length of training or monitors."""
        recorded = self.provenance.get("fingerprint", fingerprint)
        if recorded != fingerprint:
            raise UserError(f"resume: the data have changed: their fingerprint is {fingerprint}, and was {recorded}")
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
        else:
            measured = {name for rank in self.loop_state["metrics"] for name in rank if is_text(name)}
            refuse_other_metric(self.provenance, config, measured)

    def prepare(self, trainer: Trainer, data: Any) -> None:
        """Have a later `trainer.fit(…, ckpt_path=self.path)` continue here; the trainer must be unused.

        The data have a method `resume_at(epoch, batches)`, which begins in the middle of an epoch.
        The fit raises UserError for a value of the checkpoint that cannot be restored, before it cuts the log files.
        """
        callbacks = callbacks_of(trainer)
        # `on_train_start` is the first hook after everything has been restored; nothing has been logged by then.
        callbacks.insert(0, Hooks(on_train_start=self._cut_logs))
        if self.path is not None:
            # A LearningRateFinder would drop the checkpoint, whose optimizer has the rate that was found.
            callbacks[:] = [c for c in callbacks if type(c).on_fit_start is not LearningRateFinder.on_fit_start]
            data.resume_at(self.epoch, self.batches)
            on_restore_error(trainer, self._restore_error)
            resume_after_last_batch(trainer, lambda: self._restore_and_save(trainer))

    def _cut_logs(self, trainer: Trainer, module: LightningModule) -> None:
        """Remove what a killed run logged after its checkpoint; the resumed run logs it again, with the same values.

        TensorBoard purges all steps from one number on: the larger number if an optimizer steps less often than Lightning
        logs. Steps before it, such as that of the validation at the checkpoint, are there twice, equal except for speeds.
        """
        for logger in loggers_of_rank(trainer):
            if isinstance(logger, TensorBoardLogger):
                start: Any = Event(session_log=SessionLog(status=SessionLog.START))
                logger.experiment.file_writer.add_event(start, max(self.steps, logged_step(trainer)) + 1)
            elif isinstance(logger, StepFile):
                logger.cut(self.steps, logged_step(trainer))
        if self.path is not None:  # a schedule or a callback may read these metrics
            metrics = self.loop_state["metrics"][trainer.global_rank]
            trainer.callback_metrics.update({key: metrics[key] for key in metrics if is_text(key)})

    def _restore_and_save(self, trainer: Trainer) -> None:
        """Restore what Lightning does not, and save a checkpoint if one is due, as before a validation that follows."""
        module: Any = trainer.lightning_module
        parameters, rank = dict(module.named_parameters()), trainer.global_rank
        try:
            frozen = {*self.loop_state["frozen"]}  # a callback may have frozen or unfrozen a part in an earlier epoch
            for name, parameter in parameters.items():
                parameter.requires_grad_(name not in frozen)
            for name, part in module.named_modules():
                if getattr(part, "track_running_stats", None) is (name in frozen):  # a norm that has to change
                    part.track_running_stats = name not in frozen
            for name, gradient in self.loop_state["gradients"][rank].items():
                parameters[name].grad = gradient.to(parameters[name])
            trainer.should_stop |= bool(self.loop_state.get("has_to_stop"))
            restore_random_state(self.loop_state["random"][rank])
        except Exception as error:
            raise self._restore_error(error) from error
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, Checkpoints):
                callback.save_if_due(trainer)

    def _restore_error(self, error: Exception) -> UserError:
        """Return the UserError for a value of the checkpoint that cannot be restored."""
        return UserError(f"resume: {self.path} cannot be resumed from: {type(error).__name__}: {cut(str(error), 200)}")


def _exists(path: Path) -> bool:
    """Whether a checkpoint exists, or a link, broken or not; UserError for a folder that cannot be searched."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UserError(f"resume: {path} cannot be read, and nothing was changed: {why(error)}") from error
    return True


def find_resume_point(module: LightningModule, run_dir: Path) -> ResumePoint:
    """Return the last checkpoint of a run or, if that is missing or invalid, the best one with a warning that says why.

    UserError if no checkpoint is valid, or if the only checkpoint that was written is gone.
    """
    last, best = (run_dir / CHECKPOINTS / name for name in ("last.ckpt", "best.ckpt"))  # last is written before best
    paths = [path for path in (last, best) if _exists(path)]
    problems = [f"{last} is missing"] if paths == [best] else []
    for path in paths:
        try:
            point = check_resumable(load_checkpoint(path), path, module)
        except UserError as error:
            problems.append(str(error).removeprefix("ckpt: "))
            continue
        for problem in problems:
            warn(f"{problem}; resuming from {path.name} instead")
        return point
    if problems:
        raise UserError(f"resume: no checkpoint is valid, and nothing was changed: {'; '.join(problems)}")
    if recorded_path := recorded_checkpoint(read(run_dir)):
        if os.path.isfile(path := run_dir / recorded_path):
            raise UserError(f"resume: {path} {_foreign_checkpoint_words(path)}")
        raise UserError(
            f"resume: the run has written {recorded_path}, and it is gone; put it back, or start another run"
        )
    return ResumePoint()


def check_resumable(checkpoint: dict[str, Any], path: Path, module: LightningModule | None = None) -> ResumePoint:
    """Return the point of a loaded checkpoint; UserError if the checkpoint has none, or does not fit the unused module."""
    try:
        if "loop_state" not in checkpoint:
            raise ValueError(f"it {_foreign_checkpoint_words(path)}")
        state, batches = checkpoint["loop_state"], checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        counts = checkpoint["epoch"], batches["current"]["ready"], checkpoint["global_step"]
        for count in counts:
            if type(count) is not int or not 0 <= count <= _MAX_COUNT:
                raise ValueError(f"its counters hold {str(count)[:30]}, which is no count")
        if not state["random"] or not len(state["random"]) == len(state["gradients"]) == len(state["metrics"]):
            raise ValueError("loop_state.random, gradients and metrics are not those of all processes")
        if not all(isinstance(value, Tensor) for rank in state["metrics"] for value in rank.values()):
            raise ValueError("loop_state.metrics holds something else than tensors")
        if not all(isinstance(name, str) for name in state["frozen"]):
            raise ValueError("loop_state.frozen holds something else than names")
        # A hook may make the layers, and a method that the module overrides may complete the weights.
        loads_itself = any(is_overridden(name, module) for name in ("on_load_checkpoint", "load_state_dict"))
        if module is not None and not makes_layers(module) and not loads_itself:
            _check_weights(checkpoint["state_dict"], module)
        # On every rank Lightning stores whether the last batch that was trained ends the epoch.
        is_within_epoch = batches.get("is_last_batch") is not True
        return ResumePoint(path, state, checkpoint["batchscope"], *counts, is_within_epoch)
    except Exception as error:  # a missing or malformed value may raise anything
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise UserError(f"ckpt: {path} cannot be resumed from: {kind}{cut(str(error), 200)}") from error


def _foreign_checkpoint_words(path: Path) -> str:
    word = trust.as_words("init", str(path))
    return f"is ModelCheckpoint's, which lacks the random states; {word} starts another run from its weights"


def _check_weights(saved: dict[str, Any], module: LightningModule) -> None:
    """Raise ValueError unless saved weights have the names and shapes of a module's."""
    expected = module.state_dict()
    names = dict.fromkeys([*expected, *saved]) if module.strict_loading else expected.keys() & saved.keys()
    for name in names:
        saved_shape = _shape(saved[name]) if name in saved else "missing"
        shape = _shape(expected[name]) if name in expected else "unknown"
        if saved_shape != shape and not (shape == _LAZY and name in saved):
            raise ValueError(f"its weights are of another model: {name} is {saved_shape} there and {shape} here")


def _shape(value: Any) -> tuple[int, ...] | str:
    """Return the shape of a tensor of a `state_dict`, or words for a module's extra state or a lazy layer's parameter."""
    if not isinstance(value, Tensor):
        return "extra state"
    return _LAZY if is_lazy(value) else tuple(value.shape)
