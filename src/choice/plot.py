"""The plot: time to train against cost, or time alone where no prices are known; intervals are bars."""

import io
import math
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import Bbox

from ..analysis.plot_style import COLOURS, GREY, RC, new_figure
from .rows import Question, Row
from .words import one_time

_HOW = {"measured": COLOURS[2], "predicted": COLOURS[0], "bound": GREY}
_EXPLAINED = {
    "measured": "measured here",
    "predicted": "predicted, with its 80 % interval",
    "bound": "at best: a bound, no prediction",
}
_LIMIT_COLOUR = COLOURS[1]
_TICKS = [base * 10.0**power for power in range(-4, 1) for base in (1, 2, 5)]  # seconds that are easy to say
_TICKS += [10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 18000, 36000]
_TICKS += [86400.0 * base * 10**power for power in range(5) for base in (1, 2, 5)]
_MOST_TICKS = 10
_PLACES = ((8, -13, "left"), (-8, 6, "right"), (9, -3, "left"), (-9, -3, "right"), (0, 9, "center"), (0, -17, "center"))


def choice_png(rows: Sequence[Row], question: Question, title: str, taken: str | None) -> bytes:
    """The plot as a PNG; the arguments are those of `choice_plot`."""
    with rc_context(RC):
        file = io.BytesIO()
        choice_plot(rows, question, title, taken).savefig(file, format="png")
    return file.getvalue()


def choice_plot(rows: Sequence[Row], question: Question, title: str, taken: str | None) -> Figure:
    """Time against cost where at least one device has a price, else a line of time for each device.

    Args:
        rows: as `rows.rows` gives them.
        question: the deadline and the budget are lines.
        title: of the training.
        taken: the label of the recommended device.
    """
    with_cost = any(row.cost is not None for row in rows)
    shown = [row for row in rows if not with_cost or row.here or row.cost is not None]
    figure = new_figure(5.0 if with_cost else 1.9 + 0.32 * len(rows))
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    _time_axis(axes, shown, question)
    axes.set_title(f"{title}: {question.epochs:,} epoch{'s' if question.epochs > 1 else ''}")
    heights: dict[str, tuple[float, float, float]] = {}
    if with_cost:
        heights = _cost_axis(axes, shown, question)
        for row in shown:
            _draw(axes, row, heights[row.label], taken)
    else:
        _device_axis(axes, shown, taken)
        for place, row in enumerate(shown):
            _draw(axes, row, (place, place, place), taken)
    _legend(figure, shown, taken)
    if with_cost:
        canvas.draw()  # fixes the layout, so that texts can be measured
        _label_points(axes, shown, heights, taken, canvas)
    return figure


