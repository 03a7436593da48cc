"""Two pictures of when a GPU pays: the time of products against n, and the use of a device against the batch size.

What is measured is drawn filled, with a solid line; what is predicted hollow, dashed, with the band of its interval. The legend has
what the predictions do not know.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties

from ..analysis import plot_style as style
from ..files import writing
from ..records.formatting import with_prefix
from .crossing import Line, nearest
from .interval import Interval, digits
from .products import LIMITS, ProductLine
from .use import UseLine

_LIMITS = dict(zip(LIMITS, ("#DDDDDD", "#F0E442", "#999999"), strict=True))
_UNKNOWN = (
    "Predictions do not know other hosts and drivers, falling clocks,\nshared cards, and how fast data loads elsewhere."
)


def draw_products(lines: Sequence[ProductLine], path: Path) -> None:
    """The time of n×n products, where another device passes the first one, and what limits each. Raises WriteError."""
    with _picture(lines, path, [12, len(lines)], "n") as (above, below):
        for number, line in enumerate(lines):
            _draw(above, number, line, line.times)
            for n in line.times:
                left, right = n / math.sqrt(2), n * math.sqrt(2)
                below.barh(number, right - left, 0.8, left, color=_LIMITS[line.points[f"{n:,}"].limit])
        style.log_axis(above)
        above.yaxis.set_major_formatter(lambda value, _: with_prefix(value, "s"))
        above.set_title("time of a product of two n×n matrices in float32")
        for limit, colour in _LIMITS.items():
            above.fill_between([], [], color=colour, label=f"limit: {limit}")
        below.set_yticks(range(len(lines)), [line.label for line in lines])
        below.invert_yaxis()
        below.grid(visible=False)


def draw_use(lines: Sequence[UseLine], path: Path) -> None:
    """Samples/s and MFU by batch size, where another device passes the first one, and where memory ends. Raises WriteError."""
    with _picture(lines, path, [1, 1], "batch size") as (above, below):
        for number, line in enumerate(lines):
            _draw(above, number, line, line.rates)
            _draw(below, number, line, {size: share * 100 for size, share in line.shares.items()})
            if line.memory_ends:
                size, look = max(line.rates), {"color": "black", "marker": "|", "ms": 14, "mew": 2, "ls": ""}
                above.plot(size, line.rates[size].middle, label="memory ends", **look)
        below.axhline(50, color="black", lw=0.8, ls=":")
        for axes, title in (
            (above, "samples/s"),
            (below, "MFU (model FLOPs utilization), %; dotted: half of the peak"),
        ):
            style.log_axis(axes)
            axes.yaxis.set_major_formatter(lambda value, _: digits(value))
            axes.set_title(title)


@contextlib.contextmanager
def _picture(lines: Sequence[Line], path: Path, heights: Sequence[int], x: str) -> Iterator[tuple[Axes, Axes]]:
    """Two axes above each other to draw in; the size from which on another device is the faster one is marked."""
    with rc_context(style.RC), writing("--plot", path):
        figure = style.new_figure(6.2)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=heights)
        yield above, below
        at = nearest(lines)
        if 0 < at.middle < math.inf:
            ends = max(at.low, min(lines[0].times)), min(at.high, max(lines[0].times))
            above.axvspan(*ends, color="black", alpha=0.12, lw=0, zorder=0)
            above.axvline(at.middle, color="black", ls=":", label=f"first to pass the {lines[0].label}")
        style.size_axis(figure, below)
        below.set_xlabel(x)
        style.legend_below(figure, above)
        if not all(line.here for line in lines):
            figure.legends[0].set_title(_UNKNOWN, FontProperties(size="small"))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


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
