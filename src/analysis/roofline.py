"""The roofline plot of an explanation: how fast each module computes, and how fast this device could.

A point is a module. Its x is FLOP for each byte that moves through main memory, its y is FLOP a second. The device's
memory bandwidth and its peaks are the roofs, as they were measured on this machine. Below is the whole step as a bar.
"""

import io
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import Bbox

from ..records.explanation import OWN_CODE, Cost, Explanation
from ..records.formatting import count, percent, with_prefix
from .plot_style import COLOURS, GREY, RC, new_figure

MOST = 8  # modules with a point and a colour of their own; the shortest ones share a grey
_DARK, _LIGHT, _PALE = "#222222", "#BBBBBB", "#EEEEEE"
_DARK_COLOURS = (*COLOURS[:3], GREY)  # on which white can be read
_STEP = "the step"
_LONGEST = 24  # characters of a name
_LINES_APART = 1.5  # roofs that are nearer to each other share a label
_PLACES = sorted(product((1, -1), range(-8, 9)), key=lambda place: (abs(place[1]), -place[0]))  # side, and lines up
_LINE = 11  # points


@dataclass(frozen=True)
class _Point:
    name: str
    x: float  # FLOP a byte; infinite without traffic
    y: float  # FLOP/s
    share: float  # of the step
    colour: str

    @property
    def area(self) -> float:
        """Of the marker in square points: in proportion to the share, as far as the smallest can still be seen."""
        return 150.0 if self.name == _STEP else max(20.0, 1600 * self.share)


def roofline_png(step: Explanation) -> bytes | None:
    """The plot as a PNG; None where no roof or no FLOPs are known."""
    with rc_context(RC):
        figure, file = roofline(step), io.BytesIO()
        if figure is None:
            return None
        figure.savefig(file, format="png")
    return file.getvalue()


def roofline(step: Explanation) -> Figure | None:
    """The plot; None where no roof or no FLOPs are known."""
    roofs, bandwidth = step.roofs.flops_per_sec, step.roofs.bytes_per_sec
    rows = _without_prefix(step.modules(most=MOST + 4))
    points = _points(step, rows)
    if not roofs or not bandwidth or not step.is_timed or not points:
        return None
    figure = new_figure(5.6)
    canvas = FigureCanvasAgg(figure)
    top, bar = figure.subplots(2, 1, height_ratios=(9, 1))
    batch = f", batches of {step.batch_size:,}" if step.batch_size else ""
    threads = f", {count(step.threads, 'thread')}" if step.threads else ""
    title = f"{step.title}{batch}, {step.precision} on {step.device_name}{threads}: roofline of a step"
    top.set_title(textwrap.fill(title, 95))
    placed = _set_limits(top, points, roofs, bandwidth)
    _draw_roofs(top, roofs, bandwidth, {cost.dtype for cost in step.operations if cost.flops})
    for point in placed:
        if point.name == _STEP:
            top.plot(point.x, point.y, marker="D", ms=9, mfc="white", mec=_DARK, mew=2, zorder=7)
        else:
            top.scatter(point.x, point.y, s=point.area, color=point.colour, edgecolor="white", lw=0.8, zorder=5)
    _draw_bar(bar, step, rows, {point.name: point.colour for point in points})
    canvas.draw()  # fixes the layout, so that texts can be measured
    _label_slope(top, bandwidth)
    _label_points(top, placed, canvas)
    return figure


def _without_prefix(rows: Sequence[Cost]) -> list[Cost]:
    """The rows without the first names that all modules share, such as the attribute that holds the network."""
    paths = [row.module.split(".") for row in rows if row.part != "optimizer" and row.module != OWN_CODE]
    shared = min([len(os.path.commonprefix(paths)), *(len(path) - 1 for path in paths)]) if paths else 0
    inner = {".".join(path): ".".join(path[shared:]) for path in paths}
    return [replace(row, module=inner.get(row.module, row.module)) for row in rows]


