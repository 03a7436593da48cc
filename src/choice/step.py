"""A training step on another device, predicted from the operations of the steps that were measured here.

A GPU computes while its host launches, so a step takes about the longer of two times: the sum of its kernels (kernels.py), and
the host's time (launches.py, and the wait for data). Memory follows from a count of bytes (memory.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from ..errors import UserError
from ..hardware.datasheet import Datasheet
from ..records.operations import OperationRow, StepOperations
from .interval import Interval, exactly
from .kernels import is_compute, predict
from .launches import AUTOGRAD_S, BELOW_AUTOGRAD, MOST_LOOP_S, MOST_OPERATION_S, count_launches, on_other_host
from .memory import estimate_gpu_bytes
from .roofs import norm
from .scale import interpolate, rows_at
from .work import adapt_to_device, expand_row

_OVERLAP_NORM = 4.0  # the p of the p-norm of the device's and the host's time: with 1 they would not overlap at all
_LARGEST_CORRECTION = 3.0
_INTERPOLATED = ("data_wait_s", "memory_bytes")  # attributes of `Measured`, linear in the batch size
# Seconds a byte for the copy of a batch to a GPU: prefetched; from pinned memory over PCIe 3; from pageable memory. The first
# and the last are the least and the most; they serve as the ends of the interval.
TRANSFER = Interval(0.0, 1 / 12e9, 1 / 5e9)


@dataclass(frozen=True)
class Measured:
    """The measurement of one batch size on a device that is here. Times are those of a batch."""

    seconds: Interval
    data_wait_s: float  # wait for data
    memory_bytes: float  # as in memory.py; NaN if no run has counted them
    step: StepOperations
    is_peak: bool = False  # whether `memory_bytes` is the peak of a GPU's allocator

    @property
    def compute_s(self) -> float:
        """Seconds without the wait for data."""
        return max(0.0, self.seconds.middle - self.data_wait_s)


@dataclass(frozen=True, eq=False)
class Source:
    """The measurements of a training on one device, at two batch sizes at least, smallest first."""

    device: Datasheet
    sizes: Mapping[int, Measured]
    others_share: float | None = None  # of the processor, that other programs took; None if it is small
    has_data_on_device: bool = False  # whether the data set lies on the device, so that no step copies a batch

    @property
    def shortest_step_s(self) -> float:
        """Seconds of the shortest step, without the wait for data."""
        return min(measured.compute_s for measured in self.sizes.values())


@dataclass(frozen=True)
class Step:
    """A training step on a device.

    Attributes:
        limit: the largest part of a predicted step: `arithmetic`, `bandwidth`, `launches` or `data`; empty if measured.
        memory: bytes that the step takes; None if unknown.
    """

    seconds: Interval
    limit: str
    memory: Interval | None


def step_here(source: Source, batch_size: int) -> Step:
    """Return the measured step at a measured batch size."""
    measured = source.sizes[batch_size]
    return Step(measured.seconds, "", None if math.isnan(measured.memory_bytes) else exactly(measured.memory_bytes))


def step_on(source: Source, device: Datasheet, batch_size: int, precision: str | None = None) -> Step:
    """Predict a step on a card other than the measured one.

    Args:
        batch_size: any.
        precision: one of `work.PRECISIONS`; None for the measured one.

    Raises:
        UserError: if the card has no hardware for the precision.
    """
    rows = rows_at({size: measured.step for size, measured in source.sizes.items()}, batch_size)
    kernels, is_arithmetic = _sum_kernels(rows, source, device, precision)
    kernels, transfer = kernels * _kernel_correction(source), TRANSFER * _batch_bytes(source, rows, batch_size)
    numbers = [{size: getattr(measured, name) for size, measured in source.sizes.items()} for name in _INTERPOLATED]
    data_wait_s, memory_bytes = (interpolate(values, batch_size) for values in numbers)
    host_work = _host_seconds(source, rows)
    host = on_other_host(exactly(data_wait_s)) + host_work
    seconds = overlap(kernels + transfer, host)
    parts = {"arithmetic" if is_arithmetic else "bandwidth": kernels.middle, "launches": host_work.middle}
    parts["data"] = max(data_wait_s, transfer.middle)
    limit = max(parts, key=lambda part: parts[part])
    is_peak = all(measured.is_peak for measured in source.sizes.values())
    return Step(seconds, limit, None if math.isnan(memory_bytes) else estimate_gpu_bytes(memory_bytes, is_peak))


def overlap(device: Interval, host: Interval) -> Interval:
    """Return the seconds of a step whose device computes while its host launches."""
    low = max(device.low, host.low)
    middle = max(low, float(norm(device.middle, host.middle, _OVERLAP_NORM)))
    return Interval(low, middle, max(middle, float(norm(device.high, host.high, _OVERLAP_NORM))))


def _sum_kernels(
    rows: Sequence[OperationRow], source: Source, device: Datasheet, precision: str | None
) -> tuple[Interval, bool]:
    """Return the sum of the seconds of a step's kernels, and whether arithmetic bounds most of this time."""
    works = [adapt_to_device(work, device, precision, source.device.kind) for row in rows for work in expand_row(row)]
    times = predict(works, device) * np.array([work.calls for work in works])
    arithmetic_s = times[1] @ np.array([is_compute(work, device) for work in works])
    seconds = Interval(*map(float, times.sum(axis=1)))
    return seconds, bool(arithmetic_s >= seconds.middle / 2)


