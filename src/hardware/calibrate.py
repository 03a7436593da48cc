"""What a device of this machine can do, measured: products, memory, transfers, and the cost of issuing an operation.

Everything is timed several times and the best time counts, since noise only ever makes a computation slower. The
result is kept in the user's cache folder, so that a device is measured once for each version of torch and driver, unless
others computed on it meanwhile.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..files import atomic_write
from .contention import Contention
from .devices import device_name
from .telemetry import _nvml_handle

Run = Callable[[], object]
# Seconds that a device takes for a number of runs, one after another.
Timer = Callable[[Run, int], float]
Clock = Callable[[], float]
Say = Callable[[str], None]

SCHEMA = 2  # of the cached file, and of how it is measured
_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DTYPES["fp64"] = torch.float64
PRECISIONS = tuple(_DTYPES)
_KINDS = ("matmul", "convolution", "recurrent")  # of products: each has a switch of its own for TF32
_CLEARLY_FASTER = 1.2  # less is not worth another precision
_MIB = 2**20


@dataclass(frozen=True)
class Calibration:
    """What one device can do. What it does not have, or cannot tell, is None.

    Attributes:
        device, device_name: the kind (`cpu`, `cuda`, `mps`), and the model.
        driver: the driver's version; on a CPU the instruction sets that torch and oneDNN may use.
        torch: torch's version.
        threads: that torch computes with, on a CPU.
        matmul_flops_per_sec: the most FLOP/s seen in any product, by precision: `fp32`, `tf32` (CUDA only), `bf16`,
            `fp16`, `fp64`. Among the products are convolutions, which have a library of their own: on some CPUs it is
            twice as fast as the one for matrices, and a peak below them would make a network faster than the peak.
        copy_bytes_per_sec: of the device's memory, copying from one place to another, read and write both counted.
        launch_us: what one of the smallest operations takes, many issued one after another.
        h2d_bytes_per_sec, h2d_pinned_bytes_per_sec: from the host's memory, ordinary or pinned, to the device's.
        d2h_bytes_per_sec, d2h_pinned_bytes_per_sec: and back.
        host: the machine's name; several may share a home folder.
        uuid: of a GPU.
        power_limit_w: of an NVIDIA GPU; a lower one makes it slower.
        disturbed: what others did on the device during the measurement, which makes the rates too low.
    """

    device: str
    device_name: str
    driver: str | None
    torch: str
    threads: int | None
    matmul_flops_per_sec: Mapping[str, float]
    copy_bytes_per_sec: float | None = None
    launch_us: float | None = None
    h2d_bytes_per_sec: float | None = None
    h2d_pinned_bytes_per_sec: float | None = None
    d2h_bytes_per_sec: float | None = None
    d2h_pinned_bytes_per_sec: float | None = None
    host: str | None = None
    uuid: str | None = None
    power_limit_w: float | None = None
    disturbed: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain containers, without what is None."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The opposite of `to_dict`.

        Raises:
            ValueError, TypeError: if it is not one: keys are missing or unknown, or a measurement is no positive number.
        """
        made = cls(**{"driver": None, "threads": None, **values})
        others = {*_IDENTITY, "matmul_flops_per_sec", "disturbed"}
        single = [getattr(made, field.name) for field in dataclasses.fields(made) if field.name not in others]
        rates = [*made.matmul_flops_per_sec.values(), *single]
        if not all(rate is None or (math.isfinite(rate) and rate > 0) for rate in rates):
            raise ValueError(f"not a calibration: {values}")
        return made


def peak_flops_per_sec(
    calibration: Calibration,
    precision: str | int | None = None,
    module: nn.Module | None = None,
    shares: Mapping[str, float] | None = None,
) -> float | None:
    """The measured peak to hold a training step against.

    In 32 bits on CUDA that is TF32 wherever torch may use it: for matrices if `torch.set_float32_matmul_precision`
    or `allow_tf32` allow it, and for convolutions and cuDNN's recurrent kernels, where it is torch's default. A step of
    several kinds has the rate at which each of its FLOPs would be done at the peak of its kind. Mixed precision computes
    in either format, so the faster of the two is its peak.

    Args:
        calibration: of the device that trains.
        precision: as Lightning takes it: `32-true`, `bf16-mixed`, `16-true`, …; None is `32-true`.
        module: what is trained; without it, any kind of layer may be in it.
        shares: the fractions of the FLOPs in `matmul`, `convolution` and `recurrent` (`StepFlops.shares`). Without them
            the peak is that of the fastest kind of layer in the module.

    Returns:
        None for what was not measured or is not known.
    """
    bits, _, mode = str(precision or "32-true").partition("-")
    peaks = calibration.matmul_flops_per_sec
    single = _single_peak(calibration, module, shares)
    if bits == "32":
        return single
    peak = peaks.get({"64": "fp64", "16": "fp16", "bf16": "bf16"}.get(bits, ""))
    is_mixed = bits != "64" and mode != "true"
    return max(peak, single or 0) if peak is not None and is_mixed else peak


