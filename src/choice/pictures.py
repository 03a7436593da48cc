"""Two pictures of when a GPU pays: the time of products against n, and the use of a device against the batch size.

What is measured is drawn filled, with a solid line; what is predicted hollow, dashed, with the band of its interval. Above them stands
what the predictions do not know.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..analysis import plot_style as style
from ..analysis.anonymous import anonymous
from ..records.formatting import with_prefix
from .crossing import Line, nearest
from .interval import Interval, digits
from .products import LIMITS, ProductLine
from .use import UseLine

_LIMITS = dict(zip(LIMITS, ("#DDDDDD", "#F0E442", "#999999"), strict=True))
_UNKNOWN = (
    "Bands and bars: 90 % intervals, with hosts that take half to twice as long as this one. Predictions do not know other drivers, "
    "falling clocks, shared cards, and how fast data loads elsewhere."
)


def draw_products(lines: Sequence[ProductLine], width: float = style.TWO_COLUMNS) -> Figure:
    """The time of n×n products, where another device passes the first one, and what limits each."""
    title = "time of a product of two n×n matrices in float32"
    with _picture(lines, width, [12, len(lines)], "n", title) as (figure, above, below):
        for number, line in enumerate(lines):
            _draw(above, number, line, line.times)
            for n in line.times:
                left, right = n / math.sqrt(2), n * math.sqrt(2)
                below.barh(number, right - left, 0.8, left, color=_LIMITS[line.points[f"{n:,}"].limit])
        style.log_axis(above)
        above.yaxis.set_major_formatter(lambda value, _: with_prefix(value, "s"))
        for limit, colour in _LIMITS.items():
            above.fill_between([], [], color=colour, label=f"limit: {limit}")
        below.set_yticks(range(len(lines)), [line.label for line in lines])
        below.invert_yaxis()
        below.grid(visible=False)
    return figure


def draw_use(lines: Sequence[UseLine], width: float = style.TWO_COLUMNS, subject: str = "") -> Figure:
    """Samples/s and MFU by batch size, where another device passes the first one, and where memory ends."""
    with _picture(lines, width, [1, 1], "batch size", "samples/s") as (figure, above, below):
        for number, line in enumerate(lines):
            _draw(above, number, line, line.rates)
            _draw(below, number, line, {size: share * 100 for size, share in line.shares.items()})
            if line.memory_ends:
                size, look = max(line.rates), {"color": "black", "marker": "|", "ms": 14, "mew": 2, "ls": ""}
                above.plot(size, line.rates[size].middle, label="memory ends", **look)
        below.axhline(50, color="black", lw=0.8, ls=":")
        for axes in (above, below):
            style.log_axis(axes)
            axes.yaxis.set_major_formatter(lambda value, _: digits(value))
        peak = "% of the measured peak, on cards of the datasheet's; dotted: half"
        style.note(figure, below, f"MFU (model FLOPs utilization), {peak}")
        style.title(figure, anonymous(subject))
    return figure


@contextlib.contextmanager
def _picture(
    lines: Sequence[Line], width: float, heights: Sequence[int], x: str, title: str
) -> Iterator[tuple[Figure, Axes, Axes]]:
    """Two axes above each other to draw in; the size from which on another device is the faster one is marked."""
    with rc_context(style.RC):
        figure = style.new_figure(2 * (0.8 + 0.32 * width), width)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=heights)
        yield figure, above, below
        at = nearest(lines)
        if 0 < at.middle < math.inf:
            ends = max(at.low, min(lines[0].times)), min(at.high, max(lines[0].times))
            above.axvspan(*ends, color="black", alpha=0.12, lw=0, zorder=0)
            above.axvline(at.middle, color="black", ls=":", label=f"first to pass the {lines[0].label}")
        style.size_axis(figure, below, {size for line in lines for size in line.times})
        below.set_xlabel(x)
        style.note(figure, above, title if all(line.here for line in lines) else f"{title}. {_UNKNOWN}")
        style.legend_below(figure, [above])


def _draw(axes: Axes, number: int, line: Line, values: Mapping[int, Interval]) -> None:
    """A device: measured filled, with the interval of each value; predicted hollow, with a band."""
    colour = style.COLOURS[(number - 1) % len(style.COLOURS)] if number else "black"
    look = {"color": colour, "marker": style.MARKERS[number % len(style.MARKERS)]}
    lows, middles, highs = ([getattr(value, end) for value in values.values()] for end in ("low", "middle", "high"))
    if line.here:
        axes.plot([*values], middles, label=f"{line.label}, measured", **look)
        axes.vlines([*values], lows, highs, color=colour)
    else:
        axes.plot([*values], middles, ls="--", lw=1, mfc="white", label=f"{line.label}, predicted", **look)
        axes.fill_between([*values], lows, highs, color=colour, alpha=0.15, lw=0)
