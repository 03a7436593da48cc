"""A training step on another device: from the operations of the steps that were measured here.

A GPU computes while its host launches, so a step takes about the longer of two: the sum of its kernels (kernels.py), and
what the host does (launches.py, and waiting for data). Memory is counted (memory.py).
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
from .launches import BELOW_AUTOGRAD, LEAST_BESIDE, MOST_BESIDE, MOST_LOOP, MOST_WHOLE_OPERATION, elsewhere, launched
from .memory import on_gpu
from .roofs import norm
from .scale import line, rows_at
from .work import as_computed, works_of

_OVERLAP = 4.0  # of the norm that adds device and host up: with 1 they would not overlap at all
_LARGEST_CORRECTION = 3.0
_ON_A_LINE = ("waiting", "counted")  # of `Measured`, against the batch size
# Seconds a byte, of a batch on its way to a GPU: prefetched; from pinned memory over PCIe 3; from pageable memory. The first
# and the last are the least and the most, and are taken for the ends of an interval.
TRANSFER = Interval(0.0, 1 / 12e9, 1 / 5e9)


@dataclass(frozen=True)
class Measured:
    """A batch size on the device that measured. Times are those of a batch."""

    seconds: Interval
    waiting: float  # seconds, for data
    counted: float  # bytes, as in memory.py; NaN where no run has counted them
    step: StepOperations
    is_peak: bool = False  # whether `counted` is the peak of a GPU's allocator

    @property
    def working(self) -> float:
        """Seconds without the wait for data."""
        return max(0.0, self.seconds.middle - self.waiting)


@dataclass(frozen=True, eq=False)
class Source:
    """One training as it was measured on one device: at two batch sizes at least, smallest first."""

    device: Datasheet
    sizes: Mapping[int, Measured]
    others_share: float | None = None  # of the processor, that other programs took, if it is worth a word
    on_device: bool = False  # whether the set lies on the device, so that no step copies a batch to it

    @property
    def shortest(self) -> float:
        """Seconds of the shortest step, without the wait for data."""
        return min(measured.working for measured in self.sizes.values())


@dataclass(frozen=True)
class Step:
    """A training step on a device.

    Attributes:
        limit: of a step elsewhere, what takes most of it: `arithmetic`, `bandwidth`, `launches` or `data`.
        memory: bytes that it takes; None if unknown.
    """

    seconds: Interval
    limit: str
    memory: Interval | None


def step_here(source: Source, batch_size: int) -> Step:
    """A step on the device that measured, with a batch size that was measured."""
    measured = source.sizes[batch_size]
    return Step(measured.seconds, "", None if math.isnan(measured.counted) else exactly(measured.counted))


def step_on(source: Source, device: Datasheet, batch_size: int, precision: str | None = None) -> Step:
    """A step on a card that is not the one that measured.

    Args:
        batch_size: any.
        precision: one of `work.PRECISIONS`; None for that of the measurement.

    Raises:
        UserError: if the card has no hardware for the precision.
    """
    rows = rows_at({size: measured.step for size, measured in source.sizes.items()}, batch_size)
    kernels, is_arithmetic = _kernels(rows, source, device, precision)
    kernels, transfer = kernels * _correction(source), TRANSFER * _batch_bytes(source, rows, batch_size)
    numbers = [{size: getattr(measured, name) for size, measured in source.sizes.items()} for name in _ON_A_LINE]
    waiting, counted = (line(values, batch_size) for values in numbers)
    launches = _launches(source, rows)
    host = elsewhere(exactly(waiting)) + launches
    seconds = overlapped(kernels + transfer, host)
    parts = {"arithmetic" if is_arithmetic else "bandwidth": kernels.middle, "launches": launches.middle}
    parts["data"] = max(waiting, transfer.middle)
    limit = max(parts, key=lambda part: parts[part])
    return Step(
        seconds,
        limit,
        None if math.isnan(counted) else on_gpu(counted, all(one.is_peak for one in source.sizes.values())),
    )


def overlapped(on_device: Interval, host: Interval) -> Interval:
    """Seconds of what a device computes while its host launches."""
    low = max(on_device.low, host.low)
    middle = max(low, float(norm(on_device.middle, host.middle, _OVERLAP)))
    return Interval(low, middle, max(middle, float(norm(on_device.high, host.high, _OVERLAP))))


def _kernels(
    rows: Sequence[OperationRow], source: Source, device: Datasheet, precision: str | None
) -> tuple[Interval, bool]:
    """Seconds of all kernels of a step, one after the other, and whether arithmetic bounds most of this time."""
    works = [as_computed(work, device, precision, source.device.kind) for row in rows for work in works_of(row)]
    times = predict(works, device) * np.array([work.calls for work in works])
    compute = times[1] @ np.array([is_compute(work, device) for work in works])
    seconds = Interval(*map(float, times.sum(axis=1)))
    return seconds, bool(compute >= seconds.middle / 2)


def _batch_bytes(source: Source, rows: Sequence[OperationRow], batch_size: int) -> float:
    """The bytes of a batch that is copied; where no run has recorded them, about what the forward pass's first operation reads."""
    if source.on_device:
        return 0.0
    recorded = {size: float(measured.step.batch_bytes or 0) for size, measured in source.sizes.items()}
    if all(recorded.values()):
        return line(recorded, batch_size)
    first = next((row for row in rows if row.part == "forward"), None)
    if first is None:
        return 0.0
    element, dims = 2 if first.dtype in ("bf16", "fp16") else 4, first.dims
    if "conv" in first.name and len(dims) > 3:  # N, C_out, the sizes of an image, C_in, those of the kernel
        return float(element * dims[0] * math.prod(dims[2 : (len(dims) + 3) // 2]))
    if len(dims) == 3:  # a product
        return float(element * dims[0] * dims[2])
    return first.bytes / 2


def _launches(source: Source, rows: Sequence[OperationRow]) -> Interval:
    """What the host of a GPU takes for the launches of a step, and for the loop, Python and autograd beside them."""
    if source.device.kind == "cpu":
        return BELOW_AUTOGRAD * launched(rows) + elsewhere(_beside(source))
    middle = min(source.shortest, MOST_WHOLE_OPERATION * launched(rows))  # the host takes no longer than any step
    return Interval(0.6 * middle, middle, 1.1 * source.shortest)  # the least and the most


@cache
def _beside(source: Source) -> Interval:
    """Seconds of a step on this CPU outside of its operations, from the smallest batch, in which these are shortest."""
    smallest = next(iter(source.sizes.values()))
    known = smallest.waiting + sum(row.seconds for row in smallest.step.rows)
    calls = sum(row.calls for row in smallest.step.rows)
    least, most = LEAST_BESIDE * calls, MOST_LOOP + MOST_BESIDE * calls
    return Interval(*(min(max(end - known, least), most) for end in smallest.seconds.ends()))


@cache
def _correction(source: Source) -> float:
    """From one GPU to another: by which factor the kernels here took longer than predicted, if these limited a step."""
    if source.device.kind != "cuda" or source.device.sms is None:
        return 1.0
    largest = list(source.sizes.values())[-1]
    try:
        expected = _kernels(largest.step.rows, source, source.device, None)[0].middle
    except UserError:  # torch emulates a precision that the card here has not
        return 1.0
    step = largest.working
    if not expected or (step < 1.5 * source.shortest and expected < step):  # launches may have limited every size
        return 1.0
    taken = min(max(step, expected), largest.seconds.middle)  # kernels may have run in the wait for data, too
    return min(max(taken / expected, 1 / _LARGEST_CORRECTION), _LARGEST_CORRECTION)
