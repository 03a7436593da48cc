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

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import Bbox

from ..records.explanation import OWN_CODE, Cost, Explanation
from ..records.formatting import percent, with_prefix
from .plot_style import COLOURS, GREY, RC, new_figure

MOST = 8  # modules with a point and a colour of their own; the shortest ones share a grey
_DARK, _LIGHT, _PALE = "#222222", "#BBBBBB", "#EEEEEE"
_DARK_COLOURS = (*COLOURS[:3], GREY)  # on which white can be read
_STEP = "the step"
_LONGEST = 24  # characters of a name
_CLEAR = 5  # points around a marker that are free of other points' names
_LINES_APART = 1.5  # roofs that are nearer to each other share a label


@dataclass(frozen=True)
class _Point:
    name: str
    x: float  # FLOP a byte; infinite without traffic
    y: float  # FLOP/s
    share: float  # of the step
    colour: str


def roofline_png(step: Explanation) -> bytes | None:
    """The plot as a PNG; None where no roof or no FLOPs are known."""
    with rc_context(RC):
        figure = roofline(step)
        if figure is None:
            return None
        file = io.BytesIO()
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
    used = {cost.dtype for cost in step.operations if cost.flops}
    in_cache = _limits(top, points, roofs, bandwidth)
    _draw_roofs(top, roofs, bandwidth, used)
    _draw_points(top, points, in_cache)
    top.set_title(_title(step))
    _draw_bar(bar, step, rows, {point.name: point.colour for point in points})
    canvas.draw()  # fixes the layout, so that texts can be measured
    _label_slope(top, bandwidth)
    _label_points(top, points, in_cache, canvas.get_renderer())
    return figure


def _title(step: Explanation) -> str:
    batch = f", batches of {step.batch_size:,}" if step.batch_size else ""
    threads = f", {step.threads} thread{'s' if step.threads > 1 else ''}" if step.threads else ""
    return textwrap.fill(
        f"{step.title}{batch}, {step.precision} on {step.device_name}{threads}: roofline of a step", 95
    )


def _without_prefix(rows: Sequence[Cost]) -> list[Cost]:
    """The rows without the first names that all modules share, such as the attribute that holds the network."""
    paths = [row.module.split(".") for row in rows if row.part != "optimizer" and row.module != OWN_CODE]
    shared = len(os.path.commonprefix(paths)) if paths else 0
    shared = min([shared, *(len(path) - 1 for path in paths)])
    inner = {".".join(path): ".".join(path[shared:]) for path in paths}
    return [replace(row, module=inner.get(row.module, row.module)) for row in rows]


def _points(step: Explanation, rows: Sequence[Cost]) -> list[_Point]:
    """The step and its modules, as far as they have FLOPs and a time; the longest first."""
    found = [row for row in rows if row.flops and row.seconds > 0]
    points = [
        _Point(
            row.module,
            row.flops / row.cold_bytes if row.cold_bytes else math.inf,
            row.flops / row.seconds,
            row.seconds / step.step_seconds,
            COLOURS[index % len(COLOURS)] if index < len(COLOURS) else GREY,
        )
        for index, row in enumerate(found[:MOST])
    ]
    total = step.total
    if total.flops and points:
        x = total.flops / total.cold_bytes if total.cold_bytes else math.inf
        points.insert(0, _Point(_STEP, x, total.flops / step.step_seconds, 1.0, _DARK))
    return points


def _limits(axes: Axes, points: Sequence[_Point], roofs: Mapping[str, float], bandwidth: float) -> float:
    """Set the scales; returns the x at which points without traffic stand, NaN without such points."""
    ridges = [peak / bandwidth for peak in roofs.values()]
    xs = [point.x for point in points if math.isfinite(point.x)]
    low, high = min([*xs, *ridges]) / 5, max([*xs, *ridges]) * 5
    in_cache = math.nan
    if len(xs) < len(points):
        edge, high = high, high * (high / low) ** 0.1
        in_cache = math.sqrt(edge * high)
        axes.axvspan(edge, high, color=_PALE, zorder=0)
        transform = axes.get_xaxis_transform()
        axes.text(in_cache, 0.02, "in cache", transform=transform, ha="center", va="bottom", fontsize=8, color=GREY)
    ys = [point.y for point in points]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_ylim(min([*ys, *roofs.values()]) / 3, max(roofs.values()) * 2)
    axes.set_xlabel("FLOP for each byte through main memory")
    axes.set_ylabel("FLOP/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(numticks=9))
        axis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value < 1e4 else with_prefix(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: with_prefix(value)))
    return in_cache


