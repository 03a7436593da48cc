"""The plots of a sweep, in three formats, and drawn once more for the page.

They show numbers of the table of sizes (table.py). One thing looks the same in all: a marker and a colour is a group, a bar an
interval, a ring the answer, and `?` what tables mark so. What is drawn of a run has the id `run-<n>` with its number among
the runs of the report (`run-<n>_<m>` for several), by which the page picks runs.
"""

import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..errors import cut
from ..records.formatting import significant
from ..records.metrics import FRACTION, metric
from ..records.rates import RATE
from ..records.step_parts import PARTS
from . import plot_style as style
from .anonymous import anonymous
from .answer import Answer
from .groups import Group
from .report import Picture, Report
from .run import Run
from .table import BUSY, PART_MS, STEP_MS, rate_reaches
from .text import KNOWN, VAGUE, and_, reach_text

CAPTIONS = {
    "throughput": "Samples per second against batch size",
    "accuracy": "What the trained networks reach against batch size",
    "utilisation": "MFU, and how busy the device is, against batch size",
    "step_time": "The parts of the mean step, and the time of a step with its 90 % interval",
    "memory": "Peak memory against batch size",
    "time_to_target": "Training time to the target against batch size, since the last validation below it",
}
FORMATS = ("png", "svg", "pdf")
_MOST_PANELS = 6
_LONGEST = 45  # characters of a label in a title
_Sized = Sequence[tuple[Answer, pd.DataFrame]]  # the answers of groups, and their tables of sizes
# A plot that is not of the runs alone: what it shows, and the figure of a width in inches.
Drawing = tuple[str, Callable[[float], Figure]]


@dataclass(frozen=True)
class _Panel:
    """What is drawn against the batch size."""

    name: str  # of a column of the table of sizes
    label: str  # of the axis
    bars: str = "90 % intervals"  # what they are
    scale: Callable[[Axes], None] = style.from_zero
    note: str = ""


_OF_RUNS = "range of all runs"
_PANELS = {
    "throughput": [_Panel(RATE, "samples/s", scale=style.ratio_axis)],
    "utilisation": [
        _Panel("mfu", "MFU, %", note="MFU: model FLOPs utilization"),
        _Panel(BUSY[0], "processor time, %", _OF_RUNS),
        _Panel(BUSY[1], "kernel ran, % of the time", _OF_RUNS),
    ],
    "memory": [_Panel("memory_peak_gib", "peak memory, GiB", _OF_RUNS)],
    "time_to_target": [_Panel("time_to_target_s", "s to target", "since the validation before", style.ratio_axis)],
}


def draw(report: Report, more: Mapping[str, Drawing] | None = None) -> dict[str, Picture]:
    """Every plot that has data, and others, by their names."""
    small = figures(report, style.ON_PAGE)
    drawn = {name: (CAPTIONS[name], figure, small[name]) for name, figure in figures(report).items()}
    for name, (caption, figure) in (more or {}).items():
        drawn[name] = caption, figure(style.TWO_COLUMNS), figure(style.ON_PAGE)
    return {
        name: Picture(
            caption, {kind: saved(wide, name, kind) for kind in FORMATS}, saved(narrow, name, "page").decode()
        )
        for name, (caption, wide, narrow) in drawn.items()
    }


def figures(report: Report, width: float = style.TWO_COLUMNS) -> dict[str, Figure]:
    """The same before they are saved, so many inches wide."""
    pairs = zip(report.answers, report.tables, strict=True)
    groups = [(answer, sizes) for answer, sizes in pairs if len(answer.group.sizes) > 1]
    key = next(iter(report.metrics), "")
    quality = _Panel(key, key)
    if metric(key).unit == FRACTION:
        quality = _Panel(key, f"{key}, %", scale=style.percent_axis)
    with rc_context(style.RC):
        panels = _PANELS | {"accuracy": [quality]}
        found = {name: _against_size(groups, of_figure, width) for name, of_figure in panels.items()}
        found["step_time"] = _step_time(groups, width)
    return {name: figure for name in CAPTIONS if (figure := found[name]) is not None}


