"""The plot of the validation metric of all runs in the course of their training."""

from collections import Counter
from collections.abc import Mapping

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ..records.metrics import FRACTION, metric
from . import plot_style as style
from .groups import SweepResults


def draw_curves(sweep: SweepResults, looks: Mapping[int, tuple[str, str]], numbers: Mapping[int, int]) -> Figure | None:
    """The curves of all runs against time and against samples; None without a curve of two validations.

    Args:
        sweep: the runs.
        looks: colour and marker, by the id of a group.
        numbers: those of the runs, by the id of a run.
    """
    found = [(group, run, curve) for group in sweep.groups for run in group.runs if (curve := run.curve)]
    names = Counter(curve.metric for *_, curve in found)
    name = max(names, key=lambda name: (names[name], name), default="")
    shown = [(group, run, curve) for group, run, curve in found if curve.metric == name]
    if not any(len(curve.values) > 1 for *_, curve in shown):
        return None
    sizes = sorted({run.batch_size or 0 for _, run, _ in shown})
    by_size = len({id(group) for group, *_ in shown}) == 1 and len(sizes) > 1
    shades = dict(zip(sizes, colormaps["viridis"](np.linspace(0, 0.88, len(sizes))), strict=True))
    figure = style.new_figure(3.7, style.REPORT_WIDTH)
    left, right = figure.subplots(1, 2, sharey=True)
    for group, run, curve in shown:
        colour, marker = (shades[run.batch_size or 0], "o") if by_size else looks[id(group)]
        label, gid = f"{run.batch_size:,}" if by_size else group.label, style.gid_of([numbers[id(run)]])
        for axes, x in ((left, curve.seconds), (right, curve.samples)):
            axes.plot(x, curve.values, color=colour, marker=marker, ms=3.5, lw=1.2, alpha=0.9, label=label, gid=gid)
    curves = [curve for *_, curve in shown]
    style.wide_axis(left, (seconds for curve in curves for seconds in curve.seconds))
    style.wide_axis(right, (samples for curve in curves for samples in curve.samples))
    left.set(title=f"{name} of every run", ylabel=name, xlabel="seconds of training")
    right.set_xlabel("samples seen")
    if metric(name).unit == FRACTION:
        left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    elif min(value for curve in curves for value in curve.values) > 0:
        style.log_axis(left)
    style.legend_below(figure, left, "batch size" if by_size else None)
    return figure