def _draw_roofs(axes: Axes, roofs: Mapping[str, float], bandwidth: float, used: set[str]) -> None:
    """The slope of the memory up to the highest peak, and each peak from its ridge on; what the step uses is dark."""
    left, right = axes.get_xlim()
    relevant = {name: peak for name, peak in roofs.items() if name in used} or roofs
    ridge, highest = max(relevant.values()) / bandwidth, max(roofs.values()) / bandwidth
    axes.plot([ridge, highest], [ridge * bandwidth, highest * bandwidth], color=_LIGHT, lw=1.2, zorder=2)
    axes.plot([left, ridge], [left * bandwidth, ridge * bandwidth], color=_DARK, lw=1.8, zorder=3)
    for name, peak in roofs.items():
        colour, width = (_DARK, 1.8) if name in relevant else (_LIGHT, 1.2)
        axes.plot([peak / bandwidth, right], [peak, peak], color=colour, lw=width, zorder=4 if name in relevant else 3)
    texts = {"ha": "left", "va": "center", "textcoords": "offset points", "fontsize": 8.5, "annotation_clip": False}
    for group in _together(roofs):
        peaks = list(dict.fromkeys(with_prefix(roofs[name], "FLOP/s") for name in group))
        colour = _DARK if set(group) & set(relevant) else GREY
        text = ", ".join(group) + "\n" + (peaks[0] if len(peaks) == 1 else f"{peaks[-1].split()[0]} to {peaks[0]}")
        middle = math.sqrt(roofs[group[0]] * roofs[group[-1]])
        axes.annotate(text, (right, middle), (5, 0), color=colour, **texts)


def _together(roofs: Mapping[str, float]) -> list[list[str]]:
    """The roofs' names, from the highest on; those that are nearly equal share a label."""
    groups: list[list[str]] = []
    for name, peak in sorted(roofs.items(), key=lambda item: -item[1]):
        if groups and roofs[groups[-1][0]] < _LINES_APART * peak:
            groups[-1].append(name)
        else:
            groups.append([name])
    return groups


def _draw_points(axes: Axes, points: Sequence[_Point], in_cache: float) -> None:
    for point in points:
        x = point.x if math.isfinite(point.x) else in_cache
        if point.name == _STEP:
            axes.plot(x, point.y, marker="D", ms=9, mfc="white", mec=_DARK, mew=2, zorder=7)
        else:
            axes.scatter(x, point.y, s=_area(point), color=point.colour, edgecolor="white", lw=0.8, zorder=5)


def _area(point: _Point) -> float:
    """Of a marker in square points: in proportion to the share, as far as the smallest can still be seen."""
    return max(20.0, 1600 * point.share)


def _radius(point: _Point) -> float:
    """Of a marker in points."""
    return 7.0 if point.name == _STEP else math.sqrt(_area(point) / math.pi)


def _label_slope(axes: Axes, bandwidth: float) -> None:
    """Write the bandwidth along its roof."""
    (left, _), (low, _) = axes.get_xlim(), axes.get_ylim()
    x = max(left, low / bandwidth) * 1.6
    a, b = axes.transData.transform([(x, x * bandwidth), (10 * x, 10 * x * bandwidth)])
    angle = math.degrees(math.atan2(b[1] - a[1], b[0] - a[0]))
    text = f"main memory: {with_prefix(bandwidth, 'B/s')}"
    how = {"rotation": angle, "rotation_mode": "anchor", "textcoords": "offset points"}
    axes.annotate(text, (x, x * bandwidth), (0, 5), fontsize=8.5, color=_DARK, va="bottom", zorder=6, **how)


