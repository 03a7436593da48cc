"""Whether the steps of a fit have become slower (hardware/level.py), and what changed at the same time.

The fit is divided into spans of equal time, made of the rows of its table.
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
_MAX_SPANS = 200
_SAMPLED_KEYS = (SM_CLOCK, THROTTLED, RSS, ALLOCATED)  # the readings of a DeviceMonitor that spans have
_MIN_SHARE = 0.25  # of the slowdown: a part of the step with less of it is not named
# A key → whether its change, from the median before the slowdown to the one after it, is large enough to be named.
_IS_CHANGED: dict[str, Callable[[float, float], bool]] = {
    OTHERS: lambda early, late: late - early >= 0.05,
    SM_CLOCK: lambda early, late: late <= 0.97 * early,
    THROTTLED: lambda early, late: late - early >= 10,
    RSS: lambda early, late: late >= 1.1 * early,
    ALLOCATED: lambda early, late: late >= 1.1 * early,
    VALIDATION: lambda early, late: late >= 1.08 * early,
}


@dataclass(frozen=True)
class Spans:
    """Spans of equal time of a fit, without those in which no step counts.

    `columns` have one value a span: its start, its first step, `step_ms` of a whole batch, the parts of that, and the means of
    what was read in it. None stands for an unknown value.
    """

    seconds: float
    columns: Mapping[str, Sequence[float | None]]


def find_spans(table: UpdateTable, readings: Readings, validations: Iterable[tuple[float, float]]) -> Spans | None:
    """Divide a fit into spans, over its windows by the clock; return None for a fit too short for two levels.

    Args:
        table: of the fit; its windows have ended.
        readings: returns the times and the values of a sampled key, shape (N,) each, on the clock of the windows.
        validations: the start, on this clock, and the length in seconds of each validation.
    """
    windows, updates = table.windows.all, numpy.flatnonzero(table.after_warmup())
    indices = table.windows.window_indices(updates)  # of the windows
    by_clock = numpy.array([window.pass_ == NO_PASS for window in windows] + [False])
    updates, indices = updates[by_clock[indices]], indices[by_clock[indices]]
    if not len(updates):
        return None
    began, unix, seconds, others = numpy.array(
        [(window.began, window.start_unix, window.seconds, window.others_share) for window in windows]
    ).T
    rows = table.rows[updates]
    row_ms = rows["parts_ms"].sum(1, dtype=float) + rows["excluded_ms"]
    ms_before, first = numpy.cumsum(row_ms) - row_ms, numpy.searchsorted(indices, indices)
    window_ms = numpy.bincount(indices, row_ms, len(windows))[indices]
    starts = began[indices] + seconds[indices] * (ms_before - ms_before[first]) / numpy.maximum(window_ms, 1e-9)
    total_s = began[indices[-1]] + seconds[indices[-1]] - starts[0]
    if total_s < 2 * level.LASTS_S:
        return None
    count = min(_MAX_SPANS, len(rows))
    span_s = total_s / count

    def span_at(times: Floats) -> NDArray[numpy.int64]:
        return numpy.floor((times - starts[0]) / span_s).astype(int)

    spans, first = numpy.unique(numpy.clip(span_at(starts), 0, count - 1), return_index=True)  # those with rows

    def means(times: Floats, values: Floats) -> Floats:
        value_spans = span_at(times)
        is_inside = (value_spans >= 0) & (value_spans < count)
        inside = value_spans[is_inside]
        sums, counts = (numpy.bincount(inside, weights, count)[spans] for weights in (values[is_inside], None))
        return numpy.divide(sums, counts, out=numpy.full(len(spans), math.nan), where=counts > 0)

    has_samples = rows["samples"].all()
    sizes = rows["samples"].astype(float) if has_samples else numpy.ones(len(rows))
    whole_size = table.whole_batch_size() if has_samples else 1.0
    parts = numpy.add.reduceat(rows["parts_ms"].astype(float), first)
    parts *= whole_size / numpy.add.reduceat(sizes, first)[:, None]
    columns = {"start_unix": (starts + unix[indices] - began[indices])[first], "step": rows["step"][first]}
    columns |= {"step_ms": parts.sum(1)} | dict(zip(PARTS, parts.T, strict=True)) | {OTHERS: others[indices[first]]}
    columns[VALIDATION] = means(*numpy.array([*validations], float).reshape(-1, 2).T)
    columns |= {key: means(*readings(key)) for key in _SAMPLED_KEYS}
    lists = {key: column.tolist() for key, column in columns.items() if not numpy.isnan(column).all()}
    return Spans(span_s, {key: [None if math.isnan(x) else x for x in column] for key, column in lists.items()})


def slower_facts(spans: Spans | None, device: str = "") -> dict[str, Any]:
    """Return since when steps are slower, by how much, and what changed `beside` it, for the summary; empty if none are.

    On the `device` `cpu` the allocated memory is left out, because it is that of the process, which has its own key.
    """
    if spans is None:
        return {}
    columns = {key: numpy.array(values, float) for key, values in spans.columns.items()}
    is_timed = bool((columns["step_ms"] > 0).all())  # else the clock has jumped
    slowdown = level.find_slowdown(columns["step_ms"], spans.seconds) if is_timed else None
    if slowdown is None:
        return {}
    ignored_key = ALLOCATED if device == "cpu" else ""
    medians = {key: _medians(column, slowdown.span) for key, column in columns.items() if key != ignored_key}
    difference = sum(medians[part][1] - medians[part][0] for part in PARTS)
    beside = [part for part in PARTS if medians[part][1] - medians[part][0] >= _MIN_SHARE * difference > 0]
    beside += [key for key, is_changed in _IS_CHANGED.items() if key in medians and is_changed(*medians[key])]
    start = columns["start_unix"]
    return {
        "since_unix": float(start[slowdown.span]),
        "until_unix": float(start[-1]) + spans.seconds,
        "step": int(columns["step"][slowdown.span]),
        "ratio": slowdown.ratio,
        "interval": [slowdown.low, slowdown.high],
        "step_ms": list(medians["step_ms"]),
        "beside": {key: list(medians[key]) for key in beside},
    }


def _medians(column: Floats, split: int) -> tuple[float, float]:
    """Return the medians before and after a span; NaN where no value is known, which does not count as a change."""
    sides = (side[~numpy.isnan(side)] for side in (column[:split], column[split:]))
    early, late = (float(numpy.median(side)) if len(side) else math.nan for side in sides)
    return early, late
