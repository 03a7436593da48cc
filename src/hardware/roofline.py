"""The roofline peaks of a device, by its calibration, and the lower bound of a step's time.

An operation computes no faster than the peak at its precision, moves no more than the bandwidth, and takes no less than a
launch. The bound counts only traffic that no cache can save: a call finds at most a full cache of its bytes there, and
leaves at most a full cache behind that is written later. So no step is faster than its bound.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .._torch import float32_formats
from .calibration import Calibration
from .flop_formulas import kind_of_product
from .operations import Operation


@dataclass(frozen=True)
class Peaks:
    """What a device does at most."""

    asynchronous: bool  # whether the host runs ahead of it
    flops_per_sec: Mapping[str, float]  # by the type of an operation: `fp32`, …; `fp32 convolution` where it differs
    bytes_per_sec: float | None = None  # of main memory
    launch_s: float = 0.0  # of the smallest operation
    cache_bytes: int = 0  # of the last-level cache

    def compute_seconds(self, operation: Operation) -> float:
        """The least time of its arithmetic; 0 where no peak is known."""
        formats = (f"{operation.dtype} {kind_of_product(operation.name)}", operation.dtype)
        known = (self.flops_per_sec[each] for each in formats if each in self.flops_per_sec)
        peak = next(known, max(self.flops_per_sec.values(), default=0.0))
        return operation.flops / peak if peak else 0.0

    def memory_seconds(self, operation: Operation) -> float:
        """The time of its traffic with main memory at the bandwidth; 0 where that is not known."""
        return operation.cold_bytes / self.bytes_per_sec if self.bytes_per_sec else 0.0

    def launch_seconds(self, operation: Operation) -> float:
        """The least time of its calls."""
        return operation.calls * self.launch_s

    def needs(self, operation: Operation) -> dict[str, float]:
        """The least seconds for its arithmetic and its traffic, and where the host waits for it for its calls.

        Traffic counts without what the cache may hold before and after each call.
        """
        moved = max(operation.cold_bytes - 2 * operation.calls * self.cache_bytes, 0)
        memory = moved / self.bytes_per_sec if self.bytes_per_sec else 0.0
        needs = {"compute": self.compute_seconds(operation), "memory": memory}
        return needs if self.asynchronous else needs | {"launch": self.launch_seconds(operation)}

    def least_seconds(self, operation: Operation) -> float:
        """The lower bound of the operation's time."""
        return max(self.needs(operation).values())


@dataclass(frozen=True)
class LowerBound:
    """Seconds that a step takes at least, and what they are spent on.

    On a CPU each operation's seconds count for the largest of its three, so that the three sums add up to the total.
    """

    total: float
    launch: float
    memory: float
    compute: float


def peaks_of(calibration: Calibration) -> Peaks:
    """The peaks that a calibration has measured; in 32 bits those of the formats that torch computes the products in."""
    peaks = dict(calibration.matmul_flops_per_sec)
    if "fp32" in peaks:
        formats = {kind: peaks.get(form, peaks["fp32"]) for kind, form in float32_formats(calibration.device).items()}
        peaks |= {f"fp32 {kind}": peak for kind, peak in formats.items() if peak != peaks["fp32"]}
    return Peaks(
        asynchronous=calibration.device != "cpu",
        flops_per_sec=peaks,
        bytes_per_sec=calibration.memory_bytes_per_sec,
        launch_s=(calibration.launch_us or 0.0) / 1e6,
        cache_bytes=calibration.cache_bytes or 0,
    )


def lower_bound(operations: Iterable[Operation], peaks: Peaks) -> LowerBound:
    """The lower bound of a step that consists of these operations.

    A CPU does one after the other, so it is the sum over the operations. An asynchronous device computes while the host
    launches, so it is the larger of the two sums.
    """
    sums = {"launch": 0.0, "memory": 0.0, "compute": 0.0}
    for operation in operations:
        needs = peaks.needs(operation)
        if peaks.asynchronous:
            sums["launch"] += peaks.launch_seconds(operation)
        largest = max(needs, key=needs.__getitem__)
        sums[largest] += needs[largest]
    device = sums["memory"] + sums["compute"]
    return LowerBound(max(device, sums["launch"]) if peaks.asynchronous else device + sums["launch"], **sums)
