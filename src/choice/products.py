"""Matrix products on each device: measured here, and predicted on cards by the functions that predict a training step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..analysis.noise import BETWEEN, CONFIDENCE
from ..hardware.datasheet import Datasheet
from ..hardware.products import PASSES, Product, Timed
from ..records.formatting import percent
from ..records.intervals import median_interval
from .crossing import Line, nearest, words
from .interval import Interval, converted, digits, times_longer
from .kernels import predict
from .launches import BELOW_AUTOGRAD, elsewhere
from .step import TRANSFER, overlapped
from .work import Work

if TYPE_CHECKING:
    from ..hardware.calibration import Calibration  # which brings torch

LIMITS = ("launches", "memory", "arithmetic")
# Seconds of a product, of the copy and of the creation of its matrices; None for what there is not.
_Times = Sequence[Any]
_COPY = replace(TRANSFER, low=1 / 50e9)  # seconds a byte; at least those from pinned memory over PCIe 5


@dataclass(frozen=True)
class Point:
    """A product on a device; of a loop, one pass."""

    product: Product
    seconds: Interval
    share: float  # of the peak: the measured one of a device that is here, that of the datasheet of a card
    limit: str  # of LIMITS: what takes longest by the peaks
    copy: Interval | None  # seconds of the copy of both matrices to the device
    creation: Interval | None = None  # seconds in which the host creates them


@dataclass(frozen=True)
class ProductLine(Line):
    """A device and its products by their names; `times` are those of n×n matrices."""

    points: Mapping[str, Point]


def measured_line(known: "Calibration", found: Mapping[Product, Timed], others_share: float = 0.0) -> ProductLine:
    """A device that is here. Where other programs took a share of the processor, the low ends reach as much further.

    They reach the shortest sample at least: beside other programs, threads wait for each other much longer than the share says.
    """

    def interval(samples: Sequence[float]) -> Interval:
        confidence, (low, high) = CONFIDENCE, median_interval(samples, CONFIDENCE)
        if math.isinf(high):  # few samples: all of them enclose the median with this confidence
            confidence, low, high = 1 - 2.0 ** (1 - len(samples)), min(samples), max(samples)
        of_run = converted(low, median(samples), high, confidence, BETWEEN)
        return replace(of_run, low=min(of_run.low * (1 - others_share), *samples) if others_share else of_run.low)

    times = {of: [interval(each) if each else None for each in timed[:3]] for of, timed in found.items()}
    peaks = 1e-6 * (known.launch_us or 0), known.memory_bytes_per_sec or math.inf, known.matmul_flops_per_sec["fp32"]
    return _line(known.device, True, times, peaks)


def predicted_line(wanted: Sequence[Product], card: Datasheet, here: ProductLine) -> ProductLine:
    """A card that is not here. Loops that create their matrices are predicted where they were measured here."""
    times = {}
    for of in wanted:
        works = [Work("linear", "aten.mm", (of.m, of.n, of.k), of.flops, of.bytes)]
        works += [Work("elementwise", "aten.sum", (of.m, of.n), 0.0, 4.0 * of.m * of.n)] * of.loop
        host, copy = BELOW_AUTOGRAD * len(works), _COPY * (4.0 * of.k * (of.m + of.n)) + BELOW_AUTOGRAD * 2
        if of.creates and (creation := here.points[str(of)].creation if str(of) in here.points else None):
            host += copy + elsewhere(creation)
        elif of.creates:
            continue
        times[of] = [overlapped(Interval(*map(float, predict(works, card).sum(axis=1))), host), copy, None]
    peaks = BELOW_AUTOGRAD.middle, card.memory_bytes_per_sec, card.flops_per_sec["fp32"]
    return _line(card.short[0], False, times, peaks)


def _line(label: str, here: bool, times: Mapping[Product, _Times], peaks: tuple[float, float, float]) -> ProductLine:
    """A line from the times, and the peaks: seconds of a launch, bytes/s and FLOP/s."""
    launch_s, bytes_per_sec, flops_per_sec = peaks
    points = {}
    for of, (seconds, copy, creation) in times.items():
        least = (launch_s, of.bytes / bytes_per_sec, of.flops / flops_per_sec)
        limit = LIMITS[least.index(max(least))]
        points[str(of)] = Point(of, seconds, least[-1] / seconds.middle, limit, copy, creation)
    return ProductLine(label, here, {of.n: seconds for of, (seconds, *_) in times.items() if not of.loop}, points)


def sentence(lines: Sequence[ProductLine]) -> str:
    """Up to which n the first device is the fastest, and what the fastest one takes of the largest product of all."""
    first, *others = lines
    common = [name for name in first.points if all(name in line.points for line in others)]
    if not others or not first.times:
        return ""
    at = nearest(lines)
    said = f"Below n ≈ {words(at)} {first.name} is first"
    if at.middle in (0, math.inf):
        how = f"{'probably ' if at.low < at.high else ''}{'always' if at.middle else 'never'}"
        said = f"From n = {min(first.times):,} to {max(first.times):,} {first.name} is {how} first"
    name = max(common, key=lambda name: (first.points[name].product.flops, not first.points[name].product.creates))
    fastest = min(others, key=lambda line: line.points[name].seconds.middle)
    ratio, of = times_longer(first.points[name].seconds, fastest.points[name].seconds), first.points[name].product
    where, times = f"{of.m}×{of.k}" if of.loop else f"n = {of.n:,}", (ratio.value, ratio.high, ratio.low)
    value, low, high = (f"1/{digits(time)}" if time > 1 else digits(1 / time) for time in times)
    return f"{said}; at {where} {fastest.name} takes {value} of its time ({low} to {high})."


def table(lines: Sequence[ProductLine]) -> pd.DataFrame:
    """A row for each product: the time on each device, the share of its peak where it is here, and the copies."""
    rows: dict[Product, dict[str, str]] = {}
    for line in lines:
        for point in line.points.values():
            row, passes = rows.setdefault(point.product, {}), PASSES if point.product.loop else 1
            row[f"{line.label} (here)" if line.here else line.label] = str(point.seconds * passes)
            if line.here:
                row[f"{line.label}: of peak"] = percent(point.share)
            if point.copy:  # alike for all cards
                copies = point.copy * (passes if point.product.creates else 1)
                row[f"copy to {line.label if line.here else 'a card'}"] = str(copies)
    names = sorted(rows, key=lambda of: (of.loop, of.flops, of.creates))
    columns = sorted({name: None for row in rows.values() for name in row}, key=lambda name: name.startswith("copy"))
    return pd.DataFrame([rows[of] for of in names], index=list(map(str, names)), columns=columns).fillna("–")
