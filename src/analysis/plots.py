"""The plots of a sweep: rates, where the time of a step goes, what the device does, and how training went."""

import io
import itertools
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from ..files import atomic_write
from ..records.formatting import estimate, percent, significant
from ..records.metrics import FRACTION, metric
from ..records.rates import NEAR_BEST
from ..records.step_parts import PARTS
from .curves import read_curve
from .fit import Fit
from .plot_style import (
    DEVICE_TITLES,
    GREY,
    MARKERS,
    PART_COLOURS,
    RC,
    Bars,
    bars_of,
    legend_below,
    log_axis,
    look_of,
    new_figure,
    shortened,
    size_axis,
    wide_axis,
)
from .recommend import Analysis
from .run import Run

CAPTIONS = {
    "throughput": "Samples per second against batch size",
    "step_time": "Where the time of a step goes",
    "device": "How much of the time the device works, and the memory that is needed",
    "validation": "The validation metric against time and against samples",
}
_MAX_PANELS = 9
_FEW = 4  # groups, for which there is room to draw everything
_IDEAL = {"lw": 0.8, "ls": (0, (6, 4))}


_Plot = Callable[[Sequence[Analysis], bool], Figure | None]


def draw(analyses: Sequence[Analysis], folder: Path) -> tuple[list[Path], list[str]]:
    """Write every plot that has data; returns the PNG files, and a note for each plot that is missing or incomplete."""
    files, notes = [], []
    with rc_context(RC):
        for name, (plot, needs) in _PLOTS.items():
            figure = plot(analyses, False)
            if figure is None:
                notes.append(f"no {name} plot: it {needs}")
                continue
            files.append(folder / f"{name}.png")
            with atomic_write(files[-1]) as file:
                figure.savefig(file, format="png")
    if sum(len(a.group.sizes) > 1 for a in analyses) > _MAX_PANELS:
        notes.append(f"the step_time plot shows the first {_MAX_PANELS} groups")
    return files, notes


def cards(analyses: Sequence[Analysis]) -> dict[str, bytes]:
    """The plots as PNG for the cards of TensorBoard: lower, so that type is larger; of the parts of a step three panels."""
    found = {}
    with rc_context(RC):
        for name, (plot, _) in _PLOTS.items():
            if figure := plot(analyses, True):
                figure.savefig(file := io.BytesIO(), format="png")
                found[name] = file.getvalue()
    return found


def throughput(analyses: Sequence[Analysis], card: bool = False) -> Figure | None:
    """Samples/s against batch size: measured, fitted, and the knee."""
    shown = [a for a in analyses if len(a.group.sizes) > 1]
    if not shown:
        return None
    figure = new_figure(4.6, card)
    axes, looks, few = figure.subplots(), _looks(analyses), len(shown) <= _FEW
    heights = [rate for a in shown for rate in a.group.rates.values()]
    bars = bars_of(run for a in shown for run in a.group.runs)
    for analysis in shown:
        colour, marker = looks[analysis.group.label]
        _draw_measured(axes, analysis, bars, colour, marker)
        if few:
            _draw_ideal(axes, analysis, colour)
        if analysis.trusted:
            heights += _draw_fit(axes, analysis.trusted, list(analysis.group.rates), colour, named=few)
        else:
            axes.plot(*_xy(analysis.group.rates), color=colour, lw=0.8, alpha=0.5)
    size_axis(axes, (size for a in shown for size in a.group.sizes))
    axes.set_ylim(min(heights) / 1.5, max(heights) * 1.6)
    log_axis(axes)
    axes.set_ylabel(metric("samples_per_sec").unit)
    axes.set_title(f"Throughput by the median step; bars: {bars.words}")
    explained = [Line2D([], [], color=GREY, label="ideal: twice the batch, twice the rate", **_IDEAL)] if few else []
    if any(a.trusted for a in shown):
        knee = f"knee: {percent(1 - NEAR_BEST)} of the fit's maximum"
        explained.append(Line2D([], [], color=GREY, lw=1.4, label="fit (dotted: extrapolated)"))
        explained.append(Line2D([], [], ls="", marker="*", ms=11, mfc="white", mec=GREY, label=knee))
    if explained and not card:
        figure.legend(handles=explained, loc="outside upper center", ncols=len(explained), fontsize=8.5)
    legend_below(figure, axes)
    return figure


