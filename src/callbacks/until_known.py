"""StopWhenKnown: ends a timed run once its median step is known precisely, or its time is up."""

import time
from typing import Annotated, Any

import numpy
from lightning import LightningModule, Trainer
from typing_extensions import override

from .._lightning import callback_of, expect_no_validation
from ..distributed.rank_sync import RankSync, SyncsRanks
from ..errors import UserError
from ..options.types import PositiveFloat, PositiveInt, Purpose
from ..records.formatting import percent
from ..records.intervals import TIME_LIMIT, median_interval
from ._table import MIN_UNDISTURBED, WARMUP, UpdateTable
from ._timer import pause
from .throughput import ThroughputMonitor

SLOW_STEP_S = 0.3  # of longer steps, fewer than `min_steps` are enough
LEAST_S = 1.0  # of undisturbed steps: a shorter time would miss what happens once a second
MOST_WAITED = 100  # updates' worth of batches: if Lightning has counted no update by then, it never will
_TOPIC = "known"


class StopWhenKnown(SyncsRanks):
    """Ends a run when its median step is known, or when its time is up. The reason is `ended` in the run's summary.

    The steps are those of a ThroughputMonitor, which stands before it among the callbacks. The median is known when the
    95 % interval of the undisturbed steps lies within `precision` of it. Warm-up, validation and waiting do not count as
    time. Rank 0 decides, and all ranks end after the same step. Where measuring has failed, or Lightning counts no
    update, the run ends after `seconds` by the clock. A sweep ends the runs that it visits in passes itself
    (sweep/passes.py); it reads neither `precision` nor `min_steps`.

    Args:
        precision: a fraction of the median.
        seconds: the time of measured steps after which the run ends; it has at least six measured steps. Where each step is
            left out, because something records or profiles it, the time is that of all steps after the warm-up. In a sweep the
            visits of all runs take `seconds` × the number of runs, of which at most six count.
        min_steps: the least number of undisturbed steps. If steps are longer than 0.3 s, `min_steps` × 0.3 s of them are enough.
        min_passes: the least number of passes in a sweep that visits its runs.

    Raises:
        UserError: when training starts without a ThroughputMonitor.
    """

    def __init__(
        self,
        precision: Annotated[PositiveFloat, Purpose.LENGTH] = 0.05,
        seconds: Annotated[PositiveFloat, Purpose.LENGTH] = 10.0,
        min_steps: Annotated[PositiveInt, Purpose.LENGTH] = 30,
        min_passes: Annotated[PositiveInt, Purpose.LENGTH] = 10,
    ):
        self.precision = precision
        self.seconds = seconds
        self.min_steps = min_steps
        self.min_passes = min_passes  # not read here: a sweep reads the configuration
        self._is_visited: bool | None = None  # whether a sweep visits the run; None before that is known

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        monitor = callback_of(trainer, ThroughputMonitor)
        if monitor is None:
            raise UserError("callbacks: StopWhenKnown needs a ThroughputMonitor, and there is none")
        expect_no_validation(trainer)
        self._monitor = monitor
        self._end_reason: str | None = None
        self._num_windows_seen, self._start = 0, time.perf_counter()
        self._batches, self._first_step = 0, trainer.global_step
        RankSync.of(trainer).contribute(_TOPIC, lambda: int(self._end_reason is not None and trainer.is_global_zero))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        if self._end_reason is None and trainer.is_global_zero:
            self._end_reason = self._find_end_reason(trainer)
            if self._end_reason:
                self._monitor.set_end_reason(self._end_reason)
        if RankSync.of(trainer).agreed(_TOPIC):
            trainer.should_stop = True

    def unread_options(self) -> dict[str, str]:
        """Return the options that had no effect, and why."""
        if self._is_visited:
            return dict.fromkeys(("precision", "min_steps"), "the sweep ends runs that it visits in passes")
        return {} if self._is_visited is None else {"min_passes": "no sweep visits the run in passes"}

    def _find_end_reason(self, trainer: Trainer) -> str | None:
        monitor = self._monitor
        has_waited = self._batches > MOST_WAITED * trainer.accumulate_grad_batches
        if not monitor.is_measuring or (has_waited and trainer.global_step == self._first_step):
            return TIME_LIMIT if time.perf_counter() - self._start >= self.seconds else None
        windows = monitor.table.windows
        self._is_visited = windows.in_passes
        if self._is_visited or len(windows.all) == self._num_windows_seen:
            return None
        self._num_windows_seen = len(windows.all)
        with pause(trainer):
            return reason_to_end(monitor.table, self.precision, self.seconds, self.min_steps)


def reason_to_end(table: UpdateTable, precision: float, seconds: float, min_steps: int) -> str | None:
    """Return why a run with these measured steps ends, `known to ± 5 %` or `time limit`; None if it goes on."""
    undisturbed_ms = table.step_ms(table.undisturbed())
    measured_s = float(undisturbed_ms.sum()) / 1e3
    if measured_s >= LEAST_S and (len(undisturbed_ms) >= min_steps or measured_s >= SLOW_STEP_S * min_steps):
        low, high = median_interval(undisturbed_ms)
        median = float(numpy.median(undisturbed_ms))
        if (1 - precision) * median <= low and high <= (1 + precision) * median:
            return f"known to ± {percent(precision, digits=0 if precision >= 0.01 else 1)}"
    timed, counted = table.after_warmup(), table.whole_batches()
    if not timed.any():  # something records or profiles every step
        timed = counted = (table.rows["flags"] & WARMUP) == 0
    is_time_up = table.step_ms(timed).sum() / 1e3 >= seconds
    return TIME_LIMIT if is_time_up and counted.sum() >= MIN_UNDISTURBED else None
