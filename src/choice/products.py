"""Matrix products on each device: measured here, and predicted on cards in the same way as a training step."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..analysis.noise import CONFIDENCE, SEPARATE_RUNS_SD
from ..hardware.datasheet import Datasheet
from ..hardware.products import PASSES, Product, Timed
from ..records.formatting import percent
from ..records.intervals import median_interval
from .crossing import Line, crossing_text, nearest_crossing
from .interval import Interval, convert_interval, digits, time_ratio
from .kernels import predict
from .launches import BELOW_AUTOGRAD, on_other_host
from .step import TRANSFER, overlap
from .work import Work

if TYPE_CHECKING:
    from ..hardware.calibration import Calibration  # imports torch

LIMITS = ("launches", "memory", "arithmetic")
# Seconds of a product, of the copy of its matrices and of their creation; None for a copy or a creation that does not happen.
_Times = Sequence[Any]
_COPY = replace(TRANSFER, low=1 / 50e9)  # seconds a byte; the low end is that of pinned memory over PCIe 5


@dataclass(frozen=True)
class Point:
    """A product, or one pass of a loop, on a device."""

    product: Product
    seconds: Interval
    share: float  # of the peak: the measured one of a device that is here, the datasheet's of a card
    limit: str  # of LIMITS: the one that takes longest at the peaks
    copy: Interval | None  # seconds of the copy of both matrices to the device
    creation: Interval | None = None  # seconds in which the host creates both matrices


@dataclass(frozen=True)
class ProductLine(Line):
    """The products of a device by name; `times` has those of n×n matrices."""

    points: Mapping[str, Point]


def measured_line(device: "Calibration", timings: Mapping[Product, Timed], others_share: float = 0.0) -> ProductLine:
    """Make the line of a device that is here. If other programs took a share of the processor, it lowers the low ends.

    A low end then includes the shortest sample: beside other programs, threads wait for each other longer than the share says.
    """

    def interval(samples: Sequence[float]) -> Interval:
        confidence, (low, high) = CONFIDENCE, median_interval(samples, CONFIDENCE)
        if math.isinf(high):  # few samples: their range encloses the median with this confidence
            confidence, low, high = 1 - 2.0 ** (1 - len(samples)), min(samples), max(samples)
        estimate = convert_interval(low, median(samples), high, confidence, SEPARATE_RUNS_SD)
        return replace(estimate, low=min(estimate.low * (1 - others_share), *samples) if others_share else estimate.low)

    times = {key: [interval(samples) if samples else None for samples in timed[:3]] for key, timed in timings.items()}
    launch_s, bytes_per_sec = 1e-6 * (device.launch_us or 0), device.memory_bytes_per_sec or math.inf
    peaks = launch_s, bytes_per_sec, device.matmul_flops_per_sec["fp32"]
    return _make_line(device.device, True, times, peaks)


def predicted_line(wanted: Sequence[Product], card: Datasheet, measured: ProductLine) -> ProductLine:
    """Predict the line of a card. Loops that create their matrices are predicted only if they were measured here."""
    times = {}
    for product in wanted:
        m, n, k = product.m, product.n, product.k
        works = [Work("linear", "aten.mm", (m, n, k), product.flops, product.bytes)]
        works += [Work("elementwise", "aten.sum", (m, n), 0.0, 4.0 * m * n)] * product.loop
        host, copy = BELOW_AUTOGRAD * len(works), _COPY * (4.0 * k * (m + n)) + BELOW_AUTOGRAD * 2
        if product.creates:
            creation = measured.points[str(product)].creation if str(product) in measured.points else None
            if creation is None:
                continue
            host += copy + on_other_host(creation)
        times[product] = [overlap(Interval(*map(float, predict(works, card).sum(axis=1))), host), copy, None]
    peaks = BELOW_AUTOGRAD.middle, card.memory_bytes_per_sec, card.flops_per_sec["fp32"]
    return _make_line(card.short[0], False, times, peaks)


def _make_line(label: str, here: bool, times: Mapping[Product, _Times], peaks: Sequence[float]) -> ProductLine:
    """Make a line from times and peaks: seconds of a launch, bytes/s and FLOP/s."""
    launch_s, bytes_per_sec, flops_per_sec = peaks
    points = {}
    for product, (seconds, copy, creation) in times.items():
        least_seconds = (launch_s, product.bytes / bytes_per_sec, product.flops / flops_per_sec)
        limit = LIMITS[least_seconds.index(max(least_seconds))]
        points[str(product)] = Point(product, seconds, least_seconds[-1] / seconds.middle, limit, copy, creation)
    times_by_n = {product.n: seconds for product, (seconds, *_) in times.items() if not product.loop}
    return ProductLine(label, here, times_by_n, points)


def sentence(lines: Sequence[ProductLine]) -> str:
    """Return a sentence: up to which n the first device is the fastest, and the ratio of times of the largest common product."""
    baseline, *others = lines
    points = {name: point for name, point in baseline.points.items() if all(name in line.points for line in others)}
    if not points or not others or not baseline.times:
        return ""
    crossing = nearest_crossing(lines)
    claim = f"Below n ≈ {crossing_text(crossing)} {baseline.name} is first"
    if crossing.middle in (0, math.inf):
        certainty = f"{'probably ' if crossing.low < crossing.high else ''}{'always' if crossing.middle else 'never'}"
        claim = f"From n = {min(baseline.times):,} to {max(baseline.times):,} {baseline.name} is {certainty} first"
    name, point = max(points.items(), key=lambda item: (item[1].product.flops, not item[1].product.creates))
    fastest = min(others, key=lambda line: line.points[name].seconds.middle)
    ratio = time_ratio(point.seconds, fastest.points[name].seconds)
    product = point.product
    shape = f"{product.m}×{product.k}" if product.loop else f"n = {product.n:,}"
    ends = (ratio.value, ratio.high, ratio.low)
    value, low, high = (f"1/{digits(end)}" if end > 1 else digits(1 / end) for end in ends)
    return f"{claim}; at {shape} {fastest.name} takes {value} of its time ({low} to {high})."


def table(lines: Sequence[ProductLine]) -> pd.DataFrame:
    """Return a row for each product: its time on each device, the share of the peak of devices that are here, and the copies."""
    rows: dict[Product, dict[str, str]] = {}
    for line in lines:
        for point in line.points.values():
            row, num_passes = rows.setdefault(point.product, {}), PASSES if point.product.loop else 1
            row[f"{line.label} (here)" if line.here else line.label] = str(point.seconds * num_passes)
            if line.here:
                row[f"{line.label}: of peak"] = percent(point.share)
            if point.copy:  # the same for all cards
                copies = point.copy * (num_passes if point.product.creates else 1)
                row[f"copy to {line.label if line.here else 'a card'}"] = str(copies)
    columns = sorted({name: None for row in rows.values() for name in row}, key=lambda name: name.startswith("copy"))
    rows = dict(sorted(rows.items(), key=lambda item: (item[0].loop, item[0].flops, item[0].creates)))
    return pd.DataFrame([*rows.values()], index=list(map(str, rows)), columns=columns).fillna("–")