def _time_axis(axes: Axes, rows: Sequence[Row], question: Question) -> None:
    """A log scale whose ticks are times that people say: 30 s, 2 min, 1 h."""
    ends = [end for row in rows for end in ((row.training.low,) if row.is_bound else _ends(row))]
    ends += [question.deadline] if question.deadline is not None else []
    low, high = min(ends) / 1.25, max(ends) * 1.25
    axes.set_xscale("log")
    axes.set_xlim(low, max(high, 4 * low))
    low, high = axes.get_xlim()
    gap, ticks = math.log(high / low) / _MOST_TICKS, [tick for tick in _TICKS if low <= tick <= high]
    spread = [
        tick for tick, before in zip(ticks, [0.0, *ticks], strict=False) if not before or math.log(tick / before) > gap
    ]
    axes.xaxis.set_major_locator(FixedLocator(spread))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: one_time(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    started = any(row.start_up for row in rows)
    start_up = f", with {one_time(question.start_up)} to start a device that is not here" if started else ""
    axes.set_xlabel(f"time to train{start_up}")
    if question.deadline is not None:
        axes.axvline(question.deadline, color=_LIMIT_COLOUR, linestyle="--", linewidth=1)
        text = f" deadline {one_time(question.deadline)}"
        side = "right" if question.deadline > math.sqrt(low * high) else "left"
        place = (question.deadline, 1.0)
        axes.text(
            *place, text, transform=axes.get_xaxis_transform(), ha=side, va="top", color=_LIMIT_COLOUR, fontsize=9
        )


def _ends(row: Row) -> tuple[float, float]:
    return row.training.low, row.training.high


def _device_axis(axes: Axes, rows: Sequence[Row], taken: str | None) -> None:
    """A line for each device, the fastest on top."""
    axes.set_yticks(range(len(rows)), [_name(row) for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row.label == taken else "normal")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)


def _cost_axis(axes: Axes, rows: Sequence[Row], question: Question) -> dict[str, tuple[float, float, float]]:
    """A log scale; what costs nothing stands on a line of its own below it. Returns where each device's ends stand."""
    paid = [row.cost for row in rows if row.cost is not None]
    ends = [end for row in rows if row.cost for end in (row.cost.low, row.cost.low if row.is_bound else row.cost.high)]
    ends += [question.budget] if question.budget is not None else []
    low, high = min(ends) / 1.5, max(ends) * 1.5
    free = low / max(1.3, (high / low) ** 0.12)
    has_free = len(paid) < len(rows)
    axes.set_yscale("log")
    axes.set_ylim(free / (low / free) if has_free else low, high)
    ticks = [value for value in LogLocator(subs=(1, 2, 5)).tick_values(low, high) if low <= value <= high]
    axes.yaxis.set_major_locator(FixedLocator([*([free] if has_free else []), *ticks]))
    prices = question.prices
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: "nothing" if value == free else prices.text(value)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("to pay for the training")
    if question.budget is not None:
        axes.axhline(question.budget, color=_LIMIT_COLOUR, linestyle="--", linewidth=1)
        text, place = f"budget {prices.text(question.budget)}", (0.995, question.budget)
        axes.text(
            *place, text, transform=axes.get_yaxis_transform(), ha="right", va="bottom", color=_LIMIT_COLOUR, fontsize=9
        )
    return {
        row.label: (row.cost.low, row.cost.middle, row.cost.high) if row.cost else (free, free, free) for row in rows
    }


def _draw(axes: Axes, row: Row, heights: tuple[float, float, float], taken: str | None) -> None:
    """The interval as a bar with a point in it; a bound is a hollow point with an arrow towards what it may take."""
    colour, times = _HOW[row.how], row.training
    if row.is_bound:
        start, rise = (times.low, heights[0]), 0 if heights[0] == heights[2] else 13
        arrow = {"arrowstyle": "<-", "color": colour, "linewidth": 1.2}
        axes.annotate("", start, (28, rise), textcoords="offset points", arrowprops=arrow, annotation_clip=False)
        axes.plot(*start, marker="o", markersize=7, markerfacecolor="white", markeredgecolor=colour, linestyle="none")
        return
    ends = [(times.low, times.high), (heights[0], heights[2])]
    axes.plot(*ends, color=colour, linewidth=6, alpha=0.35, solid_capstyle="butt")
    size = 10 if row.label == taken else 7
    edge = "black" if row.label == taken else colour
    axes.plot(
        times.middle, heights[1], marker="o", markersize=size, color=colour, markeredgecolor=edge, linestyle="none"
    )


def _name(row: Row) -> str:
    return f"{row.label} (here)" if row.here else row.label


def _label_points(
    axes: Axes,
    rows: Sequence[Row],
    heights: dict[str, tuple[float, float, float]],
    taken: str | None,
    canvas: FigureCanvasAgg,
) -> None:
    """The name of each device beside its point, at the first place where it covers no other name or point."""
    renderer = canvas.get_renderer()
    points = [(row.training.low, heights[row.label][0]) if row.is_bound else _middle(row, heights) for row in rows]
    covered = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in axes.transData.transform(points)]
    inside = axes.get_window_extent(renderer)
    for row, point in zip(rows, points, strict=True):
        best: tuple[int, Annotation] | None = None
        for x, y, align in _PLACES:
            weight = "bold" if row.label == taken else "normal"
            text = axes.annotate(
                _name(row), point, (x, y), textcoords="offset points", ha=align, fontsize=9, fontweight=weight
            )
            box = text.get_window_extent(renderer)
            hits = sum(box.overlaps(other) for other in covered)
            hits += 0 if inside.containsx(box.x0) and inside.containsx(box.x1) else 2
            if best is None or hits < best[0]:
                if best is not None:
                    best[1].remove()
                best = hits, text
            else:
                text.remove()
        if best is not None:
            covered.append(best[1].get_window_extent(renderer))


def _middle(row: Row, heights: dict[str, tuple[float, float, float]]) -> tuple[float, float]:
    return row.training.middle, heights[row.label][1]


def _legend(figure: Figure, rows: Sequence[Row], taken: str | None) -> None:
    """What the colours mean, of those that are there, and the ring around the recommended device."""
    found = [how for how in _HOW if any(row.how == how for row in rows)]
    handles = [
        Line2D(
            [], [], marker="o", linestyle="none", color=_HOW[how], markerfacecolor="white" if how == "bound" else None
        )
        for how in found
    ]
    names = [_EXPLAINED[how] for how in found]
    if any(row.label == taken for row in rows):
        handles.append(
            Line2D([], [], marker="o", markersize=9, linestyle="none", color="white", markeredgecolor="black")
        )
        names.append("recommended")
    figure.legend(handles, names, loc="outside lower center", ncols=len(names))
