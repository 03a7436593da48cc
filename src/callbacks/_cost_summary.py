"""What the steps of a run cost: the metrics of each update, and their sums, means and median over the run."""

from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from ..records.intervals import median_interval
from ..records.rates import FIT_RATE, rate
from ..records.step_parts import PARTS, StepPart
from ._flops_meter import FlopsMeter
from ._measured_steps import MeasuredSteps
from ._step_writer import Table
from ._stopwatch import MEASURED, PREPARING, WRITING, Clock, Step, parts_ms
from ._stretches import Stretches

# A stall is a step that takes more than STALL_RATIO × the median and more than STALL_MS longer than it. The ratio lets
# pass what belongs to a model, such as sequences of different lengths. The 50 ms let pass what a scheduler or a garbage
# collector does to a short step: such hiccups are many, and the p99 shows them. A rule by standard deviations would
# raise its own threshold with every stall; one by the median does not.
STALL_RATIO, STALL_MS = 3.0, 50.0

_PLAIN = 5  # steps that later ones are compared with
# Updates are an array of shape (N, C), a row each: ms of each part, and what the update holds.
Updates = NDArray[numpy.float64]
COLUMNS = (*MEASURED, "samples", "timesteps", "batches", "watched")
_COLUMN = {name: column for column, name in enumerate(COLUMNS)}
_WORK = [_COLUMN[part] for part in PARTS if part not in (StepPart.DATA_WAIT, StepPart.TRANSFER)]


class UpdateBuilder:
    """Joins the batches of an update, which is one batch unless gradients are accumulated."""

    def __init__(self, last_step: int):
        self._last_step = last_step  # Lightning's `global_step` before the first batch
        self._open = numpy.zeros(len(COLUMNS))

    def add(self, batches: Sequence[Step], clock: Clock) -> tuple[NDArray[numpy.int64], Updates]:
        """Add batches. Returns the updates whose last batch is among them, and `global_step` after each, shape (N,)."""
        facts = numpy.array([(b.samples, b.timesteps, 1, b.watched) for b in batches], float).reshape(-1, 4)
        rows = numpy.hstack([parts_ms(batches, clock), facts])
        steps = numpy.array([batch.global_step for batch in batches], int)
        last = numpy.flatnonzero(numpy.diff(steps, prepend=self._last_step))  # batches that ended with an update
        if not len(last):
            self._open += rows.sum(0)
            return steps[:0], rows[:0]
        rows[0] += self._open
        self._last_step, self._open = steps[last[-1]], rows[last[-1] + 1 :].sum(0)
        first = numpy.concatenate([[0], last[:-1] + 1])
        return steps[last], numpy.add.reduceat(rows[: last[-1] + 1], first)


def step_metrics(steps: NDArray[numpy.int64], updates: Updates, world_size: int, flops: FlopsMeter) -> list[Table]:
    """The metrics of updates. Samples and time steps are those of all ranks, FLOP/s those of one."""
    times = updates[:, : len(PARTS)]
    step_ms = times.sum(1)
    metrics = {f"time/{part}_ms": times[:, column] for column, part in enumerate(PARTS)} | {"time/step_ms": step_ms}
    seconds = numpy.where(step_ms > 0, step_ms, numpy.nan) / 1e3  # a rate that does not exist is NaN up to here
    samples, timesteps = (
        numpy.where(n > 0, n, numpy.nan) for n in (_of(updates, "samples"), _of(updates, "timesteps"))
    )
    metrics["throughput/batches_per_sec"] = _of(updates, "batches") / seconds
    metrics["throughput/samples_per_sec"] = samples * world_size / seconds
    metrics["throughput/timesteps_per_sec"] = timesteps * world_size / seconds
    if flops.per_sample:
        metrics["throughput/flops_per_sec"] = flops.per_sample * samples / seconds
        if flops.peak:
            metrics["throughput/mfu"] = metrics["throughput/flops_per_sec"] / flops.peak
    return _tables(steps, metrics)


def _tables(steps: NDArray[numpy.int64], metrics: dict[str, NDArray]) -> list[Table]:
    """Tables without NaN: successive steps with the same metrics share one."""
    keys, values = numpy.array(list(metrics)), numpy.column_stack(list(metrics.values()))
    exists = ~numpy.isnan(values)
    borders = numpy.flatnonzero((exists[1:] != exists[:-1]).any(1)) + 1
    parts = zip(numpy.split(steps, borders), numpy.split(values, borders), numpy.split(exists, borders), strict=True)
    return [Table(keys[shown[0]].tolist(), part, of_part[:, shown[0]]) for part, of_part, shown in parts if len(part)]


def _of(updates: Updates, column: str) -> NDArray[numpy.float64]:
    return updates[:, _COLUMN[column]]


