"""What the plots share: colours, axes and legends."""

from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from ..records.formatting import with_prefix

REPORT_WIDTH = 6.4  # inches; letters can be read in 400 pixels
# Okabe and Ito's colours, which colour-blind people can tell apart; black and yellow are left for other things.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PART_COLOURS = ("#D55E00", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#BBBBBB")  # of the parts of a step
GREY = "#555555"
_LEGEND_LINE = 0.19  # inches
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
    "svg.hashsalt": "batchscope",  # the same figure is the same file
    "text.parse_math": False,  # two dollar signs in a name are no formula
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
}


def new_figure(height: float, width: float = 8.0) -> Figure:
    """A figure; sizes in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def look_of(index: int) -> tuple[str, str]:
    """Colour and marker of the n-th group."""
    return COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]


def gid_of(numbers: Iterable[int]) -> str:
    """The id of what is drawn of some runs."""
    return f"run-{'_'.join(map(str, numbers))}"


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


def log_axis(axes: Axes) -> None:
    """A log scale for y; ticks also at 2 and 5, or at all digits, where it covers few decades."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    decades = np.log10(high / low)
    digits = (1,) if decades > 3 else (1, 2, 5) if decades > 0.7 else tuple(range(1, 10))
    axes.yaxis.set_major_locator(LogLocator(subs=digits))
    axes.yaxis.set_minor_locator(NullLocator())
    plain_numbers(axes.yaxis)


def wide_axis(axes: Axes, values: Iterable[float]) -> None:
    """x from 0, or on a log scale where the values cover more than one and a half decades."""
    positive = [value for value in values if value > 0]
    if positive and max(positive) > 30 * min(positive):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0)
    plain_numbers(axes.xaxis)


def plain_numbers(axis: Axis) -> None:
    """`0.5`, `20`, `3 k`, `1.2 G` at the ticks."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: with_prefix(value) if value >= 1e3 else f"{value:g}"))


def shortened(text: str, most: int = _LONGEST) -> str:
    """A text in at most so many characters, also where it is one long word."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 2]} …"


def legend_below(figure: Figure, axes: Axes, title: str | None = None) -> None:
    """A legend of several names below the axes; every name once, as far as it leaves half of the figure."""
    once = {shortened(name): handle for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    if len(once) < 2 and title is None:
        return
    widest = max(map(len, once)) + 5  # characters, with its mark
    columns = max(1, min(len(once), round(10.5 * figure.get_figwidth() / widest)))
    most = columns * max(1, int(figure.get_figheight() / 2 / _LEGEND_LINE))
    names = [*once] if len(once) <= most else [*[*once][: most - 1], f"… and {len(once) - most + 1} more"]
    handles = list(once.values())[: len(names)]
    figure.legend(handles, names, loc="outside lower center", ncols=columns, title=title)
