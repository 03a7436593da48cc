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
from .roofs import (
    WINOGRAD,
    Array,
    convolution_seconds,
    filled,
    memory_seconds,
    product_seconds,
    shapeless_product_seconds,
)
from .work import Work

FILE = Path(__file__).with_name("kernels.json")
# What was measured, and the roofs that bound it.
GROUPS = {"linear": "products", "bmm": "products", "softmax": "memory", "layer_norm": "memory", "elementwise": "memory"}
# The measurements that a kind without ones of its own is predicted from, and the standard deviation that is assumed for the
# logarithm of its time, beside that of the group.
_LIKE = {**{name: (name, 0.0) for name in GROUPS}, "copy": ("elementwise", 0.1)}
_LIKE |= {"convolution": ("linear", 0.35), "recurrent": ("linear", 0.5), "other": ("linear", 0.7)}
# How much longer a product of few tiles may take, which depends on the tile that the library chooses, and how it splits K: this
# standard deviation if it fills no multiprocessor.
_FEW_TILES = 1.2
_BACKWARD = {"products": 0.15, "memory": 0.1}
_OTHER_PRECISION = {"products": 0.3, "memory": 0.05}
# A tensor core's joules, relative to the lanes' at their own peak. Assumed.
_TENSOR_POWER = 0.6
_ABOVE_BOOST = 0.9  # cards run a little above the clock that their datasheet states
_BEYOND = 0.3  # by how much a factor of two outside of the fitted cards widens a card's effect


@dataclass(frozen=True)
class Coefficients:
    """What is fitted to measurements."""

    products: Mapping[str, float]  # of `roofs.product_seconds`
    memory: Mapping[str, float]  # of `roofs.memory_seconds`
    device_spread: Mapping[str, float]  # by group: standard deviation of log times between cards that were not fitted
    kernel_spread: Mapping[str, float]  # the same between the kernels of a card
    range: Mapping[str, tuple[float, float]]  # by fact, the smallest and the largest of the fitted devices
    source: str = ""  # of the measurements


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
    middle, forms = np.zeros(len(works)), np.array([_form(work) for work in works])
    for form in ("memory", "product", "convolution", "shapeless"):
        if (own := forms == form).any():
            chosen = [work for work, is_own in zip(works, own, strict=True) if is_own]
            middle[own] = _middles(form, chosen, device, of)
    wider = _widening(device, of)
    spread = np.array([_spread(work, wider, of) for work in works])
    slower = np.hypot(spread, [_few_tiles(work, device) for work in works])
    below, above = np.exp(deviations(CONFIDENCE) * np.array([spread, slower]))
    # No kernel falls below a little less than the roof, unless the L2 holds its tensors.
    in_cache = [work.bytes < (device.l2_mib or 0.0) * 2**20 for work in works]
    fewest = [replace(work, flops=work.flops / WINOGRAD) if _winograd_tiles(work) else work for work in works]
    floor = np.where(in_cache, 0.0, [_ABOVE_BOOST * roof_seconds(work, device) for work in fewest])
    return np.stack([np.maximum(middle / below, np.minimum(middle, floor)), middle, middle * above])


def roof_seconds(work: Work, device: Datasheet) -> float:
    """The least that the datasheet allows: its arithmetic at this precision, or its memory."""
    return max(work.flops / _peak(work, device), work.bytes / device.memory_bytes_per_sec)


def is_compute(work: Work, device: Datasheet) -> bool:
    """Whether arithmetic bounds a work, and not memory."""
    return work.flops / _peak(work, device) > work.bytes / device.memory_bytes_per_sec


def _family(work: Work) -> str:
    return GROUPS[_LIKE[work.kind][0]]


def _form(work: Work) -> str:
    """The roofs that a work is predicted with: `memory`, `product`, `convolution`, or a product whose shape is not known."""
    if _family(work) == "memory":
        return "memory"
    forms = {"linear": "product", "bmm": "product", "convolution": "convolution"}
    return forms.get(work.kind, "shapeless") if work.dims else "shapeless"


