"""The roofline of a device, by its calibration: what an operation takes at least.

An operation computes no faster than the peak at its precision, moves no more than the bandwidth, and takes no less than a
launch. The bound counts only traffic that no cache can save: a call finds at most a full cache of its bytes there, and
leaves at most a full cache behind that is written later. So no operation is faster than its bound.
"""

from ..records.operations import OperationRow
from .calibration import Calibration, float32_peaks
from .flop_formulas import kind_of_product


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


def needs(operation: OperationRow, device: Calibration) -> dict[str, float]:
    """The least seconds for its arithmetic and its traffic, and where the host waits for it (on a CPU) for its calls."""
    saved = 2 * operation.calls * (device.cache_bytes or 0)  # what the cache may hold before and after each call
    share = max(operation.cold_bytes - saved, 0) / operation.cold_bytes if operation.cold_bytes else 0.0
    found = {"compute": compute_seconds(operation, device), "memory": share * memory_seconds(operation, device)}
    return found | ({"launch": launch_seconds(operation, device)} if device.device == "cpu" else {})


def least_seconds(operation: OperationRow, device: Calibration) -> float:
    """The lower bound of the operation's time."""
    return max(needs(operation, device).values())
