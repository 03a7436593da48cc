"""UpdateTable: one row for each update of a fit, from which curves, summary, step file and the end of a timed run derive."""

from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from ..records.step_parts import PARTS, StepPart
from ..records.step_times import StepTimes
from ._recording import FIRST_RECORDED, LAST_RECORDED
from ._timer import TIMED, Batch, HostClock, parts_ms
from ._windows import Window, Windows

# Flags of an update. The first four are set when its row is added; the other two depend on later rows.
FIRST = 1  # it includes one-time work
WARMUP = 2
RECORDED = 4  # its operations were recorded, which makes it slower
INVALID = 8  # the clock has jumped in it
PARTIAL = 16  # it holds another number of samples than a whole batch
DISTURBED = 32  # it lies in a window in which other programs used the processor, or in no window
NEVER_COUNTED = FIRST | WARMUP | RECORDED | INVALID

ROW = numpy.dtype(
    [
        ("step", "i8"),  # Lightning's `global_step` after the update
        ("parts_ms", "f4", (len(PARTS),)),
        ("excluded_ms", "f4"),  # pauses, which no part includes: mostly writing curves
        ("waits_ms", "f4"),  # waits for other ranks, within the parts; 0 where they are not measured
        ("samples", "f4"),
        ("timesteps", "f4"),
        ("batches", "f4"),  # more than one where gradients are accumulated
        ("flags", "u1"),
    ]
)
WORK = [column for column, part in enumerate(PARTS) if part not in (StepPart.DATA_WAIT, StepPart.TRANSFER)]
MIN_UNDISTURBED = 6  # with fewer undisturbed steps their median has no interval, and the disturbed steps count, too
_MAX_RECORDED = LAST_RECORDED - FIRST_RECORDED + 1
_EXTRAS = ("samples", "timesteps", "batches", "recorded", "waits_ms")
_INITIAL_CAPACITY = 1024
Mask = NDArray[numpy.bool_]
Floats = NDArray[numpy.float64]


