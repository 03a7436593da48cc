"""Phrases that several answers share, each for one fact; and tables of text for the terminal, in at most 80 columns."""

import math
from collections.abc import Iterable, Sequence

import pandas as pd

from ..errors import cut
from ..records.formatting import percent, significant
from ..records.metrics import FRACTION, metric
from ..records.rates import load_words
from ..records.terminal import BLOCK, columns
from .noise import Ratio
from .selection import LEAST, Selection

_GAP = 2  # columns between two columns
_LEAST = 8  # the least width of a column whose texts are cut
KNOWN = 0.1  # a ratio that is known to ± 10 % is given as a number, any other by the nearer end of its interval
VAGUE = "wider than ± 10 %"  # the meaning of `?` in all tables and plots
_MOST_NAMED = 6
HARDLY = 1.995  # an interval that reaches so far, to three times the number and to a third of it, says nothing


def page_width() -> int:
    """Return 80, or the columns of a narrower terminal."""
    return min(BLOCK, columns())


def is_number_column(cells: Iterable[str]) -> bool:
    """Whether each cell is a number, `not within` a number, or empty."""
    return all(not cell or cell[0] in "0123456789.+-−?" or cell.startswith("not within ") for cell in cells)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, headings first: numbers on the right, texts on the left, a too wide first column cut."""
    by_column = [*zip(*rows, strict=True)]
    widths = [max(map(len, column)) for column in by_column]
    on_right = [is_number_column(column[1:]) for column in by_column]
    excess = sum(widths) + _GAP * (len(widths) - 1) - page_width()
    widths[0] = min(widths[0], max(_LEAST, widths[0] - excess))
    lines = []
    for name, *cells in rows:
        padded = zip([cut(name, widths[0]), *cells], widths, on_right, strict=True)
        lines.append((" " * _GAP).join(cell.rjust(w) if right else cell.ljust(w) for cell, w, right in padded).rstrip())
    return lines


def size_blocks(label: str, numbers: pd.DataFrame) -> list[str]:
    """Return the lines of a table with a column for each batch size, in as many blocks as the sizes need.

    Args:
        label: the label of the group; a long one takes a line of its own.
        numbers: a row for each batch size, by its text, and a column of texts for each number.
    """
    room = max(10, *(len(str(name)) for name in numbers))
    lines = [] if len(label) <= room + _LEAST else [cut(label, page_width())]
    blocks = numbers.T.rename_axis(columns="batch size" if lines else label).to_string(line_width=page_width())
    return [*lines, *(line.rstrip(" \\") for line in blocks.splitlines())]  # pandas marks a block that goes on by \


def and_(names: Sequence[str | int], word: str = "and", most: int = _MOST_NAMED) -> str:
    """Return `64`, `64 and 512` or `8, 64 and 512`; of more than `most` names the first ones, and how many more there are."""
    words = [f"{name:,}" if isinstance(name, int) else name for name in names[:most]]
    words += [f"{len(names) - most} more"] if len(names) > most else []
    parts = [", ".join(words[:-1]), *words[-1:]]
    return f" {word} ".join(part for part in parts if part)


def times_as_fast(ratio: Ratio) -> str:
    """Say by how much something shown to be faster is faster: `1.88 times as fast as`, `at least 1.3 times as fast as`."""
    if ratio.reach <= KNOWN:
        return f"{significant(ratio.value)} times as fast as"
    factor = at_least(ratio)
    return f"at least {factor:.1f} times as fast as" if factor > 1 else "faster than"


def at_least(ratio: Ratio) -> float:
    """Return the lower end of a ratio above 1, rounded down to a decimal, at least 1."""
    return max(1.0, math.floor(10 * ratio.low) / 10)


def choice_words(selection: Selection, measurement: str, subset: str = "", load: float | None = None) -> str:
    """Return `256: 92 % of the best measured rate (1,024), at least 86 % in this sweep.`

    Args:
        selection: the selection among two sizes or more.
        measurement: what was measured: `sweep`.
        subset: which sizes were compared, if not all: ` of the sizes …`.
        load: the share of the processor that other programs took; None if it is not to be stated.
    """
    size, beside = selection.size, "" if load is None else f" beside {load_words(load)}"
    if size is None:
        line = f"Undecided: {selection.best:,} was the fastest{subset} in this {measurement}{beside}"
        return f"{line}, but of no size is it known that it reaches {percent(LEAST)} of the best rate."
    share, sure = percent(selection.shares[size].value), f"at least {math.floor(100 * selection.sure[size] + 1e-9)} %"
    if size != selection.best:
        gain = f"{share} of the best measured rate ({selection.best:,}){subset}, {sure}"
    elif selection.sure[size] >= 1:
        gain = f"the fastest{subset}" if subset else "faster than all others"
    else:
        gain = f"the best measured rate{subset}, {sure} of any other"
    guess = "Best guess " if selection.rule == "best_guess" else ""
    is_unsure = guess and selection.sure[size] < selection.wanted
    why = f"; no size is sure of {percent(selection.wanted)}" if is_unsure else ""
    return f"{guess}{size:,}: {gain} in this {measurement}{beside}{why}."


def reach_text(reach: float) -> str:
    """Return how far an interval reaches, as a fraction of the rate: `4%`; `?` where the rate is hardly known."""
    if not reach < HARDLY:
        return "?"
    return f"{significant(100 * reach)}%" if reach < 0.01 else f"{math.ceil(100 * reach - 1e-9)}%"


def mean_and_deviation(key: str, mean: float, deviation: float) -> str:
    """Return a metric of repeated runs as mean ± standard deviation, `98.42±0.11%`; the mean alone if the deviation is NaN."""
    if math.isnan(deviation):
        return "" if math.isnan(mean) else metric(key).cell(mean)
    if metric(key).unit == FRACTION:
        return f"{100 * mean:.2f}±{deviation:.2%}"
    return f"{significant(mean)}±{significant(deviation)}"
