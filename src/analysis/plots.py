"""The pictures of a sweep: rates, where time goes, what the device does, and how training went."""

import itertools
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from ..files import atomic_write
from .curves import read_curve
from .fit import NEAR
from .recommend import Analysis
from .runs import PARTS, Run, SweepResults
from .table import short

# Okabe and Ito's colours, told apart by everybody; black and yellow are left for other things.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_PART_COLOURS = ("#D55E00", "#E69F00", "#56B4E9", "#0072B2", "#009E73", "#BBBBBB")
_WIDTH, _DPI = 8.0, 150
_MAX_PANELS, _MAX_TICKS = 9, 9
_FEW = 4  # groups for which there is room to draw everything
_GREY = "#666666"

_Series = dict[int, float]


def draw(sweep: SweepResults, analyses: Sequence[Analysis], folder: Path) -> tuple[list[Path], list[str]]:
    """Write every plot that the runs have the numbers for.

    Returns:
        The PNG files, and a note for every plot that is missing.
    """
    plots: list[tuple[str, Figure | None, str]] = [
        ("throughput", throughput(analyses), "needs two batch sizes"),
        ("step_time", step_time(analyses), "needs two batch sizes with the parts of their steps"),
        ("device", device(analyses), "needs two batch sizes with utilisation or memory"),
        ("validation", validation(sweep, analyses), "needs csv/metrics.csv with two validations in a run's folder"),
    ]
    files, notes = [], []
    for name, figure, needs in plots:
        if figure is None:
            notes.append(f"no {name} plot: it {needs}")
            continue
        files.append(folder / f"{name}.png")
        with atomic_write(files[-1]) as file:
            figure.savefig(file, dpi=_DPI, format="png")
    if sum(len(a.group.sizes) > 1 for a in analyses) > _MAX_PANELS:
        notes.append(f"the step_time plot shows the first {_MAX_PANELS} groups")
    return files, notes


def throughput(analyses: Sequence[Analysis]) -> Figure | None:
    """Samples/s against batch size: what was measured, what was fitted, and the knee."""
    shown = [a for a in analyses if len(a.group.sizes) > 1]
    if not shown:
        return None
    figure = _figure(4.6)
    axes = figure.subplots()
    style, few = _styles(analyses), len(shown) <= _FEW
    rates = [rate for a in shown for rate in a.group.rates.values()]
    for analysis in shown:
        colour, marker = style[analysis.group.label]
        _measured(axes, analysis, colour, marker)
        _fitted(axes, analysis, colour, named=few)
        if few:
            _ideal(axes, analysis, colour)
    explained = []
    if few:
        dashes = {"color": _GREY, "lw": 0.8, "ls": (0, (6, 4))}
        explained.append(axes.plot([], [], **dashes, label="ideal: twice the batch, twice the rate"))
    if any(a.trusted for a in shown):
        star = {"ls": "", "marker": "*", "ms": 11, "mfc": "white", "mec": _GREY}
        explained.append(axes.plot([], [], color=_GREY, lw=1.4, label="fit (dotted: beyond what ran)"))
        explained.append(axes.plot([], [], **star, label=f"knee: {100 * NEAR:.0f} % of the fit's maximum"))
    _size_axis(axes, {size for a in shown for size in a.group.sizes})
    axes.set_ylim(min(rates) / 1.5, max(rates) * 1.6)
    _log_axis(axes)
    axes.set_ylabel("samples/s")
    axes.set_title("Throughput: median, bars from the 10th to the 90th percentile of steps", **_TITLE)
    handles = [line for (line,) in explained]
    if handles:
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=8.5)
    for handle in handles:
        handle.remove()
    _legend(figure, axes)
    return figure


def _ideal(axes: Axes, analysis: Analysis, colour: str) -> None:
    """Through the smallest size: what the rate would be if a larger batch took no longer."""
    smallest, *_, largest = analysis.group.rates
    rate = analysis.group.rates[smallest]
    ends = np.array([smallest, largest])
    axes.plot(ends, rate * ends / smallest, color=colour, lw=0.8, ls=(0, (6, 4)), alpha=0.5, zorder=1)


