"""What the plots share: colours, axes and legends."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from ..records.formatting import with_prefix

REPORT_WIDTH = 6.4  # inches; letters can be read in 400 pixels
# Okabe and Ito's colours, which colour-blind people can tell apart; black and yellow are left for other things.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PART_COLOURS = ("#D55E00", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#BBBBBB")  # of the parts of a step
GREY = "#555555"
_MOST_NAMES = 12  # in a legend
_LONGEST = 60  # characters of a name in a legend
RC = {  # matplotlib's settings while the plots are made
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.title_fontsize": 9,
    "savefig.dpi": 150,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # two dollar signs in a name are no formula
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
}


def new_figure(height: float, width: float = REPORT_WIDTH) -> Figure:
    """A figure; sizes in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def size_axis(axes: Axes, sizes: Iterable[int], most: int = 9) -> None:
    """Batch sizes on a log scale; ticks at sizes that ran, `most` of them where they are close to each other."""
    ordered = sorted(set(sizes))
    axes.set_xscale("log", base=2)
    gap = np.log2(ordered[-1] / ordered[0]) / most
    ticks = [ordered[-1]]
    for size in reversed(ordered[:-1]):
        if np.log2(ticks[-1] / size) >= gap:
            ticks.append(size)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("batch size")


def log_axis(axes: Axes, name: str = "y") -> None:
    """A log scale with plain numbers; ticks also at 2 and 5, or at all digits, where it covers few decades."""
    axes.set(**{f"{name}scale": "log"})
    axis = axes.yaxis if name == "y" else axes.xaxis
    low, high = axis.get_view_interval()
    decades = np.log10(high / low)
    digits = (1,) if decades > 3 else (1, 2, 5) if decades > 0.7 else tuple(range(1, 10))
    axis.set_major_locator(LogLocator(subs=digits))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: with_prefix(value) if value >= 1e3 else f"{value:g}"))


def shortened(text: str, most: int = _LONGEST) -> str:
    """A text in at most so many characters, also where it is one long word."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 2]} …"


def legend_above(figure: Figure, looks: Mapping[str, Mapping[str, Any]]) -> None:
    """A legend of marks and lines above the axes, each by its properties."""
    if looks:
        handles = [Line2D([], [], label=name, **look) for name, look in looks.items()]
        figure.legend(handles=handles, loc="outside upper right", ncols=2)


def legend_below(figure: Figure, axes: Axes, title: str | None = None) -> None:
    """A legend of several names below the axes; every name once, of many the first ones."""
    once = {shortened(name): handle for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    if len(once) < 2 and title is None:
        return
    names = list(once)[:_MOST_NAMES]
    title = f"{len(once)} in all" if title is None and len(once) > len(names) else title
    columns = max(1, min(len(names), 66 // (max(map(len, names)) + 5)))
    figure.legend([once[name] for name in names], names, loc="outside lower center", ncols=columns, title=title)
