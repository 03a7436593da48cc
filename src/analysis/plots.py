"""The plots of a sweep, in three formats, and drawn once more for the page.

They show numbers of the table of sizes (table.py). All plots share their signs: a marker and a colour stand for a group, a bar for
an interval, a ring for the answer, and `?` for an imprecise number, as in tables. An element that shows a run has the id `run-<n>`
with the number of the run in the report (`run-<n>_<m>` for several runs), by which the page picks runs.
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
from .anonymous import anonymise
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
_AnsweredSizes = Sequence[tuple[Answer, pd.DataFrame]]  # the answer and the table of sizes of each group
# A plot that a caller adds: its caption, and a function from a width in inches to the figure.
Drawing = tuple[str, Callable[[float], Figure]]


@dataclass(frozen=True)
class _Panel:
    """A number that is drawn against the batch size."""

    name: str  # the column of the table of sizes
    label: str  # of the axis
    bars: str = "90 % intervals"  # what the bars are
    scale: Callable[[Axes], None] = style.from_zero
    note: str = ""


_RANGE = "range of all runs"
_PANELS = {
    "throughput": [_Panel(RATE, "samples/s", scale=style.ratio_axis)],
    "utilisation": [
        _Panel("mfu", "MFU, %", note="MFU: model FLOPs utilization"),
        _Panel(BUSY[0], "processor time, %", _RANGE),
        _Panel(BUSY[1], "kernel ran, % of the time", _RANGE),
    ],
    "memory": [_Panel("memory_peak_gib", "peak memory, GiB", _RANGE)],
    "time_to_target": [_Panel("time_to_target_s", "s to target", "since the validation before", style.ratio_axis)],
}


def draw(report: Report, more: Mapping[str, Drawing] | None = None) -> dict[str, Picture]:
    """Return every plot that has data, and `more` plots, by their names."""
    narrow_figures = figures(report, style.ON_PAGE)
    plots = {name: (CAPTIONS[name], wide, narrow_figures[name]) for name, wide in figures(report).items()}
    for name, (caption, figure) in (more or {}).items():
        plots[name] = caption, figure(style.TWO_COLUMNS), figure(style.ON_PAGE)
    return {
        name: Picture(
            caption, {kind: saved(wide, name, kind) for kind in FORMATS}, saved(narrow, name, "page").decode()
        )
        for name, (caption, wide, narrow) in plots.items()
    }


def figures(report: Report, width: float = style.TWO_COLUMNS) -> dict[str, Figure]:
    """Return the figure of every plot that has data, so many inches wide."""
    pairs = zip(report.answers, report.tables, strict=True)
    groups = [(answer, sizes) for answer, sizes in pairs if len(answer.group.sizes) > 1]
    key = next(iter(report.metrics), "")
    quality = _Panel(key, key)
    if metric(key).unit == FRACTION:
        quality = _Panel(key, f"{key}, %", scale=style.percent_axis)
    with rc_context(style.RC):
        plots = _PANELS | {"accuracy": [quality]}
        drawn = {name: _plot_against_size(groups, panels, width) for name, panels in plots.items()}
        drawn["step_time"] = _plot_step_time(groups, width)
    return {name: figure for name in CAPTIONS if (figure := drawn[name]) is not None}


def saved(figure: Figure, name: str, kind: str) -> bytes:
    """Return the bytes of a figure in one of `FORMATS`, or, for the kind `page`, as SVG with the ids of runs.

    The name is in the other ids of the SVG, so that the ids of several figures differ.
    """
    file, is_svg = io.BytesIO(), kind in ("svg", "page")
    no_metadata = dict.fromkeys(
        ["Date", "Creator", "Format", "Type"] if is_svg else ["CreationDate", "Creator", "Producer"]
    )
    with rc_context({**style.RC, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # letters that the font lacks
        figure.savefig(file, format="svg" if is_svg else kind, metadata={} if kind == "png" else no_metadata)
    return re.sub(rb' id="run-[^"]*"', b"", file.getvalue()) if kind == "svg" else file.getvalue()


def _subject(groups: Iterable[Group]) -> str:
    """Return what was measured, and where: `cnn and mlp on mnist · A CPU · 32-true`."""
    runs = [run for group in groups for run in group.runs]

    def joined(text: Callable[[Run], object]) -> str:
        return and_([*dict.fromkeys(cut(anonymise(str(value)), _LONGEST) for value in map(text, runs) if value)])

    data = joined(lambda run: run.dataset or run.settings.get("data"))
    work = joined(lambda run: run.model) + (f" on {data}" if data else "")
    device = joined(lambda run: run.settings.get("device_name") or run.device)
    return " · ".join(filter(None, (work, device, joined(lambda run: run.precision))))


def _gid(runs: Iterable[Run]) -> str:
    """Return the id of an element that shows the runs."""
    return f"run-{'_'.join(str(run.number) for run in runs)}"


def _plot_against_size(groups: _AnsweredSizes, panels: Sequence[_Panel], width: float) -> Figure | None:
    """Draw panels above each other, with a line for each group; None where no group has a number at two sizes."""
    panel_lines = []
    for panel in panels:
        group_points = ((answer, _points(answer.group, sizes, panel.name)) for answer, sizes in groups)
        if lines := [(answer, points) for answer, points in group_points if len(points)]:
            panel_lines.append((panel, lines))
    if not any(len(points) > 1 for _, lines in panel_lines for _, points in lines):
        return None
    figure = style.new_figure(len(panel_lines) * (0.8 + 0.32 * width), width)
    rows = figure.subplots(len(panel_lines), 1, sharex=True, squeeze=False).ravel()
    for axes, (panel, lines) in zip(rows, panel_lines, strict=True):
        notes = dict.fromkeys(filter(None, [panel.note]))
        for answer, points in lines:
            group, n = answer.group, answer.group.number
            colour, marker = style.COLOURS[n % len(style.COLOURS)], style.MARKERS[n % len(style.MARKERS)]
            ms = max(5.0, 8.0 - 2.0 * n)  # smaller for later groups: markers of equal values do not hide each other
            axes.plot(points.index, points["value"], color=colour)
            for size, value, low, high, is_vague in points.itertuples():
                gid = _gid(group.sizes[size])
                look = {"color": colour, "marker": marker, "label": anonymise(group.label), "gid": gid}
                axes.plot(size, value, ls="", ms=ms, **look)
                axes.vlines(size, low, high, color=colour, gid=gid)
                notes |= {f"bars: {panel.bars}": None} if low < high else {}
                if size == answer.size:
                    axes.plot(size, value, ls="", marker="o", ms=13, mfc="none", mec="black", gid=gid)
                    notes["ring: the answer"] = None
                if is_vague:
                    axes.annotate("?", (size, value), (7, 3), textcoords="offset points", gid=gid)
                    notes[f"?: {VAGUE}"] = None
        panel.scale(axes)
        axes.set_ylabel(panel.label)
        style.note(figure, axes, "; ".join(notes))
    all_lines = [line for _, lines in panel_lines for line in lines]
    style.size_axis(figure, rows[-1], {size for _, points in all_lines for size in points.index})
    style.title(figure, _subject(answer.group for answer, _ in all_lines))
    style.legend_below(figure, rows)
    return figure


def _points(group: Group, sizes: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the known numbers of a column by size: `value`, the ends `low` and `high` of its interval, and `is_vague`."""
    if name not in sizes:
        return pd.DataFrame()
    value = low = high = sizes[name]
    reach, is_vague = rate_reaches(sizes), pd.Series(False, sizes.index)
    if name in (RATE, "mfu"):  # MFU is the rate times a known factor
        low, high, is_vague = value / (1 + reach), value * (1 + reach), ~(reach <= KNOWN)
    elif name == "time_to_target_s":  # a run that is at the target in its first validation was never seen below it
        low = sizes["not_reached_after_s"].replace(0.0, math.nan)
    elif f"{name}_low" in sizes:
        low, high = sizes[f"{name}_low"], sizes[f"{name}_high"]
    else:
        values = {size: [run.values[name] for run in runs if name in run.values] for size, runs in group.timed.items()}
        low, high = (sizes.index.map({s: end(vs) for s, vs in values.items() if vs}.get) for end in (min, max))
    points = pd.DataFrame({"value": value, "low": low, "high": high}).astype(float)
    points = points.apply(lambda column: column.fillna(value)) * (100 if metric(name).unit == FRACTION else 1)
    return points.assign(is_vague=is_vague).dropna()


