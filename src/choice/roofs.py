"""How long a kernel takes by a device's roofs: arithmetic, memory and power. The coefficients are fitted to measurements.

Every function works on arrays: one element an operation on a device. Seconds, bytes, FLOP/s and watts are in SI units.

    B, M, N, K   a product of (M, K) and (K, N), B times
    H            the length of a row that a softmax or a layer norm reduces
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray
Values = Mapping[str, float]  # coefficients of kernels.json
# A Datasheet with all that the roofs need, as every card of NVIDIA's in devices.yaml has; its numbers may be arrays.
Card = Any
# Output tiles of the products in cuBLAS and CUTLASS, and by how much less of the peak the smaller ones reach (relative).
_TILES = ((256, 128, -0.02), (128, 128, 0.0), (128, 64, 0.08), (64, 64, 0.16), (64, 32, 0.35), (32, 32, 0.5))
_BLOCKS_OF_SMALL_TILES = 2  # on one multiprocessor at a time; one block of a larger tile
_SMALL_TILE = 128 * 64
LEAST_K = 256  # the least part of K that a block of a split product sums up
_REFERENCE_L2_PER_SM = 0.08 * 2**20  # bytes, of the cards until 2019
_REFERENCE_LANES = 64  # fp32 lanes of a multiprocessor
_ONE_PASS_SOFTMAX = 1024  # the longest row that PyTorch's softmax keeps in registers


def product_seconds(
    shape: Sequence[Array],
    bytes_: Array,
    card: Card,
    peaks: Array,
    of: Values,
    power: Array | float = 1.0,
    least_k: Array | float = LEAST_K,
    flops: Array | float = 0.0,
) -> Array:
    """Seconds of matrix products.

    Arithmetic and memory overlap in part (a p-norm). Power is a cap: the clock falls until the product's energy fits the
    board's limit, which is what bounds T4 and L4.

    Args:
        shape: B, M, N, K; NaN where they are not known: such arithmetic is that of a product that fills the device.
        peaks: FLOP/s at the precision of each.
        of: the coefficients, `products` of kernels.json.
        power: the energy of a FLOP, relative to fp32.
        least_k: the least part of K that a block of a split product sums up; infinity where none is split.
        flops: of products without a shape.
    """
    b, m, n, k = shape
    flops = np.where(np.isnan(b), flops, 2 * b * m * n * k)
    tiled = _tiled_seconds(shape, card, peaks, of, least_k)
    arithmetic = np.where(np.isnan(b), flops / (peaks * of["compute_share"]), tiled)
    memory = bytes_ / (card.memory_bytes_per_sec * of["memory_share"])
    newer = (card.l2_mib * 2**20 / card.sms / _REFERENCE_L2_PER_SM) ** of["l2_exponent"]
    newer *= (card.cores_per_sm / _REFERENCE_LANES) ** of["lanes_exponent"]
    joules = newer * (power * of["joules_per_flop"] * flops + of["joules_per_byte"] * bytes_)
    both = norm(arithmetic, memory, of["overlap_norm"])
    return norm(both, joules / card.tdp_w, of["power_norm"]) + of["least_seconds"]


def filled(shape: Sequence[Array], card: Card) -> Array:
    """How many of the larger tiles a product has for each multiprocessor."""
    (b, m, n, _), (rows, columns, _) = shape, _TILES[1]
    return b * np.ceil(m / rows) * np.ceil(n / columns) / card.sms


def _tiled_seconds(shape: Sequence[Array], card: Card, peaks: Array, of: Values, least_k: Array | float) -> Array:
    """Arithmetic alone, with the best tile: whole tiles, partly whole waves over the multiprocessors, K split if few tiles."""
    b, m, n, k = shape
    best = np.full(np.shape(m * card.sms), np.inf)
    whole = min(1.0, of["whole_waves"])
    for rows, columns, penalty in _TILES:
        blocks = _BLOCKS_OF_SMALL_TILES if rows * columns <= _SMALL_TILE else 1
        slots = card.sms * blocks
        work = 2 * rows * columns * (k + of["k_overhead"]) * np.exp(penalty * of["small_tile_penalty"])
        split = np.maximum(1.0, np.floor(k / least_k))
        for high, wide in {(rows, columns), (columns, rows)}:
            waves = b * np.ceil(m / high) * np.ceil(n / wide) / slots
            least = 1 / (blocks * np.minimum(split, np.maximum(1.0, 1 / waves)))
            waves = np.maximum(np.where(waves > 1, whole * np.ceil(waves) + (1 - whole) * waves, waves), least)
            best = np.minimum(best, waves * slots * work)
    return best / (peaks * of["compute_share"])


def memory_seconds(kind: Array, h: Array, bytes_: Array, card: Card, of: Values) -> Array:
    """Seconds of operations that memory bounds: elementwise ones, softmax, layer norm.

    A reduction reads its rows twice (layer norm) or three times (softmax of long rows). The second read hits the L2 while
    the rows of all blocks that run at the same time fit into it.

    Args:
        kind: `elementwise`, `softmax` or `layer_norm`.
        h: length of a row; not read for elementwise operations.
        bytes_: read and written, each tensor once.
        of: the coefficients, `memory` of kernels.json.
    """
    rows = 4 * h * card.sms / (card.l2_mib * 2**20)  # one row a multiprocessor, relative to the L2
    is_norm, is_softmax = kind == "layer_norm", (kind == "softmax") & (h > _ONE_PASS_SOFTMAX)
    again = is_norm * of["norm_passes"] * _missed(rows * of["norm_rows"], of["sharpness"])
    again = again + is_softmax * of["softmax_passes"] * _missed(rows * of["softmax_rows"], of["sharpness"])
    return bytes_ * (1 + again / 2) / (card.memory_bytes_per_sec * of["memory_share"]) + of["least_seconds"]


def _missed(footprint: Array, sharpness: float) -> Array:
    """The part of reads that miss a cache: half of them when the footprint is the cache's size."""
    return 1 / (1 + np.maximum(footprint, 1e-12) ** -sharpness)


def norm(a: Array | float, b: Array | float, power: float) -> Array:
    """The larger of two times if `power` is large, and their sum if it is 1."""
    larger, smaller = np.maximum(a, b), np.minimum(a, b)
    return larger * (1 + (smaller / np.maximum(larger, 1e-30)) ** power) ** (1 / power)
