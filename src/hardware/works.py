"""What is measured of a device: works of many shapes, of which the fastest is a roof.

A roof must hold for every layer, so each quantity has works in all the shapes that a library is fast at:

- **Products** are matrix products and convolutions. A processor is fastest on matrices that stay in the caches of its
  cores, a GPU on large ones. On some CPUs the library for convolutions is twice as fast as the one for matrices.
- **Memory traffic** has a copy, an update in place, a sum, a product with a vector, and an addition to another tensor.
  Which one is fastest depends on the processor: a CPU's copy also reads the memory that it overwrites. The tensors are
  larger than the caches, so that every byte moves through main memory.
- **Small operations** are the smallest that run a kernel.
- **Page faults** are first writes to memory that the system has just given out, as an allocator that returns freed memory
  causes them in every step. They are counted, since a system may hand out larger pages.
"""

import mmap
from collections.abc import Iterable, Iterator
from functools import cache, partial
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn import functional as F

from .page_faults import page_faults
from .timing import Run, Work

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DTYPES["fp64"] = torch.float64
_MIB = 2**20
_BEYOND_CACHE = 8  # times the cache: less than an eighth of such a tensor is still there from the run before
_FRESH = 8 * _MIB  # memory in which page faults are timed
_MIN_TRAFFIC, _MAX_TRAFFIC = 256 * _MIB, 1024 * _MIB  # of one tensor

# (M, K) times (K, N): squares, and the linear layers of small and of large networks.
_MATRICES = [(n, n, n) for n in (192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)]
_MATRICES += [(64, 3136, 128), (512, 3136, 128), (4096, 784, 512), (8192, 1024, 4096)]
# (B, C_in, C_out, H, K): K×K convolutions of H×H images.
_CONVOLUTIONS = [(1, 64, 128, 28, 3), (1, 256, 256, 28, 3), (8, 32, 64, 14, 3), (64, 128, 128, 14, 3)]
_CONVOLUTIONS += [(64, 64, 128, 28, 3), (64, 256, 256, 28, 3), (256, 256, 256, 28, 3)]
_CONVOLUTIONS += [(1, 512, 512, 14, 1), (16, 128, 512, 28, 1)]


def works(device: torch.device, cache_bytes: int | None = None) -> dict[str, Iterable[Work]]:
    """Everything that is measured on a device, by name. `cache_bytes` are those of the device, if known."""
    has_tf32 = device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)
    found: dict[str, Iterable[Work]] = {
        f"products in {name}": _products(device, name) for name in _DTYPES if name != "tf32" or has_tf32
    }
    size = min(max(_MIN_TRAFFIC, _BEYOND_CACHE * (cache_bytes or 0)), _MAX_TRAFFIC)
    found["memory copy"], found["memory traffic"] = _memory(device, size)
    found["small operations"] = [Work(1.0, lambda: torch.zeros(1, device=device).neg_)]
    if device.type == "cpu":
        found["page faults"] = _page_faults()
    else:
        host, moved = torch.device("cpu"), 64 * _MIB
        for pinned, suffix in ((False, ""), (True, ", pinned")):
            found[f"host to device{suffix}"] = [Work(float(moved), partial(_copy, moved, host, device, pinned))]
            found[f"device to host{suffix}"] = [Work(float(moved), partial(_copy, moved, device, host, pinned))]
    return found


def _page_faults() -> list[Work]:
    """First writes to every page of fresh memory; none where the system does not count faults."""
    pages = _FRESH // mmap.PAGESIZE
    before = page_faults().process
    _touch(_FRESH)
    faults = page_faults().process - before
    return [Work(float(faults), lambda: partial(_touch, _FRESH))] if faults >= pages // 2 else []


def _touch(size: int) -> None:
    """Write one byte of every page of memory that the system has not given out before."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
        fresh[:: mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)


def _products(device: torch.device, precision: str) -> Iterator[Work]:
    """Matrix products and convolutions, smallest first."""
    random = partial(_random, device, _DTYPES[precision])
    form = "tf32" if precision == "tf32" else "ieee"

    def matrices(m: int, k: int, n: int) -> Run:
        return partial(F.linear, random(m, k), random(n, k))

    def convolution(batch: int, c_in: int, c_out: int, size: int, kernel: int, layout: torch.memory_format) -> Run:
        x = random(batch, c_in, size, size).to(memory_format=layout)
        weight = random(c_out, c_in, kernel, kernel).to(memory_format=layout)
        return partial(F.conv2d, x, weight, padding=kernel // 2)

    found = [Work(2.0 * m * k * n, partial(matrices, m, k, n), form) for m, k, n in _MATRICES]
    for batch, c_in, c_out, size, kernel in _CONVOLUTIONS:
        flops = 2.0 * batch * c_in * c_out * kernel**2 * size**2
        for layout in (torch.contiguous_format, torch.channels_last):
            found.append(Work(flops, partial(convolution, batch, c_in, c_out, size, kernel, layout), form))
    found.sort(key=attrgetter("amount"), reverse=True)
    while found:  # a work that is not among the fastest is freed with its tensors
        yield found.pop()


def _memory(device: torch.device, size: int) -> tuple[list[Work], list[Work]]:
    """The copy, and the other traffic, on the same two tensors of `size` bytes each. A work's amount are the bytes of
    the tensors that it reads and writes.
    """

    @cache
    def tensors() -> tuple[Tensor, Tensor]:
        return torch.ones(size // 4, device=device), torch.ones(size // 4, device=device)

    def product_with_vector() -> Run:
        matrix = tensors()[0].view(-1, 4096)
        return partial(torch.mv, matrix, torch.ones(4096, device=device))

    others = [
        Work(2.0 * size, lambda: partial(tensors()[0].mul_, 1.0)),
        Work(1.0 * size, lambda: tensors()[0].sum),
        Work(1.0 * size, product_with_vector),
        Work(3.0 * size, lambda: partial(tensors()[0].add_, tensors()[1], alpha=0.0)),
    ]
    return [Work(2.0 * size, lambda: partial(tensors()[1].copy_, tensors()[0]))], others


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Random numbers, not zeros: on zeros a device stays cooler and computes faster."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def _copy(size: int, source: torch.device, target: torch.device, pinned: bool = False) -> Run:
    """A copy of so many bytes between two devices."""
    pin = [pinned and device.type == "cpu" for device in (source, target)]
    data = torch.ones(size, dtype=torch.uint8, device=source, pin_memory=pin[0])
    place = torch.ones(size, dtype=torch.uint8, device=target, pin_memory=pin[1])
    return partial(place.copy_, data, non_blocking=pinned)
