"""The time of a kernel on a card, with its interval.

The time follows from the roofs of `roofs.py` with the coefficients of `kernels.json`. `benchmarks/device_choice/main.py --write`
fits these to measurements on other cards. The error of a prediction has three parts: the card's effect, which its kernels
share; the kernel's error; and an assumed error of what was never measured (backward passes, convolutions, other precisions).
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
from .roofs import LEAST_K, Array, memory_seconds, product_seconds, tiles_per_sm
from .work import Work

FILE = Path(__file__).with_name("kernels.json")
# The measured kinds of operation, and the group of roofs that bounds each.
GROUPS = {"linear": "products", "bmm": "products", "softmax": "memory", "layer_norm": "memory", "elementwise": "memory"}
# The measured kind that each kind is predicted from, and the standard deviation of the log time that is assumed in addition
# to the measured kind's.
_STAND_INS = {**{name: (name, 0.0) for name in GROUPS}, "copy": ("elementwise", 0.1)}
_STAND_INS |= {"convolution": ("linear", 0.35), "recurrent": ("linear", 0.5), "other": ("linear", 0.7)}
# The middle assumes the best tile. A product of few tiles may take longer, by the tile that the library chooses and by its split of
# K: the standard deviation of the log time above the middle, for a product that fills no multiprocessor.
_FEW_TILES_SPREAD = 1.2
_BACKWARD_SPREAD = {"products": 0.15, "memory": 0.1}
_PRECISION_SPREAD = {"products": 0.3, "memory": 0.05}
# The power of tensor cores at their peak, relative to that of the fp32 lanes at theirs. Assumed.
_TENSOR_POWER = 0.6
_ABOVE_BOOST = 0.9  # cards run a little above the clock that their datasheet states
_WINOGRAD = 2.25  # times fewer multiplications, for tiles of 2 × 2 pixels and kernels of 3 × 3
# The factor by which Winograd's transforms lengthen its products, how often the weights are moved, and the seconds of the kernels
# that move them. Fitted to convolutions on five cards; any four of them give nearly the same (benchmarks/log.md).
_TRANSFORMS, _WEIGHT_PASSES, _LEAST_CONVOLUTION_S = 1.2, 12.0, 35e-6
_WIDENING_PER_OCTAVE = 0.3  # of a card's effect, for each factor of two outside of the range of the fitted cards


@dataclass(frozen=True)
class Coefficients:
    """The numbers that are fitted to measurements."""

    products: Mapping[str, float]  # of `roofs.product_seconds`
    memory: Mapping[str, float]  # of `roofs.memory_seconds`
    device_spread: Mapping[str, float]  # by kind: standard deviation of log times between cards that were not fitted
    kernel_spread: Mapping[str, float]  # by kind: standard deviation of log times between the kernels of a card
    range: Mapping[str, tuple[float, float]]  # by key of `facts`: the least and the largest of the fitted cards
    source: str = ""  # of the measurements


@cache
def coefficients() -> Coefficients:
    """Return the coefficients that the package comes with."""
    return Coefficients(**json.loads(FILE.read_text(encoding="utf-8")))


def predict(works: Sequence[Work], device: Datasheet, fitted: Coefficients | None = None) -> Array:
    """Predict the seconds of one call of each work on an NVIDIA card, without its launch.

    Args:
        fitted: the coefficients; those of the package by default.

    Returns:
        Three rows (low, middle and high end), a column for each work.
    """
    fitted = fitted or coefficients()
    shapes = np.array([_product_shape(work) for work in works], float).reshape(-1, 4).T
    tiles = np.array([_winograd_tiles(work) for work in works])
    middle = _middles(works, shapes, tiles, device, fitted)
    device_factor = _device_factor(device, fitted)
    spread = np.array([_spread(work, device_factor, fitted) for work in works])
    few_tiles = np.nan_to_num(_FEW_TILES_SPREAD / (1 + tiles_per_sm(tuple(shapes), device)))
    below, above = np.exp(deviations(CONFIDENCE) * np.array([spread, np.hypot(spread, few_tiles)]))
    # No kernel falls below a little less than the roof, unless the L2 holds its tensors.
    in_cache = [work.bytes < (device.l2_mib or 0.0) * 2**20 for work in works]
    reductions = np.where(tiles > 0, _WINOGRAD, 1.0)
    roofs = [roof_seconds(work, device, reduction) for work, reduction in zip(works, reductions, strict=True)]
    floor = np.where(in_cache, 0.0, _ABOVE_BOOST * np.array(roofs))
    return np.stack([np.maximum(middle / below, np.minimum(middle, floor)), middle, middle * above])


def roof_seconds(work: Work, device: Datasheet, flop_reduction: float = 1.0) -> float:
    """Return the least seconds that the datasheet allows, by memory or by arithmetic in `flop_reduction` times fewer FLOPs."""
    return max(work.flops / flop_reduction / _peak(work, device), work.bytes / device.memory_bytes_per_sec)


def is_compute(work: Work, device: Datasheet) -> bool:
    """Return whether arithmetic bounds a work; else memory does."""
    return work.flops / _peak(work, device) > work.bytes / device.memory_bytes_per_sec


def _roof_group(work: Work) -> str:
    return GROUPS[_STAND_INS[work.kind][0]]


def _winograd_tiles(work: Work) -> int:
    """Return the tiles of 2 × 2 pixels if Winograd's algorithm may compute a work; else 0. Tensor cores do not use it."""
    if work.kind != "convolution" or work.precision != "fp32" or len(work.dims) != 7 or work.dims[-2:] != (3, 3):
        return 0
    samples, _, height, width, *_ = (max(1, size) for size in work.dims)
    return samples * math.ceil(height / 2) * math.ceil(width / 2)


