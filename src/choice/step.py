"""A training step on a device that is not here: from the operations of the steps that were measured here.

A GPU computes while its host launches, so a step takes the longer of two sums: its kernels (kernels.py), and what the host
does (launches.py, and waiting for data). Memory is counted (memory.py). On other devices than NVIDIA's the sum of the
roofs is a bound: what the device takes at best.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ..errors import UserError
from ..hardware.datasheet import by_short_name
from ..records.operations import OperationRow
from .device import Device
from .kernels import BOUND, predict, roof_seconds
from .kinds import works_of
from .launches import OTHER_HOST, host_of, host_seconds, launched
from .measured import Measured, measured
from .memory import largest_batch, needed, usable
from .precision import element_of, format_of, in_precision
from .scale import line, nearest, rows_at
from .seconds import Interval, exactly
from .work import Work

MEASURED, AT_BEST = "measured", "bound: at best"
_MOST_BOUND = 0.1  # of the kernels' time: with more of it known as a bound, so is the step
_BETWEEN, _BEYOND = 1.1, 1.3  # a step on this device at a size that was not measured: factors of the interval's ends
_TRANSFER = Interval(
    0.0, 1 / 12e9, 1 / 5e9
)  # seconds a byte: prefetched; from pinned memory over PCIe 3; from pageable
_LARGEST_CORRECTION = 3.0


@dataclass(frozen=True)
class StepPrediction:
    """A training step on a device.

    Attributes:
        how: `measured`, `predicted from <device>`, or `bound: at best`, whose middle and low are what no device with these
            roofs can do better.
        limit: `compute`, `memory`, `launches` or `data`: what takes most of it.
        memory_bytes: that the step takes.
        fits: whether the high end of these fits into the device's memory.
    """

    seconds: Interval
    how: str
    limit: str
    memory_bytes: Interval
    fits: bool


@dataclass(frozen=True)
class Kernels:
    """The kernels of a step on a device, one after the other."""

    seconds: Interval
    floor: float  # the sum of the roofs
    bound: float  # of the middle, what is known as a bound
    compute: float  # of the middle, what arithmetic bounds


class Workload:
    """One training, as it was measured on one device, and predicted for others.

    Attributes:
        title: `cnn · mnist`.
        batch_sizes: that were measured, smallest first.
        train_samples: of an epoch.
        measured: a step here, by batch size.
        device: on which it was measured.
    """

    def __init__(self, source: Measured):
        self._source = source
        self._kernels: dict[tuple[str, int, str | None], Kernels] = {}
        self.title, self.device, self.train_samples = source.title, source.device, source.train_samples
        self.precision = source.precision
        self.batch_sizes = tuple(sorted(source.steps))
        self.measured: Mapping[int, Interval] = source.seconds

    def on(
        self, device: Device, batch_size: int, host: str | None = None, precision: str | None = None
    ) -> StepPrediction:
        """A step on a device.

        Args:
            device: the one that measured, or any other.
            batch_size: any, if several were measured.
            host: of the GPU: `fast`, `typical`, `slow`, or what a small operation takes on it (`7us`).
            precision: as Lightning takes it, or `fp32`, `tf32`, `bf16`, `fp16`; that of the measurement by default.

        Raises:
            UserError: for a device without hardware for the precision, an unknown host or precision, or another batch size
                than the only one that was measured.
        """
        if batch_size < 1 or (len(self.batch_sizes) == 1 and batch_size not in self.batch_sizes):
            raise UserError(
                f"batch size {batch_size:,}: only {self.batch_sizes[0]:,} was measured; a sweep over batch sizes tells others"
            )
        per_operation = host_of(host)
        form = format_of(self.precision, precision)
        memory = needed(self._source.memory, device, batch_size, element_of(form))
        is_own = device.name == self.device.name and form is None
        if is_own and host is None:
            seconds, how, limit = self._here(batch_size)
        else:
            seconds, how, limit = self._there(device, batch_size, per_operation, form)
        return StepPrediction(
            seconds, how, limit, memory, memory.high <= usable(device) or batch_size in self._own(device)
        )

    def largest_batch_size(self, device: Device, precision: str | None = None) -> int:
        """The largest batch size whose step surely fits into the device's memory; 0 if one sample does not."""
        element = element_of(format_of(self.precision, precision))
        return max(largest_batch(self._source.memory, device, element), *self._own(device), 0)

    def _own(self, device: Device) -> Sequence[int]:
        """The sizes that this very device has trained with."""
        return self.batch_sizes if device.name == self.device.name else ()

    def _here(self, batch_size: int) -> tuple[Interval, str, str]:
        """A step on the device that measured: measured, or on the line between two sizes that were."""
        kernels = self._on(self.device, batch_size, None)
        limit = self._limit(kernels, exactly(0.0), exactly(0.0), 0.0)
        if batch_size in self.measured:
            return self.measured[batch_size], MEASURED, limit
        middle = line({size: each.middle for size, each in self.measured.items()}, batch_size, least=kernels.floor)
        wide = _BETWEEN if self.batch_sizes[0] < batch_size < self.batch_sizes[-1] else _BEYOND
        return Interval(middle / wide, middle, middle * wide), f"predicted from {self.label}", limit

    def _there(
        self, device: Device, batch_size: int, per_operation: float | None, form: str | None
    ) -> tuple[Interval, str, str]:
        """A step on another device."""
        rows = self._rows(batch_size)
        kernels = self._on(device, batch_size, form)
        waiting = exactly(line(self._source.waiting, batch_size))
        device_time = kernels.seconds
        if device.kind in ("cuda", "rocm", "mps"):
            device_time += _TRANSFER * _input_bytes(rows) if device.kind != "mps" else exactly(0.0)
            host = self._host(launched(rows), per_operation)
        else:
            host = exactly(0.0)  # a compiled program, or a processor that computes itself
        waiting = OTHER_HOST * waiting.middle if waiting.middle else waiting
        if device.kind == "cuda":
            device_time = self._corrected(device_time, device, batch_size, form)
        both = host + waiting
        ends = {end: max(getattr(device_time, end), getattr(both, end)) for end in ("low", "middle", "high")}
        seconds = Interval(max(ends["low"], kernels.floor), max(ends["middle"], kernels.floor), max(ends.values()))
        limit = self._limit(kernels, device_time, both, waiting.middle)
        is_known = limit in ("launches", "data") or kernels.bound <= _MOST_BOUND * kernels.seconds.middle
        if device.kind != "cuda" or not is_known:
            best = max(kernels.floor, seconds.low)
            return Interval(best, max(best, seconds.middle), seconds.high), AT_BEST, limit
        return seconds, f"predicted from {self.label}", limit

    def _limit(self, kernels: Kernels, device_time: Interval, host: Interval, waiting: float) -> str:
        if host.middle > device_time.middle:
            return "data" if waiting > host.middle / 2 else "launches"
        return "compute" if kernels.compute >= kernels.seconds.middle / 2 else "memory"

    @property
    def label(self) -> str:
        """The device that measured, in short: `cpu`, `t4`."""
        shorts = (short for short, sheet in by_short_name().items() if sheet.names[0] == self.device.name)
        return next(shorts, self.device.kind)

    def _rows(self, batch_size: int) -> Sequence[OperationRow]:
        return rows_at(self._source.steps, batch_size)

    def _on(self, device: Device, batch_size: int, form: str | None) -> Kernels:
        key = device.name, batch_size, form
        if key not in self._kernels:
            self._kernels[key] = kernels_of(self._rows(batch_size), device, form)
        return self._kernels[key]

    def _host(self, operations: float, per_operation: float | None) -> Interval:
        """What the host takes for the launches of a step, and for the loop, Python and autograd beside them."""
        if self.device.kind == "cpu":
            return host_seconds(operations, self._beside, per_operation)
        shortest = min(each.middle for each in self.measured.values())  # the host takes no longer than any step
        if per_operation is not None:
            return host_seconds(operations, None, per_operation)
        return Interval(0.6 * shortest, min(shortest, host_seconds(operations, None, None).high), 1.1 * shortest)

    @cached_property
    def _beside(self) -> float:
        """Seconds of a step on this CPU outside of its operations, from the smallest batch, in which these are shortest."""
        size = self.batch_sizes[0]
        step = self._source.steps[size]
        rest = self.measured[size].middle - self._source.waiting[size] - sum(row.seconds for row in step.rows)
        return max(rest, 0.0)

    def _corrected(self, seconds: Interval, device: Device, batch_size: int, form: str | None) -> Interval:
        """The kernels' time, corrected by how far the prediction is off on the GPU that measured."""
        if self.device.kind != "cuda" or device.name == self.device.name or not self.device.sms:
            return seconds
        nearby = batch_size if batch_size in self.measured else nearest(self.batch_sizes, batch_size)[1]
        expected = self._on(self.device, nearby, None).seconds.middle
        if expected < 0.7 * self.measured[nearby].middle and len(self.batch_sizes) > 1:
            largest = self.batch_sizes[-1]
            expected, nearby = self._on(self.device, largest, None).seconds.middle, largest
        factor = self.measured[nearby].middle / expected if expected else 1.0
        return seconds * min(max(factor, 1 / _LARGEST_CORRECTION), _LARGEST_CORRECTION)


