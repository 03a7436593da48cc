"""Which batch size to take, whether a larger one may be worth trying, and from which on another device is faster.

What was measured decides; a fit only says what lies beyond it, and is told apart.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from .curves import Curve, higher_is_better, read_curve
from .fit import NEAR, Fit, fit_step_time, leave_one_out
from .runs import BATCH_SIZE, SEED, Group, Run, SweepResults, label
from .table import percent, short, shown_metrics

MAX_EXTRAPOLATION = 8  # times the largest size that ran
TRUSTED = 0.2  # a fit that misses left-out sizes by more predicts nothing
_WORSE_ACCURACY = 0.005  # below that, seeds differ as much
_WORSE_LOSS = 1.1
_LATER = 1.2


@dataclass(frozen=True)
class Analysis:
    """A group's fit and what it is worth."""

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
        found = self.group.medians(lambda run: run.batch_ms)
        return list(found), list(found.values())


@dataclass(frozen=True)
class Recommendation:
    """For one group.

    Attributes:
        group: its label.
        batch_size: the smallest that ran within 5 % of the fastest.
        samples_per_sec: there.
        share_of_best: of the fastest size's rate.
        fastest: the size with the highest rate.
        memory_peak_gib, memory_total_gib: at `batch_size`, where known.
        try_up_to: a larger size that may still gain, if the sweep ended before the knee.
        remarks: one line each: what else to know before taking it.
    """

    group: str
    batch_size: int
    samples_per_sec: float
    share_of_best: float
    fastest: int
    memory_peak_gib: float | None
    memory_total_gib: float | None
    try_up_to: int | None
    remarks: list[str]

    @property
    def headline(self) -> str:
        """The recommendation in one line."""
        line = f"{self.group}: data.batch_size={self.batch_size} reaches {short(self.samples_per_sec)} samples/s"
        if self.batch_size == self.fastest:
            line += ", the most of all sizes that ran"
        else:
            line += f", {math.floor(100 * self.share_of_best)} % of the most (at {self.fastest:,})"
        if self.memory_peak_gib is not None:
            total = f" of {self.memory_total_gib:.3g}" if self.memory_total_gib else ""
            line += f"; it takes {self.memory_peak_gib:.2g}{total} GiB"
        return line + "."


def recommend(analysis: Analysis, metrics: Iterable[str] = ()) -> Recommendation | None:
    """The smallest size that ran within 5 % of the fastest; None where fewer than two sizes were measured.

    Args:
        analysis: of a group.
        metrics: test or validation metrics to compare, the most telling one first.
    """
    group, rates = analysis.group, analysis.group.rates
    if len(rates) < 2:
        return None
    fastest = max(rates, key=lambda size: rates[size])
    size = min(size for size, rate in rates.items() if rate >= NEAR * rates[fastest])
    try_up_to, further = _further(analysis, fastest)
    peaks = group.medians(lambda run: run.memory_peak_gib)
    totals = [run.memory_total_gib for run in group.sizes[size] if run.memory_total_gib]
    remarks = [further, _falls(rates, fastest), _worse(group, size, metrics), _later(group, size)]
    return Recommendation(
        group=group.label,
        batch_size=size,
        samples_per_sec=rates[size],
        share_of_best=rates[size] / rates[fastest],
        fastest=fastest,
        memory_peak_gib=peaks.get(size),
        memory_total_gib=min(totals, default=None),
        try_up_to=try_up_to,
        remarks=[remark for remark in remarks if remark],
    )


