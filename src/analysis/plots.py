"""The plots of a sweep, each drawn once and kept as PNG and as SVG: rates, utilisation, parts of a step, memory, training.

All but two are of one kind: a series for each group against the batch size. What is drawn of a run has the id `run-<n>`
with its number among the runs of the report (`run-<n>_<m>` for several), by which the page picks runs.
"""

import io
import math
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps, rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..records.formatting import significant
from ..records.metrics import FRACTION, metric
from ..records.rates import RATE
from ..records.step_parts import PARTS
from . import plot_style as style
from .answer import Answer
from .groups import Group, SweepResults
from .run import Run
from .table import BUSY
from .text import HARDLY, KNOWN

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
_MOST_PANELS = 6
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


def draw(
    sweep: SweepResults, tables: Sequence[pd.DataFrame], answers: Sequence[Answer], metrics: Sequence[str]
) -> dict[str, Picture]:
    """Every plot that has data, by its name."""
    with rc_context(style.RC), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # letters that the font lacks
        return {name: _saved(figure, name) for name, figure in figures(sweep, tables, answers, metrics).items()}


def figures(
    sweep: SweepResults, tables: Sequence[pd.DataFrame], answers: Sequence[Answer], metrics: Sequence[str]
) -> dict[str, Figure]:
    """The same before they are saved, in matplotlib's own style."""
    groups = [(group, sizes) for group, sizes in zip(sweep.groups, tables, strict=True) if len(group.sizes) > 1]
    found = {
        "throughput": _throughput(groups, answers),
        "utilisation": _utilisation(groups),
        "step_time": _step_time([group for group, _ in groups]),
        "memory": _memory(groups),
        "time_to_target": _time_to_target(answers),
        "accuracy": _accuracy(groups, metrics[0]) if metrics else None,
        "validation": _validation(sweep),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def _saved(figure: Figure, name: str) -> Picture:
    """The bytes of a figure. The name is in the ids of its SVG, so that those of several figures differ."""
    rcParams["svg.hashsalt"] = name
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


# --- a series for each group against the batch size -----------------------------------------------------------------


_Groups = Sequence[tuple[Group, pd.DataFrame]]  # with their tables of sizes, see table.py


def _values(sizes: pd.DataFrame, name: str, scale: float = 1.0) -> dict[int, float]:
    """The known numbers of a column, by size."""
    return (scale * sizes[name].dropna()).to_dict() if name in sizes else {}


def _ends(low: pd.Series, high: pd.Series) -> dict[int, tuple[float, float]]:
    """Both ends of the intervals that are known, by size."""
    known = pd.DataFrame({"low": low, "high": high}).dropna()
    return {int(str(size)): (row["low"], row["high"]) for size, row in known.iterrows()}


def _throughput(groups: _Groups, answers: Sequence[Answer]) -> Figure | None:
    """Samples/s with their intervals; the chosen size has a ring."""
    chosen = {id(answer.group): answer.size for answer in answers}
    series = []
    for group, sizes in groups:
        known = sizes["high"] <= (1 + HARDLY) * sizes[RATE]  # a wider interval says nothing
        ends = _ends(sizes["low"][known], sizes["high"][known])
        values = _values(sizes, RATE)
        vague = [size for size in values if not sizes["high"][size] <= (1 + KNOWN) * values[size]]
        series.append(_Series(group, values, ends, vague, chosen.get(id(group))))
    figure = _against_size(series, "samples/s", "Throughput, with 90 % intervals")
    if figure is None:
        return None
    heights = [h for one in series for h in (*one.values.values(), *np.ravel([*one.ends.values()]))]
    figure.axes[0].set_ylim(min(heights) / 1.4, max(heights) * 1.4)
    style.log_axis(figure.axes[0])
    marks: dict[str, dict[str, Any]] = {}
    if any(one.open_ for one in series):
        marks["not known to ± 10 %"] = {"mfc": "white", "mec": style.GREY}
    if any(one.ringed for one in series):
        marks["chosen"] = {"ms": 12, "mfc": "none", "mec": "black"}
    style.legend_above(figure, {name: {"ls": "", "marker": "o", **look} for name, look in marks.items()})
    return figure


def _utilisation(groups: _Groups) -> Figure | None:
    """The useful part of the device (MFU) and the time in which it is busy, in one picture."""
    useful = [_Series(group, _values(sizes, "mfu", 100)) for group, sizes in groups]
    busy = [_Series(group, _values(sizes, BUSY[group.device != "cpu"]), dashed=True) for group, sizes in groups]
    figure = _against_size([*useful, *busy], "%", "How much of the device is used")
    if figure is not None:
        figure.axes[0].set_ylim(0, max(105, *(v for one in (*useful, *busy) for v in one.values.values())))
        words = {"useful: MFU, of the measured peak": (useful, "-"), "busy: processor or kernel time": (busy, "--")}
        lines = {name: line for name, (series, line) in words.items() if any(one.values for one in series)}
        style.legend_above(figure, {name: {"color": style.GREY, "ls": line} for name, line in lines.items()})
    return figure


def _memory(groups: _Groups) -> Figure | None:
    series = [_Series(group, _values(sizes, "memory_peak_gib")) for group, sizes in groups]
    figure = _against_size(series, "GiB", "Peak memory")
    if figure is not None:
        figure.axes[0].set_ylim(0, 1.1 * figure.axes[0].dataLim.y1)
    return figure


def _accuracy(groups: _Groups, key: str) -> Figure | None:
    """A metric; where runs repeat each other the mean, with a bar of one standard deviation to each side."""
    scale = 100 if metric(key).unit == FRACTION else 1
    series = []
    for group, sizes in (pair for pair in groups if key in pair[1]):
        mean, deviation = scale * sizes[key], scale * sizes[f"{key}_sd"]
        series.append(_Series(group, _values(sizes, key, scale), _ends(mean - deviation, mean + deviation)))
    title = f"{key}, mean ± standard deviation" if any(one.ends for one in series) else key
    return _against_size(series, f"{key}, %" if scale == 100 else key, title)


def _time_to_target(answers: Sequence[Answer]) -> Figure | None:
    """The time to the target, and its two factors: the time of a sample and the number of samples."""
    arrivals = [one.arrivals for one in answers if one.arrivals]
    if not arrivals:
        return None
    titles = first, second, third = (f"seconds to {arrivals[0].target}", "ms a sample", "samples")
    panels: dict[str, list[_Series]] = {title: [] for title in titles}
    for one in answers:
        found = {} if one.arrivals is None else one.arrivals.typical
        factors = (
            {size: arrival.seconds for size, arrival in found.items()},
            {size: 1e3 * arrival.seconds / arrival.samples for size, arrival in found.items()},
            {size: arrival.samples for size, arrival in found.items()},
        )
        ends = {size: (max(a.after, a.seconds / 2), a.seconds) for size, a in found.items()}
        for series, values in zip(panels.values(), factors, strict=True):
            series.append(_Series(one.group, values, ends if series is panels[first] else {}))
    if not any(one.values for series in panels.values() for one in series):
        return None
    figure = style.new_figure(4.2)
    axes = figure.subplot_mosaic([[first, second], [first, third]])
    for title, series in panels.items():
        _draw(axes[title], series, title, most=5)
    _draw_expected(axes[first], answers)
    for panel in axes.values():
        style.log_axis(panel)
    lines = {"by the noise scale": {"ls": ":"}, "not reached until then": {"ls": "", "marker": "^", "mfc": "white"}}
    style.legend_above(figure, {name: {"color": style.GREY, **look} for name, look in lines.items()})
    style.legend_below(figure, axes[first])
    return figure


def _draw_expected(axes: Axes, answers: Sequence[Answer]) -> None:
    """The times that follow from the first size's by the noise scale, and a triangle where a size has not arrived."""
    sizes: set[int] = set()
    for group, progress, arrivals in ((one.group, one.progress, one.arrivals) for one in answers):
        if arrivals is None or not arrivals.typical:
            continue
        colour, found = _look(group)[0], arrivals.typical
        first = min(found, key=lambda size: found[size].seconds)
        sizes.update(arrivals.sizes)
        if progress and first in progress.known:
            work = found[first].seconds * progress.goodput(first)
            expected = {size: work / progress.goodput(size) for size in progress.known}
            axes.plot(*zip(*expected.items(), strict=True), ls=":", lw=1.2, color=colour)
        for size, of_size in arrivals.sizes.items():
            if size not in found:
                until, gid = max(arrival.after for arrival in of_size.values()), _gid(group.sizes[size])
                axes.plot(size, until, ls="", marker="^", ms=6.5, mec=colour, mfc="white", zorder=4, gid=gid)
    style.size_axis(axes, sizes, 5)


def _against_size(series: Sequence[_Series], unit: str, title: str) -> Figure | None:
    """A figure of one panel; None where no series has two sizes."""
    if not any(len(one.values) > 1 for one in series):
        return None
    figure = style.new_figure(_HEIGHT)
    axes = figure.subplots()
    _draw(axes, series, title)
    axes.set_ylabel(unit)
    style.legend_below(figure, axes)
    return figure


def _draw(axes: Axes, series: Iterable[_Series], title: str, most: int = 9) -> None:
    """Draw each series, with a marker for each size; ticks at `most` sizes."""
    sizes: set[int] = set()
    for one in (one for one in series if one.values):
        colour, marker = _look(one.group)
        sizes.update(one.values)
        look = {"color": colour, "lw": 1.2, "ls": "--" if one.dashed else "-"}
        if not one.dashed:
            axes.plot([], [], marker=marker, ms=6.5, label=one.group.label, **look)
        axes.plot(*zip(*one.values.items(), strict=True), alpha=0.6, **look)
        for size, value in one.values.items():
            gid = _gid(one.group.sizes[size])
            if size in one.ends:
                axes.vlines(size, *one.ends[size], color=colour, lw=1.4, gid=gid)
            fill = "white" if one.dashed or size in one.open_ else colour
            shape = {"ls": "", "marker": marker, "ms": 4.5 if one.dashed else 6.5, "mec": colour, "mfc": fill}
            axes.plot(size, value, gid=gid, zorder=4, **shape)
            if size == one.ringed:
                axes.plot(size, value, ls="", marker="o", ms=14, mfc="none", mec="black", zorder=5, gid=gid)
    style.size_axis(axes, sizes, most)
    axes.set_title(title)


def _look(group: Group) -> tuple[str, str]:
    """Colour and marker."""
    return style.COLOURS[group.number % len(style.COLOURS)], style.MARKERS[group.number % len(style.MARKERS)]


def _gid(runs: Iterable[Run]) -> str:
    """The id of what is drawn of some runs."""
    return f"run-{'_'.join(str(run.number) for run in runs)}"


# --- the parts of a step, and the course of training ----------------------------------------------------------------


def _step_time(groups: Sequence[Group]) -> Figure | None:
    """A panel for each group, with a bar for each size."""
    times = [(group, pd.DataFrame({part: group.medians(f"{part}_ms_mean") for part in PARTS})) for group in groups]
    shown = [(group, parts_ms) for group, parts_ms in times if len(parts_ms) > 1][:_MOST_PANELS]
    if not shown:
        return None
    columns = min(2, len(shown))
    lines = -(-len(shown) // columns)
    figure = style.new_figure(1.2 + 2.4 * lines)
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    for axes, (group, parts_ms) in zip(panels, shown, strict=False):
        _draw_bars(axes, group, parts_ms, most=9 // columns)
        axes.set_title(style.shortened(group.label, 60 // columns))
    for axes in panels[::columns]:
        axes.set_ylabel("share of the mean step, %")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _draw_bars(axes: Axes, group: Group, parts_ms: pd.DataFrame, most: int) -> None:
    """A bar for each size, with its mean step above; names at `most` of them."""
    step_ms, x = parts_ms.sum(axis="columns"), np.arange(len(parts_ms))
    every, bottom = math.ceil(len(x) / most), np.zeros(len(x))
    look = {"edgecolor": "white", "linewidth": 0.5}
    for part, colour in zip(PARTS, style.PART_COLOURS, strict=True):
        heights = (100 * parts_ms[part] / step_ms).to_numpy()
        bars = axes.bar(x, heights, 0.82, bottom, color=colour, label=part.replace("_", " "), **look)
        for bar, size in zip(bars, parts_ms.index, strict=True):
            bar.set_gid(_gid(group.sizes[size]))
        bottom += heights
    for at, ms in list(enumerate(step_ms))[::every]:
        axes.annotate(f"{significant(ms)} ms", (at, 101), ha="center", va="bottom", fontsize=7.5, color=style.GREY)
    axes.set_xticks(x[::every], [f"{size:,}" for size in parts_ms.index[::every]])
    axes.set(ylim=(0, 108), yticks=[0, 25, 50, 75, 100], xlabel="batch size")
    axes.grid(False)


def _validation(sweep: SweepResults) -> Figure | None:
    """The curves of all runs against time and against samples; None without a curve of two validations."""
    found = [(group, run, curve) for group in sweep.groups for run in group.runs if (curve := run.curve) is not None]
    names = Counter(curve.attrs["metric"] for *_, curve in found)
    name = max(names, key=lambda name: (names[name], name), default="")
    shown = [(group, run, curve) for group, run, curve in found if curve.attrs["metric"] == name]
    shown.sort(key=lambda each: (each[0].number, each[1].batch_size or 0))
    if not any(len(curve) > 1 for *_, curve in shown):
        return None
    sizes = sorted({run.batch_size or 0 for _, run, _ in shown})
    by_size = len({group.number for group, *_ in shown}) == 1 and len(sizes) > 1
    shades = dict(zip(sizes, colormaps["viridis"](np.linspace(0, 0.88, len(sizes))), strict=True))
    scale, unit = (100, ", %") if metric(name).unit == FRACTION else (1, "")
    figure = style.new_figure(3.7)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, x in zip(panels, ("seconds", "samples"), strict=True):
        for group, run, curve in shown:
            colour, marker = (shades[run.batch_size or 0], "o") if by_size else _look(group)
            label = f"{run.batch_size:,}" if by_size else group.label
            look = {"color": colour, "marker": marker, "ms": 3.5, "lw": 1.2, "alpha": 0.9}
            axes.plot(curve[x], scale * curve["value"], label=label, gid=_gid([run]), **look)
        style.log_axis(axes, "x")
        axes.set_xlabel({"seconds": "seconds of training", "samples": "samples seen"}[x])
    panels[0].set(title=f"{name} of every run", ylabel=f"{name}{unit}")
    style.legend_below(figure, panels[0], "batch size" if by_size else None)
    return figure