def faster_precision(
    calibration: Calibration | None, precision: str | int | None = None, peak: float | None = None
) -> str | None:
    """The mixed precision, as Lightning takes it, at which this device was measured to be clearly faster; else None.

    Not every device that runs bf16 is: without instructions for it a processor takes ten times as long as in float32.

    Args:
        calibration: of the device that trains, if it was measured.
        precision: of now; there is a faster one only for 32 bits.
        peak: FLOP/s that can be reached now, if known better than from the precision alone.
    """
    if calibration is None or str(precision or "32-true").partition("-")[0] != "32":
        return None
    peak = peak or peak_flops_per_sec(calibration, precision)
    # Lightning has no 16-mixed on a CPU.
    choices = {"bf16": "bf16-mixed", "fp16": "16-mixed"} if calibration.device == "cuda" else {"bf16": "bf16-mixed"}
    for name, choice in choices.items():
        if peak and calibration.matmul_flops_per_sec.get(name, 0.0) > _CLEARLY_FASTER * peak:
            return choice
    return None


def _single_peak(
    calibration: Calibration, module: nn.Module | None, shares: Mapping[str, float] | None
) -> float | None:
    """The peak in float32, whatever torch computes it in."""
    measured = calibration.matmul_flops_per_sec
    peaks = {
        kind: measured.get(form, measured.get("fp32")) for kind, form in _float32_formats(calibration.device).items()
    }
    if None in peaks.values():
        return None
    if shares is None:
        return max(peaks[kind] for kind in _kinds_of_layers(module))
    return 1 / sum(share / peaks[kind] for kind, share in shares.items())


def _float32_formats(device: str) -> dict[str, str]:
    """What torch computes float32 in, with its switches as they are; `none` and `ieee` are float32 itself."""
    backends = torch.backends
    if device == "cpu":
        switches = (backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)
    elif backends.cudnn.enabled:
        switches = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    else:
        switches = (backends.cuda.matmul,) * 3
    return {kind: switch.fp32_precision for kind, switch in zip(_KINDS, switches, strict=True)}


def _kinds_of_layers(module: nn.Module | None) -> set[str]:
    layers = {"convolution": nn.modules.conv._ConvNd, "recurrent": nn.RNNBase}
    found = {
        kind for kind, layer in layers.items() if module is None or any(isinstance(m, layer) for m in module.modules())
    }
    return {"matmul", *found}


# --- the cache ----------------------------------------------------------------------------------------------------


def calibration(device: torch.device, say: Say = lambda line: None) -> Calibration:
    """The device's calibration, from the cache or measured now, which takes a few seconds."""
    found = cached_calibration(device)
    if found is None:
        found = calibrate(device, say=say)
        keep(found)
    return found


def cached_calibration(device: torch.device) -> Calibration | None:
    """The device's calibration if it was measured before, with this driver and torch. Never measures, never raises."""
    identity = _identity(device)
    try:
        file = _cache_file(identity)
        _check_owner(file.parent)
        found = Calibration.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except Exception:  # noqa: BLE001 - missing, torn, or something else altogether
        return None
    return found if all(getattr(found, key) == value for key, value in identity.items()) else None


def keep(calibration: Calibration) -> None:
    """Write a calibration to the cache, whole or not at all; a cache that cannot be written to is done without.

    One that was disturbed is not written: its rates are too low, and would stay so.
    """
    if calibration.disturbed:
        return
    values = calibration.to_dict()
    with contextlib.suppress(OSError):
        file = _cache_file({key: getattr(calibration, key) for key in _IDENTITY})
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(file.parent)
        with atomic_write(file) as opened:
            opened.write(f"{json.dumps(values, indent=2)}\n".encode())


