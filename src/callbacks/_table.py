"""UpdateTable: one row for each update of a fit. Curves, the summary, the step file and the end of a timed run are views of it."""

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
FIRST = 1  # it pays for work that is done once
WARMUP = 2
RECORDED = 4  # its operations were recorded, which makes it slower
INVALID = 8  # the clock has jumped in it
PARTIAL = 16  # it holds fewer samples than a whole batch
DISTURBED = 32  # it lies in a window in which others used the processor, or in none
NEVER_COUNTED = FIRST | WARMUP | RECORDED | INVALID

ROW = numpy.dtype(
    [
        ("step", "i8"),  # Lightning's `global_step` after the update
        ("parts_ms", "f4", (len(PARTS),)),
        ("excluded_ms", "f4"),  # in no part: mostly writing curves
        ("waits_ms", "f4"),  # for other ranks, within the parts; 0 where it is not measured
        ("samples", "f4"),
        ("timesteps", "f4"),
        ("batches", "f4"),  # more than one where gradients are accumulated
        ("flags", "u1"),
    ]
)
WORK = [column for column, part in enumerate(PARTS) if part not in (StepPart.DATA_WAIT, StepPart.TRANSFER)]
MIN_UNDISTURBED = 6  # the median of fewer has no interval, and then the disturbed steps count, too
_RECORDED_AT_MOST = LAST_RECORDED - FIRST_RECORDED + 1
_FACTS = ("samples", "timesteps", "batches", "recorded", "waits_ms")
_CAPACITY = 1024
Mask = NDArray[numpy.bool_]
Floats = NDArray[numpy.float64]


