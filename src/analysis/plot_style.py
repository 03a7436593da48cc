"""What the plots share: colours, axes and the legend. All else is matplotlib's default."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from ..errors import cut

REPORT_WIDTH = 6.4  # inches; letters can be read in 400 pixels
# Okabe and Ito's colours, which colour-blind people can tell apart; black and yellow are left for other things.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
PART_COLOURS = ("#D55E00", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#BBBBBB")  # of the parts of a step
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


def size_axis(axes: Axes) -> None:
    """Batch sizes on a log scale."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("batch size")


def log_axis(axes: Axes) -> None:
    """A log scale of y with plain numbers."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter())


def legend_below(figure: Figure, axes: Axes) -> None:
    """A legend below the axes where there are several names; every name once."""
    once = {cut(name, _LONGEST): handle for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    if len(once) > 1:
        columns = max(1, 66 // (max(map(len, once)) + 5))
        figure.legend(once.values(), once.keys(), loc="outside lower center", ncols=columns)
