"""Restoring a run at its resume point: loop counters, batches, gradients, random states and log files.

Lightning alone does not resume exactly. In the middle of an epoch it loses the random states and the position in the
data. From a checkpoint of an epoch's last batch it skips the validation that follows. Here every checkpoint is taken
between a batch and what follows it (callback.py), and training continues from exactly there.
"""

from pathlib import Path
from typing import Protocol

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from .._lightning import callbacks_of, resume_after_last_batch
from ..distributed.sharding import shard_like
from .log_files import append_to_logs, loggers_of_rank, truncate_logs
from .random_state import restore_random_state
from .resume_point import ResumePoint


class SkipsTrained(Protocol):
    """A datamodule whose training can begin in the middle of an epoch."""

    def resume_at(self, epoch: int, batches: int) -> None:
        """Begin in an epoch of which the first `batches` batches have been trained."""


def prepare_resume(trainer: Trainer, data: SkipsTrained, point: ResumePoint) -> None:
    """Have `trainer.fit(…, ckpt_path=point.path)` continue at the resume point; the trainer is not yet used."""
    callbacks_of(trainer).insert(0, _TruncateLogs(append_to_logs(loggers_of_rank(trainer)), point))
    if point.path is not None:
        data.resume_at(point.loop_state["epoch"], point.loop_state["batches"])
        resume_after_last_batch(trainer, lambda: _restore_gradients_and_random_state(trainer, point))


class _TruncateLogs(Callback):
    """Truncates the log files once everything else has been restored, before anything is logged."""

    def __init__(self, earlier: list[Path], point: ResumePoint):
        self.earlier = earlier
        self.point = point

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        positions = self.point.loop_state.get("log_positions", {})
        truncate_logs(loggers_of_rank(trainer), self.earlier, positions, self.point.steps)


def _restore_gradients_and_random_state(trainer: Trainer, point: ResumePoint) -> None:
    parameters = dict(trainer.lightning_module.named_parameters())
    for name, gradient in point.loop_state["gradients"].items():
        parameters[name].grad = shard_like(gradient.to(parameters[name].dtype), parameters[name])
    restore_random_state(point.loop_state["random"][trainer.global_rank])
