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

CAPTIONS = {
    "throughput": "Samples per second against batch size",
    "utilisation": "MFU, the useful part of the device, and the time in which it is busy, against batch size",
    "step_time": "The parts of a step",
    "memory": "Peak memory against batch size",
    "accuracy": "The quality of the trained networks against batch size",
    "validation": "The validation metric of each run in the course of its training",
}
_OF_EARLIER_VERSIONS = ("device",)
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
    found: dict[str, Picture] = {}
    with rc_context(style.RC), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # letters that the font lacks
        looks = {id(group): style.look_of(number) for number, group in enumerate(sweep.groups)}
        by_size = _BySize(looks, numbers)
        figures = {
            "throughput": by_size.throughput(groups, answers),
            "utilisation": by_size.utilisation(groups),
            "step_time": _step_time(groups, numbers),
            "memory": by_size.memory(groups),
            "accuracy": by_size.accuracy(groups, metrics),
            "validation": draw_curves(sweep, looks, numbers),
        }
        for name, figure in figures.items():
            if figure is not None:
                found[name] = _saved(figure)
    return found


def _saved(figure: Figure) -> Picture:
    png, svg = io.BytesIO(), io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": _SOFTWARE})
    figure.set_layout_engine("none")  # the layout is found, and stays
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return Picture(png.getvalue(), svg.getvalue().decode())


def remove_stale(folder: Path, keep: Collection[str]) -> None:
    """Remove the pictures of an earlier report that this one does not have; other pictures stay."""
    for name in (*CAPTIONS, *_OF_EARLIER_VERSIONS):
        path = folder / f"{name}.png"
        if name not in keep and path.is_file() and _SOFTWARE.encode() in path.read_bytes()[:512]:
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
        figure = self._figure(series, "samples/s", "Throughput, with 90 % intervals", 3.9)
        if figure is None:
            return None
        axes = figure.axes[0]
        heights = [
            v for one in series for v in (*one.values.values(), *(end for ends in one.ends.values() for end in ends))
        ]
        axes.set_ylim(min(heights) / 1.4, max(heights) * 1.4)
        style.log_axis(axes)
        marks = []
        if any(one.open_ for one in series):
            marks.append(Line2D([], [], ls="", marker="o", mfc="white", mec=style.GREY, label="not known to ± 10 %"))
        if any(one.ringed for one in series):
            ring = {"ls": "", "marker": "o", "ms": 12, "mfc": "none", "mec": "black"}
            marks.append(Line2D([], [], label="recommended", **ring))
        if marks:
            figure.legend(handles=marks, loc="outside upper right", ncols=2)
        return figure

    def utilisation(self, groups: Sequence[Group]) -> Figure | None:
        """The useful part of the device (MFU) and the time in which it is busy, in one picture."""
        useful = [_Series(g, {s: 100 * v for s, v in g.medians("mfu").items()}) for g in groups]
        busy = [_Series(g, g.medians(BUSY[g.device != "cpu"]), dashed=True) for g in groups]
        figure = self._figure([*useful, *busy], "%", "How much of the device is used", 3.9)
        if figure is None:
            return None
        figure.axes[0].set_ylim(0, max(105, *(v for one in (*useful, *busy) for v in one.values.values())))
        on_cpu = [group.device == "cpu" for group in groups]
        words = "processor time" if all(on_cpu) else "time in which a kernel ran"
        words = f"CPU: processor time, GPU: {words}" if any(on_cpu) and not all(on_cpu) else words
        handles = [
            Line2D([], [], color=style.GREY, label="useful: MFU, of the measured peak"),
            Line2D([], [], color=style.GREY, ls="--", label=f"busy: {words}"),
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=2)
        return figure

    def memory(self, groups: Sequence[Group]) -> Figure | None:
        """Peak memory, from 0."""
        series = [_Series(group, group.medians("memory_peak_gib")) for group in groups]
        figure = self._figure(series, "GiB", "Peak memory", 3.6)
        if figure is not None:
            figure.axes[0].set_ylim(0, 1.1 * max(v for one in series for v in one.values.values()))
        return figure

    def accuracy(self, groups: Sequence[Group], metrics: Sequence[str]) -> Figure | None:
        """The first metric; where runs repeat each other the mean, with a bar of one standard deviation to each side."""
        if not metrics:
            return None
        declared, series = metric(metrics[0]), []
        scale = 100 if declared.unit == FRACTION else 1
        for group in groups:
            found = {s: [scale * r.metrics[declared.key] for r in runs if declared.key in r.metrics]
                     for s, runs in group.sizes.items()}  # fmt: skip
            means = {size: statistics.fmean(values) for size, values in found.items() if values}
            spread = {size: statistics.stdev(values) for size, values in found.items() if len(values) > 1}
            ends = {size: (means[size] - sd, means[size] + sd) for size, sd in spread.items()}
            series.append(_Series(group, means, ends))
        title = f"{declared.key}{', mean ± standard deviation' if any(one.ends for one in series) else ''}"
        return self._figure(series, f"{declared.key}{', %' if scale == 100 else ''}", title, 3.6)

    def _figure(self, series: Sequence[_Series], unit: str, title: str, height: float) -> Figure | None:
        series = [one for one in series if one.values]
        if not any(len(one.values) > 1 for one in series):
            return None
        figure = style.new_figure(height, style.REPORT_WIDTH)
        axes = figure.subplots()
        for one in series:
            self._draw(axes, one)
        style.size_axis(axes, (size for one in series for size in one.values))
        axes.set_ylabel(unit)
        axes.set_title(title)
        style.legend_below(figure, axes)
        return figure

    def _draw(self, axes: Axes, series: _Series) -> None:
        colour, marker = self._looks[id(series.group)]
        line = "--" if series.dashed else "-"
        label: dict[str, Any] = {} if series.dashed else {"label": series.group.label}
        axes.plot(*zip(*series.values.items(), strict=True), color=colour, ls=line, lw=1.2, alpha=0.6)
        for number, (size, value) in enumerate(series.values.items()):
            gid = style.gid_of(self._numbers[id(run)] for run in series.group.sizes[size])
            if size in series.ends:
                axes.vlines(size, *series.ends[size], color=colour, lw=1.4, gid=gid)
            fill = "white" if series.dashed or size in series.open_ else colour
            shape: dict[str, Any] = {
                "ls": "",
                "marker": marker,
                "ms": 4.5 if series.dashed else 6.5,
                "mec": colour,
                "mfc": fill,
            }
            axes.plot(size, value, gid=gid, zorder=4, color=colour, **shape, **(label if number == 0 else {}))
            if size == series.ringed:
                axes.plot(size, value, ls="", marker="o", ms=14, mfc="none", mec="black", zorder=5, gid=gid)


