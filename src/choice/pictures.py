"""Two plots of when a GPU pays: the time of products against n, and the utilization of a device against the batch size.

Measured values have filled markers and a solid line. Predicted values have hollow markers, a dashed line, and a band for the
interval. A note above them says what the predictions do not know.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..analysis import plot_style as style
from ..analysis.anonymous import anonymise
from ..records.formatting import with_prefix
from .crossing import Line, nearest_crossing
from .interval import Interval, digits
from .products import LIMITS, ProductLine
from .use import UseLine

_LIMIT_COLOURS = dict(zip(LIMITS, ("#DDDDDD", "#F0E442", "#999999"), strict=True))
_CAVEAT = (
    "Bands and bars: 90 % intervals, with hosts that take half to twice as long as this one. Predictions do not know other drivers, "
    "falling clocks, shared cards, and how fast data loads elsewhere."
)


def draw_products(lines: Sequence[ProductLine], width: float = style.TWO_COLUMNS) -> Figure:
    """Draw the times of n×n products, the size from which on another device beats the first, and the limit of each product."""
    title = "time of a product of two n×n matrices in float32"
    with _two_axes(lines, width, [12, len(lines)], "n", title) as (figure, above, below):
        for number, line in enumerate(lines):
            _draw_line(above, number, line, line.times)
            for n in line.times:
                left, right = n / math.sqrt(2), n * math.sqrt(2)
                below.barh(number, right - left, 0.8, left, color=_LIMIT_COLOURS[line.points[f"{n:,}"].limit])
        style.log_axis(above)
        above.yaxis.set_major_formatter(lambda value, _: with_prefix(value, "s"))
        for limit, colour in _LIMIT_COLOURS.items():
            above.fill_between([], [], color=colour, label=f"limit: {limit}")
        below.set_yticks(range(len(lines)), [line.label for line in lines])
        below.invert_yaxis()
        below.grid(visible=False)
    return figure


def draw_use(lines: Sequence[UseLine], width: float = style.TWO_COLUMNS, subject: str = "") -> Figure:
    """Draw samples/s and MFU by batch size, the size from which on another device beats the first, and the end of memory."""
    with _two_axes(lines, width, [1, 1], "batch size", "samples/s") as (figure, above, below):
        for number, line in enumerate(lines):
            _draw_line(above, number, line, line.rates)
            _draw_line(below, number, line, {size: share * 100 for size, share in line.shares.items()})
            if line.memory_ends:
                size, marker_style = max(line.rates), {"color": "black", "marker": "|", "ms": 14, "mew": 2, "ls": ""}
                above.plot(size, line.rates[size].middle, label="memory ends", **marker_style)
        below.axhline(50, color="black", lw=0.8, ls=":")
        for axes in (above, below):
            style.log_axis(axes)
            axes.yaxis.set_major_formatter(lambda value, _: digits(value))
        which_peak = "% of the measured peak, on cards of the datasheet's; dotted: half"
        style.note(figure, below, f"MFU (model FLOPs utilization), {which_peak}")
        style.title(figure, anonymise(subject))
    return figure


@contextlib.contextmanager
def _two_axes(
    lines: Sequence[Line], width: float, heights: Sequence[int], x_label: str, title: str
) -> Iterator[tuple[Figure, Axes, Axes]]:
    """Yield two axes, one above the other, to draw in; then mark the nearest crossing, and add labels and the legend."""
    with rc_context(style.RC):
        figure = style.new_figure(2 * (0.8 + 0.32 * width), width)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=heights)
        yield figure, above, below
        crossing = nearest_crossing(lines)
        if 0 < crossing.middle < math.inf:
            ends = max(crossing.low, min(lines[0].times)), min(crossing.high, max(lines[0].times))
            above.axvspan(*ends, color="black", alpha=0.12, lw=0, zorder=0)
            above.axvline(crossing.middle, color="black", ls=":", label=f"first to pass the {lines[0].label}")
        style.size_axis(figure, below, {size for line in lines for size in line.times})
        below.set_xlabel(x_label)
        style.note(figure, above, title if all(line.here for line in lines) else f"{title}. {_CAVEAT}")
        style.legend_below(figure, [above])


def _draw_line(axes: Axes, number: int, line: Line, values: Mapping[int, Interval]) -> None:
    """Draw the values of one device: measured ones with an interval each, predicted ones with a band."""
    colour = style.COLOURS[(number - 1) % len(style.COLOURS)] if number else "black"
    style_args = {"color": colour, "marker": style.MARKERS[number % len(style.MARKERS)]}
    lows, middles, highs = ([getattr(value, end) for value in values.values()] for end in ("low", "middle", "high"))
    if line.here:
        axes.plot([*values], middles, label=f"{line.label}, measured", **style_args)
        axes.vlines([*values], lows, highs, color=colour)
    else:
        axes.plot([*values], middles, ls="--", lw=1, mfc="white", label=f"{line.label}, predicted", **style_args)
        axes.fill_between([*values], lows, highs, color=colour, alpha=0.15, lw=0)
