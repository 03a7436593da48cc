"""StopAtTarget: ends a run once a metric of its validation reaches a target, or once a time limit is over."""

import math
import time
from typing import Annotated, Any

from lightning import LightningModule, Trainer
from torchmetrics import MetricCollection
from typing_extensions import override

from .._lightning import callback_of, is_accumulating, validate_by_batches_alone
from ..distributed.rank_sync import RankSync, SyncsRanks
from ..errors import UserError, did_you_mean
from ..options.types import Choice, PositiveFloat, Purpose
from ..records.formatting import count, duration
from ..records.intervals import TIME_LIMIT
from ..records.metrics import metric as declared
from ..records.metrics import staged
from ..records.terminal import row
from ._table import MIN_UNDISTURBED
from ._updates import Updates
from .throughput import ThroughputMonitor

FIRST = 5  # updates before the time limit starts, and before the first validation unless the fit is shorter
RESOLUTION = 0.1  # of the updates so far: the interval between two validations
_TOPIC = "target"
_VALIDATE, _STOP = 1, 2
_NEVER = 2**62  # as the number of batches between two validations


def is_higher_better(metric: str, module: LightningModule) -> bool | None:
    """Whether a higher value of a metric is better, by torchmetrics or records/metrics.py; None if neither knows."""
    key = staged(metric)
    stage, _, name = key.partition("/")
    measured = getattr(module, "measured", None)  # a Task's metrics by stage and name; another module's may be anything
    metrics = measured.get(stage) if isinstance(measured, dict) else None
    if isinstance(metrics, dict):
        metric_object = metrics.get(name)
    else:
        collections = (submodule for submodule in module.modules() if isinstance(submodule, MetricCollection))
        by_name = {logged: item for collection in collections for logged, item in collection.items(copy_state=False)}
        metric_object = getattr(module, metric.replace("/", "_"), by_name.get(metric))
    higher_is_better = getattr(metric_object, "higher_is_better", None)
    return declared(key).higher_is_better if higher_is_better is None else higher_is_better


