"""What a kernel takes on a card: a middle, and its interval.

The roofs of `roofs.py` with the coefficients of `kernels.json`, which `benchmarks/device_choice/main.py --write` fits to measurements
on other cards. What these coefficients miss has three parts: a card's own effect, which its kernels share; a kernel's own
error; and an error that is assumed for what was never measured (backward passes, convolutions, other precisions).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from ..hardware.datasheet import Datasheet
from .interval import CONFIDENCE, deviations
from .roofs import Array, card, memory_seconds, product_seconds, shapeless_product_seconds
from .work import Work

FILE = Path(__file__).with_name("kernels.json")
# What was measured, and the roofs that bound it.
GROUPS = {"linear": "products", "bmm": "products", "softmax": "memory", "layer_norm": "memory", "elementwise": "memory"}
# The measurements that a kind without ones of its own is predicted from, and the standard deviation that is assumed for the
# logarithm of its time, beside that of the group.
_LIKE = {**{name: (name, 0.0) for name in GROUPS}, "copy": ("elementwise", 0.1)}
_LIKE |= {"convolution": ("linear", 0.35), "recurrent": ("linear", 0.5), "other": ("linear", 0.7)}
_BACKWARD = {"products": 0.15, "memory": 0.1}
_OTHER_PRECISION = {"products": 0.3, "memory": 0.05}
# A tensor core's joules, relative to the lanes' at their own peak. Assumed.
_TENSOR_POWER = 0.6
_ABOVE_BOOST = 0.9  # cards run a little above the clock that their datasheet states
_BEYOND = 0.3  # by how much a factor of two outside of the fitted cards widens a card's effect


@dataclass(frozen=True)
class Coefficients:
    """What is fitted to measurements.

    Attributes:
        products, memory: of `roofs.product_seconds` and `roofs.memory_seconds`.
        device_spread: by group, the standard deviation of the logarithm of a time between cards that were not fitted.
        kernel_spread: the same between the kernels of a card.
        range: by fact, the smallest and the largest of the fitted devices.
        source: of the measurements.
    """

    products: Mapping[str, float]
    memory: Mapping[str, float]
    device_spread: Mapping[str, float]
    kernel_spread: Mapping[str, float]
    range: Mapping[str, tuple[float, float]]
    source: str = ""


@cache
def coefficients() -> Coefficients:
    """The ones that the package comes with."""
    return Coefficients(**json.loads(FILE.read_text(encoding="utf-8")))


def predict(works: Sequence[Work], device: Datasheet, of: Coefficients | None = None) -> Array:
    """Seconds of one call of each work on a card of NVIDIA's, without its launch.

    Args:
        of: the coefficients; those of the package by default.

    Returns:
        Three rows (low, middle and high end), a column for each work.
    """
    of = of or coefficients()
    middle, spread = middles(works, device, of), _spreads(works, device, of)
    factor = np.exp(deviations(CONFIDENCE) * spread)
    floor = np.array([floor_seconds(work, device) for work in works])
    return np.stack([np.maximum(middle / factor, np.minimum(middle, floor)), middle, middle * factor])


def floor_seconds(work: Work, device: Datasheet) -> float:
    """What no kernel falls below: a little less than the roof; 0 where the L2 holds the tensors."""
    in_cache = work.bytes < (device.l2_mib or 0.0) * 2**20
    return 0.0 if in_cache else roof_seconds(work, device) * _ABOVE_BOOST


def roof_seconds(work: Work, device: Datasheet) -> float:
    """The least that the datasheet allows: its arithmetic at this precision, or its memory."""
    return max(work.flops / _peak(work, device), work.bytes / device.memory_bytes_per_sec)


def is_compute(work: Work, device: Datasheet) -> bool:
    """Whether arithmetic bounds a work, and not memory."""
    return work.flops / _peak(work, device) > work.bytes / device.memory_bytes_per_sec


def middles(works: Sequence[Work], device: Datasheet, of: Coefficients) -> Array:
    """The middle of each work's prediction."""
    seconds = np.zeros(len(works))
    bytes_, flops, peaks = (
        np.array(values, float)
        for values in zip(*((work.bytes, work.flops, _peak(work, device)) for work in works), strict=True)
    )
    power = np.array([_relative_power(work, device) for work in works])
    forms = np.array([_form(work) for work in works])
    cards = replace(card(device), flops_per_sec=peaks)
    if (own := forms == "memory").any():
        kinds = np.array([work.kind if work.dims else "elementwise" for work in works])
        lengths = np.array([float(work.dims[-1] if work.dims else 0) for work in works])
        seconds[own] = memory_seconds(kinds[own], lengths[own], bytes_[own], cards, of.memory)
    for form, has_shape in (("product", True), ("shapeless", False)):
        if not (own := forms == form).any():
            continue
        cards = replace(cards, flops_per_sec=peaks[own])
        if has_shape:
            dims = [(1, *work.dims)[-4:] for work, chosen in zip(works, own, strict=True) if chosen]
            shape = tuple(np.array(dims, float).T)
            seconds[own] = product_seconds(shape, bytes_[own], cards, of.products, power[own])
        else:
            seconds[own] = shapeless_product_seconds(flops[own], bytes_[own], cards, of.products, power[own])
    return seconds