def kernels_of(rows: Sequence[OperationRow], device: Device, form: str | None = None) -> Kernels:
    """The kernels of a step on a device.

    Args:
        rows: of the step.
        device: on which they run.
        form: the numbers that the products are computed with, if others than the recorded ones.

    Raises:
        UserError: if the device has no hardware for these.
    """
    seconds, floor, bound, compute = exactly(0.0), 0.0, 0.0, 0.0
    for row in rows:
        for work in works_of(row):
            shown = in_precision(work, device, form)
            each, how = predict(shown, device)
            seconds += each * work.calls
            floor += _floor(shown, device, row) * work.calls
            bound += each.middle * work.calls if how == BOUND else 0.0
            memory = shown.bytes / device.bytes_per_sec if device.bytes_per_sec else 0.0
            compute += each.middle * work.calls if roof_seconds(shown, device) > memory else 0.0
    return Kernels(seconds, floor, bound, compute)


def _floor(work: Work, device: Device, row: OperationRow) -> float:
    """The roof of one call; traffic that the device's cache can hold, and arithmetic with padding, are not needed."""
    needed_flops = work.flops * (1 - row.padding_flops / row.flops) if row.flops else work.flops
    cached = work.bytes <= (device.l2_bytes or 0.0) or device.kind == "cpu"
    share = row.cold_bytes / row.bytes if device.kind == "cpu" and row.bytes else 0.0
    return roof_seconds(replace(work, flops=needed_flops, bytes=work.bytes * share if cached else work.bytes), device)


def _input_bytes(rows: Sequence[OperationRow]) -> float:
    """About the bytes of a batch: what the first operation reads."""
    first = next((row for row in rows if row.part == "forward"), None)
    if first is None:
        return 0.0
    size = 2 if first.dtype in ("bf16", "fp16") else 4
    if len(first.dims) == 7:
        n, _, height, width, channels = first.dims[:5]
        return float(size * n * channels * height * width)
    if len(first.dims) == 3:
        return float(size * first.dims[0] * first.dims[2])
    return first.bytes / 2


def workloads(folder: Path) -> list[Workload]:
    """The training that a run or a sweep has measured, for each device that it ran on. Raises UserError."""
    return [Workload(found) for found in measured(folder)]


def workload(folder: Path) -> Workload:
    """The training that a run or a sweep has measured on one device.

    Raises:
        UserError: in one line, for a folder without runs, runs without operations, of several trainings or devices, and a
            sweep of one batch size.
    """
    found = workloads(folder)
    if len(found) > 1:
        names = ", ".join(each.device.name for each in found)
        raise UserError(f"{folder}: was measured on several devices ({names}); give the folder of one")
    return found[0]