_IDENTITY = ("device", "device_name", "driver", "torch", "threads", "host", "uuid", "power_limit_w")


def _identity(device: torch.device) -> dict[str, Any]:
    """What a measurement is of; it is taken again when any of it changes."""
    threads = uuid = power_limit_w = None
    if device.type == "cpu":
        threads, driver = torch.get_num_threads(), _instruction_sets()
    elif device.type == "mps":
        driver = platform.mac_ver()[0] or None
    else:
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        driver, power_limit_w = (torch.version.hip, None) if torch.version.hip else _nvidia_driver(device)
    values = (
        device.type,
        device_name(device),
        driver,
        torch.__version__,
        threads,
        platform.node(),
        uuid,
        power_limit_w,
    )
    return dict(zip(_IDENTITY, values, strict=True))


def _instruction_sets() -> str:
    """Those that torch uses, and those that oneDNN was told to use at most."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA")
    return torch.backends.cpu.get_cpu_capability() + (f", oneDNN up to {most}" if most else "")


def _nvidia_driver(device: torch.device) -> tuple[str | None, float | None]:
    """The driver's version, and the power in W that the device was set to draw at most; None for what NVML does not tell."""
    driver = limit = None
    with contextlib.suppress(Exception):  # NVML has an exception for each thing that can be missing
        import pynvml

        pynvml.nvmlInit()
        try:
            driver = str(pynvml.nvmlSystemGetDriverVersion())
            limit = pynvml.nvmlDeviceGetPowerManagementLimit(_nvml_handle(pynvml, device)) / 1000
        finally:
            pynvml.nvmlShutdown()
    return driver, limit


def _cache_file(identity: Mapping[str, Any]) -> Path:
    digest = hashlib.blake2b(json.dumps([SCHEMA, *identity.values()]).encode(), digest_size=8).hexdigest()
    return _cache_folder() / f"calibration-{identity['device']}-{digest}.json"


def _cache_folder() -> Path:
    """The user's; in a container, which may have no home or one that cannot be written to, one among temporary files."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "batchscope"
    with contextlib.suppress(RuntimeError):  # neither HOME nor an entry in the system's list of users
        home = Path.home()
        base = home / ".cache"
        there = base if base.exists() else home
        if there.is_dir() and os.access(there, os.W_OK):
            return base / "batchscope"
    return Path(tempfile.gettempdir()) / f"batchscope-{_user_id()}"


def _user_id() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0  # on Windows each user has temporary files of his own


def _check_owner(folder: Path) -> None:
    """Where everybody may make folders, only one's own is written to and believed.

    Raises:
        OSError: if the folder among temporary files is another user's, or is not there.
    """
    if folder.parent == Path(tempfile.gettempdir()) and folder.lstat().st_uid != _user_id():
        raise PermissionError(f"{folder} belongs to another user")


# --- timing -------------------------------------------------------------------------------------------------------


def time_by_clock(run: Run, times: int, synchronize: Run = lambda: None, clock: Clock = time.perf_counter) -> float:
    """Seconds by the host's clock, from an idle device to an idle device."""
    synchronize()
    start = clock()
    for _ in range(times):
        run()
    synchronize()
    return clock() - start


def time_by_events(run: Run, times: int, cuda: Any = torch.cuda) -> float:
    """Seconds by the device's own clock, between two events in its queue. `cuda` has what torch.cuda has."""
    start, end = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda.synchronize()
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def timer_for(device: torch.device) -> Timer:
    """How to time work on a device."""
    if device.type == "cuda":
        return time_by_events
    if device.type == "mps":
        return partial(time_by_clock, synchronize=torch.mps.synchronize)
    return time_by_clock


