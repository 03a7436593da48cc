"""Matrix products, alone and in loops: their shapes (without torch), and their times on a device that is here."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

SIZES = tuple(2**power for power in range(4, 13))  # n of the products of n×n matrices
LOOPS = ((7000, 3000), (70, 30))  # M×K of the first matrix; the second one is K×M
PASSES = 100  # products in a loop
_BLOCK_S, _ENOUGH_S = 0.005, 0.5  # seconds of a sample; seconds of samples that suffice for a product
_LARGE_FLOPS = 1e9  # from here on a product's rate predicts the time of larger products


@dataclass(frozen=True)
class Product:
    """`(M, K) @ (K, N)` in float32, or one pass of a loop, which also sums the elements of the result."""

    m: int
    k: int
    n: int
    loop: bool = False
    creates: bool = False  # each pass creates both matrices on the host, and copies them to the device

    @property
    def flops(self) -> float:
        """FLOPs of the product; a multiply-add is two."""
        return 2.0 * self.m * self.k * self.n

    @property
    def bytes(self) -> float:
        """Bytes of all three matrices."""
        return 4.0 * (self.m * self.k + self.k * self.n + self.m * self.n)

    def __str__(self) -> str:
        creation = "created in the loop" if self.creates else "created before"
        return f"{PASSES} of {self.m}×{self.k}, {creation}" if self.loop else f"{self.n:,}"


class Timed(NamedTuple):
    """Seconds of a call, in samples: of the product, of the copy to the device, and of the creation on the host."""

    product: Sequence[float]
    copy: Sequence[float]  # empty on a CPU
    creation: Sequence[float]  # empty for a product that does not create matrices
    calls: int  # of the product, in all samples


def products(sizes: Sequence[int]) -> list[Product]:
    """Return the products of n×n matrices and the passes of the loops, smallest first."""
    loops = [Product(m, k, m, True, creates) for m, k in LOOPS for creates in (False, True)]
    return sorted([*(Product(n, n, n) for n in sizes), *loops], key=lambda product: product.flops)


def time_products(
    wanted: Sequence[Product], device: "torch.device", peak: float, seconds: float, say: Callable[[str], None]
) -> dict[Product, Timed]:
    """Time products on a device, except those that take too long or too much memory.

    Args:
        wanted: smallest first.
        peak: FLOP/s that estimates the time of the first large product.
        seconds: of all measurements.
        say: prints which product is measured next.
    """
    import torch

    from .._torch import float32_computed_as

    times_by_product: dict[Product, Timed] = {}
    for index, product in enumerate(wanted):
        if 2 * product.flops / peak > seconds:
            continue
        say(f"measuring products on {device.type}: {product} …")
        with contextlib.suppress(RuntimeError), torch.inference_mode(), float32_computed_as("ieee"):  # out of memory
            timed = times_by_product[product] = _time_product(product, device, seconds / (len(wanted) - index))
            spent_s = sum(timed.product) * timed.calls / len(timed.product)
            seconds -= spent_s + sum(timed.copy) + sum(timed.creation)
            if product.flops > _LARGE_FLOPS:
                peak = product.flops * timed.calls / spent_s
    return times_by_product


def _time_product(product: Product, device: "torch.device", seconds: float) -> Timed:
    import torch

    from .microbenchmarks import time_runs

    def create() -> list[torch.Tensor]:
        return [torch.randn(product.m, product.k), torch.randn(product.k, product.n)]

    def copy() -> list[torch.Tensor]:
        return [matrix.to(device) for matrix in host_matrices]

    def run() -> torch.Tensor:
        left, right = (matrix.to(device) for matrix in create()) if product.creates else device_matrices
        return (left @ right).sum() if product.loop else left @ right

    host_matrices = create()
    device_matrices, calls_per_sample = copy(), 1
    samples = [time_runs(run, 1)]  # the first call of a short product may initialize a library, and does not count
    time_limit = min(seconds, max(_ENOUGH_S, 2.5 * samples[0]))
    if samples[0] < _ENOUGH_S / 5:
        calls_per_sample, samples = max(1, round(_BLOCK_S / time_runs(run, 1))), []
    while len(samples) < 2 or sum(samples) * calls_per_sample < time_limit:
        samples.append(time_runs(run, calls_per_sample) / calls_per_sample)
    copies = [time_runs(copy, 1) for _ in range(5 * (device.type != "cpu"))]
    creations = [time_runs(create, 1) for _ in range(5 * product.creates)]
    return Timed(samples, copies, creations, len(samples) * calls_per_sample)
