"""The plots of a sweep, each drawn once and kept as PNG and as SVG: rates, utilisation, parts of a step, memory, training.

All but two are of one kind: a series for each group against the batch size. What is drawn of a run has the id `run-<n>`
with its number among the runs of the report (`run-<n>_<m>` for several), by which the page picks runs.
"""

import io
import math
import statistics
import textwrap
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..records.formatting import significant
from ..records.metrics import FRACTION, metric
from ..records.step_parts import PARTS
from . import plot_style as style
from .answer import Answer
from .curves import draw_curves
from .groups import Group, SweepResults
from .table import BUSY
from .target_plot import draw_time_to_target

CAPTIONS = {
    "throughput": "Samples per second against batch size",
    "utilisation": "MFU, the useful part of the device, and the time in which it is busy, against batch size",
    "step_time": "The parts of the mean step, and its time",
    "memory": "Peak memory against batch size",
    "time_to_target": "Training time to the target against batch size, and its factors: time and number of samples",
    "accuracy": "The quality of the trained networks against batch size",
    "validation": "The validation metric of each run in the course of its training",
}
_HEIGHT = 3.8  # inches
_MOST_PANELS = 9
_SOFTWARE = "batchscope report"  # in each PNG, by which a report knows its own pictures


@dataclass(frozen=True)
class Picture:
    """A plot in both formats."""

    png: bytes
    svg: str


@dataclass(frozen=True)
class _Series:
    """A number of a group by batch size; `ends` are those of intervals, `open_` the sizes that are not known well."""

    group: Group
    values: Mapping[int, float]
    ends: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    open_: Collection[int] = ()
    ringed: int | None = None
    dashed: bool = False


def draw(sweep: SweepResults, answers: Sequence[Answer], metrics: Sequence[str]) -> dict[str, Picture]:
    """Every plot that has data, by its name."""
    groups = [group for group in sweep.groups if len(group.sizes) > 1]
    numbers = {id(run): number for number, run in enumerate(sweep.runs)}
    with rc_context(style.RC), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # letters that the font lacks
        looks = {id(group): style.look_of(number) for number, group in enumerate(sweep.groups)}
        by_size = _BySize(looks, numbers)
        figures = {
            "throughput": by_size.throughput(groups, answers),
            "utilisation": by_size.utilisation(groups),
            "step_time": _step_time(groups, numbers),
            "memory": by_size.memory(groups),
            "time_to_target": draw_time_to_target(answers, looks, numbers),
            "accuracy": by_size.accuracy(groups, metrics[0]) if metrics else None,
            "validation": draw_curves(sweep, looks, numbers),
        }
        return {name: _saved(figure) for name, figure in figures.items() if figure is not None}


def _saved(figure: Figure) -> Picture:
    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": _SOFTWARE})
    figure.set_layout_engine("none")  # the layout is found, and stays
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return Picture(png.getvalue(), svg.getvalue().decode())


def remove_stale(folder: Path, keep: Collection[str]) -> None:
    """Remove the pictures of an earlier report that this one does not have; other pictures stay."""
    for name in (name for name in CAPTIONS if name not in keep):
        path = folder / f"{name}.png"
        if path.is_file() and _SOFTWARE.encode() in path.read_bytes()[:512]:
            path.unlink()