def _further(analysis: Analysis, fastest: int) -> tuple[int | None, str]:
    """A larger size worth trying, and the line that says so; nothing where the rate no longer rises."""
    rates = analysis.group.rates
    largest = max(rates)
    limit = analysis.group.out_of_memory
    too_large = f"{limit:,} ran out of memory" if limit else ""
    if fastest != largest:
        return None, too_large and f"{too_large}."
    fit = analysis.trusted
    if fit is None:
        second = max(size for size in rates if size != largest)
        if rates[second] >= NEAR * rates[largest]:
            return None, too_large and f"{too_large}."
        knee, why = float("inf"), "the sizes that ran do not tell how far"
    elif fit.samples_per_sec(largest) >= NEAR * fit.asymptote:
        return None, too_large and f"{too_large}."
    else:
        knee = fit.knee or float("inf")
        error = f", which is {100 * analysis.error:.0f} % off on sizes left out" if analysis.error is not None else ""
        why = f"by the fit{error}"
    samples = analysis.group.largest_possible
    if samples is not None and samples <= largest:
        return None, f"still rising at {largest:,}, which is the whole training set."
    cap = MAX_EXTRAPOLATION * largest
    if fit is None:  # no telling how far: one doubling, then look again
        target = 2 * largest
    elif knee < cap:
        target = min(cap, 2 ** math.ceil(math.log2(knee)))
    else:
        target, why = cap, f"{why}; beyond {MAX_EXTRAPOLATION} times what ran it is not trusted"
    if limit and limit <= target:
        if limit <= 2 * largest:
            return None, f"still rising at {largest:,}, but {too_large}."
        target, why = limit // 2, too_large
    if samples is not None and samples < target:
        target, why = samples, "the whole training set"
    return target, f"still rising at {largest:,}: try up to about {target:,} ({why})."


def _falls(rates: dict[int, float], fastest: int) -> str:
    largest = max(rates)
    if rates[largest] >= NEAR * rates[fastest]:
        return ""
    return f"larger is not faster: {largest:,} reaches {100 * rates[largest] / rates[fastest]:.0f} % of {fastest:,}."


def _worse(group: Group, size: int, metrics: Iterable[str]) -> str:
    """What the size costs in quality, if another that saw as many samples became clearly better."""
    alike = same_samples(group, size)
    for metric in metrics:
        reached = group.medians(lambda run, metric=metric: run.metrics.get(metric))
        reached = {s: value for s, value in reached.items() if s in alike}
        if size not in reached or len(reached) < 2:
            continue
        high = higher_is_better(metric)
        best = (max if high else min)(reached, key=lambda s: reached[s])
        here, there = reached[size], reached[best]
        if (there - here > _WORSE_ACCURACY) if high else (here > _WORSE_LOSS * there > 0):
            speed = _ratio(group.rates[size], group.rates[best])
            return (
                f"{size:,} is {speed} per sample but reaches {metric} {percent(metric, here)} "
                f"where {best:,} reaches {percent(metric, there)}."
            )
        return ""
    return ""


def same_samples(group: Group, size: int) -> set[int]:
    """The sizes whose runs were trained on as many samples as those of `size`: only their metrics can be compared."""
    seen = group.medians(lambda run: run.samples_seen)
    return {s for s in group.sizes if s == size or abs(seen.get(s, 0) - seen.get(size, 0)) <= 0.1 * seen.get(size, 0)}


def _later(group: Group, size: int) -> str:
    """What the size costs in time, if another got sooner to what it reached."""
    curves = {s: [c for c in map(read_curve, runs) if c] for s, runs in group.sizes.items()}
    here = curves.get(size)
    if not here:
        return ""
    metric = here[0].metric
    target = statistics.median(curve.best for curve in here)
    times = {s: _seconds_to([c for c in found if c.metric == metric], target) for s, found in curves.items()}
    reached = {s: seconds for s, seconds in times.items() if seconds}
    best = min(reached, key=lambda s: reached[s], default=size)
    if size not in reached or best == size or reached[size] < _LATER * reached[best]:
        return ""
    return (
        f"{best:,} gets to {metric} {percent(metric, target)} after {reached[best]:.3g} s of training, "
        f"{size:,} after {reached[size]:.3g} s."
    )


def _seconds_to(curves: list[Curve], target: float) -> float | None:
    """The median over repeated runs; None where half of them or more never got there."""
    times = sorted(math.inf if (s := curve.seconds_to(target)) is None else s for curve in curves)
    middle = statistics.median_high(times) if times else math.inf
    return middle if math.isfinite(middle) else None


