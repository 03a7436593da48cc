"""The plots of `report.html`: all draw from one source with a row for each run, so that a picked run is marked in all."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from bokeh.models import (
    BooleanFilter,
    CDSView,
    ColumnDataSource,
    FixedTicker,
    HoverTool,
    NumeralTickFormatter,
    TapTool,
)
from bokeh.plotting import figure

from ..records.metrics import FRACTION, metric
from ..records.rates import RATE
from ..records.step_parts import PARTS
from .curves import Curve, read_curve
from .plot_style import DEVICE_TITLES, GREY, PART_COLOURS, bars_of, look_of, shortened
from .recommend import Analysis, Recommendation
from .run import Run

_MARKERS = {"o": "circle", "s": "square", "^": "triangle", "D": "diamond", "v": "inverted_triangle"}
_MARKERS |= {"P": "square_pin", "X": "star"}
_HEIGHT, _LEGEND_LINE = 360, 28  # pixels
_TITLE, _LEGEND = 32, 44  # characters that fit the screen of a phone
_NARROWEST = 420  # pixels of a plot that another one stands beside
_MAX_PANELS = 6  # of the parts of a step
_DIMMED = 0.12  # opacity of what is not picked
_TICKS = [mantissa * 10.0**power for power in range(-3, 10) for mantissa in (1, 2, 5)]  # of a logarithmic axis


class Plots:
    """The figures of a report. `source` has a row for each of `runs`; an unknown number is NaN there, and not drawn."""

    def __init__(self, runs: Sequence[Run], analyses: Sequence[Analysis], recommended: Sequence[Recommendation]):
        self.runs, self.analyses, self.recommended = runs, analyses, recommended
        self.curves = {id(run): curve for run in runs if (curve := read_curve(run))}
        self.bars = bars_of(runs)
        self.labels = {id(run): analysis.group.label for analysis in analyses for run in analysis.group.runs}
        self.source = ColumnDataSource(
            {**self._numbers(), **self._texts(), **self._shares(), **self._curves()}, name="runs"
        )

    def rows(self) -> list[list[figure]]:
        """Every plot that has data, the most important first."""
        first, steps = self.throughput(), self.step_times()
        if len(steps) == 1:
            first += [steps.pop()]
        of_steps = [steps[at : at + 2] for at in range(0, len(steps), 2)]
        found = [row for row in (first, *of_steps, self.devices(), self.validations()) if row]
        for row in found:
            tallest = max(plot.height or 0 for plot in row)
            for plot in row:
                plot.height = tallest
        return found

    def _numbers(self) -> dict[str, list[float]]:
        names = ("batch_size", RATE, self.bars.low, self.bars.high, *DEVICE_TITLES)
        found = {name: [run.values.get(name, math.nan) for run in self.runs] for name in names}
        step = 2 ** (0.42 * self._least_gap())
        found["left"] = [size / step for size in found["batch_size"]]
        found["right"] = [size * step for size in found["batch_size"]]
        return found

    def _least_gap(self) -> float:
        """Between the logarithms of two batch sizes."""
        sizes = [math.log2(size) for size in self._sizes(self.analyses)]
        return min((b - a for a, b in itertools.pairwise(sizes)), default=1.0)

    def _texts(self) -> dict[str, list[str]]:
        def shown(name: str) -> list[str]:
            return [metric(name).text(run.values[name]) if name in run.values else "" for run in self.runs]

        bars = zip(shown(self.bars.low), shown(self.bars.high), strict=True)
        return {
            "name": [run.name for run in self.runs],
            "group": [self.labels.get(id(run), run.model) for run in self.runs],
            "size_text": shown("batch_size"),
            "rate_text": shown(RATE),
            "bar_text": ["–".join(filter(None, pair)) for pair in bars],
            "step_text": [f"{text} ms" if text else "" for text in shown("step_ms_median")],
            **{f"{name}_text": shown(name) for name in DEVICE_TITLES},
        }

    def _shares(self) -> dict[str, list[Any]]:
        """The ends of the parts of the mean step in %, and all of them in words."""
        totals = [sum(run.parts_ms.values()) or math.nan for run in self.runs]
        parts = [[run.parts_ms.get(part, math.nan) for part in PARTS] for run in self.runs]
        shares = 100 * np.array(parts).reshape(-1, len(PARTS)) / np.array(totals).reshape(-1, 1)
        ends = np.cumsum(shares, axis=1)
        found: dict[str, list[Any]] = {"end_0": [0.0] * len(self.runs)}
        found |= {f"end_{i + 1}": ends[:, i].tolist() for i in range(len(PARTS))}
        names = [part.replace("_", " ") for part in PARTS]
        found["parts_text"] = [
            ", ".join(f"{name} {share:.0f} %" for name, share in zip(names, line, strict=True)) if line[0] >= 0 else ""
            for line in shares.tolist()
        ]
        return found

    def _curves(self) -> dict[str, list[list[float]]]:
        found = [self.curves.get(id(run), Curve("", [], [], [])) for run in self.runs]
        values = [[100 * v for v in c.values] if metric(c.metric).unit == FRACTION else c.values for c in found]
        return {"curve": values, "seconds": [c.seconds for c in found], "samples": [c.samples for c in found]}

    @staticmethod
    def _sizes(analyses: Iterable[Analysis]) -> list[int]:
        return sorted({size for analysis in analyses for size in analysis.group.sizes})

    def _view(self, analysis: Analysis) -> CDSView:
        """The measured runs of a group."""
        measured = {id(run) for runs in analysis.group.sizes.values() for run in runs}
        return CDSView(filter=BooleanFilter(booleans=[id(run) in measured for run in self.runs]))

    def throughput(self) -> list[figure]:
        """Samples/s against batch size: each run, the fit of its group, and what is recommended."""
        shown = [analysis for analysis in self.analyses if len(analysis.group.sizes) > 1]
        if not shown:
            return []
        rates = [rate for analysis in shown for rate in analysis.group.rates.values()]
        plot = self._plot("Throughput by the median step", f"samples/s; bars: {self.bars.heading}", log=True)
        plot.y_range.update(start=min(rates) / 1.6, end=1.7 * max(rates))
        points = []
        for colour, marker, label, analysis in self._looks(shown):
            line = analysis.trusted
            sizes = np.geomspace(min(analysis.group.rates), max(analysis.group.rates), 60).tolist()
            fitted = {size: line.samples_per_sec(size) for size in sizes} if line else analysis.group.rates
            style = {"color": colour, "legend_label": label}
            plot.line(list(fitted), list(fitted.values()), line_width=2, alpha=0.7, **style)
            drawn = {"source": self.source, "view": self._view(analysis), "nonselection_alpha": _DIMMED, **style}
            plot.segment("batch_size", self.bars.low, "batch_size", self.bars.high, line_width=1.5, **drawn)
            points.append(plot.scatter("batch_size", RATE, marker=marker, size=10, **drawn))
        self._mark_recommended(plot)
        self._size_axis(plot, shown)
        tips = [("samples/s", "@rate_text"), (self.bars.heading, "@bar_text"), ("median step", "@step_text")]
        self._finish(plot, points, tips)
        return [plot]

    def _mark_recommended(self, plot: figure) -> None:
        sizes, rates = [r.batch_size for r in self.recommended], [r.samples_per_sec for r in self.recommended]
        if sizes:
            ring = {"fill_color": None, "line_color": GREY, "line_width": 2.5, "legend_label": "recommended"}
            plot.scatter(sizes, rates, marker="circle", size=22, **ring)

    def step_times(self) -> list[figure]:
        """Where the time of a step goes, in shares of the mean step; a plot for each group."""
        several = [
            a for a in self.analyses if sum(any(r.parts_ms for r in runs) for runs in a.group.sizes.values()) > 1
        ]
        return [self._step_time(analysis, len(several) > 1) for analysis in several[:_MAX_PANELS]]

    def _step_time(self, analysis: Analysis, named: bool) -> figure:
        title = analysis.group.label if named else "Where the time of a step goes"
        plot = self._plot(title, "share of the mean step, %")
        plot.y_range.update(start=0, end=112)
        typical = {id(self._typical(analysis, size)) for size in analysis.group.sizes}
        view = CDSView(filter=BooleanFilter(booleans=[id(run) in typical and bool(run.parts_ms) for run in self.runs]))
        drawn = {"source": self.source, "view": view, "nonselection_alpha": 0.3}
        bars = []
        for i, (part, colour) in enumerate(zip(PARTS, PART_COLOURS, strict=True)):
            style = {"color": colour, "line_color": "white", "legend_label": part.replace("_", " ")}
            bars.append(plot.quad("left", "right", f"end_{i + 1}", f"end_{i}", **style, **drawn))
        text = {"text_align": "center", "text_font_size": "11px", "text_color": GREY, "y_offset": -2}
        plot.text("batch_size", f"end_{len(PARTS)}", "step_text", **text, **drawn)
        self._size_axis(plot, [analysis])
        plot.xaxis.axis_label = "batch size; above a bar: the median step"
        self._finish(plot, bars, [("median step", "@step_text"), ("mean step", "@parts_text")], hide=False)
        return plot

    @staticmethod
    def _typical(analysis: Analysis, size: int) -> Run:
        """Of repeated runs the one with the middle rate."""
        runs = sorted(analysis.group.sizes[size], key=lambda run: run.values[RATE])
        return runs[(len(runs) - 1) // 2]

    def devices(self) -> list[figure]:
        """What the device does and the memory it needs, against batch size."""
        plots = []
        for name, title in DEVICE_TITLES.items():
            shown = [a for a in self.analyses if len(a.group.medians(name)) > 1]
            if not shown:
                continue
            highest = max(value for a in shown for value in a.group.medians(name).values())
            heading, unit = title.rsplit(", ", 1)
            plot = self._plot(heading, unit)
            plot.y_range.update(start=0, end=max(105.0, 1.05 * highest) if name.endswith("_pct") else 1.15 * highest)
            points = []
            for colour, marker, label, analysis in self._looks(shown):
                medians, style = analysis.group.medians(name), {"color": colour, "legend_label": label}
                plot.line(list(medians), list(medians.values()), line_width=2, alpha=0.7, **style)
                drawn = {"source": self.source, "view": self._view(analysis), "nonselection_alpha": _DIMMED, **style}
                points.append(plot.scatter("batch_size", name, marker=marker, size=9, **drawn))
            self._size_axis(plot, shown)
            self._finish(plot, points, [(title, f"@{name}_text")])
            plots.append(plot)
        return plots

    def validations(self) -> list[figure]:
        """The validation metric of every run against its training time, and against the samples that it had seen."""
        names = [curve.metric for curve in self.curves.values()]
        name = max(set(names), key=lambda name: (names.count(name), name), default="")
        if not any(len(curve.values) > 1 for curve in self.curves.values() if curve.metric == name):
            return []
        unit = ", %" if metric(name).unit == FRACTION else ""
        plots = []
        for x, label in (("seconds", "seconds of training"), ("samples", "samples seen")):
            values = [v for c in self.curves.values() if c.metric == name for v in getattr(c, x) if v > 0]
            wide = bool(values) and max(values) > 30 * min(values)
            plot = self._plot(f"{name} of every run", f"{name}{unit}", log_x=wide)
            plot.xaxis.axis_label = label
            plot.xaxis.formatter = NumeralTickFormatter(format="0.[00]a" if x == "samples" else "0,0.[00]")
            lines = []
            for colour, _, group, analysis in self._looks(self.analyses):
                known = {id(run) for run in analysis.group.runs if id(run) in self.curves}
                chosen = [id(run) in known and self.curves[id(run)].metric == name for run in self.runs]
                drawn = {"source": self.source, "view": CDSView(filter=BooleanFilter(booleans=chosen)), "alpha": 0.8}
                style = {"color": colour, "line_width": 2, "legend_label": group, "nonselection_alpha": _DIMMED}
                lines.append(plot.multi_line(x, "curve", **style, **drawn))
            self._finish(plot, lines, [])
            plots.append(plot)
        return plots

    def _looks(self, analyses: Sequence[Analysis]) -> list[tuple[str, str, str, Analysis]]:
        """Colour, marker and name of each group, the same in all plots."""
        at = {label: i for i, label in enumerate(dict.fromkeys(a.group.label for a in self.analyses))}
        looks = [(*look_of(at[a.group.label]), a) for a in analyses]
        return [(colour, _MARKERS[marker], _shortened(a.group.label, _LEGEND), a) for colour, marker, a in looks]

    def _plot(self, title: str, y: str, log: bool = False, log_x: bool = True) -> figure:
        plot = figure(
            title=_shortened(title, _TITLE),
            height=_HEIGHT,
            sizing_mode="stretch_width",
            frame_align=False,  # beside a plot with a higher legend the title would lie under the legend
            styles={"flex": f"1 1 {_NARROWEST}px"},  # below each other where there is no room beside each other
            tools="pan,wheel_zoom,box_zoom,box_select,reset,save",
            x_axis_type="log" if log_x else "linear",
            y_axis_type="log" if log else "linear",
        )
        plot.yaxis.axis_label = y
        plot.yaxis.formatter = NumeralTickFormatter(format="0,0.[000]")
        if log:
            plot.yaxis.ticker = plot.ygrid.ticker = FixedTicker(
                ticks=_TICKS
            )  # a LogTicker's are even below two decades
        plot.toolbar.update(logo=None, autohide=True)
        return plot

    def _size_axis(self, plot: figure, analyses: Sequence[Analysis]) -> None:
        sizes = self._sizes(analyses)
        plot.xaxis.ticker = FixedTicker(ticks=sizes)
        plot.xgrid.ticker = FixedTicker(ticks=sizes)
        plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
        plot.xaxis.axis_label = "batch size"

    def _finish(self, plot: figure, glyphs: list[Any], tips: list[tuple[str, str]], hide: bool = True) -> None:
        """Hover, picking by a click, and the legend, which is above the plot, where it covers nothing."""
        tips = [("run", "@name"), ("", "@group"), ("batch size", "@size_text"), *tips]
        plot.add_tools(HoverTool(renderers=glyphs, tooltips=tips), TapTool(renderers=glyphs))
        legend: Any = plot.legend[0]
        longest = max(len(item.label.value) for item in legend.items)
        columns = max(1, min(len(legend.items), _LEGEND // (longest + 3)))
        legend.update(orientation="horizontal", ncols=columns, click_policy="hide" if hide else "none")
        legend.update(margin=0, spacing=8)
        plot.height = _HEIGHT + _LEGEND_LINE * (math.ceil(len(legend.items) / columns) - 1)
        plot.add_layout(legend, "above")


def _shortened(text: str, most: int) -> str:
    """A name that is short enough for a title. Two dollar signs would begin a formula."""
    return shortened(text.replace("$", "＄"), most)