def _product_shape(work: Work) -> tuple[float, ...]:
    """Return (B, M, N, K) of a product; NaN for any other operation, and where the dimensions are unknown.

    A convolution is a product of (pixels, patch) @ (patch, channels), and its backward pass is two of them.
    """
    if not work.dims or work.kind not in ("linear", "bmm", "convolution"):
        return (math.nan,) * 4
    if work.kind != "convolution":
        return tuple(map(float, (1, *work.dims)[-4:]))
    samples, channels, *spatial_sizes = (max(1, size) for size in work.dims)
    num_spatial = (len(spatial_sizes) - 1) // 2
    m, k = samples * math.prod(spatial_sizes[:num_spatial]), math.prod(spatial_sizes[num_spatial:])
    return max(work.flops / (2.0 * m * channels * k), 1e-9), m, channels, k


def _middles(works: Sequence[Work], shapes: Array, tiles: Array, device: Datasheet, fitted: Coefficients) -> Array:
    """Return the middles of the works' seconds, given the shapes of their products and their tiles for Winograd's algorithm.

    A convolution takes as long as the product of its patches, or less by Winograd's algorithm: 16 products with a row for
    2 × 2 pixels and a ninth of the patch. Its weights are moved several times, to transform them or to change their layout,
    which takes most of the time if there are few pixels.
    """
    peaks = np.array([_peak(work, device) for work in works])
    moved, flops = np.array([(work.bytes, work.flops) for work in works], float).reshape(-1, 2).T
    on_tensor_cores = np.array([work.precision in ("tf32", "bf16", "fp16") for work in works])
    power = device.flops_per_sec["fp32"] / peaks * np.where(on_tensor_cores, _TENSOR_POWER, 1.0)  # a FLOP's energy
    is_convolution = np.array([work.kind == "convolution" and bool(work.dims) for work in works])
    b, _, n, k = shapes
    roof_args = (moved, device, peaks, fitted.products, power)
    products = product_seconds(tuple(shapes), *roof_args, np.where(is_convolution, np.inf, LEAST_K), flops)
    by_winograd = product_seconds((16 * b, np.maximum(tiles, 1), n, k / 9), *roof_args, np.inf)
    products = np.where(tiles > 0, np.minimum(products, _TRANSFORMS * by_winograd), products)
    weights_s = _WEIGHT_PASSES * 4 * b * n * k / device.memory_bytes_per_sec + _LEAST_CONVOLUTION_S
    products = products + np.where(is_convolution, weights_s, 0.0)
    kinds = np.array([work.kind if work.dims else "elementwise" for work in works])
    lengths = np.array([float(work.dims[-1] if work.dims else 0) for work in works])
    is_memory_bound = np.array([_roof_group(work) == "memory" for work in works])
    return np.where(is_memory_bound, memory_seconds(kinds, lengths, moved, device, fitted.memory), products)


def _peak(work: Work, device: Datasheet) -> float:
    """Return the peak FLOP/s at a work's precision; that of fp32 for memory-bound kernels and unknown precisions."""
    fp32 = device.flops_per_sec["fp32"]
    return fp32 if _roof_group(work) == "memory" else device.flops_per_sec.get(work.precision, fp32)


def _spread(work: Work, device_factor: float, fitted: Coefficients) -> float:
    """Return the standard deviation of a work's log time; `device_factor` multiplies the device's part of it."""
    kind, spread = _STAND_INS[work.kind]
    spread = _STAND_INS["recurrent"][1] if "rnn" in work.name else spread  # cuDNN may fuse or overlap its parts
    backward = _BACKWARD_SPREAD[GROUPS[kind]] if work.part == "backward" else 0.0
    precision = _PRECISION_SPREAD[GROUPS[kind]] if work.precision != "fp32" else 0.0
    return math.hypot(
        fitted.device_spread[kind] * device_factor, spread, backward, precision, fitted.kernel_spread[kind]
    )


def facts(device: Datasheet) -> dict[str, float]:
    """Return the numbers by which a device is compared with the fitted cards."""
    peak, bandwidth = device.flops_per_sec["fp32"], device.memory_bytes_per_sec
    return {
        "flops_per_sec": peak,
        "bytes_per_sec": bandwidth,
        "flops_per_byte": peak / bandwidth,
        "joules_per_flop": (device.tdp_w or 0.0) / peak,
        "l2_bytes_per_sm": (device.l2_mib or 0.0) * 2**20 / (device.sms or 1),
    }


def _device_factor(device: Datasheet, fitted: Coefficients) -> float:
    """Return the factor that widens the device's effect if the device lies outside of the fitted cards' range."""
    ranges = [(value, *fitted.range[name]) for name, value in facts(device).items() if name in fitted.range]
    octaves_outside = (max(math.log2(low / value), math.log2(value / high)) for value, low, high in ranges)
    return 1 + _WIDENING_PER_OCTAVE * max([0.0, *octaves_outside])
