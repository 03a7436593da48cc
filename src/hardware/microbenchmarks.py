"""The microbenchmarks of a device: each quantity is measured in several shapes, and the fastest one is the roofline peak.

A peak must bound every layer, so each quantity has microbenchmarks in all shapes at which libraries are fast:

- **Products** are matrix products and convolutions. A processor is fastest on matrices that stay in the caches of its
  cores, a GPU on large ones. On some CPUs the library for convolutions is twice as fast as the one for matrices.
- **Memory traffic** has a copy, an update in place, a sum, a product with a vector, and an addition to another tensor.
  The fastest one depends on the processor: a CPU's copy also reads the memory that it overwrites. The tensors are
  larger than the caches, so that every byte moves through main memory.
- **Launches** are many runs in a row of the smallest operation that runs a kernel.

A microbenchmark is timed in many short blocks, and the best block counts, because noise only makes a block slower.

`torch.utils.benchmark.Timer.blocked_autorange` does not replace this: its blocks take 0.1 s and more, and few of them are
undisturbed on a shared machine.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from itertools import chain, repeat
from operator import itemgetter

import torch
from torch import Tensor
from torch.nn import functional as F

from .._torch import float32_computed_as

Run = Callable[[], object]

# The shorter the blocks, the more likely is an undisturbed one. On a Mac the wait for the GPU at the end of a block costs more.
_BLOCK_S = 0.02 if torch.backends.mps.is_available() else 0.002
_PASS_S = 0.02  # of blocks of one microbenchmark, before the next one
_FINALISTS = 5  # of each quantity
_SLOWEST_RUN_S = 0.06  # a candidate is left out if one run would take longer
# If other programs use all cores, the threads of a small run wait 50 ms for each other. Its rate is then 50 times too low, and
# would leave out all larger candidates. So the first candidates are always timed.
_ALWAYS_TIMED = 6

MEMORY, LAUNCHES = "memory", "launches"
_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DTYPES["fp64"] = torch.float64
_MIB = 2**20
_CACHE_MULTIPLE = 8  # tensor ÷ cache: less than an eighth of the tensor stays cached between runs
_MIN_TRAFFIC, _MAX_TRAFFIC = 256 * _MIB, 1024 * _MIB  # of one tensor

# (M, K, N) of (M, K) @ (K, N): squares, and the linear layers of small and of large networks.
_MATRICES = [(n, n, n) for n in (192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)]
_MATRICES += [(64, 3136, 128), (512, 3136, 128), (4096, 784, 512), (8192, 1024, 4096)]
# (B, C_in, C_out, H, K): K×K convolutions of H×H images.
_CONVOLUTIONS = [(8, 32, 64, 14, 3), (1, 256, 256, 28, 3), (16, 128, 512, 28, 1), (64, 256, 256, 28, 3)]


def synchronized_time() -> float:
    """Return the host's time in seconds after synchronizing the accelerator; a GPU that this process does not use is left alone."""
    if torch.accelerator.is_available() and (torch.cuda.is_initialized() or not torch.cuda.is_available()):
        torch.accelerator.synchronize()
    return time.perf_counter()


def time_runs(run: Run, times: int) -> float:
    """Return the seconds of a number of runs in a row, from an idle device to an idle device."""
    start = synchronized_time()
    for _ in repeat(None, times):  # costs less than counting
        run()
    return max(synchronized_time() - start, 1e-9)


class Microbenchmark:
    """A run to be timed, and the best rate of its blocks so far.

    Args:
        amount: the work of one run, in FLOPs, bytes or operations.
        make: allocates the tensors of a run, and returns the run.
        float32: the format of float32 products during the runs: `ieee` or `tf32`.
    """

    def __init__(self, amount: float, make: Callable[[], Run], float32: str = "ieee"):
        self.amount = amount
        self.rate = 0.0  # amount per second
        self._make = make
        self._float32 = float32
        self._run: Run | None = None
        self._runs_per_block = 1

    def time_for(self, seconds: float) -> None:
        """Time blocks for `seconds`. The very first run is extra, since it may initialize a library: cuBLAS takes 30 ms."""
        with float32_computed_as(self._float32):
            if self._run is None:
                self._run = self._make()
                self._time_block(self._run)
            spent = 0.0
            while spent < seconds:
                spent += self._time_block(self._run)

    def _time_block(self, run: Run) -> float:
        seconds = time_runs(run, self._runs_per_block)
        self.rate = max(self.rate, self.amount * self._runs_per_block / seconds)
        self._runs_per_block = max(1, round(_BLOCK_S * self.rate / self.amount))
        return seconds


