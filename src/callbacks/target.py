"""StopAtTarget: ends a run once a metric of its validation reaches a target, or once it has taken too long for that."""

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

FIRST = 5  # updates before the clock of the limit starts, and before any validation but that of a shorter fit
RESOLUTION = 0.1  # of the updates so far, between two validations
_TOPIC = "target"
_VALIDATE, _STOP = 1, 2
_NEVER = 2**62  # batches between two validations


def rises(metric: str, module: LightningModule) -> bool | None:
    """Whether a metric is better the higher it is, as torchmetrics or records/metrics.py says; None where neither does."""
    key = staged(metric)
    stage, _, name = key.partition("/")
    measured = getattr(module, "measured", None)  # of a Task, by stage and name; of another module, anything
    metrics = measured.get(stage) if isinstance(measured, dict) else None
    if isinstance(metrics, dict):
        own = metrics.get(name)
    else:
        collections = (part for part in module.modules() if isinstance(part, MetricCollection))
        named = {logged: part for one in collections for logged, part in one.items(copy_state=False)}
        own = getattr(module, metric.replace("/", "_"), named.get(metric))
    found = getattr(own, "higher_is_better", None)
    return declared(key).higher_is_better if found is None else found


class StopAtTarget(SyncsRanks):
    """Ends a run when a metric of the validation reaches a value, and records the training time until then.

    A validation follows a tenth of the updates so far, and no sooner than after as much time as a validation takes. So
    the time is known to about 10 %, and validations take at most half of a run. They take the place of those that the
    trainer plans. Training time is that of all updates at the mean step of the ThroughputMonitor, without validation; it is
    not known where that knows no step, and the first validation follows six that count, or the last update. Rank 0 decides, and all ranks
    validate and end after the same step.

    Args:
        metric: of the validation, such as `val/acc`.
        value: the target.
        seconds: of the fit without validations, after which the run ends without the target; null for no limit.
        wall_seconds: of the fit, with its validations; null for no limit.

    Raises:
        UserError: if nobody says which way the metric gets better, if the module optimises by hand, which says of no step
            to which update it belongs; at the first validation, if that does not measure the metric.
    """

    def __init__(
        self,
        metric: Annotated[Choice, Purpose.OBSERVATION],  # a group of runs is told apart by the option `target`
        value: Annotated[float, Purpose.OBSERVATION],
        seconds: Annotated[PositiveFloat | None, Purpose.SEARCH] = None,
        wall_seconds: Annotated[PositiveFloat | None, Purpose.SEARCH] = None,
    ):
        self.metric, self.value = metric, value
        self.seconds = math.inf if seconds is None else seconds
        self.wall_seconds = math.inf if wall_seconds is None else wall_seconds
        self._validation_s = 0.0  # that the last validation took
        self._resumed: dict[str, Any] = {}
        self._begin(0)

    def _begin(self, step: int, monitor: ThroughputMonitor | None = None) -> None:
        self._start = step  # Lightning's `global_step` before this fit
        self._updates = Updates(step)
        self._before = self._last = step  # `global_step` at the last validation but one, and at the last one
        self._began = self._validated = time.perf_counter()  # the fit; the first timed update or a validation's end
        self._limit = math.inf  # when too much of the fit is over; each validation moves it
        self._wish = 0  # of all ranks, for the end of the update
        self._best: float | None = None
        self.reached = False
        self.ended = ""  # why the run has ended without the target
        self._monitor = monitor
        self._is_validated = False  # in this fit
        resumed, self._resumed = self._resumed, {}
        self._began -= resumed.get("wall_spent_s", 0.0)
        self._spent_s = resumed.get("spent_s", 0.0)  # of `seconds`, before this fit
        if (resumed.get("metric"), resumed.get("value")) == (
            self.metric,
            self.value,
        ):  # else its validations were of another target
            self._before, self._last, self._best = (resumed[key] for key in ("before", "last", "best"))

    @override
    def state_dict(self) -> dict[str, Any]:
        now = time.perf_counter()
        spent_s = self.seconds - (self._limit - now) if math.isfinite(self._limit) else self._spent_s
        spent = {"wall_spent_s": now - self._began, "spent_s": spent_s}
        seen = {"before": self._before, "last": self._last, "best": self._best}
        return {"metric": self.metric, "value": self.value, **seen, **spent}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.enable_validation:
            raise UserError("target: needs a validation, and this run has none; leave trainer.limit_val_batches alone")
        if not pl_module.automatic_optimization:
            raise UserError("target: needs automatic optimisation, and this module optimises by hand")
        self._rises = rises(self.metric, pl_module)
        if self._rises is None:
            raise UserError(
                f"target_metric: got '{self.metric}', of which neither batchscope nor a torchmetrics metric of the module says "
                "whether it is better the higher it is; take another one"
            )
        self._begin(trainer.global_step, callback_of(trainer, ThroughputMonitor))
        validate_by_batches_alone(trainer)
        trainer.val_check_batch = _NEVER
        RankSync.of(trainer).contribute(_TOPIC, lambda: self._wished() if trainer.is_global_zero else 0)

    def _wished(self) -> int:
        """What is to follow this update."""
        now = time.perf_counter()
        if now - self._began >= self.wall_seconds:
            self.ended = f"the {TIME_LIMIT}"
        if now >= self._limit:
            self.ended = "other runs were faster"
        if self.ended:
            return _STOP
        since, done = self._updates.step - self._last, self._updates.step - self._start
        timed = self._monitor.first_counted + MIN_UNDISTURBED if self._monitor else 0  # by several steps
        is_due = (
            self._updates.count >= max(FIRST, timed)
            and since >= max(1, RESOLUTION * done)
            and now - self._validated >= self._validation_s
        )
        return _VALIDATE if is_due else 0

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._updates.end_batch(trainer.global_step) and self._updates.count == FIRST:
            self._validated = time.perf_counter()
            self._limit = self._validated + self.seconds - self._spent_s
        wish = RankSync.of(trainer).agreed(_TOPIC) or self._wish  # ranks agree at some batches of an update alone
        self._wish, wish = (wish, 0) if is_accumulating(trainer) else (0, wish)
        ends = trainer.is_last_batch and trainer.current_epoch + 1 == trainer.max_epochs
        if not self._is_validated and (ends or trainer.global_step == trainer.max_steps):
            wish = wish or _VALIDATE
        trainer.val_check_batch = 1 if wish else _NEVER  # Lightning reads it after this hook
        if wish == _STOP:
            trainer.should_stop = True

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validating = time.perf_counter()
        self._before, self._last = self._last, self._updates.step

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        self._is_validated, self._validated = True, time.perf_counter()
        self._validation_s = self._validated - self._validating
        self._limit += self._validation_s
        score = self._score(trainer)
        reached = math.isfinite(score) and (score >= self.value if self._rises else score <= self.value)
        reached = trainer.strategy.broadcast(reached)  # a module may log the metric of each rank's own share
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

    def _seconds(self, step: int) -> float | None:
        """The training time until a `global_step`; None where no step is known."""
        step_ms = self._monitor.summary.get("step_ms") if self._monitor else None
        return step * step_ms / 1e3 if step_ms else None

    def record_facts(self) -> dict[str, Any]:
        """What came of it: the updates and seconds until the last validation, and the seconds until the one before it."""
        facts: dict[str, Any] = {
            "metric": self.metric,
            "value": self.value,
            "reached": self.reached,
            "best": self._best,
            "steps": self._last,
            "seconds": self._seconds(self._last),
            "after_seconds": self._seconds(self._before),
        }
        facts |= {"ended": self.ended} if self.ended else {}
        return {"target": facts, "time_to_target_s": facts["seconds"] if self.reached else None}

    def summary_lines(self) -> list[str]:
        """A line of the run's last lines."""
        target, seconds = f"{self.metric} {declared(self.metric).exact(self.value)}", self._seconds(self._last)
        trained = f"{duration(seconds)} of training, " if seconds is not None else ""
        after = f"after {trained}{count(self._last, 'update')}"
        return [row("target", f"{target} {after}" if self.reached else f"{target} not reached {after}")]
