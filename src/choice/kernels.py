"""What one operation's kernel takes on a device: a middle, and the interval that holds it in 80 of 100 cases.

The roofs of `roofs.py` with the coefficients of `kernels.json`, which `benchmarks/choose.py --write` fits to measurements
on other devices. What these coefficients miss has three parts. A device's own effect is shared by its kernels, and a few
measurements on that device correct it. A kernel has its own error. What was never measured (backward passes, convolutions,
other precisions) has an error that is assumed.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from .device import Device
from .roofs import Array, card, memory_seconds, missing, product_seconds, shapeless_product_seconds
from .seconds import TEN_TO_NINETY, Interval
from .work import Work

PREDICTED, BOUND = "predicted", "bound"
FILE = Path(__file__).with_name("kernels.json")
Measured = Sequence[tuple[Work, Device, float]]
# What was measured, and how much two of them share of a device's effect: in one family, and across families.
GROUPS = {"linear": "products", "bmm": "products", "softmax": "memory", "layer_norm": "memory", "elementwise": "memory"}
_IN_FAMILY, _ACROSS = 0.7, 0.4
# The measurements that a kind without ones of its own is predicted from, and the standard deviation that is assumed for the
# logarithm of its time, beside that of the group.
_LIKE = {**{name: (name, 0.0) for name in GROUPS}, "copy": ("elementwise", 0.1)}
_LIKE |= {"convolution": ("linear", 0.35), "recurrent": ("linear", 0.5)}
_BACKWARD = {"products": 0.15, "memory": 0.1}
_OTHER_PRECISION = {"products": 0.3, "memory": 0.05}
# A tensor core's joules, relative to the lanes' at their own peak. Assumed.
_TENSOR_POWER = 0.6
_ABOVE_BOOST = 0.9  # cards run a little above the clock that their datasheet states
_BOUND_WIDTH = 4.0  # from the roof to the high end of a bound
_BEYOND = 0.3  # by how much a factor of two outside of the fitted devices widens a device's effect


@dataclass(frozen=True)
class Coefficients:
    """What is fitted to measurements.

    Attributes:
        products, memory: of `roofs.product_seconds` and `roofs.memory_seconds`.
        device_spread: by group, the standard deviation of the logarithm of a time between devices that were not fitted.
        kernel_spread: the same between the kernels of a device.
        range: by fact, the smallest and the largest of the fitted devices.
        source: of the measurements.
    """

    products: Mapping[str, float]
    memory: Mapping[str, float]
    device_spread: Mapping[str, float]
    kernel_spread: Mapping[str, float]
    range: Mapping[str, tuple[float, float]]
    source: str = ""

    def as_json(self) -> str:
        """The text of `kernels.json`, with six digits."""
        return json.dumps(_rounded(asdict(self)), indent=2) + "\n"


@cache
def coefficients() -> Coefficients:
    """The ones that the package comes with."""
    return Coefficients(**json.loads(FILE.read_text(encoding="utf-8")))


def predict(
    work: Work, device: Device, measured: Measured = (), of: Coefficients | None = None
) -> tuple[Interval, str]:
    """Seconds of one call on the device's kernel alone, without its launch, and how they are known.

    Args:
        measured: kernels measured on this device: works, the device, seconds. Those of another name are left out.
        of: the coefficients; those of the package by default.

    Returns:
        The interval, and `predicted` or `bound`. Low and middle of a bound are the roof: the device at its best.
    """
    of = of or coefficients()
    roof = roof_seconds(work, device)
    middle = middle_seconds(work, device, of)
    if middle is None:
        return Interval(roof, roof, roof * _BOUND_WIDTH), BOUND
    shift, spread = _correction(work, device, measured, of)
    return interval_around(work, device, middle * math.exp(shift), spread, of), PREDICTED


def interval_around(work: Work, device: Device, middle: float, spread: float, of: Coefficients) -> Interval:
    """The interval of a prediction; `spread` is the standard deviation of the device's effect on its logarithm."""
    spread = math.hypot(spread, of.kernel_spread[_LIKE[work.kind][0]])
    low, high = ends(middle, spread, floor_seconds(work, device))
    return Interval(float(low), middle, float(high))


def ends(middle: float | Array, spread: float, floor: float | Array) -> tuple[float | Array, float | Array]:
    """The low and the high end of 80 % intervals, of which the low one is not below the floor."""
    factor = math.exp(TEN_TO_NINETY / 2 * spread)
    return np.maximum(middle / factor, np.minimum(middle, floor)), middle * factor


def floor_seconds(work: Work, device: Device) -> float:
    """What no kernel falls below: a little less than the roof; 0 where the L2 holds the tensors."""
    in_cache = work.bytes < (device.l2_bytes or 0.0)
    return 0.0 if in_cache else roof_seconds(work, device) * _ABOVE_BOOST


def roof_seconds(work: Work, device: Device) -> float:
    """The least that the datasheet allows: its arithmetic at this precision, or its memory."""
    peak = _peak(work, device)
    return max(work.flops / peak if peak else 0.0, work.bytes / device.bytes_per_sec)