class _BySize:
    """Figures with a series for each group against the batch size."""

    def __init__(self, looks: Mapping[int, tuple[str, str]], numbers: Mapping[int, int]):
        self._looks = looks  # colour and marker, by the id of a group
        self._numbers = numbers  # by the id of a run

    def throughput(self, groups: Sequence[Group], answers: Sequence[Answer]) -> Figure | None:
        """Samples/s with their intervals; the recommended size has a ring."""
        found = {id(answer.group): answer for answer in answers}
        series = []
        for group in groups:
            rates, known = group.rates, found.get(id(group))
            reach = {size: rates.reach(size) for size in group.sizes}
            values = {size: rates.rate(size) for size in group.sizes}
            ends = {s: (values[s] / (1 + r), values[s] * (1 + r)) for s, r in reach.items() if r < 1}
            vague = known.vague if known else [size for size, r in reach.items() if not r < 1]
            series.append(_Series(group, values, ends, vague, known.size if known else None))
        figure = self._figure(series, "samples/s", "Throughput, with 90 % intervals")
        if figure is None:
            return None
        heights = [h for one in series for h in (*one.values.values(), *np.ravel([*one.ends.values()]))]
        figure.axes[0].set_ylim(min(heights) / 1.4, max(heights) * 1.4)
        style.log_axis(figure.axes[0])
        dot = {"ls": "", "marker": "o"}
        marks = [Line2D([], [], mfc="white", mec=style.GREY, label="not known to ± 10 %", **dot)]
        marks += [Line2D([], [], ms=12, mfc="none", mec="black", label="recommended", **dot)]
        used = [any(one.open_ for one in series), any(one.ringed for one in series)]
        _legend_above(figure, [mark for mark, is_used in zip(marks, used, strict=True) if is_used])
        return figure

    def utilisation(self, groups: Sequence[Group]) -> Figure | None:
        """The useful part of the device (MFU) and the time in which it is busy, in one picture."""
        series = [_Series(g, {s: 100 * v for s, v in g.medians("mfu").items()}) for g in groups]
        series += [_Series(g, g.medians(BUSY[g.device != "cpu"]), dashed=True) for g in groups]
        figure = self._figure(series, "%", "How much of the device is used")
        if figure is None:
            return None
        figure.axes[0].set_ylim(0, max(105, *(v for one in series for v in one.values.values())))
        words = {"cpu": "processor time", "": "time in which a kernel ran"}
        busy = dict.fromkeys(words["cpu" if group.device == "cpu" else ""] for group in groups)
        useful = Line2D([], [], color=style.GREY, label="useful: MFU, of the measured peak")
        _legend_above(figure, [useful, Line2D([], [], color=style.GREY, ls="--", label=f"busy: {' or '.join(busy)}")])
        return figure

    def memory(self, groups: Sequence[Group]) -> Figure | None:
        """Peak memory, from 0."""
        figure = self._figure([_Series(g, g.medians("memory_peak_gib")) for g in groups], "GiB", "Peak memory")
        if figure is not None:
            figure.axes[0].set_ylim(0, 1.1 * figure.axes[0].dataLim.y1)
        return figure

    def accuracy(self, groups: Sequence[Group], key: str) -> Figure | None:
        """A metric; where runs repeat each other the mean, with a bar of one standard deviation to each side."""
        scale = 100 if metric(key).unit == FRACTION else 1
        series = []
        for group in groups:
            found = {s: [scale * r.metrics[key] for r in runs if key in r.metrics] for s, runs in group.sizes.items()}
            means = {size: statistics.fmean(values) for size, values in found.items() if values}
            spread = {size: statistics.stdev(values) for size, values in found.items() if len(values) > 1}
            series.append(_Series(group, means, {s: (means[s] - sd, means[s] + sd) for s, sd in spread.items()}))
        title = f"{key}, mean ± standard deviation" if any(one.ends for one in series) else key
        return self._figure(series, f"{key}, %" if scale == 100 else key, title)

    def _figure(self, series: Sequence[_Series], unit: str, title: str) -> Figure | None:
        series = [one for one in series if one.values]
        if not any(len(one.values) > 1 for one in series):
            return None
        figure = style.new_figure(_HEIGHT, style.REPORT_WIDTH)
        axes = figure.subplots()
        for one in series:
            self._draw(axes, one)
        style.size_axis(axes, (size for one in series for size in one.values))
        axes.set(ylabel=unit, title=title)
        style.legend_below(figure, axes)
        return figure

    def _draw(self, axes: Axes, series: _Series) -> None:
        colour, marker = self._looks[id(series.group)]
        size_of_marker = 4.5 if series.dashed else 6.5
        line = "--" if series.dashed else "-"
        if not series.dashed:
            axes.plot([], [], color=colour, marker=marker, ms=size_of_marker, lw=1.2, label=series.group.label)
        axes.plot(*zip(*series.values.items(), strict=True), color=colour, ls=line, lw=1.2, alpha=0.6)
        for size, value in series.values.items():
            gid = style.gid_of(self._numbers[id(run)] for run in series.group.sizes[size])
            if size in series.ends:
                axes.vlines(size, *series.ends[size], color=colour, lw=1.4, gid=gid)
            fill = "white" if series.dashed or size in series.open_ else colour
            shape = {"ls": "", "marker": marker, "ms": size_of_marker, "mec": colour, "mfc": fill}
            axes.plot(size, value, gid=gid, zorder=4, **shape)
            if size == series.ringed:
                axes.plot(size, value, ls="", marker="o", ms=14, mfc="none", mec="black", zorder=5, gid=gid)


def _legend_above(figure: Figure, handles: Sequence[Line2D]) -> None:
    if handles:
        figure.legend(handles=handles, loc="outside upper right", ncols=2)


def _step_time(groups: Sequence[Group], numbers: Mapping[int, int]) -> Figure | None:
    """The parts of a mean step as shares of it; a panel for each group."""
    parts = [(group, [group.medians(f"{part}_ms_mean") for part in PARTS]) for group in groups]
    shown = [(group, of_part) for group, of_part in parts if len(of_part[0]) > 1][:_MOST_PANELS]
    if not shown:
        return None
    columns = 2 if len(shown) == 4 else min(3, len(shown))
    lines = -(-len(shown) // columns)
    figure = style.new_figure(1.2 + 2.4 * lines, style.REPORT_WIDTH)
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    for axes, (group, of_part) in zip(panels, shown, strict=False):
        _draw_bars(axes, group, of_part, numbers, most=(9, 5, 3)[columns - 1])
        name = textwrap.fill(style.shortened(group.label, 140 // columns), 70 // columns)
        axes.set_title(name if len(shown) > 1 else "The parts of the mean step, and its time")
    for axes in panels[::columns]:
        axes.set_ylabel("share of the mean step, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _draw_bars(
    axes: Axes, group: Group, of_part: Sequence[Mapping[int, float]], numbers: Mapping[int, int], most: int
) -> None:
    """A bar for each size, with its mean step above; names at `most` of them."""
    sizes = list(of_part[0])
    every = math.ceil(len(sizes) / most)
    for at, size in enumerate(sizes):
        gid, bottom = style.gid_of(numbers[id(run)] for run in group.sizes[size]), 0.0
        step_ms = sum(of[size] for of in of_part)
        for part, colour, of in zip(PARTS, style.PART_COLOURS, of_part, strict=True):
            label: dict[str, Any] = {"label": part.replace("_", " ")} if at == 0 else {}
            height = 100 * of[size] / step_ms
            axes.bar(at, height, 0.82, bottom, color=colour, edgecolor="white", linewidth=0.5, gid=gid, **label)
            bottom += height
        if at % every == 0:
            text = f"{significant(step_ms)} ms"
            axes.annotate(text, (at, 101), ha="center", va="bottom", fontsize=7.5, color=style.GREY)
    axes.set_xticks(np.arange(len(sizes))[::every], [f"{size:,}" for size in sizes[::every]])
    axes.set(ylim=(0, 108), yticks=[0, 25, 50, 75, 100], xlabel="batch size")
    axes.grid(False)
