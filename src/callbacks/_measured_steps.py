"""The measured steps of a run, one by one: which of them hold a whole batch, and which lie in undisturbed stretches."""

import math
from array import array
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from ..records.intervals import drifting_interval
from ..records.step_times import StepTimes, thinned
from ._stretches import OUTSIDE, Stretch, Stretches

MIN_CLEAN = 6  # undisturbed steps; the median of fewer has no interval, and then all steps are taken

_Indices = NDArray[numpy.int64]
_Floats = NDArray[numpy.float64]


class Known(NamedTuple):
    """What is known so far: ms of the whole steps (N,), of those in undisturbed stretches, and seconds of all steps."""

    step_ms: _Floats
    clean_ms: _Floats
    seconds: float


class MeasuredSteps:
    """Collects steps as they come. `stretches` is how the run was divided, if it was."""

    def __init__(self, stretches: Stretches | None = None):
        self._stretches = stretches
        self._step_ms, self._work_ms, self._samples = array("d"), array("d"), array("d")
        self._numbers = array("q")  # how many updates were before each; negative for the warm-up of a short run
        self._parts_ms = array("f")

    def __len__(self) -> int:
        return len(self._step_ms)

    def add(self, parts_ms: _Floats, work_ms: _Floats, samples: _Floats, numbers: _Indices) -> None:
        """Add N steps: all their parts (N, parts), the time without data, their samples, and their numbers."""
        self._step_ms.frombytes(parts_ms.sum(1).tobytes())
        self._work_ms.frombytes(work_ms.tobytes())
        self._samples.frombytes(samples.tobytes())
        self._numbers.frombytes(numbers.astype(numpy.int64).tobytes())
        self._parts_ms.frombytes(parts_ms.astype(numpy.float32).tobytes())

    @property
    def step_ms(self) -> _Floats:
        """Of each step, shape (N,)."""
        return numpy.array(self._step_ms)

    @property
    def work_ms(self) -> _Floats:
        """Of each step, without waiting for data and copying them, shape (N,)."""
        return numpy.array(self._work_ms)

    def whole(self) -> tuple[float, _Indices]:
        """The samples of a whole step, and the indices of the whole steps; at least one step was added.

        It is the size with which most of the samples were trained. If that is less than half of them, sizes vary by
        design: then it is the mean size, and all steps count.
        """
        samples = numpy.array(self._samples)
        sizes, counts = numpy.unique(samples, return_counts=True)
        held = max(zip((sizes * counts).tolist(), sizes.tolist(), strict=True))[1]
        if 2 * held * (samples == held).sum() < samples.sum():
            return float(samples.mean()), numpy.arange(len(samples))
        return held, numpy.flatnonzero(samples == held)

    def clean(self, steps: _Indices) -> _Indices:
        """Those in undisturbed stretches, of steps by their indices; none where the run was not divided."""
        if self._stretches is None or not self._stretches.all:
            return steps[:0]
        stretch = self._stretches.of_updates(numpy.array(self._numbers)[steps])
        return steps[(stretch >= 0) & ~self._stretches.disturbed()[stretch]]

    def counted(self) -> tuple[float, _Indices, bool]:
        """As `whole`, without the steps of disturbed stretches where enough others exist: what the median is of.

        The last value says whether these steps are known to be undisturbed.
        """
        held, steps = self.whole()
        clean = self.clean(steps)
        enough = len(clean) >= MIN_CLEAN
        return held, clean if enough else steps, enough

    def known(self) -> Known:
        """What is known so far."""
        whole = self.whole()[1] if len(self) else numpy.arange(0)
        return Known(self.step_ms[whole], self.step_ms[self.clean(whole)], sum(self._step_ms) / 1e3)

    def facts_of(self, stretch: Stretch) -> dict[str, Any]:
        """The whole steps of an ended stretch and what disturbed it; an unknown share is left out."""
        assert self._stretches is not None
        index = self._stretches.all.index(stretch)
        steps = self.whole()[1] if len(self) else numpy.arange(0)
        step_ms = self.step_ms[steps[self._stretches.of_updates(numpy.array(self._numbers)[steps]) == index]]
        shares = {key: getattr(stretch.noise, key) for key in ("others_share", "steal_share")}
        facts: dict[str, Any] = {key: share for key, share in shares.items() if not math.isnan(share)}
        if len(step_ms):
            facts["median_s"] = float(numpy.median(step_ms)) / 1e3
        return facts | {"steps": len(step_ms), "disturbed": bool(self._stretches.disturbed()[index])}

    def interval_of_turns(self, median_ms: float) -> tuple[float, float] | None:
        """The interval of the median step in ms, by the medians of the turns; None for a run that took fewer than two.

        Steps of a turn follow each other, and are alike. Turns are seconds apart, and each counts as one value.
        """
        stretches = self._stretches.all if self._stretches else []
        facts = [self.facts_of(each) for each in stretches if each.round != OUTSIDE and each.end is not None]
        medians = [one["median_s"] * 1e3 for one in facts if "median_s" in one and not one["disturbed"]]
        _, low, high = drifting_interval(medians)
        return (min(low, median_ms), max(high, median_ms)) if low > 0 else None

    def times(self) -> StepTimes | None:
        """For the run's folder: the whole steps in their stretches; None without a step.

        Of a run that was not divided, all are one stretch of which nothing else is known.
        """
        if not len(self):
            return None
        steps = self.whole()[1]
        if self._stretches is None or not self._stretches.all:
            stretches, disturbed, of = [Stretch(0, OUTSIDE, numpy.nan, 0.0)], numpy.zeros(1), numpy.zeros_like(steps)
        else:
            stretches, disturbed = self._stretches.all, self._stretches.disturbed()
            of = self._stretches.of_updates(numpy.array(self._numbers)[steps])
            steps, of = steps[of >= 0], of[of >= 0]
        parts, every = thinned(numpy.array(self._parts_ms).reshape(len(self), -1)[steps] / 1e3)
        return StepTimes(
            step_s=(self.step_ms[steps] / 1e3).astype(numpy.float32),
            stretch=numpy.searchsorted(of, numpy.arange(len(stretches))),
            round=numpy.array([stretch.round for stretch in stretches]),
            start_unix=numpy.array([stretch.start_unix for stretch in stretches]),
            others_share=numpy.array([stretch.noise.others_share for stretch in stretches]),
            steal_share=numpy.array([stretch.noise.steal_share for stretch in stretches]),
            involuntary_switches=numpy.array([stretch.noise.switches for stretch in stretches]),
            throttled=numpy.array([stretch.noise.throttled for stretch in stretches]),
            probe_s=numpy.array([stretch.probe_s for stretch in stretches]),
            disturbed=disturbed.astype(float),
            parts_s=parts,
            parts_every=every,
        )
