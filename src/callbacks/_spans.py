"""From the table of a fit to equal spans of its time, in which a change of level is looked for."""

import math
from collections.abc import Callable, Iterable

import numpy
from numpy.typing import NDArray

from ..hardware import level
from ..records.step_parts import PARTS
from ._level import OTHERS, READ, VALIDATION, Spans
from ._table import UpdateTable
from ._windows import NO_PASS

Floats = NDArray[numpy.float64]
Readings = Callable[[str], tuple[Floats, Floats]]
_MOST = 200  # spans


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

    units = rows["samples"].astype(float) if rows["samples"].all() else numpy.ones(len(rows))
    usual = table.whole_batch() if rows["samples"].all() else 1.0
    parts = (
        numpy.add.reduceat(rows["parts_ms"].astype(float), first) * usual / numpy.add.reduceat(units, first)[:, None]
    )
    columns = {"start_unix": (starts + unix[of] - began[of])[first], "step": rows["step"][first]}
    columns |= {"step_ms": parts.sum(1)} | dict(zip(PARTS, parts.T, strict=True)) | {OTHERS: others[of[first]]}
    columns[VALIDATION] = means(*numpy.array([*validations], float).reshape(-1, 2).T)
    columns |= {key: means(*readings(key)) for key in READ}
    known = {key: column for key, column in columns.items() if not numpy.isnan(column).all()}
    return Spans(
        span_s,
        {key: [None if math.isnan(value) else value for value in column.tolist()] for key, column in known.items()},
    )
