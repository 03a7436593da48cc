"""The operations of a step at a batch size that was not measured, by linear interpolation between two measured sizes."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from ..records.operations import OperationRow, StepOperations

NUMERIC_FIELDS = tuple(field.name for field in fields(OperationRow) if field.type is float)


def rows_at(steps: Mapping[int, StepOperations], batch_size: int) -> list[OperationRow]:
    """Return the rows of a step with `batch_size` samples in each batch.

    Args:
        steps: the recorded steps by batch size; two at least.

    Returns:
        Rows interpolated between the two nearest sizes; outside of the measured sizes, extrapolated from the last two. If the two
        sizes have different operations (a library may choose by size), those of the nearer size, scaled to the batch size.
    """
    if batch_size in steps:
        return list(steps[batch_size].rows)
    below, above = nearest_sizes(list(steps), batch_size)
    weight = (batch_size - below) / (above - below)
    rows_by_key: dict[Any, tuple[list[OperationRow], list[OperationRow]]] = defaultdict(lambda: ([], []))
    for side, size in enumerate((below, above)):
        for row in steps[size].rows:
            rows_by_key[row.name, row.module, row.part, row.dtype][side].append(row)
    at_size: list[OperationRow] = []
    for low, high in rows_by_key.values():
        if len(low) == len(high):
            at_size += [_interpolate_row(a, b, weight) for a, b in zip(low, high, strict=True)]
        else:
            size, rows = (below, low) if abs(batch_size - below) <= abs(batch_size - above) else (above, high)
            at_size += [_scale_row(row, batch_size / size) for row in rows]
    return at_size


def nearest_sizes(sizes: Sequence[int], batch_size: int) -> tuple[int, int]:
    """Return the two sizes to interpolate between: those around the batch size, or the two next to it on one side."""
    ordered = sorted(sizes)
    index = min(max(bisect_left(ordered, batch_size), 1), len(ordered) - 1)
    return ordered[index - 1], ordered[index]


def interpolate(values: Mapping[int, float], batch_size: int) -> float:
    """Interpolate a number, given by batch size at two sizes or more; the result is at least 0, and NaN if a value is NaN."""
    if batch_size in values:
        return float(values[batch_size])
    below, above = nearest_sizes(list(values), batch_size)
    weight = (batch_size - below) / (above - below)
    return float(max(values[below] + weight * (values[above] - values[below]), 0.0))  # in this order NaN stays NaN


def _interpolate_row(low: OperationRow, high: OperationRow, weight: float) -> OperationRow:
    """Interpolate between two rows; each number is at least a tenth of the smaller of both, so that none becomes negative."""
    ends = {name: (getattr(low, name), getattr(high, name)) for name in NUMERIC_FIELDS}
    numbers = {name: max(a + weight * (b - a), 0.1 * min(a, b)) for name, (a, b) in ends.items()}
    dims = low.dims
    if len(dims) == len(high.dims):
        dims = tuple(max(1, round(a + weight * (b - a))) for a, b in zip(dims, high.dims, strict=True))
    return replace(low, **numbers, dims=dims)


def _scale_row(row: OperationRow, factor: float) -> OperationRow:
    """Return a row with `factor` times the work, of unknown shape; the work of an optimizer does not grow with the batch."""
    if row.part == "optimizer":
        return row
    return replace(row, **{name: getattr(row, name) * factor for name in NUMERIC_FIELDS if name != "calls"}, dims=())