def _points(step: Explanation, rows: Sequence[Cost]) -> list[_Point]:
    """The step and its modules, as far as they have FLOPs and a time; the longest first."""
    found = [row for row in rows if row.flops and row.seconds > 0][:MOST]
    colours = [*COLOURS, *[GREY] * MOST]
    whole = [replace(step.total, module=_STEP, seconds=step.step_seconds)] if found else []
    return [
        _Point(
            row.module,
            row.flops / row.cold_bytes if row.cold_bytes else math.inf,
            row.flops / row.seconds,
            row.seconds / step.step_seconds,
            colour,
        )
        for row, colour in zip([*whole, *found], [_DARK, *colours], strict=False)
    ]


def _set_limits(axes: Axes, points: Sequence[_Point], roofs: Mapping[str, float], bandwidth: float) -> list[_Point]:
    """Set the scales; the points, of which those without traffic stand in a strip of their own."""
    xs = [point.x for point in points if math.isfinite(point.x)] + [peak / bandwidth for peak in roofs.values()]
    low, high = min(xs) / 5, max(xs) * 5
    placed = list(points)
    if not all(math.isfinite(point.x) for point in points):
        edge, high = high, high * (high / low) ** 0.1
        middle = math.sqrt(edge * high)
        axes.axvspan(edge, high, color=_PALE, zorder=0)
        how = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "bottom", "fontsize": 8, "color": GREY}
        axes.text(middle, 0.02, "in cache", **how)
        placed = [point if math.isfinite(point.x) else replace(point, x=middle) for point in points]
    axes.set(xscale="log", yscale="log", xlabel="FLOP for each byte through main memory", ylabel="FLOP/s")
    axes.set_xlim(low, high)
    axes.set_ylim(min([*(point.y for point in points), *roofs.values()]) / 3, max(roofs.values()) * 2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(numticks=9))
        axis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value < 1e4 else with_prefix(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: with_prefix(value)))
    return placed


def _draw_roofs(axes: Axes, roofs: Mapping[str, float], bandwidth: float, used: set[str]) -> None:
    """The slope of the memory up to the highest peak, and each peak from its ridge on; what the step uses is dark."""
    left, right = axes.get_xlim()
    used = used & roofs.keys() or set(roofs)
    ridge, highest = max(roofs[name] for name in used) / bandwidth, max(roofs.values()) / bandwidth
    axes.plot([ridge, highest], [ridge * bandwidth, highest * bandwidth], color=_LIGHT, lw=1.2, zorder=2)
    axes.plot([left, ridge], [left * bandwidth, ridge * bandwidth], color=_DARK, lw=1.8, zorder=3)
    groups: list[list[str]] = []  # roofs that are nearly equal share a label
    for name, peak in sorted(roofs.items(), key=lambda item: -item[1]):
        colour, width, order = (_DARK, 1.8, 4) if name in used else (_LIGHT, 1.2, 3)
        axes.plot([peak / bandwidth, right], [peak, peak], color=colour, lw=width, zorder=order)
        if groups and roofs[groups[-1][0]] < _LINES_APART * peak:
            groups[-1].append(name)
        else:
            groups.append([name])
    for group in groups:
        peaks = list(dict.fromkeys(with_prefix(roofs[name], "FLOP/s") for name in group))
        text = ", ".join(group) + "\n" + (peaks[0] if len(peaks) == 1 else f"{peaks[-1].split()[0]} to {peaks[0]}")
        place = (right, math.sqrt(roofs[group[0]] * roofs[group[-1]]))
        how = {"va": "center", "textcoords": "offset points", "fontsize": 8.5, "annotation_clip": False}
        axes.annotate(text, place, (5, 0), color=_DARK if used & {*group} else GREY, **how)


