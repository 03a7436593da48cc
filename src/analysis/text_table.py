"""The table of a sweep for the terminal: the columns that have room."""

import textwrap
from collections.abc import Sequence

from ..records.terminal import columns, wrapped
from . import table
from .groups import SweepResults

# Left out in this order where the terminal is too narrow: the headings of columns, or how they begin.
_LESS_USEFUL = (
    *("fit samples/s", "mean ", "p10", "seconds", "throttled", "fastest", "comm", "kernel ran", "processor time"),
    *("SM activity", "mJ/sample", "scaled lr", "MFU", "peak GiB", "median step"),
)
_GAP = 2  # columns between two columns
_LEAST = 24  # characters that remain of a text that is cut

_Column = tuple[str, list[str]]  # a heading and the cells of all runs


def to_text(sweep: SweepResults, width: int | None = None) -> str:
    """The columns of `report.md` as far as they fit, aligned; then what is left out.

    Args:
        sweep: the runs.
        width: in characters; None for that of the terminal.
    """
    width = width or columns()
    header, cells = table.cells(sweep)
    shown = list(zip(header, map(list, zip(*cells, strict=True)), strict=True))
    left_out: list[str] = []
    for useless in _LESS_USEFUL:
        if _width(_cut(shown, width)) <= width:
            break
        left_out += [heading for heading, _ in shown if heading.startswith(useless)]
        shown = [column for column in shown if not column[0].startswith(useless)]
    lines = _aligned(_cut(shown, width, least=8), width)
    if left_out:
        lines += wrapped([f"(without {', '.join(left_out)}: see report.md)"], width)
    return "\n".join(lines) + "\n"


def _width(shown: Sequence[_Column]) -> int:
    return sum(_column_width(column) for column in shown) + _GAP * (len(shown) - 1)


def _column_width(column: _Column) -> int:
    """A heading may take several lines, so it needs no more than its longest word."""
    return max(map(len, [*column[0].split(), *column[1]]))


def _cut(shown: Sequence[_Column], width: int, least: int = _LEAST) -> list[_Column]:
    """The columns with their longest texts cut, one after the other, until the table fits."""
    found = list(shown)
    for at in sorted(range(len(found)), key=lambda at: -_column_width(found[at])):
        heading, cells = found[at]
        excess = _width(found) - width
        if excess > 0 and not table.is_number_column(cells):
            room = max(least, _column_width(found[at]) - excess)
            found[at] = heading, [cell if len(cell) <= room else f"{cell[: room - 1]}…" for cell in cells]
    return found


def aligned(cells: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Any table, its headings first, in as many lines: texts that are too long are cut."""
    width = width or columns()
    shown = [(heading, list(column)) for heading, *column in zip(*cells, strict=True)]
    return _aligned(_cut(shown, width, least=8), width)


def _aligned(shown: Sequence[_Column], width: int) -> list[str]:
    """Numbers on the right, texts on the left. Headings take one line each if there is room, else as many as they need."""
    in_one_line = sum(max(map(len, [heading, *cells])) + _GAP for heading, cells in shown) - _GAP <= width
    headings = [
        [h] if in_one_line else textwrap.wrap(h, _column_width((h, c)), break_long_words=False) for h, c in shown
    ]
    height = max(map(len, headings))
    blocks = []
    for heading, (_, cells) in zip(headings, shown, strict=True):
        lines = [*[""] * (height - len(heading)), *heading, *cells]
        room = max(map(len, lines))
        blocks.append([line.rjust(room) if table.is_number_column(cells) else line.ljust(room) for line in lines])
    return [(" " * _GAP).join(line).rstrip() for line in zip(*blocks, strict=True)]