def _batch_bytes(source: Source, rows: Sequence[OperationRow], batch_size: int) -> float:
    """Return the bytes of the copied batch; if no run has recorded them, about those that the first operation reads."""
    if source.has_data_on_device:
        return 0.0
    batch_bytes = {size: float(measured.step.batch_bytes or 0) for size, measured in source.sizes.items()}
    if all(batch_bytes.values()):
        return interpolate(batch_bytes, batch_size)
    operation = next((row for row in rows if row.part == "forward"), None)
    if operation is None:
        return 0.0
    element, dims = 2 if operation.dtype in ("bf16", "fp16") else 4, operation.dims
    # The dims of a convolution: N, C_out, the spatial sizes of the image, C_in, the sizes of the kernel.
    if "conv" in operation.name and len(dims) > 3:
        return float(element * dims[0] * math.prod(dims[2 : (len(dims) + 3) // 2]))
    if len(dims) == 3:  # a product
        return float(element * dims[0] * dims[2])
    return operation.bytes / 2


def _host_seconds(source: Source, rows: Sequence[OperationRow]) -> Interval:
    """Return the seconds of the host of a GPU for a step: the launches, the training loop, Python and autograd."""
    if source.device.kind == "cpu":
        return BELOW_AUTOGRAD * count_launches(rows) + on_other_host(_host_overhead(source))
    middle = min(source.shortest_step_s, MOST_OPERATION_S * count_launches(rows))  # no longer than any step
    return Interval(0.6 * middle, middle, 1.1 * source.shortest_step_s)  # the least and the most


@cache
def _host_overhead(source: Source) -> Interval:
    """Return the seconds of a step on this CPU outside of its operations, at the smallest batch: its operations are shortest."""
    smallest = next(iter(source.sizes.values()))
    accounted_s = smallest.data_wait_s + sum(row.seconds for row in smallest.step.rows)
    calls = sum(row.calls for row in smallest.step.rows)
    low, high = AUTOGRAD_S[0] * calls, MOST_LOOP_S + AUTOGRAD_S[1] * calls
    return Interval(*(min(max(end - accounted_s, low), high) for end in smallest.seconds.ends()))


@cache
def _kernel_correction(source: Source) -> float:
    """Return the measured ÷ the predicted time of the kernels on a GPU that is here; 1 if launches may have limited it."""
    if source.device.kind != "cuda" or source.device.sms is None:
        return 1.0
    largest = list(source.sizes.values())[-1]
    try:
        predicted_s = _sum_kernels(largest.step.rows, source, source.device, None)[0].middle
    except UserError:  # torch emulates a precision that the card here lacks
        return 1.0
    step_s = largest.compute_s
    if not predicted_s or (step_s < 1.5 * source.shortest_step_s and predicted_s < step_s):
        return 1.0  # launches may have limited the step at every size
    kernels_s = min(max(step_s, predicted_s), largest.seconds.middle)  # kernels may have run during the wait for data
    return min(max(kernels_s / predicted_s, 1 / _LARGEST_CORRECTION), _LARGEST_CORRECTION)
