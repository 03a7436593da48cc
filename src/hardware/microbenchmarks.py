"""The microbenchmarks of a device: for each quantity several shapes, of which the fastest is the roofline peak.

A peak must hold for every layer, so each quantity has microbenchmarks in all the shapes that a library is fast at:

- **Products** are matrix products and convolutions. A processor is fastest on matrices that stay in the caches of its
  cores, a GPU on large ones. On some CPUs the library for convolutions is twice as fast as the one for matrices.
- **Memory traffic** has a copy, an update in place, a sum, a product with a vector, and an addition to another tensor.
  Which one is fastest depends on the processor: a CPU's copy also reads the memory that it overwrites. The tensors are
  larger than the caches, so that every byte moves through main memory.
- **Launches** are the smallest operation that runs a kernel, many in a row.
- **Transfers** are copies from the host's pinned memory to the device.
"""

from collections.abc import Iterable, Iterator
from functools import cache, partial
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn import functional as F

from .timing import Microbenchmark, Run

MEMORY, LAUNCHES, TRANSFERS = "memory", "launches", "transfers"
_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DTYPES["fp64"] = torch.float64
_MIB = 2**20
_BEYOND_CACHE = 8  # times the cache: less than an eighth of such a tensor is still there from the run before
_MIN_TRAFFIC, _MAX_TRAFFIC = 256 * _MIB, 1024 * _MIB  # of one tensor
_TRANSFERRED = 64 * _MIB

# (M, K) times (K, N): squares, and the linear layers of small and of large networks.
_MATRICES = [(n, n, n) for n in (192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)]
_MATRICES += [(64, 3136, 128), (512, 3136, 128), (4096, 784, 512), (8192, 1024, 4096)]
# (B, C_in, C_out, H, K): K×K convolutions of H×H images.
_CONVOLUTIONS = [(1, 64, 128, 28, 3), (1, 256, 256, 28, 3), (8, 32, 64, 14, 3), (64, 128, 128, 14, 3)]
_CONVOLUTIONS += [(64, 64, 128, 28, 3), (64, 256, 256, 28, 3), (256, 256, 256, 28, 3)]
_CONVOLUTIONS += [(1, 512, 512, 14, 1), (16, 128, 512, 28, 1)]


def microbenchmarks(device: torch.device, cache_bytes: int | None = None) -> dict[str, Iterable[Microbenchmark]]:
    """The candidates of each quantity: the products of each precision by its name, MEMORY, LAUNCHES and TRANSFERS.

    Args:
        device: to measure.
        cache_bytes: of the device's caches, if known.
    """
    has_tf32 = device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)
    found: dict[str, Iterable[Microbenchmark]] = {
        name: _products(device, name) for name in _DTYPES if name != "tf32" or has_tf32
    }
    found[MEMORY] = _traffic(device, min(max(_MIN_TRAFFIC, _BEYOND_CACHE * (cache_bytes or 0)), _MAX_TRAFFIC))
    found[LAUNCHES] = [Microbenchmark(1.0, lambda: torch.zeros(1, device=device).neg_)]
    if device.type != "cpu":
        found[TRANSFERS] = [Microbenchmark(float(_TRANSFERRED), partial(_transfer, device))]
    return found


def _products(device: torch.device, precision: str) -> Iterator[Microbenchmark]:
    """Matrix products and convolutions, smallest first."""
    random = partial(_random, device, _DTYPES[precision])
    float32 = "tf32" if precision == "tf32" else "ieee"

    def matrices(m: int, k: int, n: int) -> Run:
        return partial(F.linear, random(m, k), random(n, k))

    def convolution(batch: int, c_in: int, c_out: int, size: int, kernel: int, layout: torch.memory_format) -> Run:
        x = random(batch, c_in, size, size).to(memory_format=layout)
        weight = random(c_out, c_in, kernel, kernel).to(memory_format=layout)
        return partial(F.conv2d, x, weight, padding=kernel // 2)

    found = [Microbenchmark(2.0 * m * k * n, partial(matrices, m, k, n), float32) for m, k, n in _MATRICES]
    for batch, c_in, c_out, size, kernel in _CONVOLUTIONS:
        flops = 2.0 * batch * c_in * c_out * kernel**2 * size**2
        for layout in (torch.contiguous_format, torch.channels_last):
            make = partial(convolution, batch, c_in, c_out, size, kernel, layout)
            found.append(Microbenchmark(flops, make, float32))
    found.sort(key=attrgetter("amount"), reverse=True)
    while found:  # one that is not among the fastest is freed with its tensors
        yield found.pop()


def _traffic(device: torch.device, size: int) -> list[Microbenchmark]:
    """Operations on the same two tensors of `size` bytes. The amount is what they read and write, in bytes."""

    @cache
    def tensors() -> tuple[Tensor, Tensor]:
        return torch.ones(size // 4, device=device), torch.ones(size // 4, device=device)

    def product_with_vector() -> Run:
        return partial(torch.mv, tensors()[0].view(-1, 4096), torch.ones(4096, device=device))

    return [
        Microbenchmark(1.0 * size, lambda: tensors()[0].sum),
        Microbenchmark(1.0 * size, product_with_vector),
        Microbenchmark(2.0 * size, lambda: partial(tensors()[1].copy_, tensors()[0])),
        Microbenchmark(2.0 * size, lambda: partial(tensors()[0].mul_, 1.0)),
        Microbenchmark(3.0 * size, lambda: partial(tensors()[0].add_, tensors()[1], alpha=0.0)),
    ]


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Random numbers, not zeros: on zeros a device stays cooler and computes faster."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def _transfer(device: torch.device) -> Run:
    pinned = torch.ones(_TRANSFERRED, dtype=torch.uint8, pin_memory=True)
    return partial(torch.empty_like(pinned, device=device).copy_, pinned, non_blocking=True)
