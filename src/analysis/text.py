"""Tables of text for the terminal, in at most 80 columns."""

from collections.abc import Iterable, Sequence

import pandas as pd

from ..records.terminal import columns

WIDTH = 80
_GAP = 2  # columns between two columns
_LEAST = 8  # characters that remain of a text that is cut


def page_width() -> int:
    """80 columns, or fewer in a narrower terminal."""
    return min(WIDTH, columns())


def is_number_column(cells: Iterable[str]) -> bool:
    """Whether the cells are numbers or empty."""
    return all(not cell or cell[0] in "0123456789.-−>?" for cell in cells)


def aligned(cells: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """A table, its headings first: numbers on the right, texts on the left. The first column is cut where it is too wide."""
    found = [list(column) for column in zip(*cells, strict=True)]
    widths = [max(map(len, column)) for column in found]
    excess = sum(widths) + _GAP * (len(widths) - 1) - (width or page_width())
    widths[0] = min(widths[0], max(_LEAST, widths[0] - excess))
    right = [is_number_column(column[1:]) for column in found]
    lines = []
    for line in cells:
        texts = [_cut(line[0], widths[0]), *line[1:]]
        padded = [t.rjust(w) if r else t.ljust(w) for t, w, r in zip(texts, widths, right, strict=True)]
        lines.append((" " * _GAP).join(padded).rstrip())
    return lines


def size_blocks(label: str, numbers: pd.DataFrame) -> list[str]:
    """A table with a column for each batch size, below each other in as many blocks as the sizes need.

    Args:
        label: of the group; a long one takes a line of its own.
        numbers: a row for each batch size, a column of texts for each number.
    """
    room = max(10, *(len(str(name)) for name in numbers))
    lines = [] if len(label) <= room + _LEAST else [_cut(label, page_width())]
    names = ["batch size" if lines else label, *numbers.columns]
    columns = [[f"{size:,}", *numbers.loc[size]] for size in numbers.index]
    widest = _GAP + max(len(cell) for column in columns for cell in column)
    most = max(1, (page_width() - max(map(len, names))) // widest)
    for begin in range(0, len(columns), most):
        lines += [*([""] if begin else []), *aligned(list(zip(names, *columns[begin : begin + most], strict=True)))]
    return lines


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