def _winograd_tiles(work: Work) -> int:
    """The tiles of 2 × 2 pixels of a convolution that Winograd's algorithm may compute; else 0. Tensor cores do without."""
    if work.kind != "convolution" or work.precision != "fp32" or len(work.dims) != 7 or work.dims[-2:] != (3, 3):
        return 0
    samples, _, high, wide, *_ = (max(1, size) for size in work.dims)
    return samples * math.ceil(high / 2) * math.ceil(wide / 2)


def _product(work: Work) -> tuple[float, ...]:
    """(B, M, N, K) of a product. A convolution is one of (pixels, patch) @ (patch, channels), and its backward pass two."""
    if work.kind != "convolution":
        return (1, *work.dims)[-4:]
    samples, channels, *sizes = (max(1, size) for size in work.dims)
    spatial = (len(sizes) - 1) // 2
    m, k = samples * math.prod(sizes[:spatial]), math.prod(sizes[spatial:])
    return max(work.flops / (2.0 * m * channels * k), 1e-9), m, channels, k


def _middles(form: str, works: Sequence[Work], device: Datasheet, of: Coefficients) -> Array:
    """The middles of works of one form."""
    peaks = np.array([_peak(work, device) for work in works])
    moved, flops = np.array([(work.bytes, work.flops) for work in works], float).T
    if form == "memory":
        kinds = np.array([work.kind if work.dims else "elementwise" for work in works])
        lengths = np.array([float(work.dims[-1] if work.dims else 0) for work in works])
        return memory_seconds(kinds, lengths, moved, device, of.memory)
    on_tensor_cores = np.array([work.precision in ("tf32", "bf16", "fp16") for work in works])
    power = device.flops_per_sec["fp32"] / peaks * np.where(on_tensor_cores, _TENSOR_POWER, 1.0)  # a FLOP's energy
    if form == "shapeless":
        return shapeless_product_seconds(flops, moved, device, peaks, of.products, power)
    b, m, n, k = np.array([_product(work) for work in works], float).T
    if form == "convolution":
        tiles = np.array([_winograd_tiles(work) for work in works], float)
        return convolution_seconds((b, m, n, k), tiles, moved, device, peaks, of.products, power)
    return product_seconds((b, m, n, k), moved, device, peaks, of.products, power)


def _peak(work: Work, device: Datasheet) -> float:
    """FLOP/s at the work's precision; those of fp32 for elementwise kernels, and where the datasheet has no other."""
    fp32 = device.flops_per_sec["fp32"]
    return fp32 if _family(work) == "memory" else device.flops_per_sec.get(work.precision, fp32)


def _spread(work: Work, wider: float, of: Coefficients) -> float:
    """The standard deviation of the logarithm of a time; `wider` multiplies the part that is the device's."""
    group, own = _LIKE[work.kind]
    own = _LIKE["recurrent"][1] if "rnn" in work.name else own  # cuDNN may fuse or overlap its parts
    backward = _BACKWARD[GROUPS[group]] if work.part == "backward" else 0.0
    other = _OTHER_PRECISION[GROUPS[group]] if work.precision != "fp32" else 0.0
    return math.hypot(of.device_spread[group] * wider, own, backward, other, of.kernel_spread[group])


def _few_tiles(work: Work, device: Datasheet) -> float:
    """By how much more the logarithm of a time may be above its middle, which is that of the best tile."""
    if _form(work) not in ("product", "convolution"):
        return 0.0
    b, m, n, _ = _product(work)
    return _FEW_TILES / (1 + filled(b, m, n, device))


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


def _widening(device: Datasheet, of: Coefficients) -> float:
    """By which factor a device outside of the fitted ones' range widens its effect."""
    ranges = [(value, *of.range[name]) for name, value in facts(device).items() if name in of.range]
    beyond = (max(math.log2(low / value), math.log2(value / high)) for value, low, high in ranges)
    return 1 + _BEYOND * max([0.0, *beyond])