def _measured(axes: Axes, analysis: Analysis, colour: str, marker: str) -> None:
    rates = analysis.group.rates
    low = analysis.group.medians(lambda run: run.samples_per_sec_p10)
    high = analysis.group.medians(lambda run: run.samples_per_sec_p90)
    below = [max(0.0, rate - low.get(size, rate)) for size, rate in rates.items()]
    above = [max(0.0, high.get(size, rate) - rate) for size, rate in rates.items()]
    axes.errorbar(
        list(rates), list(rates.values()), yerr=[below, above],
        ls="", marker=marker, ms=6, color=colour, elinewidth=1.2, capsize=2.5, label=analysis.group.label, zorder=4,
    )  # fmt: skip


def _fitted(axes: Axes, analysis: Analysis, colour: str, named: bool) -> None:
    """The curve over what ran, dotted to the knee if that is not much further."""
    fit = analysis.trusted
    if fit is None:
        axes.plot(list(analysis.group.rates), list(analysis.group.rates.values()), color=colour, lw=0.8, alpha=0.5)
        return
    smallest, *_, largest = analysis.group.rates
    ran = np.geomspace(smallest, largest, 100)
    axes.plot(ran, [fit.samples_per_sec(b) for b in ran], color=colour, lw=1.4, alpha=0.8, zorder=3)
    if fit.knee is None or not smallest <= fit.knee <= 4 * largest:
        return
    if fit.knee > largest:
        beyond = np.geomspace(largest, fit.knee, 40)
        axes.plot(beyond, [fit.samples_per_sec(b) for b in beyond], color=colour, lw=1.4, ls=":", zorder=3)
    at = (fit.knee, fit.samples_per_sec(fit.knee))
    axes.plot(*at, marker="*", ms=12, mfc="white", mec=colour, mew=1.4, zorder=5)
    if named:
        axes.annotate(
            f"{float(f'{fit.knee:.2g}'):,.0f}", at, (0, -9), textcoords="offset points",
            ha="center", va="top", fontsize=8, color=colour, zorder=6,
        )  # fmt: skip