def _xy(series: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(series), list(series.values())


def _draw_measured(axes: Axes, analysis: Analysis, bars: Bars, colour: str, marker: str) -> None:
    rates = analysis.group.rates
    low, high = (analysis.group.medians(name) for name in (bars.low, bars.high))
    below = [max(0.0, rate - low.get(size, rate)) for size, rate in rates.items()]
    above = [max(0.0, high.get(size, rate) - rate) for size, rate in rates.items()]
    style = {"ls": "", "marker": marker, "ms": 6, "color": colour, "elinewidth": 1.2, "capsize": 2.5, "zorder": 4}
    axes.errorbar(*_xy(rates), yerr=[below, above], label=analysis.group.label, **style)


def _draw_ideal(axes: Axes, analysis: Analysis, colour: str) -> None:
    """From the smallest size on: the rate if a larger batch took no longer."""
    smallest, *_, largest = analysis.group.rates
    rate = analysis.group.rates[smallest]
    axes.plot([smallest, largest], [rate, rate * largest / smallest], color=colour, alpha=0.5, zorder=1, **_IDEAL)


def _draw_fit(axes: Axes, fit: Fit, sizes: list[int], colour: str, named: bool) -> list[float]:
    """The fit at the sizes that ran, dotted to the knee if that is not much further; returns the rate at the knee."""
    smallest, *_, largest = sizes
    ran = np.geomspace(smallest, largest, 100)
    axes.plot(ran, [fit.samples_per_sec(b) for b in ran], color=colour, lw=1.4, alpha=0.8, zorder=3)
    if fit.knee is None or not smallest <= fit.knee <= 4 * largest:
        return []
    if fit.knee > largest:
        beyond = np.geomspace(largest, fit.knee, 40)
        axes.plot(beyond, [fit.samples_per_sec(b) for b in beyond], color=colour, lw=1.4, ls=":", zorder=3)
    at = (fit.knee, fit.samples_per_sec(fit.knee))
    axes.plot(*at, marker="*", ms=12, mfc="white", mec=colour, mew=1.4, zorder=5)
    if named:
        centred = {"textcoords": "offset points", "ha": "center", "va": "top"}
        axes.annotate(estimate(fit.knee), at, (0, -9), fontsize=8, color=colour, zorder=6, **centred)
    return [at[1]]


def step_time(analyses: Sequence[Analysis], card: bool = False) -> Figure | None:
    """Where the time of a step goes, in shares; a panel for each group."""
    shown = [(a, shares) for a in analyses if len(shares := _shares(a)) > 1]
    shown = shown[: 3 if card else _MAX_PANELS]
    if not shown:
        return None
    columns = 2 if len(shown) == 4 else min(3, len(shown))
    lines = -(-len(shown) // columns)
    figure = new_figure(1.0 + 2.7 * lines, card)
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    for axes, (analysis, shares) in zip(panels, shown, strict=False):
        _draw_bars(
            axes, shares, analysis.group.medians("step_ms_median"), labels=(12, 6, 4)[columns - 1] // (2 if card else 1)
        )
        name = textwrap.fill(shortened(analysis.group.label, 180 // columns), 90 // columns)
        axes.set_title(name if len(shown) > 1 else CAPTIONS["step_time"])
    for axes in panels[::columns]:
        axes.set_ylabel("share of the mean step, %")
    names = panels[0].get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", ncols=len(PARTS), title="above a bar: the median step")
    return figure


def _shares(analysis: Analysis) -> dict[int, list[float]]:
    """By size, the shares of the parts of the mean step in % (of their medians over repeated runs)."""
    series = [analysis.group.medians(f"{part}_ms_mean") for part in PARTS]
    parts = {size: [of[size] for of in series] for size in series[0]}
    return {size: [100 * ms / sum(found) for ms in found] for size, found in parts.items() if sum(found) > 0}


def _draw_bars(axes: Axes, shares: dict[int, list[float]], medians: dict[int, float], labels: int) -> None:
    """A bar for each size; above the bar the median step, as in the table, although the shares are of the mean."""
    at, bottom = np.arange(len(shares)), np.zeros(len(shares))
    for part, colour, heights in zip(PARTS, PART_COLOURS, zip(*shares.values(), strict=True), strict=True):
        label = part.replace("_", " ")
        axes.bar(at, heights, 0.82, bottom, color=colour, label=label, edgecolor="white", linewidth=0.5)
        bottom += heights
    every = -(-len(shares) // labels)
    for i, size in list(enumerate(shares))[::every]:
        if size in medians:
            text = f"{significant(medians[size])} ms"
            axes.annotate(text, (i, 101), ha="center", va="bottom", fontsize=7.5, color=GREY)
    axes.set_xticks(at[::every], [f"{size:,}" for size in list(shares)[::every]])
    axes.set_ylim(0, 108)
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.set_xlabel("batch size")
    axes.grid(False)


def device(analyses: Sequence[Analysis], card: bool = False) -> Figure | None:
    """How much of its time the device works, and the memory it needs, against batch size."""
    found = {name: {a.group.label: a.group.medians(name) for a in analyses} for name in DEVICE_TITLES}
    found = {name: {label: s for label, s in series.items() if len(s) > 1} for name, series in found.items()}
    shown = {name: series for name, series in found.items() if series}
    if not shown:
        return None
    figure, looks = new_figure(3.7, card), _looks(analyses)
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, (name, groups) in zip(panels, shown.items(), strict=True):
        for label, series in groups.items():
            colour, marker = looks[label]
            axes.plot(*_xy(series), color=colour, marker=marker, ms=5, lw=1.2, label=label)
        size_axis(axes, itertools.chain(*groups.values()), most=6)
        axes.set_title(DEVICE_TITLES[name])
        if name.endswith("_pct"):
            axes.set_ylim(0, 105)
        else:
            axes.set_ylim(0, 1.1 * max(value for series in groups.values() for value in series.values()))
    legend_below(figure, panels[-1])
    return figure


def validation(analyses: Sequence[Analysis], card: bool = False) -> Figure | None:
    """The validation metric of every run, against its training time and against the samples that it had seen."""
    curves = [(a, run, curve) for a in analyses for run in a.group.runs if (curve := read_curve(run))]
    names = [curve.metric for _, _, curve in curves]
    name = max(set(names), key=lambda name: (names.count(name), name), default="")
    curves = [(a, run, curve) for a, run, curve in curves if curve.metric == name]
    if not any(len(curve.values) > 1 for _, _, curve in curves):
        return None
    figure = new_figure(4.2, card)
    left, right = figure.subplots(1, 2, sharey=True)
    look, title = _curve_looks([(a, run) for a, run, _ in curves], analyses)
    sizes = sorted({run.batch_size or 0 for _, run, _ in curves})
    for analysis, run, curve in curves:
        colour, marker, label = look(analysis, run)
        alpha = 0.9 if title else 0.3 + 0.65 * (sizes.index(run.batch_size or 0) + 1) / len(sizes)
        for axes, x in ((left, curve.seconds), (right, curve.samples)):
            axes.plot(x, curve.values, color=colour, marker=marker, ms=3.5, lw=1.1, alpha=alpha, label=label)
    left.set_ylabel(name)
    if metric(name).unit == FRACTION:
        left.set_ylabel(f"{name}, %")
        left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}"))
    elif min(value for *_, curve in curves for value in curve.values) > 0:
        log_axis(left)
    wide_axis(left, itertools.chain(*(curve.seconds for *_, curve in curves)))
    wide_axis(right, itertools.chain(*(curve.samples for *_, curve in curves)))
    left.set_xlabel("seconds of training")
    right.set_xlabel("samples seen")
    faint = "" if title or len(sizes) == 1 else "; the smaller the batch, the fainter"
    left.set_title(f"{name} of every run{faint}")
    legend_below(figure, left, title)
    return figure


_PLOTS: dict[str, tuple[_Plot, str]] = {  # and what each needs
    "throughput": (throughput, "needs two batch sizes"),
    "step_time": (step_time, "needs two batch sizes with the parts of their steps"),
    "device": (device, "needs two batch sizes with utilisation or memory"),
    "validation": (validation, "needs csv/metrics.csv with two validations in the folder of a run"),
}


def _looks(analyses: Sequence[Analysis]) -> dict[str, tuple[str, str]]:
    """A colour and a marker for each group, the same in all plots."""
    return {label: look_of(i) for i, label in enumerate(dict.fromkeys(a.group.label for a in analyses))}


def _curve_looks(
    shown: list[tuple[Analysis, Run]], analyses: Sequence[Analysis]
) -> tuple[Callable[[Analysis, Run], tuple[str, str, str]], str | None]:
    """Colour, marker and name of a run's curve, and the title of the legend: one group's curves differ by batch size."""
    groups = {analysis.group.label for analysis, _ in shown}
    sizes = sorted({run.batch_size or 0 for _, run in shown})
    if len(groups) > 1 or len(sizes) == 1:
        looks = _looks(analyses)
        return lambda analysis, run: (*looks[analysis.group.label], analysis.group.label), None
    shades = colormaps["viridis"](np.linspace(0, 0.88, len(sizes)))
    by_size = {size: (shades[i], MARKERS[i % len(MARKERS)], f"{size:,}") for i, size in enumerate(sizes)}
    return lambda analysis, run: by_size[run.batch_size or 0], "batch size"
