"""Tables for the terminal, in at most 80 columns."""

from collections.abc import Sequence

from ..records.terminal import columns
from .table import is_number_column

WIDTH = 80
_GAP = 2  # columns between two columns
_LEAST = 8  # characters that remain of a text that is cut


def page_width() -> int:
    """80 columns, or fewer in a narrower terminal."""
    return min(WIDTH, columns())


def cut(text: str, most: int) -> str:
    """A text in at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def aligned(cells: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """A table, its headings first: numbers on the right, texts on the left. Texts are cut, the longest first."""
    found = [list(column) for column in zip(*cells, strict=True)]
    widths = [max(map(len, column)) for column in found]
    excess = sum(widths) + _GAP * (len(widths) - 1) - (width or page_width())
    right = [is_number_column(column[1:]) for column in found]
    for at in sorted(range(len(found)), key=lambda at: -widths[at]):
        if excess > 0 and not right[at]:
            room = min(widths[at], max(_LEAST, widths[at] - excess))
            excess -= widths[at] - room
            widths[at] = room
    lines = []
    for line in cells:
        texts = [cut(cell, room) for cell, room in zip(line, widths, strict=True)]
        padded = [t.rjust(w) if r else t.ljust(w) for t, w, r in zip(texts, widths, right, strict=True)]
        lines.append((" " * _GAP).join(padded).rstrip())
    return lines


def size_blocks(label: str, sizes: Sequence[int], rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """A table with a column for each batch size, below each other in as many blocks as the sizes need.

    Args:
        label: of the group; a long one takes a line of its own.
        sizes: the batch sizes.
        rows: a name and a cell for each size.
    """
    room, width = max(10, *(len(name) for name, _ in rows)), page_width()
    lines = [] if len(label) <= room + 8 else [cut(label, width)]
    first = "batch size" if lines else label
    room = max(room, len(first))
    cells = [[first, *(f"{size:,}" for size in sizes)], *([name, *cells] for name, cells in rows)]
    widths = [max(len(line[at]) for line in cells) + _GAP for at in range(1, len(cells[0]))]
    begin = 0
    while begin < len(widths):
        end = begin + 1
        while end < len(widths) and room + sum(widths[begin : end + 1]) <= width:
            end += 1
        for line in cells:
            padded = (line[at + 1].rjust(widths[at]) for at in range(begin, end))
            lines.append((line[0].ljust(room) + "".join(padded)).rstrip())
        lines += [""] if end < len(widths) else []
        begin = end
    return lines
