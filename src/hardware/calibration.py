"""A calibration: the measured rates of a device, and its roofline: a training step's peak, an operation's least time."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .._torch import float32_formats
from ..records.operations import OperationRow
from .flops import kind_of_product

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp64")
# The fields that identify a measurement. The cache holds one file for each combination.
IDENTITY = ("device", "device_name", "driver", "torch", "threads", "cores", "on_battery", "power_limit_w")
_FORMATS = {"64": "fp64", "16": "fp16", "bf16": "bf16"}  # of Lightning's precisions, except 32
_CLEARLY_FASTER = 1.2  # a smaller gain is not worth another precision


@dataclass(frozen=True)
class Calibration:
    """The measured rates of one device. None stands for what the device does not have or does not report.

    `matmul_flops_per_sec` has the highest FLOP/s of any product, by precision: `fp32`, `tf32` (CUDA only), `bf16`,
    `fp16`, `fp64`. Convolutions are among the products: on some CPUs their library is twice as fast as the one for
    matrices, and without convolutions a network could be faster than the peak.

    Raises:
        ValueError: for a rate, `launch_us` or `cache_bytes` that is no positive number.
    """

    device: str  # torch's type: `cpu`, `cuda`, `mps`
    device_name: str
    driver: str | None  # version; on a CPU the instruction sets that torch and oneDNN may use
    torch: str  # version
    threads: int | None  # that torch computes with, on a CPU
    matmul_flops_per_sec: Mapping[str, float]
    memory_bytes_per_sec: float | None = None  # of main memory: the best of a copy and other traffic; reads + writes
    launch_us: float | None = None  # of the smallest operation when many are issued in a row
    power_limit_w: float | None = None  # of an NVIDIA GPU; a lower limit makes the GPU slower
    disturbed: str | None = None  # what other processes did during the measurement, which makes the rates too low
    cache_bytes: int | None = None  # of the caches in front of main memory, as the device reports them
    cores: float | None = None  # usable by the process, on a CPU; a quota may be a fraction
    on_battery: bool | None = None  # of a laptop: a battery lowers the clocks

    def __post_init__(self) -> None:
        rates = [*self.matmul_flops_per_sec.values(), self.memory_bytes_per_sec, self.launch_us, self.cache_bytes]
        if not all(0 < rate < math.inf for rate in rates if rate is not None):
            raise ValueError("a calibration has a rate that is no positive number")


def undisturbed(machine: Calibration | None) -> Calibration | None:
    """Return the calibration if it is undisturbed; else None."""
    return None if machine is None or machine.disturbed else machine


def peak_flops_per_sec(
    calibration: Calibration, precision: str | int | None = None, shares: Mapping[str, float] | None = None
) -> float | None:
    """Return the measured peak FLOP/s that a training step is compared with.

    In 32 bits on CUDA the peak is that of TF32 wherever torch's switches allow TF32. A module may compute in another format
    than its Trainer's 32 bits: then that format's peak counts. The peak of a step with several kinds of products is their harmonic
    mean by FLOPs: the rate if each product runs at the peak of its kind. Mixed precision computes in two formats, and its peak is
    that of the faster one.

    Args:
        calibration: of the device that trains.
        precision: as Lightning spells it: `32-true`, `bf16-mixed`, `16-true`, …; None is `32-true`.
        shares: of each kind of product in the step's FLOPs, by the names of flops.py. Without shares the peak is that of the
            fastest kind.

    Returns:
        None for a precision that was not measured or is unknown.
    """
    bits, _, mode = str(precision or "32-true").partition("-")
    if bits == "32":
        return _peak_in_32_bits(calibration, shares)
    peak = calibration.matmul_flops_per_sec.get(_FORMATS.get(bits, ""))
    is_mixed = bits != "64" and mode != "true"
    return max(peak, _peak_in_32_bits(calibration) or 0.0) if peak and is_mixed else peak


def faster_precision(
    calibration: Calibration | None, precision: str | int | None = None, peak: float | None = None
) -> str | None:
    """Return the mixed precision, as Lightning spells it, at which this device was measured to be clearly faster; else None.

    Support for bf16 does not mean speed: a processor without instructions for it takes ten times as long as in float32.
    Only a `precision` of 32 bits has a faster one. `peak` is the peak FLOP/s of the run, if it is known better than by
    the precision alone.
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


def _peak_in_32_bits(calibration: Calibration, shares: Mapping[str, float] | None = None) -> float | None:
    """Return the peak of a step in 32 bits; products of other formats count at their peaks. Without shares: the highest peak."""
    if "fp32" not in calibration.matmul_flops_per_sec:
        return None
    if shares is None:
        return max(_product_peak(calibration, kind, "fp32") for kind in float32_formats(calibration.device))
    shares_by_product = ((name.partition(" "), share) for name, share in shares.items())
    return 1 / sum(
        share / _product_peak(calibration, kind, dtype or "fp32") for (kind, _, dtype), share in shares_by_product
    )


def _product_peak(calibration: Calibration, kind: str, dtype: str) -> float:
    """Return the peak FLOP/s of a kind of product: float32 as torch computes it; the highest peak for an unmeasured dtype."""
    peaks = calibration.matmul_flops_per_sec
    if dtype == "fp32" and dtype in peaks:
        return peaks.get(float32_formats(calibration.device)[kind], peaks[dtype])
    return peaks.get(dtype, max(peaks.values()))


def compute_seconds(operation: OperationRow, device: Calibration) -> float:
    """Return the least seconds of an operation's arithmetic; 0 if no peak is known."""
    if not operation.flops or not device.matmul_flops_per_sec:
        return 0.0
    return operation.flops / _product_peak(device, kind_of_product(operation.name), operation.dtype)


def memory_seconds(operation: OperationRow, device: Calibration) -> float:
    """Return the seconds of an operation's traffic with main memory; 0 if the bandwidth is unknown."""
    return operation.cold_bytes / device.memory_bytes_per_sec if device.memory_bytes_per_sec else 0.0


def launch_seconds(operation: OperationRow, device: Calibration) -> float:
    """Return the least seconds of an operation's calls."""
    return operation.calls * (device.launch_us or 0.0) / 1e6


def least_seconds(operation: OperationRow, device: Calibration) -> float:
    """Return the lower bound of an operation's seconds: by arithmetic, traffic and, on a CPU, where the host waits for it, its calls.

    Only traffic that no cache can save counts: a call finds at most one cache of its bytes cached, and leaves at most one
    cache of its bytes to be written later. So no operation is faster than its bound.
    """
    cached_bytes = 2 * operation.calls * (device.cache_bytes or 0)
    cold_share = max(operation.cold_bytes - cached_bytes, 0) / operation.cold_bytes if operation.cold_bytes else 0.0
    launch = launch_seconds(operation, device) if device.device == "cpu" else 0.0
    return max(compute_seconds(operation, device), cold_share * memory_seconds(operation, device), launch)
