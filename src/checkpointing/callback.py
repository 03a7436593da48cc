"""Checkpoints: the last one, from which a run can be resumed exactly, and the best one by a validation metric."""

import math
import time
from pathlib import Path
from typing import Any, Literal

import lightning
import torch
from lightning.pytorch.callbacks import Checkpoint

from ..distributed.rank_sync import RankSync
from ..distributed.sharding import whole
from ..errors import UserError, did_you_mean
from ..options.types import PositiveFloat, PositiveInt
from .checkpoint_file import keep_as, remove_leftovers
from .log_files import on_this_process, positions
from .random_state import random_state

_TOPIC = "checkpoint"


class Checkpoints(Checkpoint):
    """Keeps `last.ckpt` and `best.ckpt`.

    Every checkpoint is taken at the same place: a batch has been trained, and what follows a batch (a validation, the
    end of an epoch) is still to come. That, with the state of every random generator, the batches of the epoch that
    have been trained, the gradients that are being accumulated and how far the curves have been written, stands in
    the checkpoint as its `position`. One is written at the end of every epoch, before every validation, and when
    `every_minutes` or `every_n_steps` are over. The best one is the one that was written before the best validation.

    Args:
        dirpath: the folder for both; `checkpoints` in the trainer's own by default.
        monitor: the metric that says which one is the best.
        mode: whether the best is the least (`min`) or the greatest (`max`).
        every_minutes: the longest time of training that is lost when a run is killed; null for none but the above.
        every_n_steps: the same, in steps.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        monitor: str = "val/loss",
        mode: Literal["min", "max"] = "min",
        every_minutes: PositiveFloat | None = 5.0,
        every_n_steps: PositiveInt | None = None,
    ):
        self.dirpath = dirpath
        self.monitor = monitor
        self.mode = mode
        self.every_minutes = every_minutes
        self.every_n_steps = every_n_steps
        self.best_model_path = ""  # by these names Lightning, too, knows them
        self.last_model_path = ""
        self.best_model_score: float | None = None
        self.metrics: dict[str, float] = {}  # of the last validation
        self._fits = False
        self._curves: dict[str, int] = {}  # how far they reached where the run was resumed
        self._saving = False
        self._saved_batch: int | None = None
        self._saved_at = 0.0

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Know the folder, and clear what a killed run has left half-written."""
        self._fits = stage == "fit"
        self.folder = self.folder_of(trainer)
        if stage == "fit":
            self._curves = {}
            if trainer.is_global_zero:
                remove_leftovers(self.folder)

    def folder_of(self, trainer: lightning.Trainer) -> Path:
        """Where the checkpoints of a trainer are kept."""
        return Path(self.dirpath or Path(trainer.default_root_dir) / "checkpoints")

    def on_load_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep how far the curves reached."""
        self._curves = checkpoint.get("position", {}).get("curves", {})

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """The clock starts."""
        self._saved_at, self._saved_batch = time.monotonic(), None
        RankSync.of(trainer).contribute(_TOPIC, lambda: int(self._is_over()))

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Ask the other ranks whether the time is over by their clocks."""
        RankSync.of(trainer).start(trainer.fit_loop.epoch_loop.total_batch_idx)

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save where the epoch or the training ends, and where it is time."""
        steps_done = 0 < trainer.max_steps <= trainer.global_step
        if trainer.is_last_batch or steps_done or trainer.should_stop or self._is_time(trainer):
            self.save(trainer)

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Save before a validation in mid-epoch."""
        if not trainer.sanity_checking and self._saved_batch != trainer.fit_loop.epoch_loop.total_batch_idx:
            self.save(trainer)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Keep the checkpoint as the best one, if it is."""
        if trainer.sanity_checking or trainer.fast_dev_run:
            return
        self.metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        if self.monitor not in self.metrics:
            raise UserError(
                f"callbacks.checkpoint.monitor: got '{self.monitor}', and the validation measures "
                f"{', '.join(self.metrics) or 'nothing'}.{did_you_mean(self.monitor, self.metrics)}"
            )
        if self._is_best(self.metrics[self.monitor]):
            self.best_model_score = self.metrics[self.monitor]
            self.best_model_path = str(self.folder / "best.ckpt")
            if trainer.is_global_zero:
                keep_as(Path(self.last_model_path), Path(self.best_model_path))

    def save(self, trainer: lightning.Trainer) -> None:
        """Write `last.ckpt` now; only between a batch and what follows it, and in all processes."""
        if trainer.fast_dev_run:
            return
        path = str(self.folder / "last.ckpt")
        self._saving = True
        try:
            trainer.save_checkpoint(path)
        finally:
            self._saving = False
        self.last_model_path = path
        self._saved_at, self._saved_batch = time.monotonic(), trainer.fit_loop.epoch_loop.total_batch_idx

    def on_save_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the position; called after all other callbacks, so that the curves reach up to it."""
        if self._saving:
            checkpoint["position"] = {
                "epoch": trainer.current_epoch,
                "batches": trainer.fit_loop.epoch_loop.batch_progress.current.ready,
                "steps": trainer.global_step,
                "random": _of_all_processes(trainer, random_state()),
                "gradients": _accumulating(trainer, pl_module),
                "curves": positions(on_this_process(trainer), self._curves),
            }

    def state_dict(self) -> dict[str, Any]:
        """What the best one reached, and what the last validation measured."""
        return {"best": self.best_model_score, "metrics": self.metrics}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The folder is this run's own, wherever the checkpoint was written.

        A test that loads the best checkpoint changes nothing of what the validations since have measured.
        """
        if not self._fits:
            return
        self.best_model_score, self.metrics = state_dict["best"], state_dict["metrics"]
        if self.best_model_score is None:
            return
        if (self.folder / "best.ckpt").is_file():
            self.best_model_path = str(self.folder / "best.ckpt")
        else:  # somebody has removed it: the best one is that of the validations to come
            self.best_model_score = None

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        """There is nothing more to agree on."""
        RankSync.close(trainer)

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """As after an exception."""
        RankSync.close(trainer)

    def _is_time(self, trainer: lightning.Trainer) -> bool:
        if self.every_n_steps and trainer.global_step % self.every_n_steps == 0 and not _is_accumulating(trainer):
            return True
        return bool(RankSync.of(trainer).agreed(_TOPIC))

    def _is_over(self) -> bool:
        return self.every_minutes is not None and time.monotonic() - self._saved_at >= 60 * self.every_minutes

    def _is_best(self, score: float) -> bool:
        if not math.isfinite(score) or self.best_model_score is None:
            return math.isfinite(score)
        return score < self.best_model_score if self.mode == "min" else score > self.best_model_score


def _is_accumulating(trainer: lightning.Trainer) -> bool:
    """Whether the gradients of the last batch wait for those of the next ones."""
    return trainer.fit_loop.epoch_loop._should_accumulate()


def _accumulating(trainer: lightning.Trainer, module: lightning.LightningModule) -> dict[str, torch.Tensor]:
    """The gradients that an update in progress has collected, by parameter; empty between updates."""
    if not _is_accumulating(trainer):
        return {}
    return {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def _of_all_processes(trainer: lightning.Trainer, state: dict[str, Any]) -> list[dict[str, Any]]:
    """The states of all processes, in the order of their ranks."""
    if trainer.world_size == 1:
        return [state]
    states: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(states, state)
    return states
