"""The plot of the time to a target against the batch size, with its two factors: the time and the number of samples."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from . import plot_style as style
from .answer import Answer
from .progress import Progress
from .target import Arrival, Arrivals

_PANELS = ("seconds to the target", "milliseconds a sample", "samples to the target")


def draw_time_to_target(
    answers: Sequence[Answer], looks: Mapping[int, tuple[str, str]], numbers: Mapping[int, int]
) -> Figure | None:
    """The arrivals of each group; None where no group of several sizes has reached a target.

    Args:
        answers: of the groups.
        looks: colour and marker, by the id of a group.
        numbers: those of the runs, by the id of a run.
    """
    shown = [
        (one, arrivals)
        for one in answers
        if (arrivals := one.arrivals) and len(arrivals.sizes) > 1 and _typical(arrivals)
    ]
    if not shown:
        return None
    figure = style.new_figure(4.2, style.REPORT_WIDTH)
    mosaic = figure.subplot_mosaic([[_PANELS[0], _PANELS[1]], [_PANELS[0], _PANELS[2]]])
    panels = [mosaic[name] for name in _PANELS]
    for one, arrivals in shown:
        colour, marker = looks[id(one.group)]
        panels[0].plot([], [], color=colour, marker=marker, label=f"{one.group.label}: {arrivals.target}")
        _draw(panels, arrivals, one.progress, colour, numbers, marker)
    sizes = [size for _, arrivals in shown for size in arrivals.sizes]
    for axes, name in zip(panels, _PANELS, strict=True):
        style.size_axis(axes, sizes, most=5)
        style.log_axis(axes)
        axes.set_title(name)
    for axes in panels:
        axes.set_xlim(panels[0].get_xlim())
    targets = {arrivals.target for _, arrivals in shown}
    panels[0].set_title(f"seconds to {targets.pop()}" if len(targets) == 1 else _PANELS[0])
    marks = [Line2D([], [], color=style.GREY, ls="", marker="^", mfc="white", label="ended without it")]
    if any(one.progress for one, _ in shown):
        marks.append(Line2D([], [], color=style.GREY, ls=":", label="by the noise scale"))
    figure.legend(handles=marks, loc="outside upper right", ncols=2)
    style.legend_below(figure, panels[0])
    return figure


def _typical(arrivals: Arrivals) -> dict[int, Arrival]:
    return {size: one for size in sorted(arrivals.sizes) if (one := arrivals.typical(size))}


def _factors(one: Arrival) -> tuple[float, float, float]:
    """Seconds, milliseconds a sample, and samples; those of a run that has not arrived are of its time without the target."""
    per_update, step_ms = one.run.global_batch_size, one.run.values.get("step_ms")
    each = step_ms / per_update if step_ms and per_update else math.nan
    return (one.seconds, each, one.samples) if one.reached else (one.after, each, math.nan)


def _draw(
    panels: Sequence[Axes],
    arrivals: Arrivals,
    progress: Progress | None,
    colour: str,
    numbers: Mapping[int, int],
    marker: str,
) -> None:
    typical = _typical(arrivals)
    for axes, *values in zip(panels, *map(_factors, typical.values()), strict=True):
        axes.plot(list(typical), values, color=colour, lw=1.2, alpha=0.6)
    for size, of_size in arrivals.sizes.items():
        for one in of_size.values():
            gid = style.gid_of([numbers[id(one.run)]])
            look: dict[str, Any] = {"ls": "", "ms": 6, "mec": colour, "zorder": 4, "gid": gid}
            look |= {"marker": marker, "mfc": colour} if one.reached else {"marker": "^", "mfc": "white"}
            for axes, value in zip(panels, _factors(one), strict=True):
                if value > 0:
                    axes.plot(size, value, **look)
            if one.reached:
                panels[0].vlines(size, max(one.after, one.seconds / 2), one.seconds, color=colour, lw=1.4, gid=gid)
    if progress and (both := [size for size in progress.known if size in typical]):
        best = min(both, key=lambda size: typical[size].seconds)
        for axes, of, at_best in (
            (panels[0], progress.goodput, typical[best].seconds),
            (panels[2], progress.efficiency, typical[best].samples),
        ):
            axes.plot(
                progress.known, [at_best * of(best) / of(s) for s in progress.known], color=colour, ls=":", lw=1.2
            )