class UpdateTable:
    """An append-only table of dtype `ROW`, and the windows of time into which its rows fall.

    Args:
        warmup: the number of warm-up updates, which are never counted.
        windows: of the fit; there may be none yet.
        last_step: Lightning's `global_step` before the fit.
        parts: the parts of a step that the clock can time; the columns of the others are 0.
    """

    def __init__(self, warmup: int, windows: Windows, last_step: int = 0, parts: Sequence[str] = PARTS):
        self.windows = windows
        self._warmup = warmup
        self._rows = numpy.empty(_INITIAL_CAPACITY, ROW)
        self._length = 0
        self.last_step = last_step
        self.parts = tuple(parts)
        self._unfinished = numpy.zeros(len(TIMED) + len(_EXTRAS))  # sums over the batches of an unfinished update

    def __len__(self) -> int:
        return self._length

    @property
    def rows(self) -> NDArray[Any]:
        """Return all rows so far, shape (N,); a view."""
        return self._rows[: self._length]

    def add(self, batches: Sequence[Batch], clock: HostClock) -> NDArray[Any]:
        """Add the updates whose last batch is among `batches`. Return their rows, a view of shape (N,)."""
        extras = [(b.samples, b.timesteps, 1, b.is_recorded, b.waits_ms(clock) if b.waits else 0.0) for b in batches]
        values = numpy.hstack([parts_ms(batches, clock), numpy.array(extras, float).reshape(-1, len(_EXTRAS))])
        steps = numpy.array([batch.global_step for batch in batches], int)
        last_batches = numpy.flatnonzero(numpy.diff(steps, prepend=self.last_step))  # batches that ended an update
        if not len(last_batches):
            self._unfinished += values.sum(0)
            return self.rows[self._length :]
        values[0] += self._unfinished
        end = last_batches[-1] + 1
        self.last_step, self._unfinished = steps[last_batches[-1]], values[end:].sum(0)
        first_batches = numpy.concatenate([[0], last_batches[:-1] + 1])
        return self._append(steps[last_batches], numpy.add.reduceat(values[:end], first_batches))

    def _append(self, steps: NDArray[numpy.int64], values: Floats) -> NDArray[Any]:
        start, self._length = self._length, self._length + len(steps)
        while len(self._rows) < self._length:
            self._rows = numpy.concatenate([self._rows, numpy.empty_like(self._rows)])
        new, numbers = self._rows[start : self._length], numpy.arange(start, self._length)
        timed = values[:, : len(TIMED)]
        new["step"] = steps
        new["parts_ms"], new["excluded_ms"] = timed[:, : len(PARTS)], timed[:, len(PARTS)]
        new["samples"], new["timesteps"], new["batches"], recorded, new["waits_ms"] = values[:, len(TIMED) :].T
        is_invalid = ~((values >= 0) & numpy.isfinite(values)).all(1)
        new["flags"] = (
            FIRST * (numbers == 0)
            | WARMUP * (numbers < self._warmup)
            | RECORDED * (recorded > 0)
            | INVALID * is_invalid
        )
        return new

    def step_ms(self, where: Mask | slice = slice(None)) -> Floats:
        """Return the time of each chosen step, shape (N,)."""
        return self.rows["parts_ms"][where].sum(1, dtype=float)

    def total_s(self) -> float:
        """Return the time of all steps in seconds, without those in which the clock has jumped."""
        return float(self.step_ms((self.rows["flags"] & INVALID) == 0).sum()) / 1e3

    def whole_batch_size(self) -> float:
        """Return the samples of a whole batch: the size of update with which most samples were trained; 0 without a row.

        If no size has half of the samples, sizes vary by design. Then return the mean size of the updates in the median.
        """
        size = self._usual_size()
        return float(self.rows["samples"][self.in_median()].mean(dtype=float)) if size is None else size

    def whole_batch_ms(self) -> float:
        """Return the time of a whole batch: the median step, or the mean step where sizes vary by design."""
        step_ms = self.step_ms(self.in_median())
        return float(step_ms.mean() if self._usual_size() is None else numpy.median(step_ms))

    def batch_size(self) -> int:
        """Return the samples of one batch of an update, or their mean where they vary; 0 where they are unknown."""
        size, rows = self._usual_size(of_batches=True), self.rows[self.in_median()]
        return round(rows["samples"].sum(dtype=float) / rows["batches"].sum(dtype=float) if size is None else size)

    def sizes_vary(self, of_batches: bool) -> bool:
        """Whether no size of an update (with `of_batches`, of a batch) has half of the samples: sizes vary by design."""
        return self._usual_size(of_batches) is None

    def _usual_size(self, of_batches: bool = False) -> float | None:
        """Return the size of update, or of batch, that has at least half of the samples; None if sizes vary, 0 without a row."""
        rows = self.rows[self.after_warmup()]
        samples = rows["samples"].astype(float)
        if not len(samples):
            return 0.0
        sizes, size_indices = numpy.unique(samples / rows["batches"] if of_batches else samples, return_inverse=True)
        trained = numpy.bincount(size_indices, samples)
        return float(sizes[trained.argmax()]) if 2 * trained.max() >= samples.sum() else None

    def after_warmup(self) -> Mask:
        """Return a mask of the updates for sums and means: those after the warm-up that were not recorded and are valid."""
        return (self.rows["flags"] & NEVER_COUNTED) == 0

    def flags(self) -> NDArray[numpy.uint8]:
        """Return the flags of all rows, shape (N,), with `PARTIAL` and `DISTURBED`."""
        flags, size = self.rows["flags"].copy(), self._usual_size()
        if size is not None:
            flags[self.rows["samples"] != numpy.float32(size)] |= PARTIAL
        flags[numpy.append(self.windows.disturbed(), True)[self._window_indices()]] |= DISTURBED
        return flags

    def whole_batches(self) -> Mask:
        """Return a mask of the counted updates of a whole batch."""
        return (self.flags() & (NEVER_COUNTED | PARTIAL)) == 0

    def undisturbed(self) -> Mask:
        """Return a mask of the `whole_batches` in undisturbed windows."""
        return (self.flags() & (NEVER_COUNTED | PARTIAL | DISTURBED)) == 0

    def in_median(self) -> Mask:
        """Return a mask of the updates for the median: `undisturbed`, or `whole_batches` where these are too few."""
        undisturbed = self.undisturbed()
        return undisturbed if undisturbed.sum() >= MIN_UNDISTURBED else self.whole_batches()

    def _window_indices(self) -> NDArray[numpy.int64]:
        """Return the index of each row's window, shape (N,); -1 for a row in no window."""
        return self.windows.window_indices(numpy.arange(len(self)))

    def summarize_window(self, window: Window) -> dict[str, Any]:
        """Return facts of an ended window: the number of its `steps` of a whole batch, their means `mean_s` and `samples`, the
        `wait_share` of their time that waits for data, and the window's `others_share` and `disturbed`.
        """
        rows, is_whole = slice(window.first, window.end), self.whole_batches()[window.first : window.end]
        step_ms = self.step_ms()[rows][is_whole]
        facts: dict[str, Any] = {"steps": len(step_ms), "disturbed": window.disturbed}
        if len(step_ms):
            facts["mean_s"] = float(step_ms.mean()) / 1e3  # a hiccup counts, however long the steps are
            facts["samples"] = float(self.rows["samples"][rows][is_whole].mean(dtype=float))
            waits_ms = self.rows["parts_ms"][rows, PARTS.index(StepPart.DATA_WAIT)][is_whole]
            facts["wait_share"] = float(waits_ms.sum() / max(step_ms.sum(), 1e-9))
        if not numpy.isnan(window.others_share):
            facts["others_share"] = window.others_share
        return facts

    def drift_since_recording(self, work_ms: float, num_early: int = 5) -> float:
        """Return the work of a batch ÷ that of the first `num_early` ones after the recorded updates; 1 within their range.

        `work_ms` is that of an update. Without recorded updates or later ones the ratio is 1. A single long step does not
        count, nor do updates that are recorded or traced later.
        Recording slows a step down, so a recorded step that was shorter than those after it did less work.
        """
        flags, batches = self.rows["flags"], numpy.maximum(self.rows["batches"], 1)
        batch_work_ms = self.rows["parts_ms"][:, WORK].sum(1, dtype=float) / batches
        median_batches = batches[self.in_median()]
        work_ms /= float(numpy.median(median_batches)) if len(median_batches) else 1.0
        recorded = numpy.flatnonzero(flags & RECORDED)
        later = numpy.flatnonzero((flags & (RECORDED | INVALID)) == 0)
        later = later[later > recorded[0]] if len(recorded) else later[:0]
        if not len(later):
            return 1.0
        recorded = recorded[recorded < later[0]][:_MAX_RECORDED]  # the update after these may be held, and is long
        early_ms = numpy.minimum(numpy.sort(batch_work_ms[later[:num_early]]), batch_work_ms[recorded].max())
        low, high = float(early_ms[0]), float(early_ms[max(0, len(early_ms) - 2)])
        return work_ms / min(max(work_ms, low), high) if high > 0 else 1.0

    def has_other_accumulation(self) -> bool:
        """Whether the updates in the median hold another number of batches than the recorded ones."""
        is_recorded = (self.rows["flags"] & RECORDED) > 0
        recorded, median = (self.rows["batches"][mask] for mask in (is_recorded, self.in_median()))
        return bool(len(recorded) and len(median) and recorded[:_MAX_RECORDED].max() != median.max())

    def step_times(self) -> StepTimes | None:
        """Return the times of the steps of a whole batch, by windows, for the run's folder; None without such a step.

        Where sizes vary by design each time is scaled to one size, so that windows of different sizes are comparable.
        """
        indices, windows = self._window_indices(), self.windows.all
        rows = numpy.flatnonzero(self.whole_batches() & (indices >= 0))
        if not len(rows):
            return None
        factors = self._equal_size_factors(rows, indices[rows]) / 1e3
        return StepTimes(
            step_s=(self.step_ms()[rows] * factors).astype(numpy.float32),
            window=numpy.searchsorted(indices[rows], numpy.arange(len(windows))),
            pass_=numpy.array([window.pass_ for window in windows]),
            start_unix=numpy.array([window.start_unix for window in windows]),
            others_share=numpy.array([window.others_share for window in windows]),
            disturbed=self.windows.disturbed().astype(float),
        )

    def _equal_size_factors(self, rows: NDArray[numpy.int64], windows: NDArray[numpy.int64]) -> Floats:
        """Return factors (N,) that scale the steps of `rows` (N,) in `windows` (N,) to the size that takes the median step."""
        if self._usual_size() is not None:
            return numpy.ones(len(rows))
        sizes = numpy.bincount(windows, self.rows["samples"][rows]) / numpy.maximum(numpy.bincount(windows), 1)
        median_ms = float(numpy.median(self.step_ms(self.in_median())))
        return self.whole_batch_size() * median_ms / self.whole_batch_ms() / sizes[windows]