def _plot_step_time(groups: _AnsweredSizes, width: float) -> Figure | None:
    """Draw a panel for each group, with a bar of the parts' shares for each size, above the typical time of a step."""
    tables = ((answer.group, sizes, sizes[list(PART_MS)].dropna()) for answer, sizes in groups)
    panels_data = [(group, sizes, parts_ms) for group, sizes, parts_ms in tables if len(parts_ms) > 1]
    shown = panels_data[:_MOST_PANELS]
    not_shown = and_([cut(anonymise(group.label), _LONGEST) for group, *_ in panels_data[_MOST_PANELS:]])
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
        times = sizes.loc[parts_ms.index, STEP_MS].map(lambda ms: significant(ms) if ms > 0 else "?")
        reaches = rate_reaches(sizes).map(reach_text).loc[parts_ms.index]
        names = [f"{n:,}\n{time}\n± {reach}" for n, time, reach in zip(parts_ms.index, times, reaches, strict=True)]
        every = math.ceil(len(x) / style.most_names(figure, names))
        axes.set_xticks(x[::every], names[::every])
        axes.set(ylabel="% of the mean step", xlabel="batch size, ms a step", ylim=(0, 100))
        axes.set_title(cut(anonymise(group.label), _LONGEST) if len(shown) > 1 else "")
        axes.grid(visible=False)
    not_drawn = f" · not drawn: {not_shown}" if not_shown else ""
    style.title(figure, _subject(group for group, *_ in shown) + not_drawn)
    style.legend_below(figure, panels[:1])
    return figure