def _form(work: Work) -> str:
    """The roofs that a work is predicted with: `memory`, `product`, or a product whose shape is not known."""
    if _family(work) == "memory":
        return "memory"
    return "product" if len(work.dims) == {"linear": 3, "bmm": 4}.get(work.kind) else "shapeless"


def _family(work: Work) -> str:
    return GROUPS[_LIKE[work.kind][0]]


def _peak(work: Work, device: Datasheet) -> float:
    """FLOP/s at the work's precision; those of fp32 for elementwise kernels, and where the datasheet has no other."""
    fp32 = device.flops_per_sec["fp32"]
    return fp32 if _family(work) == "memory" else device.flops_per_sec.get(work.precision, fp32)


def _relative_power(work: Work, device: Datasheet) -> float:
    """The energy of a FLOP, relative to fp32."""
    on_tensor_cores = work.precision in ("tf32", "bf16", "fp16")
    return device.flops_per_sec["fp32"] / _peak(work, device) * (_TENSOR_POWER if on_tensor_cores else 1.0)


def _spreads(works: Sequence[Work], device: Datasheet, of: Coefficients) -> Array:
    """The standard deviation of the logarithm of each time."""
    wider = widening(device, of)
    found = []
    for work in works:
        group, own = _LIKE[work.kind]
        own = _LIKE["recurrent"][1] if "rnn" in work.name else own  # cuDNN may fuse or overlap its parts
        backward = _BACKWARD[GROUPS[group]] if work.part == "backward" else 0.0
        other = _OTHER_PRECISION[GROUPS[group]] if work.precision != "fp32" else 0.0
        found.append(math.hypot(of.device_spread[group] * wider, own, backward, other, of.kernel_spread[group]))
    return np.array(found)


def facts(device: Datasheet) -> dict[str, float]:
    """What decides whether a device is like the fitted ones."""
    peak, bandwidth = device.flops_per_sec["fp32"], device.memory_bytes_per_sec
    return {
        "flops_per_sec": peak,
        "bytes_per_sec": bandwidth,
        "flops_per_byte": peak / bandwidth,
        "joules_per_flop": (device.tdp_w or 0.0) / peak,
        "l2_bytes_per_sm": (device.l2_mib or 0.0) * 2**20 / (device.sms or 1),
    }


def widening(device: Datasheet, of: Coefficients) -> float:
    """By which factor a device outside of the fitted ones' range widens its effect."""
    beyond = 0.0
    for name, value in facts(device).items():
        if name in of.range:
            low, high = of.range[name]
            beyond = max(beyond, math.log2(low / value), math.log2(value / high))
    return 1 + _BEYOND * beyond