def step_time(analyses: Sequence[Analysis]) -> Figure | None:
    """Where the time of a step goes, in shares, a panel a group."""
    shown = [a for a in analyses if len(_with_parts(a)) > 1][:_MAX_PANELS]
    if not shown:
        return None
    columns = 2 if len(shown) == 4 else min(3, len(shown))
    lines = -(-len(shown) // columns)
    figure = _figure(1.0 + 2.7 * lines)
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    for axes, analysis in zip(panels, shown, strict=False):
        _stack(
            axes,
            _with_parts(analysis),
            analysis.group.medians(lambda run: run.step_ms_median),
            labels=(12, 6, 4)[columns - 1],
        )
        name = textwrap.fill(analysis.group.label, 90 // columns)
        axes.set_title(name if len(shown) > 1 else "Where the time of a step goes", **_TITLE)
    for axes in panels[::columns]:
        axes.set_ylabel("share of the mean step, %")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(PARTS), frameon=False, fontsize=9,
        title="above a bar: the median step", title_fontsize=9,
    )  # fmt: skip
    return figure


def _with_parts(analysis: Analysis) -> dict[int, dict[str, float]]:
    """By size, the shares of the parts of a mean step in % (of their medians over repeated runs)."""
    found = {}
    for size in analysis.group.sizes:
        parts = {part: _part(analysis, part).get(size) for part in PARTS}
        if all(ms is not None for ms in parts.values()) and sum(parts.values()) > 0:
            found[size] = {part: 100 * ms / sum(parts.values()) for part, ms in parts.items()}
    return found


def _part(analysis: Analysis, part: str) -> _Series:
    return analysis.group.medians(lambda run: run.parts_ms.get(part))


def _stack(axes: Axes, sizes: dict[int, dict[str, float]], medians: _Series, labels: int) -> None:
    """A bar a size; above it the median step, which is what the table has, and not the mean that the shares are of."""
    at = np.arange(len(sizes))
    bottom = np.zeros(len(sizes))
    for part, colour in zip(PARTS, _PART_COLOURS, strict=True):
        share = np.array([shares[part] for shares in sizes.values()])
        label = part.replace("_", " ")
        axes.bar(at, share, 0.82, bottom, color=colour, label=label, edgecolor="white", linewidth=0.5)
        bottom += share
    every = -(-len(sizes) // labels)
    for i, size in enumerate(sizes):
        if i % every == 0 and size in medians:
            axes.annotate(f"{short(medians[size])} ms", (i, 101), ha="center", va="bottom", fontsize=7.5, color=_GREY)
    axes.set_xticks(at[::every], [f"{size:,}" for size in list(sizes)[::every]])
    axes.set_ylim(0, 108)
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.set_xlabel("batch size")
    _clean(axes)
    axes.grid(False)


def device(analyses: Sequence[Analysis]) -> Figure | None:
    """How busy the device is, and the memory it needs, against batch size."""
    panels: list[tuple[str, Callable[[Run], float | None]]] = [
        ("device busy, %", lambda run: run.busy_pct),
        ("peak memory, GiB", lambda run: run.memory_peak_gib),
    ]
    shown = [
        (title, {a.group.label: series for a in analyses if len(series := a.group.medians(of)) > 1})
        for title, of in panels
    ]
    shown = [(title, series) for title, series in shown if series]
    if not shown:
        return None
    figure = _figure(3.7)
    style = _styles(analyses)
    for axes, (title, groups) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for name, series in groups.items():
            colour, marker = style[name]
            axes.plot(list(series), list(series.values()), color=colour, marker=marker, ms=5, lw=1.2, label=name)
        _size_axis(axes, {size for series in groups.values() for size in series}, most=6)
        axes.set_title(title, **_TITLE)
        if "busy" in title:
            axes.set_ylim(0, 105)
        else:
            values = [value for series in groups.values() for value in series.values()]
            axes.set_ylim(min(values) / 1.4, max(values) * 1.4)
            _log_axis(axes)
    _legend(figure, axes)
    return figure


def validation(sweep: SweepResults, analyses: Sequence[Analysis]) -> Figure | None:
    """How good every run was, against its training time and against the samples it had seen."""
    curves = [(a, run, curve) for a in analyses for run in a.group.runs if (curve := read_curve(run))]
    metrics = [curve.metric for _, _, curve in curves]
    metric = max(set(metrics), key=lambda name: (metrics.count(name), name)) if metrics else ""
    curves = [(a, run, curve) for a, run, curve in curves if curve.metric == metric]
    if not any(len(curve.values) > 1 for _, _, curve in curves):
        return None
    figure = _figure(4.2)
    left, right = figure.subplots(1, 2, sharey=True)
    look, title = _curve_styles([(a, run) for a, run, _ in curves], analyses)
    sizes = sorted({run.batch_size or 0 for _, run, _ in curves})
    for analysis, run, curve in curves:
        colour, marker, name = look(analysis, run)
        alpha = 0.9 if title else 0.3 + 0.65 * (sizes.index(run.batch_size or 0) + 1) / len(sizes)
        for axes, x in ((left, curve.seconds), (right, curve.samples)):
            axes.plot(x, curve.values, color=colour, marker=marker, ms=3.5, lw=1.1, alpha=alpha, label=name)
    accuracy = metric == "val/acc"
    left.set_ylabel(f"{metric}, %" if accuracy else metric)
    if accuracy:
        left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}"))
    elif min(value for _, _, curve in curves for value in curve.values) > 0:
        left.set_yscale("log")
        _log_axis(left)
    for axes, x in ((left, [c.seconds for *_, c in curves]), (right, [c.samples for *_, c in curves])):
        _wide_axis(axes, list(itertools.chain.from_iterable(x)))
    left.set_xlabel("seconds of training")
    right.set_xlabel("samples seen")
    faint = "" if title or len(sizes) == 1 else "; the fainter, the smaller the batch"
    left.set_title(f"{metric} of every run{faint}", **_TITLE)
    _legend(figure, left, title)
    return figure


def _curve_styles(
    shown: list[tuple[Analysis, Run]], analyses: Sequence[Analysis]
) -> tuple[Callable[[Analysis, Run], tuple[str, str, str]], str]:
    """Colour, marker and name of a run's curve: by batch size where there is one group only, else by group."""
    groups = {analysis.group.label for analysis, _ in shown}
    sizes = sorted({run.batch_size or 0 for _, run in shown})
    if len(groups) > 1 or len(sizes) == 1:
        style = _styles(analyses)
        return lambda analysis, run: (*style[analysis.group.label], analysis.group.label), ""
    shades = colormaps["viridis"](np.linspace(0, 0.88, len(sizes)))
    look = {size: (shades[i], MARKERS[i % len(MARKERS)], f"{size:,}") for i, size in enumerate(sizes)}
    return lambda analysis, run: look[run.batch_size or 0], "batch size"


# --- what the plots share ---------------------------------------------------------------------------------------------

_TITLE = {"fontsize": 10, "loc": "left"}


def _figure(height: float) -> Figure:
    return Figure(figsize=(_WIDTH, height), layout="constrained")


def _styles(analyses: Iterable[Analysis]) -> dict[str, tuple[str, str]]:
    """A colour and a marker for every group, the same in all plots."""
    labels = dict.fromkeys(analysis.group.label for analysis in analyses)
    return {name: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(labels)}


def _size_axis(axes: Axes, sizes: set[int], most: int = _MAX_TICKS) -> None:
    """Batch sizes on a log scale; ticks at those that ran, as many as can be read side by side."""
    ordered = sorted(sizes)
    axes.set_xscale("log", base=2)
    span = np.log2(ordered[-1] / ordered[0])
    ticks = [ordered[-1]]
    for size in reversed(ordered[:-1]):
        if np.log2(ticks[-1] / size) >= span / most:
            ticks.append(size)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("batch size")
    _clean(axes)


def _log_axis(axes: Axes) -> None:
    """A log scale for y with plain numbers, at 1, 2 and 5 of a decade where it covers few of them."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    decades = np.log10(high / low)
    axes.yaxis.set_major_locator(LogLocator(subs=(1,) if decades > 3 else (1, 2, 5) if decades > 0.7 else range(1, 10)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _brief(value)))
    axes.yaxis.set_minor_locator(NullLocator())
    _clean(axes)


def _wide_axis(axes: Axes, values: list[float]) -> None:
    """From 0, or a log scale where the values cover more than one and a half decades."""
    positive = [value for value in values if value > 0]
    if positive and max(positive) > 30 * min(positive):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _brief(value)))
    _clean(axes)


def _brief(value: float) -> str:
    for factor, suffix in ((1e6, " M"), (1e3, " k")):
        if value >= factor:
            return f"{value / factor:g}{suffix}"
    return f"{value:g}"


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color="#DDDDDD", lw=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9)


def _legend(figure: Figure, axes: Axes, title: str = "") -> None:
    """Below the axes, where it covers nothing; every name once."""
    handles, names = axes.get_legend_handles_labels()
    once = dict(zip(names, handles, strict=True))
    columns = min(len(once), 8 if title else max(1, round(84 / max(12, *(len(name) + 5 for name in once)))))
    legend = figure.legend(
        once.values(), [textwrap.shorten(name, 100, placeholder=" …") for name in once], loc="outside lower center",
        ncols=columns, frameon=False, fontsize=9, title=title or None, title_fontsize=9,
    )  # fmt: skip
    for line in legend.get_lines():
        line.set_alpha(1)