def best_rates(candidates: Mapping[str, Iterable[Microbenchmark]], seconds: float) -> dict[str, float]:
    """Return the best rate of each quantity, in its amount per second, without quantities that the device does not support.

    Each candidate is timed once, in the given order: the smallest amount first. Then the finalists of all quantities are timed
    in passes, so that a disturbance of a second costs each finalist a pass, and no quantity its result.
    """
    finalists = {name: _select_finalists(group) for name, group in candidates.items()}
    end = synchronized_time() + seconds
    while synchronized_time() < end:
        for candidate in chain.from_iterable(finalists.values()):
            with contextlib.suppress(RuntimeError):  # another process took the memory
                candidate.time_for(_PASS_S)
    return {name: max(candidate.rate for candidate in group) for name, group in finalists.items() if group}


def _select_finalists(candidates: Iterable[Microbenchmark]) -> list[Microbenchmark]:
    """Time the candidates and return the finalists, best first. Other candidates are freed with their tensors."""
    finalists: list[Microbenchmark] = []
    for number, candidate in enumerate(candidates):
        if number >= _ALWAYS_TIMED and finalists and candidate.amount / finalists[0].rate > _SLOWEST_RUN_S:
            break
        with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):  # no such format here, or no memory
            candidate.time_for(_PASS_S)
            finalists = sorted([*finalists, candidate], key=lambda finalist: -finalist.rate)[:_FINALISTS]
    return finalists


def microbenchmarks(device: torch.device, cache_bytes: int | None = None) -> dict[str, Iterable[Microbenchmark]]:
    """Return the candidates of each quantity: the products of each precision by its name, MEMORY and LAUNCHES."""
    has_tf32 = device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)
    names = [name for name in _DTYPES if name != "tf32" or has_tf32]
    candidates: dict[str, Iterable[Microbenchmark]] = {name: _products(device, name) for name in names}
    candidates[MEMORY] = _traffic(device, min(max(_MIN_TRAFFIC, _CACHE_MULTIPLE * (cache_bytes or 0)), _MAX_TRAFFIC))
    candidates[LAUNCHES] = [Microbenchmark(1.0, lambda: torch.zeros(1, device=device).neg_)]
    return candidates


def _products(device: torch.device, precision: str) -> Iterator[Microbenchmark]:
    """Yield matrix products and convolutions, smallest first."""
    dtype = _DTYPES[precision]
    float32 = "tf32" if precision == "tf32" else "ieee"

    def random(*shape: int) -> Tensor:  # not zeros: on zeros a device stays cooler and computes faster
        generator = torch.Generator(device).manual_seed(0)
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def matrices(m: int, k: int, n: int) -> Run:
        return partial(F.linear, random(m, k), random(n, k))

    def convolution(batch: int, c_in: int, c_out: int, size: int, kernel: int, layout: torch.memory_format) -> Run:
        x = random(batch, c_in, size, size).to(memory_format=layout)
        weight = random(c_out, c_in, kernel, kernel).to(memory_format=layout)
        return partial(F.conv2d, x, weight, padding=kernel // 2)

    products = [(2.0 * m * k * n, partial(matrices, m, k, n)) for m, k, n in _MATRICES]
    for batch, c_in, c_out, size, kernel in _CONVOLUTIONS:
        flops = 2.0 * batch * c_in * c_out * kernel**2 * size**2
        for layout in (torch.contiguous_format, torch.channels_last):
            products.append((flops, partial(convolution, batch, c_in, c_out, size, kernel, layout)))
    for flops, make in sorted(products, key=itemgetter(0)):  # one at a time, so that the caller alone keeps it
        yield Microbenchmark(flops, make, float32)


def _traffic(device: torch.device, size: int) -> list[Microbenchmark]:
    """Return operations on two shared tensors of `size` bytes. The amount is the bytes that they read and write."""

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
