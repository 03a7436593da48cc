"""The plots of a sweep, each drawn once and kept as PNG and as SVG.

They show numbers of the table of sizes (table.py). What is drawn of a run has the id `run-<n>` with its number among
the runs of the report (`run-<n>_<m>` for several), by which the page picks runs.
"""

import io
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd
from matplotlib import rc_context, rcParams
from matplotlib.figure import Figure

from ..errors import cut
from ..records.formatting import significant
from ..records.metrics import FRACTION, metric
from ..records.rates import RATE
from ..records.step_parts import PARTS
from . import plot_style as style
from .groups import Group
from .run import Run
from .table import BUSY, PART_MS

if TYPE_CHECKING:
    from .report import Report

CAPTIONS = {
    "throughput": "Samples per second against batch size",
    "utilisation": "MFU, the useful part of the device, and the time in which it is busy, against batch size",
    "step_time": "The parts of the mean step, and its time",
    "memory": "Peak memory against batch size",
    "time_to_target": "Training time to the target against batch size, since the last validation below it",
    "accuracy": "The quality of the trained networks against batch size, mean ± standard deviation of repeated runs",
}
_MOST_PANELS = 6
_MOST_BARS_NAMED = 9
_LONGEST = 45  # characters of a label in a title
_Sized = Sequence[tuple[Group, pd.DataFrame, int | None]]  # groups, their tables of sizes, and the chosen sizes


@dataclass(frozen=True)
class Picture:
    """A plot in both formats."""

    png: bytes
    svg: str


def draw(report: "Report") -> dict[str, Picture]:
    """Every plot that has data, by its name."""
    with rc_context(style.RC), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # letters that the font lacks
        return {name: _saved(figure, name) for name, figure in figures(report).items()}


def figures(report: "Report") -> dict[str, Figure]:
    """The same before they are saved, in matplotlib's own style."""
    chosen = {id(answer.group): answer.size for answer in report.answers}
    pairs = zip(report.sweep.groups, report.tables, strict=True)
    groups = [(group, sizes, chosen.get(id(group))) for group, sizes in pairs if len(group.sizes) > 1]
    key = next(iter(report.metrics), "")
    unit = ", %" if metric(key).unit == FRACTION else ""
    found = {
        "throughput": _against_size(groups, [RATE], "samples/s, with 90 % intervals; ring: the answer", "log"),
        "utilisation": _against_size(groups, ["mfu", *BUSY], "MFU, and busy time (dashed), %", "from zero"),
        "step_time": _step_time(groups),
        "memory": _against_size(groups, ["memory_peak_gib"], "peak memory, GiB", "from zero"),
        "time_to_target": _against_size(groups, ["time_to_target_s"], "seconds of training to the target", "log"),
        "accuracy": _against_size(groups, [key], f"{key}{unit}, mean ± standard deviation"),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def _saved(figure: Figure, name: str) -> Picture:
    """The bytes of a figure. The name is in the ids of its SVG, so that those of several figures differ."""
    rcParams["svg.hashsalt"] = name
    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png")
    figure.set_layout_engine("none")  # the layout is found, and stays
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return Picture(png.getvalue(), svg.getvalue().decode())


def _look(group: Group) -> tuple[str, str]:
    """Colour and marker."""
    return style.COLOURS[group.number % len(style.COLOURS)], style.MARKERS[group.number % len(style.MARKERS)]


def _gid(runs: Iterable[Run]) -> str:
    """The id of what is drawn of some runs."""
    return f"run-{'_'.join(str(run.number) for run in runs)}"


def _against_size(
    groups: _Sized, names: Sequence[str], title: str, scale: Literal["log", "linear", "from zero"] = "linear"
) -> Figure | None:
    """Numbers of the tables of sizes, with their intervals, and a ring around the chosen size.

    A line for each group, dashed but for the first of `names`. None where no group has two sizes with the same number.
    """
    tables = ((name, group, chosen, _points(sizes, name)) for name in names for group, sizes, chosen in groups)
    lines = [line for line in tables if len(line[-1])]
    if not any(len(points) > 1 for *_, points in lines):
        return None
    figure = style.new_figure(3.8)
    axes = figure.subplots()
    for name, group, chosen, points in lines:
        colour, marker = _look(group)
        axes.plot(points.index, points["value"], color=colour, ls="-" if name == names[0] else "--")
        for size, value, low, high in points.itertuples():
            gid = _gid(group.sizes[size])
            axes.plot(size, value, ls="", marker=marker, color=colour, label=group.label, gid=gid)
            axes.vlines(size, low, high, color=colour, gid=gid)
            if size == chosen and name == names[0]:
                axes.plot(size, value, ls="", marker="o", ms=14, mfc="none", mec="black", gid=gid)
    style.size_axis(axes)
    axes.set_title(title)
    if scale == "from zero":
        axes.set_ylim(bottom=0)
    elif scale == "log":
        low, high = axes.dataLim.intervaly
        axes.set_ylim(low / 1.4, high * 1.4)
        style.log_axis(axes)
    style.legend_below(figure, axes)
    return figure


def _points(sizes: pd.DataFrame, name: str) -> pd.DataFrame:
    """The known numbers of a column by size: `value`, and its interval's ends, `low` and `high`; fractions in %."""
    if name not in sizes:
        return pd.DataFrame()
    value = low = high = sizes[name]
    if name == RATE:
        low, high = sizes["low"], sizes["high"]
    elif name == "time_to_target_s":  # a run that is at the target in its first validation was never seen below it
        low = sizes["not_reached_after_s"].clip(lower=value / 2)
    elif f"{name}_sd" in sizes:
        low, high = value - sizes[f"{name}_sd"], value + sizes[f"{name}_sd"]
    points = pd.DataFrame({"value": value, "low": low.fillna(value), "high": high.fillna(value)})
    return points.dropna() * (100 if metric(name).unit == FRACTION else 1)


def _step_time(groups: _Sized) -> Figure | None:
    """A panel for each group, with a bar for each size: the shares of the parts, above the time of the mean step."""
    tables = ((group, sizes[list(PART_MS)].dropna()) for group, sizes, _ in groups)
    shown = [(group, parts_ms) for group, parts_ms in tables if len(parts_ms) > 1][:_MOST_PANELS]
    if not shown:
        return None
    figure = style.new_figure(1 + 2.2 * len(shown))
    panels = figure.subplots(len(shown), 1, squeeze=False).ravel()
    for axes, (group, parts_ms) in zip(panels, shown, strict=True):
        step_ms, x = parts_ms.sum(axis="columns"), np.arange(len(parts_ms))
        every, bottom = math.ceil(len(x) / _MOST_BARS_NAMED), np.zeros(len(x))
        for part, column, colour in zip(PARTS, PART_MS, style.PART_COLOURS, strict=True):
            heights = (100 * parts_ms[column] / step_ms).to_numpy()
            bars = axes.bar(x, heights, 0.82, bottom, color=colour, label=part.replace("_", " "))
            for bar, size in zip(bars, parts_ms.index, strict=True):
                bar.set_gid(_gid(group.sizes[size]))
            bottom += heights
        names = [f"{size:,}\n{significant(ms)} ms" for size, ms in step_ms.items()]
        axes.set_xticks(x[::every], names[::every])
        axes.set(title=f"{cut(group.label, _LONGEST)}: % of the mean step", xlabel="batch size", ylim=(0, 100))
        axes.grid(visible=False)
    style.legend_below(figure, panels[0])
    return figure
