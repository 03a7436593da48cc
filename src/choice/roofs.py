"""The time of a kernel by the device's roofline peaks: arithmetic, memory and power. The coefficients are fitted to measurements.

Every function works on arrays with one element for each operation. Seconds, bytes, FLOP/s and watts are in SI units.

    B, M, N, K   a product of (M, K) and (K, N), B times
    H            the length of a row that a softmax or a layer norm reduces
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray
Values = Mapping[str, float]  # coefficients of kernels.json
# A Datasheet without missing numbers, as every card in devices.yaml has; its numbers may be arrays.
Card = Any
# Output tiles (rows, columns) of products in cuBLAS and CUTLASS, and the share of the peak that smaller tiles lose, relative.
_TILES = ((256, 128, -0.02), (128, 128, 0.0), (128, 64, 0.08), (64, 64, 0.16), (64, 32, 0.35), (32, 32, 0.5))
_BLOCKS_OF_SMALL_TILES = 2  # at a time on one multiprocessor; of a larger tile one
_SMALL_TILE = 128 * 64
LEAST_K = 256  # the smallest part of K that a block sums up where a product is split along K (split-K)
_REFERENCE_L2_PER_SM = 0.08 * 2**20  # bytes, of the cards up to 2019
_REFERENCE_LANES = 64  # fp32 lanes of a multiprocessor
_ONE_PASS_SOFTMAX = 1024  # the longest row that PyTorch's softmax keeps in registers


def product_seconds(
    shape: Sequence[Array],
    bytes_: Array,
    card: Card,
    peaks: Array,
    fitted: Values,
    power: Array | float = 1.0,
    least_k: Array | float = LEAST_K,
    flops: Array | float = 0.0,
) -> Array:
    """Return the seconds of matrix products.

    Arithmetic and memory traffic overlap in part (a p-norm). Power is a cap: the clock falls until the product's power fits the
    board's limit. This limits T4 and L4.

    Args:
        shape: B, M, N, K; NaN if they are unknown: such a product is taken to fill the device.
        peaks: FLOP/s at the precision of each product.
        fitted: the coefficients `products` of kernels.json.
        power: the energy of a FLOP, relative to fp32.
        least_k: the smallest part of K that a block sums up; infinity if no product is split along K.
        flops: of products without a shape.
    """
    b, m, n, k = shape
    flops = np.where(np.isnan(b), flops, 2 * b * m * n * k)
    tiled = _tiled_seconds(shape, card, peaks, fitted, least_k)
    arithmetic = np.where(np.isnan(b), flops / (peaks * fitted["compute_share"]), tiled)
    memory = bytes_ / (card.memory_bytes_per_sec * fitted["memory_share"])
    generation_factor = (card.l2_mib * 2**20 / card.sms / _REFERENCE_L2_PER_SM) ** fitted["l2_exponent"]
    generation_factor *= (card.cores_per_sm / _REFERENCE_LANES) ** fitted["lanes_exponent"]
    joules = generation_factor * (power * fitted["joules_per_flop"] * flops + fitted["joules_per_byte"] * bytes_)
    overlapped = norm(arithmetic, memory, fitted["overlap_norm"])
    return norm(overlapped, joules / card.tdp_w, fitted["power_norm"]) + fitted["least_seconds"]


def tiles_per_sm(shape: Sequence[Array], card: Card) -> Array:
    """Return the number of 128×128 tiles of each product, per multiprocessor."""
    (b, m, n, _), (rows, columns, _) = shape, _TILES[1]
    return b * np.ceil(m / rows) * np.ceil(n / columns) / card.sms


def _tiled_seconds(shape: Sequence[Array], card: Card, peaks: Array, fitted: Values, least_k: Array | float) -> Array:
    """Return the seconds of arithmetic alone with the best tile: whole tiles, partly whole waves, and split-K if tiles are few."""
    b, m, n, k = shape
    least_work = np.full(np.shape(m * card.sms), np.inf)
    padded_share = min(1.0, fitted["whole_waves"])
    for rows, columns, penalty in _TILES:
        blocks = _BLOCKS_OF_SMALL_TILES if rows * columns <= _SMALL_TILE else 1
        slots = card.sms * blocks
        work = 2 * rows * columns * (k + fitted["k_overhead"]) * np.exp(penalty * fitted["small_tile_penalty"])
        split = np.maximum(1.0, np.floor(k / least_k))
        for height, width in {(rows, columns), (columns, rows)}:
            waves = b * np.ceil(m / height) * np.ceil(n / width) / slots
            least_waves = 1 / (blocks * np.minimum(split, np.maximum(1.0, 1 / waves)))
            padded = np.where(waves > 1, padded_share * np.ceil(waves) + (1 - padded_share) * waves, waves)
            least_work = np.minimum(least_work, np.maximum(padded, least_waves) * slots * work)
    return least_work / (peaks * fitted["compute_share"])


def memory_seconds(kind: Array, h: Array, bytes_: Array, card: Card, fitted: Values) -> Array:
    """Return the seconds of memory-bound operations: elementwise operations, softmax, layer norm.

    A reduction reads its rows twice (layer norm) or three times (softmax of long rows). A repeated read hits the L2 cache if
    the rows of all concurrent blocks fit into it.

    Args:
        kind: `elementwise`, `softmax` or `layer_norm`.
        h: length of a row; not read for elementwise operations.
        bytes_: that are read and written, each tensor once.
        fitted: the coefficients `memory` of kernels.json.
    """
    rows_in_l2 = 4 * h * card.sms / (card.l2_mib * 2**20)  # one row a multiprocessor, relative to the L2
    is_norm, is_softmax = kind == "layer_norm", (kind == "softmax") & (h > _ONE_PASS_SOFTMAX)
    reads = is_norm * fitted["norm_passes"] * _miss_rate(rows_in_l2 * fitted["norm_rows"], fitted["sharpness"])
    softmax_misses = _miss_rate(rows_in_l2 * fitted["softmax_rows"], fitted["sharpness"])
    reads = reads + is_softmax * fitted["softmax_passes"] * softmax_misses  # repeated ones
    return bytes_ * (1 + reads / 2) / (card.memory_bytes_per_sec * fitted["memory_share"]) + fitted["least_seconds"]


def _miss_rate(footprint: Array, sharpness: float) -> Array:
    """Return the share of reads that miss a cache, given the footprint relative to its size: a half at 1."""
    return 1 / (1 + np.maximum(footprint, 1e-12) ** -sharpness)


def norm(a: Array | float, b: Array | float, power: float) -> Array:
    """Return the p-norm of two times, p = `power`: about the larger one if p is large, and their sum if it is 1."""
    larger, smaller = np.maximum(a, b), np.minimum(a, b)
    return larger * (1 + (smaller / np.maximum(larger, 1e-30)) ** power) ** (1 / power)
