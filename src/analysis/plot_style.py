"""What all plots share: sizes, colours, axes, the title and the legend. The rest is matplotlib's default."""

import math
from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from ..errors import cut
from ..records.terminal import wrapped

TWO_COLUMNS = 7.0  # inches: a figure over both columns of a paper
ON_PAGE = 3.8  # inches: letters can be read if the page shows the figure 370 pixels wide
# Okabe and Ito's colours and a violet, which colour-blind people can tell apart; black and yellow are left for other
# things.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8700F0")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")  # one more, so that the eighth series looks like no other
_LONGEST = 60  # characters of a name in a legend
_LETTERS = 14.5  # letters of the usual size in an inch
_LINE = 0.17  # inches
_POINTS = 10.0  # the least span of an axis of accuracies, in percentage points
_LEAST_RATIO = 8.0  # the ratio of an axis's ends from which on a log scale shows more than a scale from zero
RC = {  # matplotlib's settings while the plots are made
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.titlecolor": "#444444",
    "axes.titlelocation": "left",
    "axes.titlesize": "small",
    "figure.titlesize": "medium",
    "font.size": 9,
    "grid.color": "#DDDDDD",
    "legend.frameon": False,
    "pdf.fonttype": 42,  # fonts that publishers take, and text that stays text
    "savefig.dpi": 300,
    "svg.fonttype": "none",  # text stays text
    "text.parse_math": False,  # two dollar signs in a name are no formula
}


def new_figure(height: float, width: float = TWO_COLUMNS) -> Figure:
    """Return an empty figure; sizes in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def title(figure: Figure, text: str) -> None:
    """Write a title over all axes, on the left, in as many lines as it needs; the figure grows by these lines."""
    lines = wrapped([text], max(20, round(_LETTERS * figure.get_figwidth())), indent=0)
    figure.suptitle("\n".join(lines), x=0.01, ha="left")
    _grow(figure, len(lines))


def note(figure: Figure, axes: Axes, text: str) -> None:
    """Write what marks mean in small letters above the axes, in as many lines as needed; the figure grows by these lines."""
    letters = round(1.25 * _LETTERS * (figure.get_figwidth() - 0.8))
    lines = wrapped([text], max(20, letters), indent=0)
    axes.set_title("\n".join(lines))
    _grow(figure, len(lines))


def _grow(figure: Figure, lines: int) -> None:
    figure.set_figheight(figure.get_figheight() + lines * _LINE)


def most_names(figure: Figure, names: Iterable[str]) -> int:
    """How many names, of several lines each, have room beside each other below axes."""
    longest = max(len(line) for name in names for line in name.splitlines())
    return max(3, int(_LETTERS * (figure.get_figwidth() - 0.8) / (longest + 3)))


def size_axis(figure: Figure, axes: Axes, sizes: Iterable[int]) -> None:
    """Put batch sizes on a log scale, with numbers at as many sizes as there is room for."""
    smallest, *larger = sorted(sizes)
    room, shown = max(3, round(1.7 * figure.get_figwidth())), [smallest]
    for size in larger:
        if math.log(size / shown[-1]) >= math.log(larger[-1] / smallest) / room:
            shown.append(size)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("batch size")


def log_axis(axes: Axes) -> None:
    """Give y a log scale with plain numbers; call it when all data are drawn."""
    low, high = axes.dataLim.intervaly
    subs = (1, 2, 5) if high < 60 * low else (1,)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:,.10g}")


def from_zero(axes: Axes) -> None:
    """Give y a scale from zero, which shows ratios as they are."""
    low, high = axes.dataLim.intervaly
    axes.set_ylim(min(0.0, 1.1 * low), 1.12 * high if high > 0 else float(low == 0))
    axes.yaxis.set_major_formatter("{x:,.10g}")


def ratio_axis(axes: Axes) -> None:
    """Give y a scale from zero, or a log scale where values differ by a factor of 8 or more."""
    low, high = axes.dataLim.intervaly
    if low > 0 and high / low >= _LEAST_RATIO:
        axes.set_ylim(low / 1.4, high * 1.4)
        log_axis(axes)
    else:
        from_zero(axes)


def percent_axis(axes: Axes) -> None:
    """Give y a scale so wide that small differences look small: at least ten percentage points, within 0 and 100 %."""
    low, high = axes.dataLim.intervaly
    room = max(0.08 * (high - low), (_POINTS - (high - low)) / 2)
    top = min(100 + 0.02 * _POINTS, max(high + room, low - room + _POINTS))
    axes.set_ylim(max(0.0, min(low - room, top - _POINTS)), top)
    axes.yaxis.set_major_formatter("{x:,.10g}")


def legend_below(figure: Figure, panels: Iterable[Axes]) -> None:
    """Draw a legend below the panels if there are several names, each name once; the figure grows by its lines."""
    letters = _LETTERS * figure.get_figwidth()
    most = min(_LONGEST, max(8, int(letters) - 8))
    pairs = (pair for axes in panels for pair in zip(*axes.get_legend_handles_labels(), strict=True))
    handles = {name: handle for handle, name in pairs}
    if len(handles) > 1:
        labels = [cut(name, most) for name in handles]
        if len({*labels}) < len(labels):  # names that differ only in their ends
            labels = [name if len(name) <= most else f"…{name[1 - most :]}" for name in handles]
        columns = max(1, int(letters / (max(map(len, labels)) + 7)))
        figure.legend(handles.values(), labels, loc="outside lower left", ncols=columns)
        _grow(figure, math.ceil(len(handles) / columns))