def _ratio(rate: float, other: float) -> str:
    factor = max(rate, other) / min(rate, other)
    return f"{factor:{'.0f' if factor >= 10 else '.1f'}}× {'faster' if rate >= other else 'slower'}"


# --- one device or another --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Crossover:
    """From which batch size on one device is faster than another.

    Attributes:
        base: the model, and what else the two groups share.
        small, large: the devices, faster at small and at large sizes.
        kind: `measured`, `extrapolated` (by fits, beyond what ran), `always` (no change was seen, `large` wins), or
            `unclear` (which is faster changes to and fro).
        between: the two sizes that ran on both and bracket the change, or the sizes that ran.
        near: where it is in between, or beyond, by the rates or the fits.
        ratio: of the faster device's rate at the size where it is furthest ahead.
    """

    base: str
    small: str
    large: str
    kind: Literal["measured", "extrapolated", "always", "unclear"]
    between: tuple[int, int]
    near: float | None
    ratio: float

    @property
    def headline(self) -> str:
        """The answer in one line."""
        low, high = (f"{size:,}" for size in self.between)
        up_to = f", up to {self.ratio:.1f}×" if self.ratio >= 1.05 else ""
        if self.kind == "measured":
            return (
                f"{self.base}: {self.large} is faster than {self.small} from a batch size between {low} and {high} on"
                f" (near {_round(self.near)}){up_to}."
            )
        if self.kind == "unclear":
            return f"{self.base}: {self.small} and {self.large} take turns in being faster between {low} and {high}."
        ran = f"at every size that ran on both ({low} to {high})" if low != high else f"at the one size on both ({low})"
        if self.kind == "always":
            return f"{self.base}: {self.large} is always faster than {self.small}, {ran}{up_to}; {self.small} never."
        here, when = (self.small, "above") if (self.near or 0) > self.between[1] else (self.large, "below")
        other = self.large if here == self.small else self.small
        return (
            f"{self.base}: {here} is faster than {other} {ran}{up_to}; extrapolated, not measured: "
            f"{other} would be {when} about {_round(self.near)}."
        )


def crossovers(analyses: Iterable[Analysis]) -> list[Crossover]:
    """For every model that ran on several devices, each pair of them that has a size in common."""
    by_base: dict[str, list[Analysis]] = {}
    for analysis in analyses:
        if analysis.group.device and analysis.group.rates:
            by_base.setdefault(analysis.group.base, []).append(analysis)
    found = []
    for base, members in by_base.items():
        ordered = sorted(members, key=lambda a: a.group.device != "cpu")
        for first, second in itertools.combinations(ordered, 2):
            if len({first.group.device, second.group.device}) > 1:
                found.append(_crossover(base, first, second))
    return [crossover for crossover in found if crossover]