def middle_seconds(work: Work, device: Device, of: Coefficients) -> float | None:
    """The prediction without a correction; None where nothing is known: another vendor, kind or precision."""
    peak = _peak(work, device)
    if device.kind != "cuda" or work.kind not in _LIKE or peak is None:
        return None
    cards, bytes_ = card(device, peak), np.array([work.bytes])
    if GROUPS[_LIKE[work.kind][0]] == "memory":
        kind = work.kind if work.dims else "elementwise"
        row = np.array([float(work.dims[-1] if work.dims else 0)])
        return float(memory_seconds(np.array([kind]), row, bytes_, cards, of.memory)[0])
    power = _relative_power(work, device, peak)
    dims = (1, *work.dims) if work.kind == "linear" else work.dims
    if work.kind in GROUPS and len(dims) == 4:
        b, m, n, k = (np.array([float(size)]) for size in dims)
        return float(product_seconds((b, m, n, k), bytes_, cards, of.products, power)[0])
    return float(shapeless_product_seconds(np.array([work.flops]), bytes_, cards, of.products, power)[0])


def _peak(work: Work, device: Device) -> float | None:
    """FLOP/s at the work's precision. A card without TF32 computes in fp32; other precisions have no such stand-in."""
    precision = "fp32" if work.precision == "tf32" and "tf32" not in device.flops_per_sec else work.precision
    if GROUPS.get(_LIKE.get(work.kind, ("", 0.0))[0]) == "memory":
        precision = "fp32"  # elementwise kernels compute in float32
    return device.flops_per_sec.get(precision)


def _relative_power(work: Work, device: Device, peak: float) -> float:
    fp32 = device.flops_per_sec.get("fp32", peak)
    return fp32 / peak * (_TENSOR_POWER if work.precision in ("tf32", "bf16", "fp16") else 1.0)


def facts(device: Device) -> dict[str, float]:
    """What decides whether a device is like the fitted ones."""
    peak = device.flops_per_sec.get("fp32", 0.0)
    found = {
        "flops_per_sec": peak,
        "bytes_per_sec": device.bytes_per_sec,
        "flops_per_byte": peak / device.bytes_per_sec,
    }
    if device.tdp_w and peak:
        found["joules_per_flop"] = device.tdp_w / peak
    if device.l2_bytes and device.sms:
        found["l2_bytes_per_sm"] = device.l2_bytes / device.sms
    return {name: value for name, value in found.items() if value > 0}


def widening(device: Device, of: Coefficients) -> float:
    """By which factor a device outside of the fitted ones' range widens its effect."""
    beyond = 0.0
    for name, value in facts(device).items():
        if name in of.range:
            low, high = of.range[name]
            beyond = max(beyond, math.log2(low / value), math.log2(value / high))
    return 1 + _BEYOND * beyond


Family = tuple[str, str, str]  # kind, part, precision


def kernel_family(work: Work) -> Family:
    """Works whose errors on a device are alike."""
    return work.kind, "backward" if work.part == "backward" else "", "" if work.precision == "fp32" else work.precision


def _assumed(family: Family) -> float:
    """The standard deviation that is assumed for what was never measured."""
    kind, part, precision = family
    group, own = _LIKE[kind]
    return math.hypot(
        own, _BACKWARD[GROUPS[group]] if part else 0.0, _OTHER_PRECISION[GROUPS[group]] if precision else 0.0
    )


def _correction(work: Work, device: Device, measured: Measured, of: Coefficients) -> tuple[float, float]:
    """The shift of the logarithm of the time by what was measured on the device, and the spread that is left."""
    residuals: dict[Family, list[float]] = defaultdict(list)
    for other, where, seconds in measured:
        middle = middle_seconds(other, device, of) if where.name == device.name and seconds > 0 else None
        if middle:
            residuals[kernel_family(other)].append(math.log(seconds / middle))
    return correction(kernel_family(work), residuals, device, of)


def correction(
    family: Family, residuals: Mapping[Family, Sequence[float]], device: Device, of: Coefficients
) -> tuple[float, float]:
    """The mean and the standard deviation of a family's effect on a device, given residuals measured there.

    Effects are jointly normal, so that a measured product says something of other products, and less of softmax.
    """
    families = [family, *residuals]
    covariance = _covariance(families, device, of)
    if not residuals:
        return 0.0, math.sqrt(covariance[0, 0])
    noise = [math.pi / 2 * of.kernel_spread[_LIKE[each[0]][0]] ** 2 / len(found) for each, found in residuals.items()]
    gain = np.linalg.solve(covariance[1:, 1:] + np.diag(noise), covariance[1:, 0])
    shift = float(gain @ np.array([median(found) for found in residuals.values()]))
    return shift, math.sqrt(max(0.0, covariance[0, 0] - float(gain @ covariance[1:, 0])))


def _covariance(families: Sequence[Family], device: Device, of: Coefficients) -> Array:
    wider = widening(device, of)
    groups = [_LIKE[kind][0] for kind, _, _ in families]
    spreads = [math.hypot(of.device_spread[group] * wider, missing(device)) for group in groups]
    covariance = np.empty((len(families), len(families)))
    for i, (first, spread) in enumerate(zip(groups, spreads, strict=True)):
        for j, (second, other) in enumerate(zip(groups, spreads, strict=True)):
            shared = 1.0 if first == second else _IN_FAMILY if GROUPS[first] == GROUPS[second] else _ACROSS
            own = _assumed(families[i]) ** 2 if families[i] == families[j] else 0.0
            covariance[i, j] = shared * spread * other + own
    return covariance


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
