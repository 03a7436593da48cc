"""What the plots share: colours, axes and the legend. All else is matplotlib's default."""

from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from ..errors import cut
from ..records.formatting import with_prefix

REPORT_WIDTH = 6.4  # inches; letters can be read in 400 pixels
# Okabe and Ito's colours, which colour-blind people can tell apart; black and yellow are left for other things.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PART_COLOURS = ("#D55E00", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#BBBBBB")  # of the parts of a step
_MOST_TICKS = 9
_MOST_NAMES = 12  # in a legend
_LONGEST = 60  # characters of a name in a legend
RC = {  # matplotlib's settings while the plots are made
    "axes.grid": True,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "grid.color": "#DDDDDD",
    "savefig.dpi": 150,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # two dollar signs in a name are no formula
}


def new_figure(height: float, width: float = REPORT_WIDTH) -> Figure:
    """A figure; sizes in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def size_axis(axes: Axes, sizes: Iterable[int]) -> None:
    """Batch sizes on a log scale; ticks at sizes that ran, not all of them where they are close to each other."""
    ordered = sorted(set(sizes))
    axes.set_xscale("log", base=2)
    gap = np.log2(ordered[-1] / ordered[0]) / _MOST_TICKS
    ticks = [ordered[-1]]
    for size in reversed(ordered[:-1]):
        if np.log2(ticks[-1] / size) >= gap:
            ticks.append(size)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("batch size")


def log_axis(axes: Axes) -> None:
    """A log scale of y with plain numbers; ticks also at 2 and 5, or at all digits, where it covers few decades."""
    axes.set_yscale("log")
    axis = axes.yaxis
    low, high = axis.get_view_interval()
    decades = np.log10(high / low)
    digits = (1,) if decades > 3 else (1, 2, 5) if decades > 0.7 else tuple(range(1, 10))
    axis.set_major_locator(LogLocator(subs=digits))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: with_prefix(value) if value >= 1e3 else f"{value:g}"))


def legend_below(figure: Figure, axes: Axes) -> None:
    """A legend below the axes where there are several names; every name once, of many the first ones."""
    once = {cut(name, _LONGEST): handle for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    names = list(once)[:_MOST_NAMES]
    if len(names) > 1:
        columns = max(1, 66 // (max(map(len, names)) + 5))
        title = "" if len(names) == len(once) else f"({len(once)} in all)"
        figure.legend([once[name] for name in names], names, loc="outside lower center", ncols=columns, title=title)