def _step_time(groups: Sequence[Group], numbers: Mapping[int, int]) -> Figure | None:
    """The shares of the parts of a mean step; a panel for each group."""
    shown = [(group, shares) for group in groups if len(shares := _shares(group)) > 1][:_MOST_PANELS]
    if not shown:
        return None
    columns = 2 if len(shown) == 4 else min(3, len(shown))
    lines = -(-len(shown) // columns)
    figure = style.new_figure(1.2 + 2.4 * lines, style.REPORT_WIDTH)
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    for axes, (group, shares) in zip(panels, shown, strict=False):
        _draw_bars(axes, group, shares, numbers, most=(9, 5, 3)[columns - 1])
        name = textwrap.fill(style.shortened(group.label, 140 // columns), 70 // columns)
        axes.set_title(name if len(shown) > 1 else "The parts of a step; above: the median step")
    for axes in panels[::columns]:
        axes.set_ylabel("share of the mean step, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _shares(group: Group) -> dict[int, list[float]]:
    """By size, the shares of the parts in %."""
    series = [group.medians(f"{part}_ms_mean") for part in PARTS]
    parts = {size: [of[size] for of in series] for size in series[0]}
    return {size: [100 * ms / sum(found) for ms in found] for size, found in parts.items() if sum(found) > 0}


def _draw_bars(axes: Axes, group: Group, shares: dict[int, list[float]], numbers: Mapping[int, int], most: int) -> None:
    medians, every = group.medians("step_ms_median"), math.ceil(len(shares) / most)
    for at, (size, heights) in enumerate(shares.items()):
        gid, bottom = style.gid_of(numbers[id(run)] for run in group.sizes[size]), 0.0
        for part, colour, height in zip(PARTS, style.PART_COLOURS, heights, strict=True):
            label: dict[str, Any] = {"label": part.replace("_", " ")} if at == 0 else {}
            axes.bar(at, height, 0.82, bottom, color=colour, edgecolor="white", linewidth=0.5, gid=gid, **label)
            bottom += height
        if at % every == 0 and size in medians:
            text = f"{significant(medians[size])} ms"
            axes.annotate(text, (at, 101), ha="center", va="bottom", fontsize=7.5, color=style.GREY)
    axes.set_xticks(np.arange(len(shares))[::every], [f"{size:,}" for size in list(shares)[::every]])
    axes.set_ylim(0, 108)
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.set_xlabel("batch size")
    axes.grid(False)
