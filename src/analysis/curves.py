"""A validation metric in the course of training, from the CSV file of a run; and the plot of all runs."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ..records.metrics import FRACTION, best_first, metric
from ..records.step_file import read_rows
from ..records.values import number
from . import plot_style as style
from .groups import SweepResults
from .run import Run


@dataclass(frozen=True)
class Curve:
    """A validation metric in the course of training; the lists have the same length."""

    metric: str  # such as `val/acc`
    seconds: list[float]  # training time, at the mean step: without validation and checkpoints
    samples: list[float]  # trained on by then
    values: list[float]


def read_curve(run: Run) -> Curve | None:
    """The curve of the run's most telling validation metric; None without one, or where no step was measured."""
    try:
        names, rows = read_rows(run.folder / "csv" / "metrics.csv")
    except OSError:
        return None
    step_ms = run.values.get("step_ms")
    for name in best_first(name for name in names if name.startswith("val/")):
        # Lightning logs a validation at the number of the update before it, counted from 0: one less than that of its step.
        points = {_number(row.get("step")) + 1: _number(row[name]) for row in rows}
        points = {step: points[step] for step in sorted(points) if math.isfinite(step + points[step])}
        if points and step_ms and run.global_batch_size and metric(name).higher_is_better is not None:
            samples = [run.samples_after(step) or 0.0 for step in points]
            return Curve(name, [step * step_ms / 1e3 for step in points], samples, list(points.values()))
    return None


def _number(text: str | None) -> float:
    """NaN for what is no number that can have been measured."""
    try:
        found = number(float(text or "nan"))
    except ValueError:
        found = None
    return math.nan if found is None else found


def draw_curves(sweep: SweepResults, looks: Mapping[int, tuple[str, str]], numbers: Mapping[int, int]) -> Figure | None:
    """The curves of all runs against time and against samples; None without a curve of two validations.

    Args:
        sweep: the runs.
        looks: colour and marker, by the id of a group.
        numbers: those of the runs, by the id of a run.
    """
    found = [(group, run, curve) for group in sweep.groups for run in group.runs if (curve := read_curve(run))]
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
