"""A step's operations at a batch size that was not measured: each number on the line through two that were."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from ..records.operations import OperationRow, StepOperations

NUMBERS = tuple(field.name for field in fields(OperationRow) if field.type is float)


def rows_at(steps: Mapping[int, StepOperations], batch_size: int) -> list[OperationRow]:
    """The rows of a step with so many samples in each batch.

    Args:
        steps: what was recorded, by batch size; two at least.

    Returns:
        Rows on the lines between the two nearest sizes; beyond the measured ones, on the line of the last two. Where two
        sizes have other operations (a library may choose by size), those of the nearer size, as many times larger.
    """
    if batch_size in steps:
        return list(steps[batch_size].rows)
    below, above = nearest(list(steps), batch_size)
    share = (batch_size - below) / (above - below)
    found: dict[Any, tuple[list[OperationRow], list[OperationRow]]] = defaultdict(lambda: ([], []))
    for number, size in enumerate((below, above)):
        for row in steps[size].rows:
            found[row.name, row.module, row.part, row.dtype][number].append(row)
    at_size: list[OperationRow] = []
    for low, high in found.values():
        if len(low) == len(high):
            at_size += [_between(a, b, share) for a, b in zip(low, high, strict=True)]
        else:
            size, rows = min(((below, low), (above, high)), key=lambda of_size: abs(batch_size - of_size[0]))
            at_size += [_scaled(row, batch_size / size) for row in rows]
    return at_size


def nearest(sizes: Sequence[int], batch_size: int) -> tuple[int, int]:
    """The two sizes that a number is taken from: those around the batch size, or the two next to it on one side."""
    ordered = sorted(sizes)
    at = min(max(bisect_left(ordered, batch_size), 1), len(ordered) - 1)
    return ordered[at - 1], ordered[at]


def line(values: Mapping[int, float], batch_size: int) -> float:
    """A number at a batch size, from what it was at two others at least: on a line, and never below 0; NaN of a NaN."""
    if batch_size in values:
        return float(values[batch_size])
    below, above = nearest(list(values), batch_size)
    share = (batch_size - below) / (above - below)
    return float(max(values[below] + share * (values[above] - values[below]), 0.0))  # in this order NaN stays NaN


def _between(low: OperationRow, high: OperationRow, share: float) -> OperationRow:
    """A row on the line through two; a number that would become negative keeps a tenth of the smaller one."""
    ends = {name: (getattr(low, name), getattr(high, name)) for name in NUMBERS}
    numbers = {name: max(a + share * (b - a), 0.1 * min(a, b)) for name, (a, b) in ends.items()}
    dims = low.dims
    if len(dims) == len(high.dims):
        dims = tuple(max(1, round(a + share * (b - a))) for a, b in zip(dims, high.dims, strict=True))
    return replace(low, **numbers, dims=dims)


def _scaled(row: OperationRow, factor: float) -> OperationRow:
    """A row whose work grows with the batch, in a shape that nobody knows; an optimizer's does not."""
    if row.part == "optimizer":
        return row
    return replace(row, **{name: getattr(row, name) * factor for name in NUMBERS if name != "calls"}, dims=())
