"""The kernels of a step on a device, added up: the device computes one after the other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..records.operations import OperationRow
from .device import Device
from .kernels import BOUND, predict, roof_seconds
from .kinds import works_of
from .precision import in_precision
from .seconds import Interval, exactly
from .work import Work

_TRANSFER = Interval(
    0.0, 1 / 12e9, 1 / 5e9
)  # seconds a byte: prefetched; from pinned memory over PCIe 3; from pageable

_UNROLLED = 1.5  # by how much the intervals of a recurrent kernel's parts are wider: cuDNN may fuse or overlap them


@dataclass(frozen=True)
class KernelSum:
    """Seconds of the kernels of a step."""

    seconds: Interval
    floor: float  # the sum of the roofs
    bound: float  # of the middle, what is known as a bound
    compute: float  # of the middle, what arithmetic bounds


class Kernels:
    """The kernels of steps on one device; a kernel of the same shape is predicted once."""

    def __init__(self, device: Device):
        self._device = device
        self._known: dict[Work, tuple[Interval, str]] = {}

    def of(self, rows: Sequence[OperationRow], form: str | None = None) -> KernelSum:
        """The sum over the operations of a step.

        Args:
            rows: of the step.
            form: the numbers that the products are computed with, if others than the recorded ones.

        Raises:
            UserError: if the device has no hardware for these.
        """
        seconds, floor, bound, compute = exactly(0.0), 0.0, 0.0, 0.0
        for row, work in _works(rows):
            shown = in_precision(work, self._device, form)
            each, how = self._one(shown)
            seconds += (_widened(each, _UNROLLED) if "rnn" in work.name else each) * work.calls
            floor += self._floor(shown, row) * work.calls
            bound += each.middle * work.calls if how == BOUND else 0.0
            compute += each.middle * work.calls if roof_seconds(shown, self._device) > self._traffic(shown) else 0.0
        return KernelSum(seconds, floor, bound, compute)

    def _one(self, work: Work) -> tuple[Interval, str]:
        part = "backward" if work.part == "backward" else "forward"
        alike = replace(work, name=work.kind, module="", part=part, calls=1)
        if alike not in self._known:
            self._known[alike] = predict(alike, self._device)
        return self._known[alike]

    def _traffic(self, work: Work) -> float:
        return work.bytes / self._device.bytes_per_sec if self._device.bytes_per_sec else 0.0

    def _floor(self, work: Work, row: OperationRow) -> float:
        """The roof of a call, without traffic that the device's cache can hold."""
        moved = work.bytes
        if self._device.kind == "cpu":
            moved *= row.cold_bytes / row.bytes if row.bytes else 0.0
        elif moved <= (self._device.l2_bytes or 0.0):
            moved = 0.0
        return roof_seconds(replace(work, bytes=moved), self._device)


def _widened(interval: Interval, factor: float) -> Interval:
    return Interval(interval.low / factor, interval.middle, interval.high * factor)


def transfer_seconds(rows: Sequence[OperationRow]) -> Interval:
    """The transfer of a batch to a GPU; its bytes are about those that the first operation reads."""
    first = next((row for row in rows if row.part == "forward"), None)
    if first is None:
        return exactly(0.0)
    element = 2 if first.dtype in ("bf16", "fp16") else 4
    if len(first.dims) == 7:  # a convolution of N images
        n, _, height, width, channels = first.dims[:5]
        return _TRANSFER * float(element * n * height * width * channels)
    if len(first.dims) == 3:
        return _TRANSFER * float(element * first.dims[0] * first.dims[2])
    return _TRANSFER * (first.bytes / 2)


def _works(rows: Sequence[OperationRow]) -> Iterator[tuple[OperationRow, Work]]:
    for row in rows:
        for work in works_of(row):
            yield row, work
