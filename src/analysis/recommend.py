"""Which batch size to take, and whether a larger one may be worth trying.

Measurements decide, as far as they are known: a size counts as fast only where its rate is within 5 % of the fastest with
90 % confidence. A fit only extrapolates beyond the measurements, and the text says where it does.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ..records.formatting import duration, percent, significant
from ..records.metrics import FRACTION, Metric, metric
from ..records.rates import is_near
from .curves import Curve, read_curve
from .fit import Fit, fit_step_time, leave_one_out
from .groups import Group
from .noise import Rates, Ratio
from .windows import windows_of

CONFIDENCE = 0.9  # with which the size that is taken is within 5 % of the fastest
_TWO_SIDED = 2 * CONFIDENCE - 1  # the lower end of such an interval has that confidence
MAX_EXTRAPOLATION = 8  # times the largest size that ran
TRUSTED = 0.2  # a fit with a larger error on left-out sizes predicts nothing
_WORSE_FRACTION, _WORSE_RELATIVE = 0.005, 0.1  # smaller differences are as large as those between seeds
_LATER = 1.2  # times as long


@dataclass(frozen=True)
class Analysis:
    """A group, the fit of its step times, and how far the fit can be trusted."""

    group: Group

    @cached_property
    def fit(self) -> Fit | None:
        """Of the median batch times; None with fewer than three sizes."""
        return fit_step_time(*self._points, serial=self.group.device == "cpu")

    @cached_property
    def error(self) -> float | None:
        """Median relative error on sizes that were left out; None with fewer than four."""
        return leave_one_out(*self._points, serial=self.group.device == "cpu")

    @property
    def trusted(self) -> Fit | None:
        """The fit, unless it is known to be far off."""
        return self.fit if self.error is None or self.error <= TRUSTED else None

    @property
    def _points(self) -> tuple[list[float], list[float]]:
        found = self.group.medians("batch_ms")
        return list(found), list(found.values())


@dataclass(frozen=True)
class Recommendation:
    """For one group. Rate and memory are those at `batch_size`; memory is None where unknown."""

    group: str  # its label
    batch_size: int  # the smallest size within 5 % of the fastest, with 90 % confidence
    samples_per_sec: float
    share_of_best: float  # of the rate of the fastest size
    fastest: int  # the size with the highest rate
    equally_fast: list[int]  # the sizes, this one included, of which no difference to the fastest is shown; or none
    memory_peak_gib: float | None
    memory_total_gib: float | None
    least_memory: bool  # of the sizes that are equally fast
    costs: str  # what the size costs in quality; empty if nothing is known to be worse
    try_up_to: int | None  # a larger size that may still gain, if the sweep ended before the knee
    remarks: list[str]  # what else to know, one line each

    @property
    def headline(self) -> str:
        """The recommendation in one line."""
        rate, memory = f"{significant(self.samples_per_sec)} samples/s", self._memory
        if self.equally_fast:
            line = f"{_span(self.equally_fast)} are equally fast here; data.batch_size={self.batch_size} is taken, "
            line += "the least memory" if self.least_memory else "the smallest"
            line += f": {', '.join(filter(None, (rate, memory)))}"
        else:
            line = f"data.batch_size={self.batch_size} reaches {rate}"
            if self.batch_size == self.fastest:
                line += ", the most of all sizes that ran"
            else:  # rounded down: 94.9 % would seem to be within the 5 %
                line += f", {min(100, math.floor(100 * self.share_of_best))} % of the most (at {self.fastest:,})"
            line += f"; it takes {memory}" if memory else ""
        return f"{self.group}: {line}" + (f"; but {self.costs}." if self.costs else ".")

    @property
    def _memory(self) -> str:
        if self.memory_peak_gib is None:
            return ""
        total = f" of {significant(self.memory_total_gib)}" if self.memory_total_gib else ""
        return f"{significant(self.memory_peak_gib)}{total} GiB"


def recommend(analysis: Analysis, metrics: Iterable[str] = ()) -> Recommendation | None:
    """The smallest size that ran within 5 % of the fastest; None where fewer than two sizes were measured.

    The rate of each size is compared with that of the fastest: within rounds where the sizes took turns, else by their
    intervals. Records without intervals are compared by their rates alone.

    `metrics` are those of the test or validation, the most telling one first.
    """
    group, rates = analysis.group, analysis.group.rates
    if len(rates) < 2:
        return None
    fastest = max(rates, key=lambda size: rates[size])
    shares = {size: _share(group, size, fastest) for size in rates}
    near = [size for size, share in shares.items() if is_near(share.low, 1)]
    size = min(near)
    alike = sorted(other for other in near if other == fastest or _is_alike(shares[other]))
    equally_fast = [other for other in alike if other >= size] if size in alike and len(alike) > 1 else []
    try_up_to, further = _further(analysis, fastest)
    totals = [run.memory_total_gib for run in group.sizes[size] if run.memory_total_gib]
    memory = group.medians("memory_peak_gib")
    remarks = [further, _falls(rates, fastest), _unsure(shares, size), _later(group, size)]
    return Recommendation(
        group=group.label,
        batch_size=size,
        samples_per_sec=rates[size],
        share_of_best=shares[size].value,
        fastest=fastest,
        equally_fast=equally_fast,
        memory_peak_gib=memory.get(size),
        memory_total_gib=min(totals, default=None),
        least_memory=all(size in memory and memory[size] <= memory.get(other, 0) for other in equally_fast),
        costs=_worse(group, size, metrics),
        try_up_to=try_up_to,
        remarks=[remark for remark in remarks if remark],
    )


def _share(group: Group, size: int, fastest: int) -> Ratio:
    """The rate of a size over that of the fastest; without a spread where the records know none."""
    value = group.rates[size] / group.rates[fastest]
    runs, best = group.sizes[size], group.sizes[fastest]
    windows = windows_of({size: runs, fastest: best})
    if size == fastest or len(set(windows["setting"])) < 2:
        return Ratio(value, value, value)
    found = Rates(windows).ratio(size, fastest, _TWO_SIDED)
    return found if found.low else Ratio(value, value, value)


def _is_alike(share: Ratio) -> bool:
    """Whether no difference to the fastest is shown, although a spread is known."""
    return share.low < share.high and not share.differs


def _unsure(shares: dict[int, Ratio], size: int) -> str:
    """A remark on smaller sizes that may be as fast, but are not known well enough."""
    found = [s for s, share in shares.items() if s < size and share.low < share.high and is_near(share.value, 1)]
    if not found:
        return ""
    one = min(found)
    reach = f"{percent(shares[one].low)} to {percent(shares[one].high)}"
    return f"{one:,} may be as fast: its rate is {reach} of the most, which is not known well enough to take it."


def _span(sizes: list[int]) -> str:
    return f"{sizes[0]:,} and {sizes[1]:,}" if len(sizes) == 2 else f"{sizes[0]:,} to {sizes[-1]:,}"


def _further(analysis: Analysis, fastest: int) -> tuple[int | None, str]:
    """A larger size worth trying, and a remark about it; neither where the rate no longer rises."""
    group, largest = analysis.group, max(analysis.group.rates)
    limit, samples = group.out_of_memory, group.largest_possible
    too_large = f"{limit:,} ran out of memory" if limit else ""
    if fastest != largest or not _rises(analysis, largest):
        return None, too_large and f"{too_large}."
    if samples is not None and samples <= largest:
        return None, f"still rising at {largest:,}, which is the whole training set."
    target, why = _target(analysis, largest)
    if limit and limit <= target:
        if limit <= 2 * largest:
            return None, f"still rising at {largest:,}, but {too_large}."
        target, why = limit // 2, too_large
    if samples is not None and samples < target:
        target, why = samples, "the whole training set"
    return target, f"still rising at {largest:,}: try up to about {target:,} ({why})."


def _rises(analysis: Analysis, largest: int) -> bool:
    """Whether a size larger than the largest may be faster: by the fit, or by the last two sizes."""
    rates, fit = analysis.group.rates, analysis.trusted
    if fit is None:
        return not is_near(rates[max(size for size in rates if size != largest)], rates[largest])
    return not is_near(fit.samples_per_sec(largest), fit.asymptote)


def _target(analysis: Analysis, largest: int) -> tuple[int, str]:
    """How far to go by the fit, and why no further. Without a fit it is one doubling."""
    fit, error = analysis.trusted, analysis.error
    if fit is None:
        return 2 * largest, "the sizes that ran do not show how far"
    why = "by the fit" if error is None else f"by the fit, with an error of {percent(error)} on sizes left out"
    cap = MAX_EXTRAPOLATION * largest
    if fit.knee is not None and fit.knee < cap:
        return min(cap, 2 ** math.ceil(math.log2(fit.knee))), why
    return cap, f"{why}; it is not trusted beyond {MAX_EXTRAPOLATION} times the largest size"


def _falls(rates: dict[int, float], fastest: int) -> str:
    largest = max(rates)
    if is_near(rates[largest], rates[fastest]):
        return ""
    return f"larger is not faster: {largest:,} reaches {percent(rates[largest] / rates[fastest])} of {fastest:,}."


def _worse(group: Group, size: int, metrics: Iterable[str]) -> str:
    """What the size costs in quality, if another size that saw as many samples became clearly better."""
    alike = same_samples(group, size)
    for declared in map(metric, metrics):
        reached = {s: value for s, value in group.medians(declared.key).items() if s in alike}
        if declared.higher_is_better is None or size not in reached or len(reached) < 2:
            continue
        best = (max if declared.higher_is_better else min)(reached, key=lambda s, of=reached: of[s])
        here, there = reached[size], reached[best]
        if not _is_clearly_worse(declared, here, there):
            return ""
        slower = ratio(group.rates[best], group.rates[size])
        return (
            f"it costs {'accuracy' if declared.higher_is_better else 'quality'}: {declared.key} "
            f"{declared.text(here)} where {best:,}, {slower} per sample, reaches {declared.text(there)}"
        )
    return ""


def _is_clearly_worse(declared: Metric, here: float, there: float) -> bool:
    gap = there - here if declared.higher_is_better else here - there
    if declared.unit == FRACTION:
        return gap > _WORSE_FRACTION
    return gap > _WORSE_RELATIVE * abs(there) > 0


def same_samples(group: Group, size: int) -> set[int]:
    """The sizes whose runs saw as many samples as those of `size`: the metrics of others cannot be compared."""
    seen = group.medians("samples_seen")
    return {s for s in group.sizes if s == size or abs(seen.get(s, 0) - seen.get(size, 0)) <= 0.1 * seen.get(size, 0)}


def _later(group: Group, size: int) -> str:
    """What the size costs in time, if another size reached the same validation metric sooner."""
    curves = {s: [c for c in map(read_curve, runs) if c] for s, runs in group.sizes.items()}
    here = curves.get(size)
    if not here:
        return ""
    declared = metric(here[0].metric)
    target = statistics.median(curve.best for curve in here)
    times = {s: _seconds_to([c for c in found if c.metric == declared.key], target) for s, found in curves.items()}
    reached = {s: seconds for s, seconds in times.items() if seconds}
    best = min(reached, key=lambda s: reached[s], default=size)
    if size not in reached or best == size or reached[size] < _LATER * reached[best]:
        return ""
    return (
        f"{best:,} reaches {declared.key} {declared.text(target)} after {duration(reached[best])} of training, "
        f"{size:,} after {duration(reached[size])}."
    )


def _seconds_to(curves: list[Curve], target: float) -> float | None:
    """The median over repeated runs; None where half of them or more never got there."""
    times = sorted(math.inf if (s := curve.seconds_to(target)) is None else s for curve in curves)
    middle = statistics.median_high(times) if times else math.inf
    return middle if math.isfinite(middle) else None


def ratio(rate: float, other: float) -> str:
    """How a rate compares with another: `1.88× faster`."""
    return f"{significant(max(rate, other) / min(rate, other))}× {'faster' if rate >= other else 'slower'}"
