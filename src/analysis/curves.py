"""A validation metric against training time and samples, from the step file of a run; and the plot of all of them."""

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

_Row = dict[str, float]


@dataclass(frozen=True)
class Curve:
    """A validation metric in the course of training; the lists have the same length."""

    metric: str  # such as `val/acc`
    seconds: list[float]  # training time, without validation and checkpoints
    samples: list[float]  # trained on by then
    values: list[float]


def read_curve(run: Run) -> Curve | None:
    """The curve of the run's most telling validation metric; None without a step file, a validation or step times."""
    try:
        names, texts = read_rows(run.folder / "csv" / "metrics.csv")
    except OSError:
        return None
    if not any(name.startswith("val/") for name in names):
        return None
    rows = sorted((row for row in map(_numbers, texts) if "step" in row), key=lambda row: row["step"])
    validated = [n for n in best_first(name for name in names if name.startswith("val/")) if any(n in r for r in rows)]
    name = next((n for n in validated if metric(n).higher_is_better is not None), None)
    if name is None or run.global_batch_size is None:
        return None
    # Lightning logs a validation at the number of the update before it, counted from 0: one less than that of its step.
    points = {row["step"] + 1: row[name] for row in rows if name in row}
    seconds = _seconds_at(list(points), rows, run.values.get("step_ms"))
    if seconds is None:
        return None
    return Curve(name, seconds, [run.samples_after(step) or 0.0 for step in points], list(points.values()))


def _numbers(texts: dict[str, str]) -> _Row:
    found: _Row = {}
    for name, text in texts.items():
        try:
            value = number(float(text))
        except ValueError:
            continue
        if value is not None:
            found[name] = value
    return found


def _seconds_at(wanted: list[float], rows: list[_Row], mean_step_ms: float | None) -> list[float] | None:
    """Training time at some steps. A logged step time counts for the steps since the one logged before it."""
    steps, seconds = [0.0], [0.0]
    for row in rows:
        if "time/step_ms" in row:
            seconds.append(seconds[-1] + (row["step"] - steps[-1]) * row["time/step_ms"] / 1e3)
            steps.append(row["step"])
    if steps[-1] < wanted[-1]:  # not logged: the mean step counts
        if not mean_step_ms and not steps[-1]:
            return None
        mean = mean_step_ms / 1e3 if mean_step_ms else seconds[-1] / steps[-1]
        seconds.append(seconds[-1] + (wanted[-1] - steps[-1]) * mean)
        steps.append(wanted[-1])
    return [float(s) for s in np.interp(wanted, steps, seconds)]


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
        colour, marker = looks[id(group)]
        label = group.label
        if by_size:
            colour, marker, label = shades[run.batch_size or 0], "o", f"{run.batch_size:,}"
        gid = style.gid_of([numbers[id(run)]])
        for axes, x in ((left, curve.seconds), (right, curve.samples)):
            axes.plot(x, curve.values, color=colour, marker=marker, ms=3.5, lw=1.2, alpha=0.9, label=label, gid=gid)
    _label_axes(figure, name, [curve for *_, curve in shown])
    style.legend_below(figure, left, "batch size" if by_size else None)
    return figure


def _label_axes(figure: Figure, name: str, curves: list[Curve]) -> None:
    left, right = figure.axes
    left.set_title(f"{name} of every run")
    left.set_ylabel(name)
    if metric(name).unit == FRACTION:
        left.set_ylabel(f"{name}, %")
        left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}"))
    elif min(value for curve in curves for value in curve.values) > 0:
        style.log_axis(left)
    style.wide_axis(left, (s for curve in curves for s in curve.seconds))
    style.wide_axis(right, (s for curve in curves for s in curve.samples))
    left.set_xlabel("seconds of training")
    right.set_xlabel("samples seen")