class StopAtTarget(SyncsRanks):
    """Ends a run when a metric of the validation reaches a value, and records the training time until then.

    The interval between two validations is a tenth of the updates so far, and takes at least as long as a validation. So the
    time is known to about 10 %, and validations take at most half of a run. They replace those that the trainer plans.
    Training time is the number of updates × the mean step of the ThroughputMonitor, without validation; it is unknown if the
    monitor has no step. The first validation follows six counted steps, or the last update. Rank 0 decides, and all ranks
    validate and end after the same step.

    Args:
        metric: of the validation, such as `val/acc`.
        value: the target.
        seconds: the time of the fit without validations after which the run ends without the target; null for no limit.
        wall_seconds: the same limit for the time of the fit with its validations; null for no limit.

    Raises:
        UserError: if it is unknown whether a higher value is better; if the module optimises manually, because its steps do not
            say to which update they belong; at the first validation, if that does not measure the metric.
    """

    def __init__(
        self,
        metric: Annotated[Choice, Purpose.OBSERVATION],  # the option `target` distinguishes groups of runs
        value: Annotated[float, Purpose.OBSERVATION],
        seconds: Annotated[PositiveFloat | None, Purpose.SEARCH] = None,
        wall_seconds: Annotated[PositiveFloat | None, Purpose.SEARCH] = None,
    ):
        self.metric, self.value = metric, value
        self.seconds = math.inf if seconds is None else seconds
        self.wall_seconds = math.inf if wall_seconds is None else wall_seconds
        self._validation_s = 0.0  # of the last validation
        self._resumed: dict[str, Any] = {}
        self._reset(0)

    def _reset(self, step: int, monitor: ThroughputMonitor | None = None) -> None:
        self._start = step  # Lightning's `global_step` before this fit
        self._updates = Updates(step)
        self._second_last_step = self._last_step = step  # `global_step` at the last two validations
        self._began = self._validated = time.perf_counter()  # the fit; the first timed update or a validation's end
        self._deadline = math.inf  # the time at which the run ends without the target; each validation moves it
        self._pending_action = 0  # agreed by all ranks, for the end of the update
        self._best: float | None = None
        self.reached = False
        self.ended = ""  # why the run has ended without the target
        self._monitor = monitor
        self._is_validated = False  # in this fit
        resumed, self._resumed = self._resumed, {}
        self._began -= resumed.get("wall_spent_s", 0.0)
        self._spent_s = resumed.get("spent_s", 0.0)  # the part of `seconds` that was spent before this fit
        old_target = resumed.get("metric"), resumed.get("value")
        if old_target == (self.metric, self.value):  # else its validations were for another target
            self._second_last_step, self._last_step, self._best = (resumed[key] for key in ("before", "last", "best"))

    @override
    def state_dict(self) -> dict[str, Any]:
        now = time.perf_counter()
        spent_s = self.seconds - (self._deadline - now) if math.isfinite(self._deadline) else self._spent_s
        spent = {"wall_spent_s": now - self._began, "spent_s": spent_s}
        validations = {"before": self._second_last_step, "last": self._last_step, "best": self._best}
        return {"metric": self.metric, "value": self.value, **validations, **spent}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.enable_validation:
            raise UserError("target: needs a validation, and this run has none; leave trainer.limit_val_batches alone")
        if not pl_module.automatic_optimization:
            raise UserError("target: needs automatic optimisation, and this module optimises by hand")
        self._rises = is_higher_better(self.metric, pl_module)
        if self._rises is None:
            raise UserError(
                f"target_metric: got '{self.metric}', of which neither batchscope nor a torchmetrics metric of the module says "
                "whether a higher value is better; take another metric"
            )
        self._reset(trainer.global_step, callback_of(trainer, ThroughputMonitor))
        validate_by_batches_alone(trainer)
        trainer.val_check_batch = _NEVER
        RankSync.of(trainer).contribute(_TOPIC, lambda: self._choose_action() if trainer.is_global_zero else 0)

    def _choose_action(self) -> int:
        """Return what follows this update: `_VALIDATE`, `_STOP` or 0."""
        if self.reached or self.ended:  # the fit goes on until its `min_steps` or `min_epochs`
            return 0
        now = time.perf_counter()
        if now - self._began >= self.wall_seconds:
            self.ended = f"the {TIME_LIMIT}"
        if now >= self._deadline:
            self.ended = "other runs were faster"
        if self.ended:
            return _STOP
        steps_since, steps_done = self._updates.step - self._last_step, self._updates.step - self._start
        num_timed = self._monitor.first_counted + MIN_UNDISTURBED if self._monitor else 0  # updates, for a mean step
        is_due = (
            self._updates.count >= max(FIRST, num_timed)
            and steps_since >= max(1, RESOLUTION * steps_done)
            and now - self._validated >= self._validation_s
        )
        return _VALIDATE if is_due else 0

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._updates.end_batch(trainer.global_step) and self._updates.count == FIRST:
            self._validated = time.perf_counter()
            self._deadline = self._validated + self.seconds - self._spent_s
        action = RankSync.of(trainer).agreed(_TOPIC) or self._pending_action  # ranks agree only at some batches
        self._pending_action, action = (action, 0) if is_accumulating(trainer) else (0, action)
        is_last = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        if not self._is_validated and (is_last or trainer.global_step == trainer.max_steps):
            action = action or _VALIDATE
        trainer.val_check_batch = 1 if action else _NEVER  # Lightning reads it after this hook
        if action == _STOP:
            trainer.should_stop = True

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.reached:  # Lightning's own, at the end of a fit that had to go on
            return
        self._validation_began = time.perf_counter()
        self._second_last_step, self._last_step = self._last_step, self._updates.step

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or self.reached:
            return
        self._is_validated, self._validated = True, time.perf_counter()
        self._validation_s = self._validated - self._validation_began
        self._deadline += self._validation_s
        score = self._read_metric(trainer)
        is_reached = math.isfinite(score) and (score >= self.value if self._rises else score <= self.value)
        is_reached = trainer.strategy.broadcast(is_reached)  # each rank may log the metric of its own samples
        best_of = max if self._rises else min
        self._best = score if self._best is None or not math.isfinite(self._best) else best_of(self._best, score)
        if is_reached:
            self.reached, self.ended, trainer.should_stop = True, "", True

    def _read_metric(self, trainer: Trainer) -> float:
        metrics = trainer.callback_metrics
        if self.metric not in metrics:
            hint, measured = did_you_mean(self.metric, metrics), ", ".join(metrics) or "nothing"
            raise UserError(f"target_metric: got '{self.metric}', and the validation measures {measured}.{hint}")
        return float(metrics[self.metric])

    def _training_s(self, step: int) -> float | None:
        """Return the training time until a `global_step`; None if the mean step is unknown."""
        step_ms = self._monitor.summary.get("step_ms") if self._monitor else None
        return step * step_ms / 1e3 if step_ms else None

    def record_facts(self) -> dict[str, Any]:
        """Return the result: the updates and seconds until the last validation, and the seconds until the one before it.

        The last validation is the first that has reached the target, even if the fit goes on.
        """
        facts: dict[str, Any] = {
            "metric": self.metric,
            "value": self.value,
            "reached": self.reached,
            "best": self._best,
            "steps": self._last_step,
            "seconds": self._training_s(self._last_step),
            "after_seconds": self._training_s(self._second_last_step),
        }
        facts |= {"ended": self.ended} if self.ended else {}
        return {"target": facts, "time_to_target_s": facts["seconds"] if self.reached else None}

    def summary_lines(self) -> list[str]:
        """Return the run's last line about the target."""
        target, seconds = f"{self.metric} {declared(self.metric).exact(self.value)}", self._training_s(self._last_step)
        trained = f"{duration(seconds)} of training, " if seconds is not None else ""
        after = f"after {trained}{count(self._last_step, 'update')}"
        return [row("target", f"{target} {after}" if self.reached else f"{target} not reached {after}")]