class CostSummary:
    """Adds up updates as they come, without the first `warmup` ones as far as there are more.

    The median is of the steps of undisturbed `stretches`, where there are enough. Sums and means are of all steps.
    """

    def __init__(self, warmup: int, stretches: Stretches | None = None):
        self.warmup = warmup
        self.steps = MeasuredSteps(stretches)
        self.updates = 0
        self._trained = 0.0  # samples of all updates, warm-up included
        self._kept = numpy.empty((0, len(COLUMNS)))  # the warm-up, for runs that are no longer than it
        self._watched = numpy.empty((0, len(COLUMNS)))
        self._sums = numpy.zeros(len(COLUMNS))
        self._batches: dict[float, float] = {}  # by the samples of a step

    def add(self, updates: Updates) -> NDArray[numpy.bool_]:
        """Add updates, in order. Returns from which of them a rate may be read: the others pay for other work, too."""
        numbers = numpy.arange(len(updates)) + self.updates
        broken = ~((updates >= 0) & numpy.isfinite(updates)).all(1)  # a clock that has jumped
        watched = (_of(updates, "watched") > 0) & ~broken
        warm = ~watched & ~broken & (numbers < self.warmup)
        rated = ~watched & ~broken & (numbers > 0)
        self.updates += len(updates)
        self._trained += float(_of(updates, "samples").sum())
        self._watched = numpy.concatenate([self._watched, updates[watched]])
        self._kept = numpy.concatenate([self._kept, updates[warm]])
        counted = ~watched & ~warm & ~broken
        self._count(updates[counted], numbers[counted])
        return rated

    def summary(self, world_size: int = 1, fit_seconds: float | None = None) -> dict[str, Any]:
        """The cost over the counted updates of this rank; empty if there is none.

        `batch_size` is that of a whole batch, and `step_ms_median`, `_p10`, `_p90` and `_p99` are of the steps that held
        one. `samples_per_sec` is the run's rate (see records/rates.py), and `samples_per_sec_mean` all samples over all
        of their time. `step_ms` and the parts are means, which add up. Samples/s and time steps/s are those of all ranks.

        Args:
            world_size: the number of ranks.
            fit_seconds: wall time of the whole fit without the time of compiling, for `samples_per_sec_fit`: every sample that was trained, those of
                the warm-up included, over it.
        """
        self._count_short_run()
        steps, sums = len(self.steps), dict(zip(COLUMNS, self._sums.tolist(), strict=True))
        seconds = float(self.steps.step_ms.sum()) / 1e3
        if not steps or not seconds > 0:
            return {}
        held, counted, undisturbed = self.steps.counted()
        batches = self._batches.get(held, sums["batches"] / steps)
        step_ms = self.steps.step_ms[counted]
        low, median, high, highest = (float(ms) for ms in numpy.quantile(step_ms, (0.1, 0.5, 0.9, 0.99)))
        if median <= 0:
            return {}
        result: dict[str, Any] = {
            "updates": steps,
            "samples": int(sums["samples"]),
            "seconds": seconds,
            "batch_size": round(held / batches),
            "batches_per_sec": rate(batches, median),
            "samples_per_sec": rate(held * world_size, median),
            "samples_per_sec_mean": sums["samples"] * world_size / seconds,
            "step_ms": 1e3 * seconds / steps,
            "step_ms_median": median,
            "step_ms_p10": low,
            "step_ms_p90": high,
            "step_ms_p99": highest,
            "parts_ms": {part: sums[part] / steps for part in PARTS},
            "work_ms_median": float(numpy.median(self.steps.work_ms[counted])),
            **self._stalls(median),
        }
        interval = self.steps.interval_of_turns(median) or median_interval(step_ms)
        if numpy.isfinite(interval).all():
            result["step_ms_interval"] = list(interval)
        if undisturbed:
            result["undisturbed_steps"] = len(counted)  # the median is of these alone
            result["undisturbed_share"] = float(step_ms.sum()) / 1e3 / seconds  # of the time of all steps
        if fit_seconds:
            result |= {"fit_seconds": fit_seconds, FIT_RATE: self._trained * world_size / fit_seconds}
        if sums[WRITING]:
            result["writing_ms"] = sums[WRITING] / steps
        if any(sums[hook] for hook in PREPARING):
            result["preparing_ms"] = {hook: sums[hook] / steps for hook in PREPARING if sums[hook]}
        if sums["timesteps"] and sums["samples"]:
            result["timesteps_per_sec"] = result["samples_per_sec"] * sums["timesteps"] / sums["samples"]
        return result

    def change(self, step_ms: float) -> float:
        """By which factor a step is longer than the longest, or shorter than the shortest, of those right after the watched
        ones; 1 between them, and where none was watched. One long step does not count.

        A watched step is slower than it would be: if it was shorter than those after it, it did less.
        """
        plain = numpy.concatenate([self._kept[1:, : len(PARTS)].sum(1), self.steps.step_ms[:_PLAIN]])[:_PLAIN]
        if not len(self._watched) or not len(plain):
            return 1.0
        plain = numpy.minimum(numpy.sort(plain), self._watched[:, : len(PARTS)].sum(1).max())
        low, high = plain[0], plain[max(0, len(plain) - 2)]
        return float(step_ms / min(max(step_ms, low), high))

    def _count_short_run(self) -> None:
        """Count a run that is no longer than the warm-up: all but the first update, which pays for one-time work."""
        if not len(self.steps):
            parts = (self._kept[1:], self._watched, self._kept)
            counted = next((part for part in parts if len(part)), self._kept)
            self._count(counted, numpy.full(len(counted), -1))
            self._kept = self._kept[:0]

    def _stalls(self, median: float) -> dict[str, float]:
        """How many steps were stalls, and the seconds that they took beyond the median."""
        step_ms = self.steps.step_ms
        stalled = step_ms[step_ms > max(STALL_RATIO * median, median + STALL_MS)]
        return {"stalls": len(stalled), "stall_seconds": float((stalled - median).sum()) / 1e3}

    def _count(self, updates: Updates, numbers: NDArray[numpy.int64]) -> None:
        self._sums += updates.sum(0)
        samples = _of(updates, "samples")
        self.steps.add(updates[:, : len(PARTS)], updates[:, _WORK].sum(1), samples, numbers)
        self._batches.update(zip(samples.tolist(), _of(updates, "batches").tolist(), strict=True))
