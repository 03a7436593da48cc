"""A calibration: what one device was measured to be able to do, and its roofline: the peak that a training step is compared with,
and what an operation takes at least.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .._torch import float32_formats
from ..records.operations import OperationRow
from .flops import kind_of_product

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp64")
# What a measurement is of. The cache holds one file for each combination.
IDENTITY = ("device", "device_name", "driver", "torch", "threads", "cores", "on_battery", "power_limit_w")
_CLEARLY_FASTER = 1.2  # a smaller gain is not worth another precision


@dataclass(frozen=True)
class Calibration:
    """What one device can do. None stands for what the device does not have or does not report.

    `matmul_flops_per_sec` has the highest FLOP/s seen in any product by precision: `fp32`, `tf32` (CUDA only), `bf16`,
    `fp16`, `fp64`. Convolutions are among the products: on some CPUs their library is twice as fast as the one for
    matrices, and without them a network could be faster than the peak.

    Raises:
        ValueError: for a rate, `launch_us` or `cache_bytes` that is no positive number.
    """

    device: str  # the kind: `cpu`, `cuda`, `mps`
    device_name: str
    driver: str | None  # its version; on a CPU the instruction sets that torch and oneDNN may use
    torch: str  # its version
    threads: int | None  # that torch computes with, on a CPU
    matmul_flops_per_sec: Mapping[str, float]
    memory_bytes_per_sec: float | None = None  # of main memory: the best of a copy and other traffic; reads + writes
    launch_us: float | None = None  # of the smallest operation when many are issued in a row
    power_limit_w: float | None = None  # of an NVIDIA GPU; a lower limit makes it slower
    disturbed: str | None = None  # what other processes did on the device meanwhile; the rates are then too low
    cache_bytes: int | None = None  # of the caches in front of main memory, as the device reports them
    cores: float | None = None  # that the process may use, on a CPU; a quota may be a fraction
    on_battery: bool | None = None  # of a laptop, whose clocks it lowers

    def __post_init__(self) -> None:
        rates = [*self.matmul_flops_per_sec.values(), self.memory_bytes_per_sec, self.launch_us, self.cache_bytes]
        if not all(0 < rate < math.inf for rate in rates if rate is not None):
            raise ValueError("a calibration has a rate that is no positive number")


def undisturbed(machine: Calibration | None) -> Calibration | None:
    """A calibration whose rates are peaks; None for one that other processes have lowered, and without one."""
    return None if machine is None or machine.disturbed else machine


def peak_flops_per_sec(
    calibration: Calibration, precision: str | int | None = None, shares: Mapping[str, float] | None = None
) -> float | None:
    """The measured peak that a training step is compared with.

    In 32 bits on CUDA the peak is that of TF32 wherever torch's switches allow TF32. A module may compute in another format
    than its Trainer's 32 bits: then that format's peak counts. The peak of a step with several kinds of products is the rate at
    which each FLOP is done at the peak of its kind. Mixed precision computes in either format, so the faster of the two is its
    peak.

    Args:
        calibration: of the device that trains.
        precision: as Lightning takes it: `32-true`, `bf16-mixed`, `16-true`, …; None is `32-true`.
        shares: of the kinds of product in its FLOPs, as flops.py names them. Without them the peak is that of the fastest
            kind.

    Returns:
        None for a precision that was not measured or is unknown.
    """
    bits, _, mode = str(precision or "32-true").partition("-")
    peaks = calibration.matmul_flops_per_sec
    if bits == "32":
        return _single_peak(calibration, shares)
    of_kinds: dict[str, float] = {}  # in whatever format they ran
    for name, share in (shares or {}).items():
        of_kinds[name.split()[0]] = of_kinds.get(name.split()[0], 0.0) + share
    single = _single_peak(calibration, of_kinds or None)
    peak = peaks.get({"64": "fp64", "16": "fp16", "bf16": "bf16"}.get(bits, ""))
    is_mixed = bits != "64" and mode != "true"
    return max(peak, single or 0) if peak is not None and is_mixed else peak


def faster_precision(
    calibration: Calibration | None, precision: str | int | None = None, peak: float | None = None
) -> str | None:
    """The mixed precision, as Lightning takes it, at which this device was measured to be clearly faster; else None.

    Support for bf16 does not mean speed: a processor without instructions for it takes ten times as long as in float32.
    Only a `precision` of 32 bits has a faster one. `peak` is the FLOP/s that the run can reach, if known better than
    from the precision alone.
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


def float32_peaks(calibration: Calibration) -> dict[str, float]:
    """The FLOP/s of float32 tensors by kind of product, in the formats that torch computes them in; needs `fp32`."""
    measured, formats = calibration.matmul_flops_per_sec, float32_formats(calibration.device)
    return {kind: measured.get(form, measured["fp32"]) for kind, form in formats.items()}


def _single_peak(calibration: Calibration, shares: Mapping[str, float] | None) -> float | None:
    """The peak of a step in 32 bits, but for products whose tensors are of another format; the highest one without shares."""
    if "fp32" not in calibration.matmul_flops_per_sec:
        return None
    peaks = float32_peaks(calibration)
    if shares is None:
        return max(peaks.values())
    seconds = 0.0  # of a FLOP
    for name, share in shares.items():
        kind, _, dtype = name.partition(" ")
        highest = max(calibration.matmul_flops_per_sec.values())  # for a format that was not measured
        seconds += share / (calibration.matmul_flops_per_sec.get(dtype, highest) if dtype else peaks[kind])
    return 1 / seconds


def compute_seconds(operation: OperationRow, device: Calibration) -> float:
    """The least time of its arithmetic; 0 where no peak is known. A type without a peak is held against the highest."""
    peaks = device.matmul_flops_per_sec
    if not operation.flops or not peaks:
        return 0.0
    if operation.dtype == "fp32" and "fp32" in peaks:
        return operation.flops / float32_peaks(device)[kind_of_product(operation.name)]
    return operation.flops / peaks.get(operation.dtype, max(peaks.values()))


def memory_seconds(operation: OperationRow, device: Calibration) -> float:
    """The time of its traffic with main memory at the bandwidth; 0 where that is not known."""
    return operation.cold_bytes / device.memory_bytes_per_sec if device.memory_bytes_per_sec else 0.0


def launch_seconds(operation: OperationRow, device: Calibration) -> float:
    """The least time of its calls."""
    return operation.calls * (device.launch_us or 0.0) / 1e6


def least_seconds(operation: OperationRow, device: Calibration) -> float:
    """The lower bound of its time: for arithmetic, traffic and, where the host waits for it (on a CPU), its calls.

    Only traffic counts that no cache can save: a call finds at most a full cache of its bytes there, and leaves at most a full
    cache behind that is written later. So no operation is faster than its bound.
    """
    saved = 2 * operation.calls * (device.cache_bytes or 0)
    share = max(operation.cold_bytes - saved, 0) / operation.cold_bytes if operation.cold_bytes else 0.0
    launch = launch_seconds(operation, device) if device.device == "cpu" else 0.0
    return max(compute_seconds(operation, device), share * memory_seconds(operation, device), launch)