class Work:
    """Something to be timed, and the best that was seen of it.

    Args:
        amount: what one run does: FLOPs, bytes or operations.
        run: does it.
        setting: a context that it is timed in.
    """

    def __init__(
        self, amount: float, run: Run, setting: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    ):
        self.amount = amount
        self.rate = 0.0  # amount per second
        self._run = run
        self._setting = setting
        self._times = 1

    def take_a_turn(self, timer: Timer, effort: "Effort") -> None:
        """Time it again and again for a while, at least once, in rounds just long enough for the clock.

        The very first run may carry the start of a library, cuBLAS's 30 ms for one, and uses up nobody's turn.
        """
        with self._setting():
            if not self.rate:
                self._round(timer, effort)
            spent = 0.0
            while spent < effort.turn_seconds:
                spent += self._round(timer, effort)

    def _round(self, timer: Timer, effort: "Effort") -> float:
        """Seconds that as many runs take as the clock needs; the rate and their number follow the fastest round."""
        seconds = max(timer(self._run, self._times), 1e-9)
        self.rate = max(self.rate, self.amount * self._times / seconds)
        self._times = max(1, round(effort.round_seconds * self.rate / self.amount))
        return seconds


@dataclass(frozen=True)
class Effort:
    """How much time to take.

    Attributes:
        seconds: for the finals, after everything has been tried once.
        turn_seconds: of one work, before it is another's turn.
        round_seconds: what is timed at once; the shorter, the more likely that nothing disturbs one of the rounds.
        slowest_run_seconds: work that would take longer for one run is left out.
    """

    seconds: float
    turn_seconds: float
    round_seconds: float
    slowest_run_seconds: float


FULL = Effort(seconds=2.0, turn_seconds=0.03, round_seconds=0.002, slowest_run_seconds=0.15)
QUICK = Effort(seconds=0.3, turn_seconds=0.01, round_seconds=0.002, slowest_run_seconds=0.03)
_FINALISTS = 5

# What there is to try for one quantity, smallest first: an amount, and what makes the work.
Candidates = Iterable[tuple[float, Callable[[], Work]]]


def best_rates(
    candidates: Mapping[str, Candidates],
    timer: Timer,
    effort: Effort,
    clock: Clock = time.perf_counter,
    say: Say = lambda line: None,
) -> dict[str, float]:
    """The best rate seen for each quantity; one of which nothing runs is left out.

    Everything is tried once; then the fastest of each take turns until the time is up, so that a disturbance of a
    second costs every one of them a round, and none its result.
    """
    finalists = {}
    for name, choices in candidates.items():
        say(name)
        finalists[name] = _tried(choices, timer, effort)
    say("all again, for the best of several rounds")
    end = clock() + effort.seconds
    while clock() < end:
        for work in itertools.chain.from_iterable(finalists.values()):
            with contextlib.suppress(RuntimeError):  # of memory that others have taken meanwhile
                work.take_a_turn(timer, effort)
    return {name: max(work.rate for work in works) for name, works in finalists.items() if works}


def _tried(choices: Candidates, timer: Timer, effort: Effort) -> list[Work]:
    """The fastest of what runs on this device."""
    tried: list[Work] = []
    for amount, make in choices:
        if tried and amount / tried[0].rate > effort.slowest_run_seconds:
            break
        with contextlib.suppress(RuntimeError, TypeError, NotImplementedError):  # no such format here, or no memory
            work = make()
            work.take_a_turn(timer, effort)
            tried = sorted([*tried, work], key=lambda each: -each.rate)[:_FINALISTS]
    return tried


# --- what is measured ---------------------------------------------------------------------------------------------


def calibrate(device: torch.device, quick: bool = False, say: Say = lambda line: None) -> Calibration:
    """Measure what a device can do; takes a few seconds, and with `quick` less than two, at less accuracy.

    Leaves torch's random states and its switches for TF32 as they are; the peak of its memory statistics does grow.

    Args:
        device: one that this machine has.
        quick: shorter rounds, and none of the largest products.
        say: is told what is being measured.
    """
    identity = _identity(device)
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device, torch.inference_mode(), Contention(device) as others:
        rates = best_rates(
            candidates(device),
            timer_for(device),
            QUICK if quick else FULL,
            say=lambda line: say(f"measuring {device.type}: {line}"),
        )
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return as_calibration(identity, rates, others.finding)


def as_calibration(
    identity: Mapping[str, Any], rates: Mapping[str, float], disturbed: str | None = None
) -> Calibration:
    """Measured rates, by the names of `candidates`, as a Calibration."""
    peaks = {name: rates[f"products in {name}"] for name in _DTYPES if f"products in {name}" in rates}
    launches = rates.get("small operations")
    return Calibration(
        **identity,
        matmul_flops_per_sec=peaks,
        copy_bytes_per_sec=rates.get("memory copy"),
        launch_us=1e6 / launches if launches else None,
        h2d_bytes_per_sec=rates.get("host to device"),
        h2d_pinned_bytes_per_sec=rates.get("host to device, pinned"),
        d2h_bytes_per_sec=rates.get("device to host"),
        d2h_pinned_bytes_per_sec=rates.get("device to host, pinned"),
        disturbed=disturbed,
    )


