"""Whether the steps of a fit are slower since some time (hardware/level.py), and what changed with that.

Looked at are equal spans of the fit's time, made of the rows of its table.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from ..hardware import level
from ..hardware.nvml_readings import SM_CLOCK, THROTTLED
from ..hardware.telemetry import ALLOCATED, RSS
from ..records.step_parts import PARTS
from ._table import UpdateTable
from ._windows import NO_PASS

Floats = NDArray[numpy.float64]
Readings = Callable[[str], tuple[Floats, Floats]]
OTHERS, VALIDATION = "others_share", "validation_s"
_MOST = 200  # spans
_READ = (SM_CLOCK, THROTTLED, RSS, ALLOCATED)  # of a DeviceMonitor
_OF_DIFFERENCE = 0.25  # that a part of the step makes at least, to be named
# What else is named if the later value differs so from the earlier one.
_CHANGED: dict[str, Callable[[float, float], bool]] = {
    OTHERS: lambda early, late: late - early >= 0.05,
    SM_CLOCK: lambda early, late: late <= 0.97 * early,
    THROTTLED: lambda early, late: late - early >= 10,
    RSS: lambda early, late: late >= 1.1 * early,
    ALLOCATED: lambda early, late: late >= 1.1 * early,
    VALIDATION: lambda early, late: late >= 1.08 * early,
}


@dataclass(frozen=True)
class Spans:
    """Equal spans of a fit, without those in which no step counts.

    The columns have a value for each: its start, its first step, `step_ms` of a whole batch, the parts of these, and what was
    read meanwhile. None stands for what is unknown.
    """

    seconds: float
    columns: Mapping[str, Sequence[float | None]]


def spans_of(table: UpdateTable, readings: Readings, validations: Iterable[tuple[float, float]]) -> Spans | None:
    """The spans of a fit, in its windows by the clock; None for a fit too short for two levels.

    Args:
        table: of the fit, whose windows have ended.
        readings: the times and the values of a key that was sampled, shape (N,) each, on the clock of the windows.
        validations: the beginning, on this clock, and the length of each.
    """
    windows, numbers = table.windows.all, numpy.flatnonzero(table.after_warmup())
    of = table.windows.of_updates(numbers)
    by_clock = numpy.array([window.pass_ == NO_PASS for window in windows] + [False])
    numbers, of = numbers[by_clock[of]], of[by_clock[of]]
    if not len(numbers):
        return None
    began, unix, seconds, others = numpy.array(
        [(window.began, window.start_unix, window.seconds, window.others_share) for window in windows]
    ).T
    rows = table.rows[numbers]
    lasted = rows["parts_ms"].sum(1, dtype=float) + rows["excluded_ms"]
    before, first = numpy.cumsum(lasted) - lasted, numpy.searchsorted(of, of)
    of_window = numpy.bincount(of, lasted, len(windows))[of]
    starts = began[of] + seconds[of] * (before - before[first]) / numpy.maximum(of_window, 1e-9)
    total = began[of[-1]] + seconds[of[-1]] - starts[0]
    if total < 2 * level.LASTS_S:
        return None
    count = min(_MOST, len(rows))
    span_s = total / count

    def span_at(times: Floats) -> NDArray[numpy.int64]:
        return numpy.floor((times - starts[0]) / span_s).astype(int)

    kept, first = numpy.unique(numpy.clip(span_at(starts), 0, count - 1), return_index=True)

    def means(times: Floats, values: Floats) -> Floats:
        spans = span_at(times)
        known = (spans >= 0) & (spans < count)
        sums, numbers = (numpy.bincount(spans[known], weights, count)[kept] for weights in (values[known], None))
        return numpy.divide(sums, numbers, out=numpy.full(len(kept), math.nan), where=numbers > 0)

    has_samples = rows["samples"].all()
    units = rows["samples"].astype(float) if has_samples else numpy.ones(len(rows))
    usual = table.whole_batch() if has_samples else 1.0
    parts = numpy.add.reduceat(rows["parts_ms"].astype(float), first)
    parts *= usual / numpy.add.reduceat(units, first)[:, None]
    columns = {"start_unix": (starts + unix[of] - began[of])[first], "step": rows["step"][first]}
    columns |= {"step_ms": parts.sum(1)} | dict(zip(PARTS, parts.T, strict=True)) | {OTHERS: others[of[first]]}
    columns[VALIDATION] = means(*numpy.array([*validations], float).reshape(-1, 2).T)
    columns |= {key: means(*readings(key)) for key in _READ}
    known = {key: column.tolist() for key, column in columns.items() if not numpy.isnan(column).all()}
    return Spans(span_s, {k: [None if math.isnan(each) else each for each in column] for k, column in known.items()})


def slower_facts(spans: Spans | None, device: str = "") -> dict[str, Any]:
    """For the run's summary: since when its steps are slower, by how much, and what changed `beside` it; else empty.

    On a `device` that is the CPU its memory is that of the process, which is named.
    """
    if spans is None:
        return {}
    columns = {key: numpy.array(values, float) for key, values in spans.columns.items()}
    is_timed = bool((columns["step_ms"] > 0).all())  # else the clock has jumped
    found = level.slower_since(columns["step_ms"], spans.seconds) if is_timed else None
    if found is None:
        return {}
    left_out = ALLOCATED if device == "cpu" else ""
    medians = {key: _medians(column, found.span) for key, column in columns.items() if key != left_out}
    difference = sum(medians[part][1] - medians[part][0] for part in PARTS)
    beside = [part for part in PARTS if medians[part][1] - medians[part][0] >= _OF_DIFFERENCE * difference > 0]
    beside += [key for key, is_changed in _CHANGED.items() if key in medians and is_changed(*medians[key])]
    start = columns["start_unix"]
    return {
        "since_unix": float(start[found.span]),
        "until_unix": float(start[-1]) + spans.seconds,
        "step": int(columns["step"][found.span]),
        "ratio": found.ratio,
        "interval": [found.low, found.high],
        "step_ms": list(medians["step_ms"]),
        "beside": {key: list(medians[key]) for key in beside},
    }


def _medians(column: Floats, split: int) -> tuple[float, float]:
    """Before and after; NaN where nothing is known, which is no change."""
    sides = (side[~numpy.isnan(side)] for side in (column[:split], column[split:]))
    early, late = (float(numpy.median(side)) if len(side) else math.nan for side in sides)
    return early, late
