"""The roofline plot of an explanation: how fast each module computes, and how fast this device could.

A point is a module. Its x is FLOP for each byte that moves through main memory, its y is FLOP a second, its area its share
of the step. The device's memory bandwidth and its peaks are the roofs, as they were measured on this machine.
"""

import io
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from ..records.explanation import OWN_CODE, Cost, Explanation
from ..records.formatting import count, percent, with_prefix
from .plot_style import COLOURS, GREY, RC, new_figure, plain_numbers, shortened

MOST = 8  # modules with a point; beyond the colours they share a grey
_DARK, _LIGHT = "#222222", "#BBBBBB"
_LONGEST = 32  # characters of a name
_IN_CACHE = 5  # times the largest FLOP a byte stands what moves nothing through main memory
_LEAST_AREA = 20.0  # of a point, in square points, so that it can be seen
_AREA = 1600.0  # of a point that is the whole step


def roofline_png(step: Explanation) -> bytes | None:
    """The plot as a PNG; None where no roof or no FLOPs are known."""
    with rc_context(RC):
        figure, file = roofline(step), io.BytesIO()
        if figure is None:
            return None
        figure.savefig(file, format="png")
    return file.getvalue()


def roofline(step: Explanation) -> Figure | None:
    """The plot; None where no roof or no FLOPs are known."""
    roofs, bandwidth = step.roofs.flops_per_sec, step.roofs.bytes_per_sec
    modules = _without_prefix(step.modules(most=MOST + 4))
    rows = [row for row in modules if row.flops and row.seconds > 0][:MOST]
    if not roofs or not bandwidth or not step.is_timed or not rows:
        return None
    figure = new_figure(5.2)
    axes = figure.subplots()
    batch = f", batches of {step.batch_size:,}" if step.batch_size else ""
    threads = f", {count(step.threads, 'thread')}" if step.threads else ""
    title = f"{step.title}{batch}, {step.precision} on {step.device_name}{threads}: roofline of a step"
    axes.set_title(textwrap.fill(title, 75))
    _draw_points(axes, rows, step, max(roofs.values()) / bandwidth)
    _draw_roofs(axes, roofs, bandwidth, {cost.dtype for cost in step.operations if cost.flops})
    axes.set(xscale="log", yscale="log", xlabel="FLOP for each byte through main memory", ylabel="FLOP/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(numticks=9))
        axis.set_minor_locator(NullLocator())
        plain_numbers(axis)
    figure.legend(loc="outside right upper", labelspacing=0.9)
    return figure


def _without_prefix(rows: Sequence[Cost]) -> list[Cost]:
    """The rows without the first names that all modules share, such as the attribute that holds the network."""
    paths = [row.module.split(".") for row in rows if row.part != "optimizer" and row.module != OWN_CODE]
    shared = min([len(os.path.commonprefix(paths)), *(len(path) - 1 for path in paths)]) if paths else 0
    inner = {".".join(path): ".".join(path[shared:]) for path in paths}
    return [replace(row, module=inner.get(row.module, row.module)) for row in rows]


def _draw_points(axes: Axes, rows: Sequence[Cost], step: Explanation, ridge: float) -> None:
    """The step and its modules; what moves nothing through main memory stands at the right edge."""
    whole = replace(step.total, seconds=step.step_seconds)
    edge = _IN_CACHE * max([ridge, *(row.flops / row.cold_bytes for row in (whole, *rows) if row.cold_bytes)])
    colours = [*COLOURS, *[GREY] * MOST]
    for row, colour in zip(rows, colours, strict=False):
        share = row.seconds / step.step_seconds
        place = "" if row.cold_bytes else ", in cache"
        label = f"{shortened(row.module, _LONGEST)}  {percent(share) if share >= 0.005 else '< 1 %'}{place}"
        x, area = row.flops / row.cold_bytes if row.cold_bytes else edge, max(_LEAST_AREA, _AREA * share)
        axes.scatter(x, row.flops / row.seconds, s=area, color=colour, edgecolor="white", lw=0.8, zorder=5)
        axes.plot([], [], ls="", marker="o", color=colour, label=label)
    x = whole.flops / whole.cold_bytes if whole.cold_bytes else edge
    mark = {"ls": "", "marker": "D", "ms": 8, "mfc": "white", "mec": _DARK, "mew": 2}
    axes.plot(x, whole.flops / whole.seconds, zorder=7, label="the step", **mark)


def _draw_roofs(axes: Axes, roofs: Mapping[str, float], bandwidth: float, used: set[str]) -> None:
    """The slope of the memory, and each peak from its ridge on; what the step uses is dark."""
    left = min(axes.dataLim.x0, min(roofs.values()) / bandwidth) / 5
    right = max(axes.dataLim.x1, max(roofs.values()) / bandwidth) * 2
    highest = max(peak for name, peak in roofs.items() if name in used or not used & roofs.keys())
    ends = [left, highest / bandwidth]
    memory = f"main memory: {with_prefix(bandwidth, 'B/s')}"
    axes.plot(ends, [end * bandwidth for end in ends], color=_DARK, lw=1.8, zorder=3, label=memory)
    for name, peak in sorted(roofs.items(), key=lambda item: -item[1]):
        colour, order = (_DARK, 4) if name in used else (_LIGHT, 2)
        style = {"color": colour, "lw": 1.8, "zorder": order, "ls": "-" if name in used else "--"}
        axes.plot([peak / bandwidth, right], [peak, peak], **style)
        text = f"{name}: {with_prefix(peak, 'FLOP/s')}"
        axes.annotate(
            text,
            (right, peak),
            (0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8.5,
            color=_DARK if name in used else GREY,
        )
    axes.set_xlim(left, right)
    axes.set_ylim(min([*roofs.values(), axes.dataLim.y0]) / 3, max(roofs.values()) * 2)