def _crossover(base: str, first: Analysis, second: Analysis) -> Crossover | None:
    one, two = first.group.rates, second.group.rates
    sizes = sorted(set(one) & set(two))
    if not sizes:
        return None
    ahead = [math.log(two[size] / one[size]) for size in sizes]  # of the second; above 0 it is faster
    furthest = math.exp(max(map(abs, ahead)))
    changes = [i for i in range(len(sizes) - 1) if (ahead[i] > 0) != (ahead[i + 1] > 0)]
    names = (first.group.device, second.group.device)
    if len(changes) % 2:
        small, large = names if ahead[-1] > 0 else names[::-1]
        low, high = changes[0], changes[-1] + 1
        middle = changes[len(changes) // 2]
        share = ahead[middle] / (ahead[middle] - ahead[middle + 1])
        near = sizes[middle] * (sizes[middle + 1] / sizes[middle]) ** share
        lead = math.exp(abs(ahead[-1]))
        return Crossover(base, small, large, "measured", (sizes[low], sizes[high]), near, lead)
    if changes:  # it ends as it began
        return Crossover(base, *names, "unclear", (sizes[changes[0]], sizes[changes[-1] + 1]), None, furthest)
    winner_is_second = ahead[0] > 0
    loser, winner = names if winner_is_second else names[::-1]
    near = _beyond(first.trusted, second.trusted, winner_is_second, sizes)
    if near is None:
        return Crossover(base, loser, winner, "always", (sizes[0], sizes[-1]), None, furthest)
    small, large = (winner, loser) if near > sizes[-1] else (loser, winner)
    return Crossover(base, small, large, "extrapolated", (sizes[0], sizes[-1]), near, furthest)


def _beyond(one: Fit | None, two: Fit | None, two_leads: bool, sizes: list[int]) -> float | None:
    """Where by the fits the other device takes the lead, up to 8 times beyond the sizes that ran; None if nowhere."""
    if one is None or two is None:
        return None
    for edge, step in ((sizes[-1], 1.02), (sizes[0], 1 / 1.02)):
        size = float(edge)
        if (two.step_ms(size) < one.step_ms(size)) != two_leads:
            continue  # the fits contradict what was measured there
        while size * step >= 1 and edge / MAX_EXTRAPOLATION <= size * step <= edge * MAX_EXTRAPOLATION:
            size *= step
            if (two.step_ms(size) < one.step_ms(size)) != two_leads:
                return size
    return None


def _round(size: float | None) -> str:
    return "?" if size is None else f"{float(f'{size:.2g}'):,.0f}"


# --- sweeps over something else ---------------------------------------------------------------------------------------


def repeats(sweep: SweepResults) -> list[str]:
    """One line on every group whose runs repeat one batch size: the median of what they measured, and its spread."""
    lines = []
    for group in sweep.groups:
        runs = [run for run in group.runs if run.samples_per_sec or run.metrics]
        sizes = {run.batch_size for run in runs}
        if len(runs) < 2 or len(sizes) > 1:
            continue
        facts = [_median_of([run.samples_per_sec for run in runs if run.samples_per_sec], short, " samples/s")]
        for metric in shown_metrics(sweep):
            values = [run.metrics[metric] for run in runs if metric in run.metrics]
            facts.append(_median_of(values, lambda value, metric=metric: percent(metric, value), name=f"{metric} "))
        at = "" if None in sizes else f" at batch size {max(sizes):,}"
        known = "; ".join(filter(None, facts))
        lines.append(f"{group.label}: {len(runs)} repeated runs{at}, medians: {known}.")
    return lines


def _median_of(values: list[float], text: Callable[[float], str], unit: str = "", name: str = "") -> str:
    """`name 98.5 % (98.1 % to 98.9 %)`; empty for no values."""
    if not values:
        return ""
    low, high = text(min(values)), text(max(values))
    return f"{name}{text(statistics.median(values))}{unit} ({low} to {high})"


def compare_options(sweep: SweepResults) -> list[str]:
    """One line on what was fastest and one on what became best, for runs that do not differ in batch size."""
    if "data" in sweep.varied:
        return ["The runs are on different data: there is nothing to compare."]
    lines = []
    keys = [key for key in sweep.varied if key != SEED]
    rates: dict[str, list[float]] = {}
    for run in sweep.runs:
        if run.samples_per_sec:
            rates.setdefault(_what(run, keys), []).append(run.samples_per_sec)
    median = {name: statistics.median(values) for name, values in rates.items()}
    if len(median) > 1:
        best, worst = max(median, key=median.__getitem__), min(median, key=median.__getitem__)
        lines.append(
            f"Fastest: {best}, {short(median[best])} samples/s, {_ratio(median[best], median[worst])} than {worst}."
        )
    for metric in shown_metrics(sweep)[:1]:
        values: dict[str, list[float]] = {}
        for run in sweep.runs:
            if metric in run.metrics:
                values.setdefault(_what(run, keys), []).append(run.metrics[metric])
        reached = {name: statistics.median(found) for name, found in values.items()}
        if len(reached) > 1:
            best = (max if higher_is_better(metric) else min)(reached, key=reached.__getitem__)
            lines.append(f"Best {metric}: {best}, {percent(metric, reached[best])}.")
    return lines


def _what(run: Run, keys: list[str]) -> str:
    words = label(run, [key for key in keys if key != BATCH_SIZE])
    return f"{words} · batch size {run.batch_size:,}" if BATCH_SIZE in keys and run.batch_size else words
