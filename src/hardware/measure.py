"""Measure a device: products, memory, transfers, and the cost of issuing an operation.

Every quantity is timed in many short blocks, and the best block counts, because noise only ever makes a block slower.
"""

import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .._torch import float32_computed_as
from .calibration import Calibration
from .calibration_cache import cached_calibration, identity, store
from .contention import Contention

Run = Callable[[], object]
Say = Callable[[str], None]

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DTYPES["fp64"] = torch.float64
_MIB = 2**20
_FINALISTS = 5
_BLOCK_S = 0.002  # the shorter a block, the more likely that nothing disturbs one of them
_PATIENCE_S = 600  # for a calibration in a subprocess, on a machine that is a hundred times slower than usual


class Effort(NamedTuple):
    """How much time a calibration takes."""

    seconds: float  # for the finals, after everything was tried once
    turn_s: float  # of one quantity, before the next one's turn
    slowest_run_s: float  # work that would take longer for one run is left out


FULL = Effort(seconds=2.0, turn_s=0.03, slowest_run_s=0.15)
QUICK = Effort(seconds=0.3, turn_s=0.01, slowest_run_s=0.03)


def load_or_measure(device: torch.device) -> Calibration:
    """The device's calibration, from the cache or measured now, which takes a few seconds."""
    found = cached_calibration(device)
    if found is None:
        found = calibrate(device)
        store(found)
    return found


def calibrate_in_subprocess(device: torch.device) -> Calibration:
    """`load_or_measure` without the measurement's memory (0.6 GiB on a CPU) in the peak of this process.

    Where there can be no such process, or it cannot use the device beside this one, this process measures.
    """
    line = [sys.executable, "-c", _PROGRAM, str(device), str(torch.get_num_threads())]
    try:
        done = subprocess.run(
            line, check=True, timeout=_PATIENCE_S, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        return Calibration.from_dict(json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, IndexError):
        return load_or_measure(device)


_PROGRAM = """
import json, sys, torch
from batchscope.hardware.measure import load_or_measure
torch.set_num_threads(int(sys.argv[2]))
print(json.dumps(load_or_measure(torch.device(sys.argv[1])).to_dict()))
"""


def calibrate(device: torch.device, quick: bool = False, say: Say = lambda line: None) -> Calibration:
    """Measure what a device can do; takes a few seconds, and with `quick` less than two, at less accuracy.

    torch's random states and its TF32 switches stay as they are; the peak of its memory statistics grows. `say` is called
    with what is being measured.
    """
    known = identity(device)
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device, torch.inference_mode(), Contention(device) as others:
        effort = QUICK if quick else FULL
        rates = best_rates(works(device), effort, lambda line: say(f"measuring {device.type}: {line}"))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return as_calibration(known, rates, others.finding)


def as_calibration(known: Mapping[str, Any], rates: Mapping[str, float], disturbed: str | None = None) -> Calibration:
    """Measured rates, by the names of `works`, as a Calibration of what `known` identifies."""
    launches = rates.get("small operations")
    return Calibration(
        **known,
        matmul_flops_per_sec={name: rates[f"products in {name}"] for name in _DTYPES if f"products in {name}" in rates},
        copy_bytes_per_sec=rates.get("memory copy"),
        launch_us=1e6 / launches if launches else None,
        h2d_bytes_per_sec=rates.get("host to device"),
        h2d_pinned_bytes_per_sec=rates.get("host to device, pinned"),
        d2h_bytes_per_sec=rates.get("device to host"),
        d2h_pinned_bytes_per_sec=rates.get("device to host, pinned"),
        disturbed=disturbed,
    )


def clock() -> float:
    """Seconds by the host's clock, read when the accelerator is idle.

    torch.utils.benchmark has the same clock. Its import takes a third of a second, and warns where there is a CUDA
    toolkit and no GPU.
    """
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def time_runs(run: Run, times: int) -> float:
    """Seconds that a number of runs take one after another, from an idle device to an idle device."""
    start = clock()
    for _ in range(times):
        run()
    return max(clock() - start, 1e-9)


class Work:
    """Something to be timed, and the best rate that was seen of it. `make` allocates what a run needs."""

    def __init__(self, amount: float, make: Callable[[], Run], form: str = "ieee"):
        self.amount = amount  # what one run does, in FLOPs, bytes or operations
        self.rate = 0.0  # amount per second
        self._make = make
        self._form = form  # what float32 is computed as meanwhile: `ieee` or `tf32`
        self._run: Run | None = None
        self._times = 1

    def take_turn(self, seconds: float) -> None:
        """Time blocks of runs for so long. The first run is extra: it may start a library, which takes cuBLAS 30 ms."""
        with float32_computed_as(self._form):
            if self._run is None:
                self._run = self._make()
                self._time_block(self._run)
            spent = 0.0
            while spent < seconds:
                spent += self._time_block(self._run)

    def _time_block(self, run: Run) -> float:
        seconds = time_runs(run, self._times)
        self.rate = max(self.rate, self.amount * self._times / seconds)
        self._times = max(1, round(_BLOCK_S * self.rate / self.amount))
        return seconds


def best_rates(choices: Mapping[str, Iterable[Work]], effort: Effort, say: Say = lambda line: None) -> dict[str, float]:
    """The best rate seen for each quantity; a quantity of which no work runs on this device is left out.

    Everything is tried once, smallest first. Then the fastest works of all quantities take turns until the time is up,
    so that a disturbance of a second costs each of them a turn and none of them its result.
    """
    finalists = {}
    for name, tried in choices.items():
        say(name)
        finalists[name] = _fastest(tried, effort)
    say("all again, for the best of several rounds")
    end = clock() + effort.seconds
    while clock() < end:
        for work in itertools.chain.from_iterable(finalists.values()):
            with contextlib.suppress(RuntimeError):  # another process has taken the memory
                work.take_turn(effort.turn_s)
    return {name: max(work.rate for work in works) for name, works in finalists.items() if works}


def _fastest(choices: Iterable[Work], effort: Effort) -> list[Work]:
    found: list[Work] = []
    for work in choices:
        if found and work.amount / found[0].rate > effort.slowest_run_s:
            break
        with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):  # no such format here, or no memory
            work.take_turn(effort.turn_s)
            found = sorted([*found, work], key=lambda each: -each.rate)[:_FINALISTS]
    return found


