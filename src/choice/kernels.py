"""What a kernel takes on a card: a middle, and its interval.

The roofs of `roofs.py` with the coefficients of `kernels.json`, which `benchmarks/device_choice/main.py --write` fits to measurements
on other cards. What these coefficients miss has three parts: a card's own effect, which its kernels share; a kernel's own
error; and an error that is assumed for what was never measured (backward passes, convolutions, other precisions).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from ..hardware.datasheet import Datasheet
from .interval import CONFIDENCE, deviations
from .roofs import LEAST_K, Array, filled, memory_seconds, product_seconds
from .work import Work

FILE = Path(__file__).with_name("kernels.json")
# What was measured, and the roofs that bound it.
GROUPS = {"linear": "products", "bmm": "products", "softmax": "memory", "layer_norm": "memory", "elementwise": "memory"}
# The measurements that a kind without ones of its own is predicted from, and the standard deviation that is assumed for the
# logarithm of its time, beside that of the group.
_LIKE = {**{name: (name, 0.0) for name in GROUPS}, "copy": ("elementwise", 0.1)}
_LIKE |= {"convolution": ("linear", 0.35), "recurrent": ("linear", 0.5), "other": ("linear", 0.7)}
# How much longer a product of few tiles may take, which depends on the tile that the library chooses, and how it splits K: this
# standard deviation of the logarithm if it fills no multiprocessor.
_FEW_TILES = 1.2
_BACKWARD = {"products": 0.15, "memory": 0.1}
_OTHER_PRECISION = {"products": 0.3, "memory": 0.05}
# A tensor core's joules, relative to the lanes' at their own peak. Assumed.
_TENSOR_POWER = 0.6
_ABOVE_BOOST = 0.9  # cards run a little above the clock that their datasheet states
_WINOGRAD = 2.25  # times fewer multiplications for 2 × 2 pixels of a convolution with kernels of 3 × 3
# By how much its transforms lengthen this, how often the weights are moved, and the seconds of the kernels that do it: chosen
# by convolutions of five cards, of which any four choose nearly the same (benchmarks/log.md).
_TRANSFORMS, _WEIGHT_PASSES, _LEAST_CONVOLUTION_S = 1.2, 12.0, 35e-6
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
    shapes = np.array([_product(work) for work in works], float).reshape(-1, 4).T
    tiles = np.array([_winograd_tiles(work) for work in works])
    middle = _middles(works, shapes, tiles, device, of)
    wider = _widening(device, of)
    spread = np.array([_spread(work, wider, of) for work in works])
    few_tiles = np.nan_to_num(_FEW_TILES / (1 + filled(tuple(shapes), device)))  # the middle is that of the best tile
    below, above = np.exp(deviations(CONFIDENCE) * np.array([spread, np.hypot(spread, few_tiles)]))
    # No kernel falls below a little less than the roof, unless the L2 holds its tensors.
    in_cache = [work.bytes < (device.l2_mib or 0.0) * 2**20 for work in works]
    fewest = np.where(tiles > 0, _WINOGRAD, 1.0)
    roofs = [roof_seconds(work, device, fewer) for work, fewer in zip(works, fewest, strict=True)]
    floor = np.where(in_cache, 0.0, _ABOVE_BOOST * np.array(roofs))
    return np.stack([np.maximum(middle / below, np.minimum(middle, floor)), middle, middle * above])


def roof_seconds(work: Work, device: Datasheet, fewer: float = 1.0) -> float:
    """The least that the datasheet allows: its arithmetic at this precision, in `fewer` times less FLOPs, or its memory."""
    return max(work.flops / fewer / _peak(work, device), work.bytes / device.memory_bytes_per_sec)


def is_compute(work: Work, device: Datasheet) -> bool:
    """Whether arithmetic bounds a work, and not memory."""
    return work.flops / _peak(work, device) > work.bytes / device.memory_bytes_per_sec


def _family(work: Work) -> str:
    return GROUPS[_LIKE[work.kind][0]]


def _winograd_tiles(work: Work) -> int:
    """The tiles of 2 × 2 pixels of a convolution that Winograd's algorithm may compute; else 0. Tensor cores do without."""
    if work.kind != "convolution" or work.precision != "fp32" or len(work.dims) != 7 or work.dims[-2:] != (3, 3):
        return 0
    samples, _, high, wide, *_ = (max(1, size) for size in work.dims)
    return samples * math.ceil(high / 2) * math.ceil(wide / 2)


def _product(work: Work) -> tuple[float, ...]:
    """(B, M, N, K) of a product; NaN where there is none, or nobody knows them.

    A convolution is one of (pixels, patch) @ (patch, channels), and its backward pass two.
    """
    if not work.dims or work.kind not in ("linear", "bmm", "convolution"):
        return (math.nan,) * 4
    if work.kind != "convolution":
        return tuple(map(float, (1, *work.dims)[-4:]))
    samples, channels, *sizes = (max(1, size) for size in work.dims)
    spatial = (len(sizes) - 1) // 2
    m, k = samples * math.prod(sizes[:spatial]), math.prod(sizes[spatial:])
    return max(work.flops / (2.0 * m * channels * k), 1e-9), m, channels, k


def _middles(works: Sequence[Work], shapes: Array, tiles: Array, device: Datasheet, of: Coefficients) -> Array:
    """The middles of works, with the shapes of their products and the tiles of Winograd's algorithm.

    A convolution takes as long as the product of its patches, or less by Winograd's algorithm: 16 products with a row for
    2 × 2 pixels and a ninth of the patch. Its weights are moved several times, to be transformed or laid out anew, which
    takes most of the time where there are few pixels.
    """
    peaks = np.array([_peak(work, device) for work in works])
    moved, flops = np.array([(work.bytes, work.flops) for work in works], float).reshape(-1, 2).T
    on_tensor_cores = np.array([work.precision in ("tf32", "bf16", "fp16") for work in works])
    power = device.flops_per_sec["fp32"] / peaks * np.where(on_tensor_cores, _TENSOR_POWER, 1.0)  # a FLOP's energy
    is_convolution = np.array([work.kind == "convolution" and bool(work.dims) for work in works])
    b, _, n, k = shapes
    same = (moved, device, peaks, of.products, power)
    products = product_seconds(tuple(shapes), *same, np.where(is_convolution, np.inf, LEAST_K), flops)
    by_winograd = product_seconds((16 * b, np.maximum(tiles, 1), n, k / 9), *same, np.inf)
    products = np.where(tiles > 0, np.minimum(products, _TRANSFORMS * by_winograd), products)
    weights_s = _WEIGHT_PASSES * 4 * b * n * k / device.memory_bytes_per_sec + _LEAST_CONVOLUTION_S
    products = products + np.where(is_convolution, weights_s, 0.0)
    kinds = np.array([work.kind if work.dims else "elementwise" for work in works])
    lengths = np.array([float(work.dims[-1] if work.dims else 0) for work in works])
    in_memory = np.array([_family(work) == "memory" for work in works])
    return np.where(in_memory, memory_seconds(kinds, lengths, moved, device, of.memory), products)


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