def _label_slope(axes: Axes, bandwidth: float) -> None:
    """Write the bandwidth along its roof."""
    x = max(axes.get_xlim()[0], axes.get_ylim()[0] / bandwidth) * 1.6
    a, b = axes.transData.transform([(x, x * bandwidth), (10 * x, 10 * x * bandwidth)])
    how = {"rotation": math.degrees(math.atan2(b[1] - a[1], b[0] - a[0])), "rotation_mode": "anchor", "va": "bottom"}
    text = f"main memory: {with_prefix(bandwidth, 'B/s')}"
    axes.annotate(text, (x, x * bandwidth), (0, 5), textcoords="offset points", fontsize=8.5, color=_DARK, **how)


def _label_points(axes: Axes, points: Sequence[_Point], canvas: FigureCanvasAgg) -> None:
    """Name each point beside it, so many lines higher or lower that its text covers no other text and no point."""
    renderer, scale = canvas.get_renderer(), axes.figure.dpi / 72
    frame, taken = axes.get_window_extent(renderer), [text.get_window_extent(renderer) for text in axes.texts]
    ends = [axes.transData.transform(line.get_xydata()) for line in axes.lines]
    taken += [Bbox([a, b]) for a, b in (each for each in ends if len(each) == 2) if a[1] == b[1]]  # the level roofs
    for point in points:
        (x, y), radius = axes.transData.transform((point.x, point.y)), scale * math.sqrt(point.area / math.pi)
        taken.append(Bbox.from_extents(x - radius, y - radius, x + radius, y + radius))
    for point in points:
        name = point.name if len(point.name) <= _LONGEST else f"…{point.name[1 - _LONGEST :]}"
        share = "" if point.name == _STEP else f" {percent(point.share) if point.share >= 0.005 else '< 1 %'}"
        radius = math.sqrt(point.area / math.pi)
        line = {"arrowstyle": "-", "color": GREY, "lw": 0.7, "shrinkA": 0, "shrinkB": radius}
        how = {"fontsize": 8.5, "color": _DARK, "va": "center", "zorder": 8, "textcoords": "offset points"}
        label = axes.annotate(f"{name}{share}", (point.x, point.y), (0, 0), arrowprops=line, **how)
        label.set(weight="bold" if point.name == _STEP else "normal")
        label.set_path_effects([withStroke(linewidth=2.5, foreground="white")])  # a roof may run behind it
        for side, lines in _PLACES:
            label.set(ha="left" if side > 0 else "right", position=(side * (radius + 4 + abs(lines)), lines * _LINE))
            label.update_positions(renderer)
            box = Text.get_window_extent(label, renderer)
            if frame.x0 <= box.x0 and box.x1 <= frame.x1 and not box.count_overlaps(taken):
                break
        taken.append(box.padded(2))


def _draw_bar(axes: Axes, step: Explanation, rows: Sequence[Cost], colours: dict[str, str]) -> None:
    """The whole step: modules with their points' colours, those without FLOPs in grey, and what is in no operation."""
    parts = [(row.module, row.seconds, colours.get(row.module, "#D9D9D9"), "white", "") for row in rows]
    parts.sort(key=lambda part: part[0] not in colours)  # stable: the longest first among each
    rest = max(0.0, step.step_seconds - sum(row.seconds for row in rows))
    parts.append(("no kernel" if step.device == "cuda" else "host", rest, "white", _LIGHT, "////"))
    left = 0.0
    for name, seconds, colour, edge, hatch in parts:
        share = seconds / step.step_seconds
        axes.barh(0, share, 1, left, color=colour, linewidth=0.8, edgecolor=edge, hatch=hatch)
        if len(name) <= 105 * share:  # about as many characters as there is room for
            how = {"ha": "center", "va": "center", "fontsize": 7.5}
            axes.text(left + share / 2, 0, name, color="white" if colour in _DARK_COLOURS else _DARK, **how)
        left += share
    axes.set(xlim=(0, 1), ylim=(-0.5, 0.5), yticks=[])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))
    axes.set_xlabel("share of the step (grey: no FLOPs; hatched: in no operation)")
    axes.grid(False)
    axes.spines["left"].set_visible(False)
