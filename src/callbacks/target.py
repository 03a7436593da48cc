"""StopAtTarget: ends a run once a metric of its validation reaches a target, or once it has taken too long for that."""

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import torch
from lightning import LightningModule, Trainer
from typing_extensions import override

from .._lightning import callbacks_of, is_accumulating
from ..distributed.rank_sync import RankSync, SyncsRanks
from ..errors import UserError, did_you_mean
from ..options.types import Choice, PositiveFloat, Purpose
from ..records.formatting import count, duration
from ..records.metrics import metric as declared
from ..records.terminal import row
from ._timer import add_timer, remove_timer
from .throughput import ThroughputMonitor

FIRST = 5  # updates before the first validation; the clock of the time limit starts after them
RESOLUTION = 0.1  # of the training time so far, between two validations
_TOPIC = "target"
_VALIDATE, _STOP = 1, 2
_NEVER = 2**62  # batches between two validations


class _Point(NamedTuple):
    """A validation: the updates before it, and the seconds of training by the clock."""

    steps: int = 0
    seconds: float = 0.0


class StopAtTarget(SyncsRanks):
    """Ends a run when a metric of the validation reaches a value, and records the training time until then.

    A validation follows a tenth of the training time so far, and no sooner than after as much training as a validation
    takes. So the time is known to about 10 %, and validations take at most half of a run. They take the place of those
    that the trainer plans. Training time is that of all updates at the mean step of the ThroughputMonitor, without
    validation; where it knows no step, it is the clock's. Rank 0 decides, and all ranks validate and end after the same step.

    With `trainer.num_sanity_val_steps=-1` the metric is known before the first update.

    Args:
        metric: of the validation, such as `val/acc`.
        value: the target. A metric whose direction is not declared rises if it is below its target before training.
        seconds: of training, after which the run ends without the target; null for no limit.
        wall_seconds: of the fit, with its validations; null for no limit.

    Raises:
        UserError: at the first validation, if it does not measure the metric; or if the target is reached before training.
    """

    def __init__(
        self,
        metric: Annotated[Choice, Purpose.OBSERVATION],  # a group of runs is told apart by the option `target`
        value: Annotated[float, Purpose.OBSERVATION],
        seconds: Annotated[PositiveFloat | None, Purpose.OBSERVATION] = None,
        wall_seconds: Annotated[PositiveFloat | None, Purpose.OBSERVATION] = None,
    ):
        self.metric, self.value = metric, value
        self.seconds = math.inf if seconds is None else seconds
        self.wall_seconds = math.inf if wall_seconds is None else wall_seconds
        self._rises = declared(metric).higher_is_better
        self._validation_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self._paused_s, self._pauses = 0.0, 0  # `_pauses` may be nested
        self._start = self._step = 0  # updates before this fit, and by now
        self._wish = 0  # of all ranks, for the end of the update
        self._before, self._last = _Point(), _Point()  # the last validation but one, and the last one
        self._best: float | None = None
        self.reached = False
        self.ended = ""  # why the run has ended without the target
        self._monitor: ThroughputMonitor | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.enable_validation:
            raise UserError("target: needs a validation, and this run has none; leave trainer.limit_val_batches alone")
        self._reset()
        self._monitor = next((one for one in callbacks_of(trainer) if isinstance(one, ThroughputMonitor)), None)
        self._start = self._step = trainer.global_step
        self._began = self._first = time.perf_counter()
        trainer.val_check_batch = _NEVER
        add_timer(trainer, self)
        RankSync.of(trainer).contribute(_TOPIC, lambda: self._wished() if trainer.is_global_zero else 0)

    @contextlib.contextmanager
    def pause(self, part_of_fit: bool = False) -> Iterator[None]:
        """Exclude what happens within from the training time; may be nested."""
        self._stop_clock()
        try:
            yield
        finally:
            self._start_clock()

    def _stop_clock(self) -> None:
        if not self._pauses:
            self._stopped = time.perf_counter()
        self._pauses += 1

    def _start_clock(self) -> None:
        self._pauses -= 1
        if not self._pauses:
            self._paused_s += time.perf_counter() - self._stopped

    def _trained_s(self) -> float:
        """Seconds of training since the first updates."""
        is_timed = self._step - self._start > FIRST
        return time.perf_counter() - self._first - self._paused_s if is_timed else 0.0

    def _wished(self) -> int:
        """What is to follow this update."""
        if time.perf_counter() - self._began >= self.wall_seconds:
            self.ended = "the time limit"
        if (trained := self._trained_s()) >= self.seconds:
            self.ended = "other runs were faster"
        if self.ended:
            return _STOP
        since = trained - self._last.seconds
        is_due = self._step - self._start >= FIRST and since >= max(RESOLUTION * trained, self._validation_s)
        return _VALIDATE if is_due and self._step > self._last.steps else 0

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            if self._step - self._start == FIRST:
                self._first, self._paused_s = time.perf_counter(), 0.0
        wish = RankSync.of(trainer).agreed(_TOPIC) or self._wish  # ranks agree at some batches of an update alone
        self._wish, wish = (wish, 0) if is_accumulating(trainer) else (0, wish)
        trainer.val_check_batch = 1 if wish else _NEVER  # Lightning reads it after this hook
        if wish == _STOP:
            trainer.should_stop = True

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (device := trainer.strategy.root_device).type in ("cuda", "mps"):
            getattr(torch, device.type).synchronize()  # what was submitted is training
        self._before, self._last = self._last, _Point(self._step, self._trained_s())
        self._stop_clock()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validation_s = time.perf_counter() - self._stopped
        self._start_clock()
        score = self._score(trainer)
        if self._rises is None:
            self._rises = score < self.value
        reached = math.isfinite(score) and (score >= self.value if self._rises else score <= self.value)
        if trainer.sanity_checking:
            if reached:
                raise UserError(
                    f"target: got {self.value:g}, and {self.metric} is {score:.4g} before training; take a harder one"
                )
            return
        better = max if self._rises else min
        self._best = score if self._best is None or not math.isfinite(self._best) else better(self._best, score)
        if reached:
            self.reached, self.ended, trainer.should_stop = True, "", True

    def _score(self, trainer: Trainer) -> float:
        found = trainer.callback_metrics
        if self.metric not in found:
            near = did_you_mean(self.metric, found)
            raise UserError(
                f"target_metric: got '{self.metric}', and the validation measures {', '.join(found) or 'nothing'}.{near}"
            )
        return float(found[self.metric])

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        remove_timer(trainer, self)
        super().teardown(trainer, pl_module, stage)

    def _seconds(self, point: _Point) -> float:
        step_ms = self._monitor.summary.get("step_ms") if self._monitor else None
        return point.steps * step_ms / 1e3 if step_ms else point.seconds

    def record_facts(self) -> dict[str, Any]:
        """What came of it: the updates and seconds until the last validation, and until the one before it."""
        facts: dict[str, Any] = {
            "metric": self.metric,
            "value": self.value,
            "reached": self.reached,
            "best": self._best,
        }
        facts |= {"ended": self.ended} if self.ended else {}
        facts |= {"steps": self._last.steps, "seconds": self._seconds(self._last)}
        facts |= {"after_steps": self._before.steps, "after_seconds": self._seconds(self._before)}
        return {"target": facts, "time_to_target_s": facts["seconds"] if self.reached else None}

    def summary_lines(self) -> list[str]:
        """A line of the run's last lines."""
        target, at = f"{self.metric} {declared(self.metric).text(self.value)}", self._last
        after = f"after {duration(self._seconds(at))} of training, {count(at.steps, 'update')}"
        return [row("target", f"{target} {after}" if self.reached else f"{target} not reached {after}")]
