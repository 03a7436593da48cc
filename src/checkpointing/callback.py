"""Checkpoints: `last.ckpt`, from which a run is resumed exactly, and `best.ckpt`, the best by a validation metric."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor
from typing_extensions import override

from .._lightning import (
    after_batch,
    epoch_metrics,
    has_to_stop,
    is_accumulating,
    is_fast_dev_run,
    is_stopping,
    loggers_of_rank,
    on_epoch_skip,
    validates_next,
)
from ..callbacks._timer import pause
from ..callbacks._updates import Updates
from ..callbacks.target import is_higher_better
from ..distributed.gather import gather
from ..distributed.rank_sync import RankSync, SyncsRanks
from ..errors import MetricError, UserError, did_you_mean, warn
from ..files import remove_leftovers
from ..options.types import PositiveFloat, PositiveInt, Purpose
from ..random_state import random_state
from ..records.metrics import staged
from .checkpoint_file import check_states, check_weights, copy_checkpoint

_TOPIC = "checkpoint"
DEFAULT_MONITOR = "val/loss"  # of a Task
CHECKPOINTS = "checkpoints"  # the folder of both checkpoints in the trainer's `default_root_dir`, the folder of a run


class Checkpoints(SyncsRanks, Checkpoint):
    """Keeps `last.ckpt` and `best.ckpt`.

    Every checkpoint is taken after Lightning and the module's own hooks are done with a batch, and before what follows
    the batch: a validation, or the end of the epoch. Its `loop_state` holds what Lightning's checkpoints lack: the random
    states, accumulated gradients and metrics of every rank, the frozen parts of the module, and whether the end of the fit
    was requested. A checkpoint is written at the end of every epoch, before every validation, and as often as
    `every_minutes` and `every_n_steps` say. The best checkpoint is the one that was written before the best validation.

    Args:
        monitor: the metric that decides which checkpoint is the best.
        mode: whether the lowest (`min`) or the highest (`max`) value is the best; null for the metric's better direction.
        every_minutes: how many minutes of training a killed run loses at most; null for no such limit.
        every_n_steps: how many steps of the optimizer a killed run loses at most; null for no such limit.
    """

    def __init__(
        self,
        monitor: str = DEFAULT_MONITOR,
        mode: Literal["min", "max"] | None = None,
        every_minutes: Annotated[PositiveFloat | None, Purpose.OBSERVATION] = 5.0,
        every_n_steps: Annotated[PositiveInt | None, Purpose.OBSERVATION] = None,
    ):
        self.monitor = monitor
        self.mode = mode
        self.every_minutes = every_minutes
        self.every_n_steps = every_n_steps
        self.best_model_path = ""  # Lightning and its loggers read these five by their names
        self.last_model_path = ""
        self.best_model_score: float | None = None
        self.current_score: float | None = None
        self.save_top_k = 1
        self.metrics: dict[str, float] = {}  # of the last validation
        self._is_fitting = False
        self._is_checked = False
        self._warned_of: set[str] = set()
        self.on_first_save: Callable[[], None] = lambda: None  # called once, after the first checkpoint is written
        self._is_saving = False
        self._saved_batch: int | None = None
        self._updates = Updates()
        self._saved_at = 0.0  # by time.monotonic()

    def check(self, module: LightningModule) -> None:
        """Raise UserError for weights that could not be read back later, and for a metric without a better direction."""
        check_weights(module.state_dict())
        if self.mode is None:
            is_rising = is_higher_better(self.monitor, module)
            if is_rising is None:
                problem = f"nobody says which way {self.monitor} gets better"
                raise UserError(f"callbacks.checkpoint.mode: {problem}; write min or max")
            self.mode = "max" if is_rising else "min"
        self._is_checked = True

    def unread_options(self) -> dict[str, str]:
        """Return the options that have changed nothing, and why."""
        return {} if self.metrics else dict.fromkeys(("monitor", "mode"), "no validation was measured")

    def save(self, trainer: Trainer) -> None:
        """Write `last.ckpt`, once a batch. All ranks have to call this method between a batch and what follows it."""
        batch = trainer.fit_loop.epoch_loop.total_batch_idx
        if is_fast_dev_run(trainer) or self._saved_batch == batch:
            return
        path = str(self.folder / "last.ckpt")
        self._is_saving = True
        try:
            trainer.save_checkpoint(path)
        finally:
            self._is_saving = False
        if not self.last_model_path:
            with pause(trainer):
                self.on_first_save()
        self.last_model_path, self.current_score = path, None  # no validation has seen these weights
        self._tell_loggers(trainer)
        self._saved_at, self._saved_batch = time.monotonic(), batch

    def save_if_due(self, trainer: Trainer) -> None:
        """Write `last.ckpt` if the fit or an epoch ends with this batch, a validation follows it, or an interval is over."""
        is_step_due = self.every_n_steps and self._updates.has_passed(self.every_n_steps)
        # Save before the validation begins: then torch's DataLoader draws a number from the global generator.
        if _is_last_batch(trainer) or validates_next(trainer) or is_step_due or RankSync.of(trainer).agreed(_TOPIC):
            self.save(trainer)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._is_fitting = stage == "fit"
        self.folder = Path(trainer.default_root_dir) / CHECKPOINTS
        if self._is_fitting:
            if not self._is_checked:  # the program checks before the run begins
                self.check(pl_module)
            self._is_checked = False  # the next fit may have another module
            if trainer.is_global_zero:
                remove_leftovers(self.folder, "*.ckpt")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_at, self._saved_batch = time.monotonic(), None
        self._updates = Updates(trainer.global_step)
        if not is_fast_dev_run(trainer):
            check_states(trainer)
        limit_s = 60 * (self.every_minutes or math.inf)
        RankSync.of(trainer).contribute(_TOPIC, lambda: int(time.monotonic() - self._saved_at >= limit_s))
        on_epoch_skip(trainer, lambda: self.save(trainer))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._updates.end_batch(trainer.global_step)
        after_batch(trainer, lambda: self.save_if_due(trainer))

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:  # a validation by the clock may have become due after `save_if_due`
            self.save(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or is_fast_dev_run(trainer):
            return
        self.metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        score, best = self._monitored_score(), self.best_model_score
        self.current_score = score
        if score is not None and not math.isfinite(score):
            problem = f"{self.monitor} is {score} in epoch {trainer.current_epoch}"
            self._warn_once("score", f"callbacks.checkpoint.monitor: {problem}, and no such checkpoint is the best")
        elif score is not None and (best is None or (score < best if self.mode == "min" else score > best)):
            self.best_model_score = score
            self.best_model_path = str(self.folder / "best.ckpt")
            if trainer.is_global_zero:
                copy_checkpoint(Path(self.last_model_path), Path(self.best_model_path))
            self._tell_loggers(trainer)

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Lightning calls checkpoint callbacks after all others, so that the log files include this batch.
        if self._is_saving:
            # Only a module that optimises by hand knows which of its gradients are accumulated: keep them all.
            keeps_gradients = is_accumulating(trainer) or not pl_module.automatic_optimization
            parameters = pl_module.named_parameters() if keeps_gradients else ()
            metrics = {**trainer.callback_metrics, **(epoch_metrics(trainer) if _is_last_batch(trainer) else {})}
            rank_state = {
                "random": random_state(),
                "gradients": {name: p.grad.cpu() for name, p in parameters if p.grad is not None},
                "metrics": {key: _plain_tensor(value) for key, value in metrics.items()},
            }
            rank_states = gather(rank_state, trainer.world_size)
            checkpoint["loop_state"] = {
                **{key: [state[key] for state in rank_states] for key in rank_state},
                "frozen": _frozen_names(pl_module),
                "has_to_stop": has_to_stop(trainer),
            }
            for logger in loggers_of_rank(trainer):
                logger.save()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best_model_score, "metrics": self.metrics}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self._is_fitting:  # a test of the best checkpoint keeps the metrics of the last validation
            return
        self.best_model_score = state_dict["best"] if state_dict["best"] is None else float(state_dict["best"])
        self.metrics = {key: float(value) for key, value in state_dict["metrics"].items() if key.isprintable()}
        last, best = self.folder / "last.ckpt", self.folder / "best.ckpt"  # the folder may have moved since the save
        if last.is_file():
            self.last_model_path = str(last)
        if not best.is_file():  # if somebody has removed it, only later validations decide which checkpoint is the best
            self.best_model_score = None
        elif self.best_model_score is not None:
            self.best_model_path = str(best)

    def _monitored_score(self) -> float | None:
        """Return the monitored metric of the last validation; None, with a warning, if the validation lacks the metric.

        A LightningModule of the user's own may call `val/loss` `val_loss` or `valid/loss`.
        """
        scores = {staged(key): value for key, value in self.metrics.items()} | self.metrics
        for name in (self.monitor, staged(self.monitor)):
            if name in scores:
                return scores[name]
        measured = ", ".join(name for name in self.metrics if not name.startswith("train")) or "nothing"
        suggestion = did_you_mean(self.monitor, self.metrics)
        if self.monitor != DEFAULT_MONITOR:
            raise MetricError(
                f"callbacks.checkpoint.monitor: got '{self.monitor}', and the validation measures {measured}.{suggestion}"
            )
        self._warn_once(
            "monitor",
            f"no best checkpoint is kept: the validation measures {measured}; name a metric by callbacks.checkpoint.monitor",
        )
        return None

    def _warn_once(self, topic: str, line: str) -> None:
        if topic not in self._warned_of:
            warn(line)
        self._warned_of.add(topic)

    def _tell_loggers(self, trainer: Trainer) -> None:
        """Have the loggers upload the checkpoint, now or at their end, if an option such as `log_model` asks for it."""
        with pause(trainer):
            for logger in loggers_of_rank(trainer):
                logger.after_save_checkpoint(cast(Any, self))


def _plain_tensor(value: Any) -> Tensor:
    """Return a number that was logged, of any class, as a tensor that `weights_only` reads."""
    return torch.as_tensor(value).detach().cpu().as_subclass(Tensor)


def _is_last_batch(trainer: Trainer) -> bool:
    """Whether the fit or an epoch ends with this batch."""
    are_steps_done = 0 < trainer.max_steps <= trainer.global_step
    return trainer.is_last_batch or are_steps_done or is_stopping(trainer)


def _frozen_names(module: LightningModule) -> list[str]:
    """Return the names of the parameters that are not trained, and of the normalisations that do not track statistics."""
    norms = [name for name, part in module.named_modules() if getattr(part, "track_running_stats", None) is False]
    return [*norms, *(name for name, parameter in module.named_parameters() if not parameter.requires_grad)]