class UpdateTable:
    """An append-only table of dtype `ROW`, and the windows of time into which its rows fall.

    Args:
        warmup: updates that are never counted.
        windows: see Windows; a fit that has none yet is undivided.
        last_step: Lightning's `global_step` before the fit.
        parts: of a step that the clock can time; the columns of the others are 0.
    """

    def __init__(self, warmup: int, windows: Windows, last_step: int = 0, parts: Sequence[str] = PARTS):
        self.windows = windows
        self._warmup = warmup
        self._rows = numpy.empty(_CAPACITY, ROW)
        self._length = 0
        self.last_step = last_step
        self.parts = tuple(parts)
        self._open = numpy.zeros(len(TIMED) + len(_FACTS))  # batches of an update that has not ended

    def __len__(self) -> int:
        return self._length

    @property
    def rows(self) -> NDArray[Any]:
        """All rows so far, shape (N,); a view."""
        return self._rows[: self._length]

    def add(self, batches: Sequence[Batch], clock: HostClock) -> NDArray[Any]:
        """Add the updates whose last batch is among these. Returns their rows, a view of shape (N,)."""
        facts = [(b.samples, b.timesteps, 1, b.recorded, b.waits_ms(clock) if b.waits else 0.0) for b in batches]
        values = numpy.hstack([parts_ms(batches, clock), numpy.array(facts, float).reshape(-1, len(_FACTS))])
        steps = numpy.array([batch.global_step for batch in batches], int)
        last = numpy.flatnonzero(numpy.diff(steps, prepend=self.last_step))  # batches that ended with an update
        if not len(last):
            self._open += values.sum(0)
            return self.rows[self._length :]
        values[0] += self._open
        self.last_step, self._open = steps[last[-1]], values[last[-1] + 1 :].sum(0)
        first = numpy.concatenate([[0], last[:-1] + 1])
        return self._append(steps[last], numpy.add.reduceat(values[: last[-1] + 1], first))

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
        """The time of each step among the chosen ones, shape (N,)."""
        return self.rows["parts_ms"][where].sum(1, dtype=float)

    def total_s(self) -> float:
        """The time of all steps, in seconds, without those in which the clock has jumped."""
        return float(self.step_ms((self.rows["flags"] & INVALID) == 0).sum()) / 1e3

    def whole_batch(self) -> float:
        """The samples of a whole batch: the size with which most of the samples were trained; 0 without a row.

        If that is less than half of them, sizes vary by design: then it is the mean size of the updates of the median.
        """
        size = self._usual_size()
        return float(self.rows["samples"][self.in_median()].mean(dtype=float)) if size is None else size

    def whole_batch_ms(self) -> float:
        """The time of a whole batch: the median step, or the mean one where sizes vary by design, as the size is then."""
        step_ms = self.step_ms(self.in_median())
        return float(step_ms.mean() if self._usual_size() is None else numpy.median(step_ms))

    def batch_size(self) -> int:
        """The samples of a batch, of which an update may have several, or their mean where they vary; 0 where not known."""
        size, rows = self._usual_size(of_batches=True), self.rows[self.in_median()]
        return round(rows["samples"].sum(dtype=float) / rows["batches"].sum(dtype=float) if size is None else size)

    def varies(self, of_batches: bool) -> bool:
        """Whether no size of a batch (`of_batches`), or of an update, has half of the samples: sizes vary by design."""
        return self._usual_size(of_batches) is None

    def _usual_size(self, of_batches: bool = False) -> float | None:
        """The size of an update, or of its batches, with which at least half of the samples were trained; None where sizes
        vary, 0 without a row.
        """
        rows = self.rows[self.after_warmup()]
        samples = rows["samples"].astype(float)
        if not len(samples):
            return 0.0
        sizes, of_row = numpy.unique(samples / rows["batches"] if of_batches else samples, return_inverse=True)
        trained = numpy.bincount(of_row, samples)
        return float(sizes[trained.argmax()]) if 2 * trained.max() >= samples.sum() else None

    def after_warmup(self) -> Mask:
        """The updates that count for sums and means: all after the warm-up that were not recorded."""
        return (self.rows["flags"] & NEVER_COUNTED) == 0

    def flags(self) -> NDArray[numpy.uint8]:
        """The flags of all rows, shape (N,), with `PARTIAL` and `DISTURBED`."""
        flags, size = self.rows["flags"].copy(), self._usual_size()
        if size is not None:
            flags[self.rows["samples"] != numpy.float32(size)] |= PARTIAL
        flags[numpy.append(self.windows.disturbed(), True)[self._window_of_rows()]] |= DISTURBED
        return flags

    def whole_batches(self) -> Mask:
        """The counted updates of a whole batch."""
        return (self.flags() & (NEVER_COUNTED | PARTIAL)) == 0

    def undisturbed(self) -> Mask:
        """Of `whole_batches` those in windows that nobody disturbed."""
        return (self.flags() & (NEVER_COUNTED | PARTIAL | DISTURBED)) == 0

    def in_median(self) -> Mask:
        """The updates of which the median is taken: undisturbed ones, and all of a whole batch where these are too few."""
        undisturbed = self.undisturbed()
        return undisturbed if undisturbed.sum() >= MIN_UNDISTURBED else self.whole_batches()

    def _window_of_rows(self) -> NDArray[numpy.int64]:
        """The index of each row's window, shape (N,); -1 for a row in none."""
        return self.windows.of_updates(numpy.arange(len(self)))

    def window_facts(self, window: Window) -> dict[str, Any]:
        """Of an ended window: `steps` of a whole batch, their means `mean_s` and `samples`, the `wait_share` that waits for data, the
        `others_share` and whether it is `disturbed`.
        """
        rows, whole = slice(window.first, window.end), self.whole_batches()[window.first : window.end]
        step_ms = self.step_ms()[rows][whole]
        facts: dict[str, Any] = {"steps": len(step_ms), "disturbed": window.disturbed}
        if len(step_ms):
            facts["mean_s"] = float(step_ms.mean()) / 1e3  # a hiccup counts, however long the steps are
            facts["samples"] = float(self.rows["samples"][rows][whole].mean(dtype=float))
            waits_ms = self.rows["parts_ms"][rows, PARTS.index(StepPart.DATA_WAIT)][whole]
            facts["wait_share"] = float(waits_ms.sum() / max(step_ms.sum(), 1e-9))
        if not numpy.isnan(window.others_share):
            facts["others_share"] = window.others_share
        return facts

    def changed(self, work_ms: float, plain: int = 5) -> float:
        """The work of a batch ÷ that of the first plain ones after the recorded updates; 1 within their range, or without these.

        One long step does not count. What is recorded or traced later does not count, either.

        A recorded step is slower than it would be: if it was shorter than those after it, it did less.
        """
        flags, batches = self.rows["flags"], numpy.maximum(self.rows["batches"], 1)
        works_ms = self.rows["parts_ms"][:, WORK].sum(1, dtype=float) / batches
        of_median = batches[self.in_median()]
        work_ms /= float(numpy.median(of_median)) if len(of_median) else 1.0
        recorded = numpy.flatnonzero(flags & RECORDED)
        later = numpy.flatnonzero((flags & (RECORDED | INVALID)) == 0)
        later = later[later > recorded[0]] if len(recorded) else later[:0]
        if not len(later):
            return 1.0
        before = recorded[recorded < later[0]][:_RECORDED_AT_MOST]  # after these one may be held, and is long
        early = numpy.minimum(numpy.sort(works_ms[later[:plain]]), works_ms[before].max())
        low, high = float(early[0]), float(early[max(0, len(early) - 2)])
        return work_ms / min(max(work_ms, low), high) if high > 0 else 1.0

    def has_other_batches(self) -> bool:
        """Whether the updates of the median hold another number of batches than those that were recorded."""
        recorded = (self.rows["flags"] & RECORDED) > 0
        first, later = (self.rows["batches"][where] for where in (recorded, self.in_median()))
        return bool(len(first) and len(later) and first[:_RECORDED_AT_MOST].max() != later.max())

    def times(self) -> StepTimes | None:
        """For the run's folder: the steps of a whole batch in their windows; None without one.

        Where sizes vary by design each step is made that of one size, so that windows of other sizes compare.
        """
        of, windows = self._window_of_rows(), self.windows.all
        whole = numpy.flatnonzero(self.whole_batches() & (of >= 0))
        if not len(whole):
            return None
        factors = self._to_one_size(whole, of[whole]) / 1e3
        return StepTimes(
            step_s=(self.step_ms()[whole] * factors).astype(numpy.float32),
            window=numpy.searchsorted(of[whole], numpy.arange(len(windows))),
            pass_=numpy.array([window.pass_ for window in windows]),
            start_unix=numpy.array([window.start_unix for window in windows]),
            others_share=numpy.array([window.others_share for window in windows]),
            disturbed=self.windows.disturbed().astype(float),
        )

    def _to_one_size(self, rows: NDArray[numpy.int64], windows: NDArray[numpy.int64]) -> Floats:
        """The factors that make the steps of some rows, by their windows, those of the size that takes the median step, (N,)."""
        if self._usual_size() is not None:
            return numpy.ones(len(rows))
        sizes = numpy.bincount(windows, self.rows["samples"][rows]) / numpy.maximum(numpy.bincount(windows), 1)
        median_ms = float(numpy.median(self.step_ms(self.in_median())))
        return self.whole_batch() * median_ms / self.whole_batch_ms() / sizes[windows]
