"""A step's operations at a batch size that was not measured: each number on the line through two that were."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from ..records.operations import OperationRow, StepOperations

_NUMBERS = tuple(each.name for each in fields(OperationRow) if each.type is float)
_Key = tuple[str, str, str, str]


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
    below, above = nearest(list(steps.keys()), batch_size)
    share = (batch_size - below) / (above - below)
    first, second = _grouped(steps[below].rows), _grouped(steps[above].rows)
    found: list[OperationRow] = []
    for key in dict.fromkeys((*first, *second)):
        one, other = first.get(key, []), second.get(key, [])
        if len(one) == len(other):
            found += [_between(a, b, share) for a, b in zip(one, other, strict=True)]
        else:
            size, rows = min(((below, one), (above, other)), key=lambda each: abs(batch_size - each[0]))
            found += [_scaled(row, batch_size / size) for row in rows]
    return found


def nearest(sizes: Sequence[int], batch_size: int) -> tuple[int, int]:
    """The two sizes that a number is taken from: those around the batch size, or the two next to it on one side."""
    ordered = sorted(sizes)
    at = min(max(bisect_left(ordered, batch_size), 1), len(ordered) - 1)
    return ordered[at - 1], ordered[at]


def line(values: Mapping[int, float], batch_size: int) -> float:
    """A number at a batch size, from what it was at two others at least: on a line, and never below 0."""
    if batch_size in values:
        return float(values[batch_size])
    below, above = nearest(list(values.keys()), batch_size)
    share = (batch_size - below) / (above - below)
    return float(max(0.0, values[below] + share * (values[above] - values[below])))


def _grouped(rows: Sequence[OperationRow]) -> dict[_Key, list[OperationRow]]:
    found: dict[_Key, list[OperationRow]] = {}
    for row in rows:
        found.setdefault((row.name, row.module, row.part, row.dtype), []).append(row)
    return found


def _between(one: OperationRow, other: OperationRow, share: float) -> OperationRow:
    """A row on the line through two; a number that would become negative keeps a tenth of the smaller one."""
    numbers = {}
    for name in _NUMBERS:
        first, second = getattr(one, name), getattr(other, name)
        numbers[name] = max(first + share * (second - first), 0.1 * min(first, second))
    dims = one.dims
    if len(dims) == len(other.dims):
        dims = tuple(max(1, round(a + share * (b - a))) for a, b in zip(dims, other.dims, strict=True))
    return replace(one, **numbers, dims=dims)


def _scaled(row: OperationRow, factor: float) -> OperationRow:
    """A row whose work grows with the batch; an optimizer's does not."""
    if row.part == "optimizer":
        return row
    numbers = {name: getattr(row, name) * factor for name in _NUMBERS if name != "calls"}
    return replace(row, **numbers)
