"""Matrix products, alone and in loops: their shapes, which are read without torch, and their times on a device that is here."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

SIZES = tuple(2**power for power in range(4, 13))  # n of the products of n×n matrices
LOOPS = ((7000, 3000), (70, 30))  # M×K of the first matrix; the second one is K×M
PASSES = 100  # of a loop
_BLOCK_S, _ENOUGH_S = 0.005, 0.5  # seconds of a sample, and of all samples of a product
_LARGE = 1e9  # FLOPs, from which on a product's rate tells the time of larger ones


@dataclass(frozen=True)
class Product:
    """`(M, K) @ (K, N)` in float32; or a pass of a loop, which also adds up the elements of the result."""

    m: int
    k: int
    n: int
    loop: bool = False
    creates: bool = False  # each pass creates both matrices on the host, and copies them to the device

    @property
    def flops(self) -> float:
        """Of the product; a multiply-add is two."""
        return 2.0 * self.m * self.k * self.n

    @property
    def bytes(self) -> float:
        """Of all three matrices."""
        return 4.0 * (self.m * self.k + self.k * self.n + self.m * self.n)

    def __str__(self) -> str:
        how = "created in the loop" if self.creates else "created before"
        return f"{PASSES} of {self.m}×{self.k}, {how}" if self.loop else f"{self.n:,}"


class Timed(NamedTuple):
    """Samples, each the seconds of a call: of the product, of the copy to the device, of the creation on the host."""

    product: Sequence[float]
    copy: Sequence[float]  # empty on a CPU
    creation: Sequence[float]  # empty where nothing is created
    calls: int  # in all samples of the product


def products(sizes: Sequence[int]) -> list[Product]:
    """The products of n×n matrices and the passes of the loops, smallest first."""
    loops = [Product(m, k, m, True, creates) for m, k in LOOPS for creates in (False, True)]
    return sorted([*(Product(n, n, n) for n in sizes), *loops], key=lambda product: product.flops)


def measure(
    wanted: Sequence[Product], device: "torch.device", peak: float, seconds: float, say: Callable[[str], None]
) -> dict[Product, Timed]:
    """Time products on a device, without those that take too long or too much memory.

    Args:
        wanted: smallest first.
        peak: FLOP/s, by which the time of the first large one is estimated.
        seconds: in all.
        say: is told what is measured next.
    """
    import torch

    from .._torch import float32_computed_as

    found: dict[Product, Timed] = {}
    for number, product in enumerate(wanted):
        if 2 * product.flops / peak > seconds:
            continue
        say(f"measuring products on {device.type}: {product} …")
        with contextlib.suppress(RuntimeError), torch.inference_mode(), float32_computed_as("ieee"):  # no memory
            timed = found[product] = _time(product, device, seconds / (len(wanted) - number))
            spent = sum(timed.product) * timed.calls / len(timed.product)
            seconds -= spent + sum(timed.copy) + sum(timed.creation)
            if product.flops > _LARGE:
                peak = product.flops * timed.calls / spent
    return found


def _time(product: Product, device: "torch.device", seconds: float) -> Timed:
    import torch

    from .microbenchmarks import time_runs

    def create() -> list[torch.Tensor]:
        return [torch.randn(product.m, product.k), torch.randn(product.k, product.n)]

    def copy() -> list[torch.Tensor]:
        return [matrix.to(device) for matrix in here]

    def run() -> torch.Tensor:
        first, second = (matrix.to(device) for matrix in create()) if product.creates else there
        return (first @ second).sum() if product.loop else first @ second

    here = create()
    there, times = copy(), 1
    samples = [time_runs(run, 1)]  # the first call of a short one may start a library, and does not count
    most = min(seconds, max(_ENOUGH_S, 2.5 * samples[0]))
    if samples[0] < _ENOUGH_S / 5:
        times, samples = max(1, round(_BLOCK_S / time_runs(run, 1))), []
    while len(samples) < 2 or sum(samples) * times < most:
        samples.append(time_runs(run, times) / times)
    copies = [time_runs(copy, 1) for _ in range(5 * (device.type != "cpu"))]
    return Timed(samples, copies, [time_runs(create, 1) for _ in range(5 * product.creates)], len(samples) * times)
