"""The floor of a step's time: what its operations need at least on a device whose roofs were measured.

An operation computes no faster than the device's peak at its precision, moves no more than the device's bandwidth, and
takes no less than a launch. A CPU does one after the other, so a step's floor is the sum over its operations of the
largest of the three. An asynchronous device computes while the host launches, so a step's floor is the larger of the two
sums.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .._torch import float32_formats
from .calibration import Calibration
from .operations import Operation


@dataclass(frozen=True)
class Roofs:
    """What a device does at most, by its calibration."""

    asynchronous: bool  # whether the host runs ahead of it
    flops_per_sec: Mapping[str, float]  # by the type of an operation: `fp32`, …; `fp32 convolution` where it differs
    bytes_per_sec: float | None = None  # of main memory
    launch_s: float = 0.0  # of the smallest operation
    page_fault_s: float = 0.5e-6  # of a first write to a page, by one thread

    def compute_seconds(self, operation: Operation) -> float:
        """The least time of its arithmetic; 0 where no peak is known."""
        formats = (f"{operation.dtype} {kind_of_product(operation.name)}", operation.dtype)
        known = (self.flops_per_sec[each] for each in formats if each in self.flops_per_sec)
        peak = next(known, max(self.flops_per_sec.values(), default=0.0))
        return (operation.flops - operation.padding_flops) / peak if peak else 0.0

    def memory_seconds(self, operation: Operation) -> float:
        """The least time of its traffic with main memory; 0 where no bandwidth is known."""
        return operation.cold_bytes / self.bytes_per_sec if self.bytes_per_sec else 0.0

    def launch_seconds(self, operation: Operation) -> float:
        """The least time of its calls."""
        return operation.calls * self.launch_s

    def floor_seconds(self, operation: Operation) -> float:
        """The least time of the operation: on an asynchronous device of its work, else also of its calls."""
        floor = max(self.compute_seconds(operation), self.memory_seconds(operation))
        return floor if self.asynchronous else max(floor, self.launch_seconds(operation))


def kind_of_product(name: str) -> str:
    """Which of torch's switches for 32 bits an operation follows: `convolution`, `recurrent` or `matmul`."""
    return "convolution" if "conv" in name else "recurrent" if "rnn" in name else "matmul"


@dataclass(frozen=True)
class Floor:
    """Seconds that a step takes at least, and what they are spent on.

    On a CPU each operation's seconds count for the largest of its three, so that the three sums add up to the total.
    """

    total: float
    launch: float
    memory: float
    compute: float


def roofs_of(calibration: Calibration) -> Roofs:
    """The roofs that a calibration has measured; in 32 bits those of the formats that torch computes the products in."""
    peaks = dict(calibration.matmul_flops_per_sec)
    if "fp32" in peaks:
        formats = {kind: peaks.get(form, peaks["fp32"]) for kind, form in float32_formats(calibration.device).items()}
        peaks |= {f"fp32 {kind}": peak for kind, peak in formats.items() if peak != peaks["fp32"]}
    return Roofs(
        asynchronous=calibration.device != "cpu",
        flops_per_sec=peaks,
        bytes_per_sec=calibration.memory_bytes_per_sec,
        launch_s=(calibration.launch_us or 0.0) / 1e6,
    )


def step_floor(operations: Iterable[Operation], roofs: Roofs) -> Floor:
    """The floor of a step that consists of these operations."""
    sums = {"launch": 0.0, "memory": 0.0, "compute": 0.0}
    for operation in operations:
        needs = {"compute": roofs.compute_seconds(operation), "memory": roofs.memory_seconds(operation)}
        if roofs.asynchronous:
            sums["launch"] += roofs.launch_seconds(operation)
        else:
            needs["launch"] = roofs.launch_seconds(operation)
        largest = max(needs, key=needs.__getitem__)
        sums[largest] += needs[largest]
    device = sums["memory"] + sums["compute"]
    return Floor(max(device, sums["launch"]) if roofs.asynchronous else device + sums["launch"], **sums)