def saved(figure: Figure, name: str, kind: str) -> bytes:
    """The bytes of a figure in one of `FORMATS`, or as SVG for the `page`, with the ids of runs.

    The name is in the other ids of its SVG, so that those of several figures differ.
    """
    file, is_svg = io.BytesIO(), kind in ("svg", "page")
    nothing = dict.fromkeys(
        ["Date", "Creator", "Format", "Type"] if is_svg else ["CreationDate", "Creator", "Producer"]
    )
    with rc_context({**style.RC, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # letters that the font lacks
        figure.savefig(file, format="svg" if is_svg else kind, metadata={} if kind == "png" else nothing)
    return re.sub(rb' id="run-[^"]*"', b"", file.getvalue()) if kind == "svg" else file.getvalue()


def _subject(groups: Iterable[Group]) -> str:
    """`cnn and mlp on mnist · A CPU · 32-true`: what was measured, and where."""
    runs = [run for group in groups for run in group.runs]

    def each(text: Callable[[Run], object]) -> str:
        return and_([*dict.fromkeys(cut(anonymous(str(found)), _LONGEST) for run in runs if (found := text(run)))])

    data = each(lambda run: run.dataset or run.settings.get("data"))
    what = each(lambda run: run.model) + (f" on {data}" if data else "")
    device = each(lambda run: run.settings.get("device_name") or run.device)
    return " · ".join(filter(None, (what, device, each(lambda run: run.precision))))


def _gid(runs: Iterable[Run]) -> str:
    """The id of what is drawn of some runs."""
    return f"run-{'_'.join(str(run.number) for run in runs)}"


def _against_size(groups: _Sized, panels: Sequence[_Panel], width: float) -> Figure | None:
    """Panels above each other, with a line for each group; None where no group has two sizes with the same number."""
    found = []
    for panel in panels:
        points_of = ((answer, _points(answer.group, sizes, panel.name)) for answer, sizes in groups)
        if lines := [(answer, points) for answer, points in points_of if len(points)]:
            found.append((panel, lines))
    if not any(len(points) > 1 for _, lines in found for _, points in lines):
        return None
    figure = style.new_figure(len(found) * (0.8 + 0.32 * width), width)
    rows = figure.subplots(len(found), 1, sharex=True, squeeze=False).ravel()
    for axes, (panel, lines) in zip(rows, found, strict=True):
        said = dict.fromkeys(filter(None, [panel.note]))
        for answer, points in lines:
            group, n = answer.group, answer.group.number
            colour, marker = style.COLOURS[n % len(style.COLOURS)], style.MARKERS[n % len(style.MARKERS)]
            ms = max(5.0, 8.0 - 2.0 * n)  # smaller for later groups: markers of equal values do not hide each other
            axes.plot(points.index, points["value"], color=colour)
            for size, value, low, high, is_vague in points.itertuples():
                gid = _gid(group.sizes[size])
                look = {"color": colour, "marker": marker, "label": anonymous(group.label), "gid": gid}
                axes.plot(size, value, ls="", ms=ms, **look)
                axes.vlines(size, low, high, color=colour, gid=gid)
                said |= {f"bars: {panel.bars}": None} if low < high else {}
                if size == answer.size:
                    axes.plot(size, value, ls="", marker="o", ms=13, mfc="none", mec="black", gid=gid)
                    said["ring: the answer"] = None
                if is_vague:
                    axes.annotate("?", (size, value), (7, 3), textcoords="offset points", gid=gid)
                    said[f"?: {VAGUE}"] = None
        panel.scale(axes)
        axes.set_ylabel(panel.label)
        style.note(figure, axes, "; ".join(said))
    style.size_axis(figure, rows[-1], {size for _, lines in found for _, points in lines for size in points.index})
    style.title(figure, _subject(answer.group for _, lines in found for answer, _ in lines))
    style.legend_below(figure, rows)
    return figure


def _points(group: Group, sizes: pd.DataFrame, name: str) -> pd.DataFrame:
    """The known numbers of a column by size: `value`, its interval's ends `low` and `high`, and whether it `is_vague`."""
    if name not in sizes:
        return pd.DataFrame()
    value = low = high = sizes[name]
    reach, is_vague = rate_reaches(sizes), pd.Series(False, sizes.index)
    if name in (RATE, "mfu"):  # the share of the peak that a sample a second takes is known
        low, high, is_vague = value / (1 + reach), value * (1 + reach), ~(reach <= KNOWN)
    elif name == "time_to_target_s":  # a run that is at the target in its first validation was never seen below it
        low = sizes["not_reached_after_s"].replace(0.0, math.nan)
    elif f"{name}_low" in sizes:
        low, high = sizes[f"{name}_low"], sizes[f"{name}_high"]
    else:
        ends = {size: [run.values[name] for run in runs if name in run.values] for size, runs in group.timed.items()}
        low, high = (sizes.index.map({s: end(of) for s, of in ends.items() if of}.get) for end in (min, max))
    points = pd.DataFrame({"value": value, "low": low, "high": high}).astype(float)
    points = points.apply(lambda column: column.fillna(value)) * (100 if metric(name).unit == FRACTION else 1)
    return points.assign(is_vague=is_vague).dropna()


def _step_time(groups: _Sized, width: float) -> Figure | None:
    """A panel for each group, with a bar for each size: the shares of the parts, above the time of a step by the rate."""
    tables = ((answer.group, sizes, sizes[list(PART_MS)].dropna()) for answer, sizes in groups)
    found = [(group, sizes, parts_ms) for group, sizes, parts_ms in tables if len(parts_ms) > 1]
    shown = found[:_MOST_PANELS]
    left_out = and_([cut(anonymous(group.label), _LONGEST) for group, *_ in found[_MOST_PANELS:]])
    if not shown:
        return None
    figure = style.new_figure(2.2 * len(shown), width)
    panels = figure.subplots(len(shown), 1, squeeze=False).ravel()
    shades = colormaps["viridis"](np.linspace(0, 1, len(PARTS)))  # from dark to light: they differ in grey, too
    for axes, (group, sizes, parts_ms) in zip(panels, shown, strict=True):
        step_ms, x = parts_ms.sum(axis="columns"), np.arange(len(parts_ms))
        bottom = np.zeros(len(x))
        for part, column, colour in zip(PARTS, PART_MS, shades, strict=True):
            heights = (100 * parts_ms[column] / step_ms).to_numpy()
            look = {"color": colour, "edgecolor": "white", "lw": 0.5}
            bars = axes.bar(x, heights, 0.82, bottom, label=part.replace("_", " "), **look)
            for bar, size in zip(bars, parts_ms.index, strict=True):
                bar.set_gid(_gid(group.sizes[size]))
            bottom += heights
        known = sizes.assign(reach=rate_reaches(sizes).map(reach_text)).loc[parts_ms.index]
        times = known[STEP_MS].map(lambda ms: significant(ms) if ms > 0 else "?")
        names = [
            f"{size:,}\n{time}\n± {reach}" for size, time, reach in zip(known.index, times, known["reach"], strict=True)
        ]
        every = math.ceil(len(x) / style.most_names(figure, names))
        axes.set_xticks(x[::every], names[::every])
        axes.set(ylabel="% of the mean step", xlabel="batch size, ms a step", ylim=(0, 100))
        axes.set_title(cut(anonymous(group.label), _LONGEST) if len(shown) > 1 else "")
        axes.grid(visible=False)
    not_drawn = f" · not drawn: {left_out}" if left_out else ""
    style.title(figure, _subject(group for group, *_ in shown) + not_drawn)
    style.legend_below(figure, panels[:1])
    return figure