def _label_points(axes: Axes, points: Sequence[_Point], in_cache: float, renderer: RendererBase) -> None:
    """Name each point where its text covers no other text and no point; a line leads to a text that stands apart."""
    scale = axes.figure.dpi / 72
    centres = [axes.transData.transform((p.x if math.isfinite(p.x) else in_cache, p.y)) for p in points]
    texts = [text.get_window_extent(renderer) for text in axes.texts]
    markers = []
    for point, (x, y) in zip(points, centres, strict=True):
        radius = scale * _radius(point)
        markers.append(Bbox.from_extents(x - radius, y - radius, x + radius, y + radius))
    frame = axes.get_window_extent(renderer)
    for index, (point, (x, y)) in enumerate(zip(points, centres, strict=True)):
        text = _STEP if point.name == _STEP else f"{_shortened(point.name)} {_percent(point.share)}"
        weight = "bold" if point.name == _STEP else "normal"
        label = axes.text(0, 0, text, fontsize=8.5, color=_DARK, zorder=8, va="bottom", weight=weight)
        label.set_path_effects([withStroke(linewidth=2.5, foreground="white")])  # a roof may run behind it
        size = label.get_window_extent(renderer)
        # A text beside another point would be read as that point's.
        others = [marker.padded(_CLEAR * scale) for at, marker in enumerate(markers) if at != index]
        taken = [*texts, *others, markers[index]]
        box, distance = _free_place((x, y), scale * _radius(point), (size.width, size.height), taken, frame, scale)
        texts.append(box)
        left, bottom = axes.transData.inverted().transform((box.x0, box.y0))
        label.set_position((float(left), float(bottom)))
        if distance > 2 * scale:
            near = (min(max(x, box.x0), box.x1), min(max(y, box.y0), box.y1))
            (x0, y0), (x1, y1) = axes.transData.inverted().transform([(x, y), near])
            axes.plot([x0, x1], [y0, y1], color=GREY, lw=0.7, zorder=4)


def _free_place(
    centre: tuple[float, float],
    radius: float,
    size: tuple[float, float],
    taken: Sequence[Bbox],
    frame: Bbox,
    scale: float,
) -> tuple[Bbox, float]:
    """The nearest box of a size beside a point that covers no other box, in pixels, and its distance from the point."""
    width, height = size
    best: tuple[float, Bbox, float] | None = None
    for distance in (2, 10, 20, 34, 50, 70, 95):
        reach = radius + distance * scale
        for turn in range(16):
            angle = turn * math.pi / 8
            x = centre[0] + reach * math.cos(angle) - width / 2 * (1 - math.cos(angle))
            y = centre[1] + reach * math.sin(angle) - height / 2 * (1 - math.sin(angle))
            box = Bbox.from_bounds(x, y, width, height)
            covered = sum(_overlap(box, other) for other in taken)
            outside = width * height - _overlap(box, frame)
            cost = covered + 2 * outside
            if cost <= 0:
                return box, distance * scale
            if best is None or cost < best[0]:
                best = (cost, box, distance * scale)
    assert best is not None
    return best[1:]


def _overlap(one: Bbox, other: Bbox) -> float:
    both = Bbox.intersection(one, other)
    return 0.0 if both is None else both.width * both.height


def _percent(share: float) -> str:
    return percent(share) if share >= 0.005 else "< 1 %"


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"


def _draw_bar(axes: Axes, step: Explanation, rows: Sequence[Cost], colours: dict[str, str]) -> None:
    """The whole step: modules with their points' colours, those without FLOPs in grey, and what is in no operation."""
    parts = [(row.module, row.seconds, colours.get(row.module)) for row in rows]
    parts.sort(key=lambda part: part[2] is None)  # stable: the longest first among each
    rest = max(0.0, step.step_seconds - sum(seconds for _, seconds, _ in parts))
    parts.append(("no kernel" if step.device == "cuda" else "host", rest, "white"))
    left = 0.0
    for name, seconds, colour in parts:
        share = seconds / step.step_seconds
        edge, hatch = (_LIGHT, "////") if colour == "white" else ("white", None)
        axes.barh(0, share, 1, left, color=colour or "#D9D9D9", linewidth=0.8, edgecolor=edge, hatch=hatch)
        _name_segment(axes, name, left + share / 2, share, "white" if colour in _DARK_COLOURS else _DARK)
        left += share
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.5, 0.5)
    axes.set_yticks([])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))
    axes.set_xlabel("share of the step (grey: no FLOPs; hatched: in no operation)")
    axes.grid(False)
    axes.spines["left"].set_visible(False)


def _name_segment(axes: Axes, name: str, middle: float, share: float, colour: str) -> None:
    if len(name) <= 105 * share:  # about as many characters as there is room for
        axes.text(middle, 0, name, ha="center", va="center", fontsize=7.5, color=colour)