def candidates(device: torch.device) -> dict[str, Candidates]:
    """Everything that is measured on a device, by name."""
    has_tf32 = device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)
    found: dict[str, Candidates] = {
        f"products in {name}": _products(device, name) for name in _DTYPES if name != "tf32" or has_tf32
    }
    found["memory copy"] = [_copy(device)]
    found["small operations"] = [_small_operation(device)]
    if device.type != "cpu":
        for pinned in (False, True):
            suffix = ", pinned" if pinned else ""
            found[f"host to device{suffix}"] = [_transfer(device, pinned, to_device=True)]
            found[f"device to host{suffix}"] = [_transfer(device, pinned, to_device=False)]
    return found


# (M, K) times (K, N): squares, and what the linear layers of small and of large networks do.
_MATRICES = [(n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192)]
_MATRICES += [(512, 3136, 128), (4096, 784, 512), (8192, 1024, 4096)]
# (B, C_in, C_out, H): 3×3 convolutions of images H×H.
_CONVOLUTIONS = [(32, 32, 64, 14), (64, 64, 128, 28), (64, 256, 256, 28), (256, 256, 256, 28)]


def _products(device: torch.device, precision: str) -> Candidates:
    """Matrix products and convolutions, by their FLOPs."""
    choices = [(2.0 * m * k * n, partial(_matrices, device, precision, m, k, n)) for m, k, n in _MATRICES]
    for batch, c_in, c_out, size in _CONVOLUTIONS:
        flops = 2.0 * batch * c_in * c_out * 9 * size * size
        for layout in (torch.contiguous_format, torch.channels_last):
            choices.append((flops, partial(_convolutions, device, precision, batch, c_in, c_out, size, layout)))
    return sorted(choices, key=lambda choice: choice[0])


def _matrices(device: torch.device, precision: str, m: int, k: int, n: int) -> Work:
    dtype = _DTYPES[precision]
    x, weight = _random(device, dtype, m, k), _random(device, dtype, n, k)
    return Work(2.0 * m * k * n, lambda: F.linear(x, weight), partial(_float32_as, precision))


def _convolutions(
    device: torch.device, precision: str, batch: int, c_in: int, c_out: int, size: int, layout: torch.memory_format
) -> Work:
    dtype = _DTYPES[precision]
    x = _random(device, dtype, batch, c_in, size, size).to(memory_format=layout)
    weight = _random(device, dtype, c_out, c_in, 3, 3).to(memory_format=layout)
    flops = 2.0 * batch * c_in * c_out * 9 * size * size
    return Work(flops, lambda: F.conv2d(x, weight, padding=1), partial(_float32_as, precision))


def _random(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """Random numbers, not zeros: devices compute faster, since cooler, on zeros."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


@contextlib.contextmanager
def _float32_as(precision: str) -> Iterator[None]:
    """Have float32 computed as float32, or as TF32 when that is to be measured."""
    backends = torch.backends
    switches = [backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv]
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "tf32" if precision == "tf32" else "ieee"
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value


def _copy(device: torch.device) -> tuple[float, Callable[[], Work]]:
    """From one place of the device's memory to another; more than fits into its caches."""
    size = 256 * _MIB

    def make() -> Work:
        source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
        return Work(2.0 * size, lambda: target.copy_(source))

    return 2.0 * size, make


def _small_operation(device: torch.device) -> tuple[float, Callable[[], Work]]:
    def make() -> Work:
        x = torch.zeros(1, device=device)
        return Work(1.0, lambda: x.add_(1))

    return 1.0, make


def _transfer(device: torch.device, pinned: bool, to_device: bool) -> tuple[float, Callable[[], Work]]:
    size = 64 * _MIB

    def make() -> Work:
        host = torch.ones(size, dtype=torch.uint8, pin_memory=pinned)
        source, target = host, torch.ones(size, dtype=torch.uint8, device=device)
        if not to_device:
            source, target = target, source
        return Work(float(size), lambda: target.copy_(source, non_blocking=pinned))

    return float(size), make