# (M, K) times (K, N): squares, and the linear layers of small and of large networks.
_MATRICES = [(n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192)]
_MATRICES += [(512, 3136, 128), (4096, 784, 512), (8192, 1024, 4096)]
# (B, C_in, C_out, H): 3×3 convolutions of H×H images.
_CONVOLUTIONS = [(32, 32, 64, 14), (64, 64, 128, 28), (64, 256, 256, 28), (256, 256, 256, 28)]


def works(device: torch.device) -> dict[str, Iterable[Work]]:
    """Everything that is measured on a device, by name."""
    has_tf32 = device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)
    found: dict[str, Iterable[Work]] = {
        f"products in {name}": _products(device, name) for name in _DTYPES if name != "tf32" or has_tf32
    }
    copied, moved = 256 * _MIB, 64 * _MIB  # more than caches hold
    found["memory copy"] = [Work(2.0 * copied, partial(_copy, copied, device, device))]
    found["small operations"] = [Work(1.0, lambda: partial(torch.zeros(1, device=device).add_, 1))]
    if device.type != "cpu":
        host = torch.device("cpu")
        for pinned, suffix in ((False, ""), (True, ", pinned")):
            found[f"host to device{suffix}"] = [Work(float(moved), partial(_copy, moved, host, device, pinned))]
            found[f"device to host{suffix}"] = [Work(float(moved), partial(_copy, moved, device, host, pinned))]
    return found


def _products(device: torch.device, precision: str) -> Iterator[Work]:
    """Matrix products and convolutions, smallest first."""
    random = partial(_random, device, _DTYPES[precision])
    form = "tf32" if precision == "tf32" else "ieee"

    def matrices(m: int, k: int, n: int) -> Run:
        return partial(F.linear, random(m, k), random(n, k))

    def convolution(batch: int, c_in: int, c_out: int, size: int, layout: torch.memory_format) -> Run:
        x = random(batch, c_in, size, size).to(memory_format=layout)
        return partial(F.conv2d, x, random(c_out, c_in, 3, 3).to(memory_format=layout), padding=1)

    found = [Work(2.0 * m * k * n, partial(matrices, m, k, n), form) for m, k, n in _MATRICES]
    for batch, c_in, c_out, size in _CONVOLUTIONS:
        flops = 2.0 * batch * c_in * c_out * 9 * size * size
        for layout in (torch.contiguous_format, torch.channels_last):
            found.append(Work(flops, partial(convolution, batch, c_in, c_out, size, layout), form))
    found.sort(key=attrgetter("amount"), reverse=True)
    while found:  # a work that is not among the fastest is freed with its tensors
        yield found.pop()


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Random numbers, not zeros: on zeros a device stays cooler and computes faster."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def _copy(size: int, source: torch.device, target: torch.device, pinned: bool = False) -> Run:
    """A copy of so many bytes between two devices, or within one."""
    pin = [pinned and device.type == "cpu" for device in (source, target)]
    data = torch.ones(size, dtype=torch.uint8, device=source, pin_memory=pin[0])
    place = torch.ones(size, dtype=torch.uint8, device=target, pin_memory=pin[1])
    return partial(place.copy_, data, non_blocking=pinned)
