"""A training step on a device that is not here: from the operations of the steps that were measured here.

A GPU computes while its host launches, so a step takes about the longer of two: the sum of its kernels (kernels.py), and
what the host does (launches.py, and waiting for data). Memory is counted (memory.py). On other devices than NVIDIA's the
sum of the roofs is a bound: what the device takes at best.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..errors import UserError
from ..hardware.datasheet import by_short_name
from .device import Device
from .kernel_sum import Kernels, KernelSum, transfer_seconds
from .launches import OTHER_HOST, beside_operations, host_of, host_seconds, launched
from .measured import Measured, measured
from .memory import largest_batch, needed, usable
from .precision import element_of, format_of
from .scale import line, rows_at
from .seconds import Interval, exactly

MEASURED, AT_BEST = "measured", "bound: at best"
_MOST_BOUND = 0.1  # of the kernels' time: with more of it known as a bound, so is the step
_BETWEEN, _BEYOND = 1.1, 1.3  # a step on this device at a size that was not measured: factors of the interval's ends
_OVERLAP = 4.0  # of the norm that adds device and host up: with 1 they would not overlap at all
_LARGEST_CORRECTION = 3.0
_LAUNCHED = ("cuda", "rocm", "mps")  # kinds whose host launches every operation


@dataclass(frozen=True)
class StepPrediction:
    """A training step on a device.

    Attributes:
        how: `measured`, `predicted from <device>`, or `bound: at best`: then low and middle are what the device cannot beat.
        limit: `compute`, `memory`, `launches` or `data`: what takes most of the step.
        memory_bytes: that the step takes.
        fits: whether the high end of these fits into the device's memory, or the device has trained with this size.
    """

    seconds: Interval
    how: str
    limit: str
    memory_bytes: Interval
    fits: bool


class Workload:
    """One training, as it was measured on one device, and predicted for others.

    Attributes:
        title: `cnn · mnist`.
        options: the settings that make a step another one.
        epochs: that the runs were to train; None where they do not agree.
        notes: on what was left out, and on what the runs cannot tell.
        busy: the share of the processor that other programs took while they disturbed all of a run; None if none did.
        precision: that it was measured at, as Lightning takes it.
        batch_sizes: that were measured, smallest first.
        train_samples: of an epoch.
        measured: a step here, by batch size.
        device: on which it was measured.
    """

    def __init__(self, source: Measured):
        self._source = source
        self._kernels: dict[str, Kernels] = {}
        self._sums: dict[tuple[str, int, str | None], KernelSum] = {}
        self.title, self.device, self.train_samples = source.title, source.device, source.train_samples
        self.options, self.epochs, self.notes = source.options, source.epochs, source.notes
        self.busy = source.busy
        self.precision = source.precision
        self.batch_sizes = tuple(sorted(source.steps))
        self.measured: Mapping[int, Interval] = source.seconds

    @property
    def label(self) -> str:
        """The device that measured, in short: `cpu`, `t4`."""
        shorts = (short for short, sheet in by_short_name().items() if sheet.names[0] == self.device.name)
        return next(shorts, self.device.kind)

    def on(
        self, device: Device, batch_size: int, host: str | None = None, precision: str | None = None
    ) -> StepPrediction:
        """A step on a device.

        Args:
            device: the one that measured, or any other.
            batch_size: any, if several were measured.
            host: of a GPU that is not here: `fast`, `typical`, `slow`, or what a small operation takes on it (`7us`).
            precision: as Lightning takes it, or `fp32`, `tf32`, `bf16`, `fp16`; that of the measurement by default.

        Raises:
            UserError: for a device without hardware for the precision, an unknown host or precision, or another batch size
                than the only one that was measured.
        """
        if batch_size < 1 or (len(self.batch_sizes) == 1 and batch_size not in self.batch_sizes):
            raise UserError(
                f"batch size {batch_size:,}: only {self.batch_sizes[0]:,} was measured; a sweep over batch sizes tells others"
            )
        per_operation, form = host_of(host), format_of(self.precision, precision)
        if device.name == self.device.name and form is None:
            seconds, how, limit = self._here(batch_size)
        else:
            seconds, how, limit = self._there(device, batch_size, per_operation, form)
        memory = needed(self._source.memory, device, batch_size, element_of(form))
        fits = memory.high <= usable(device) or batch_size in self._own(device)
        return StepPrediction(seconds, how, limit, memory, fits)

    def largest_batch_size(self, device: Device, precision: str | None = None) -> int:
        """The largest batch size whose step surely fits into the device's memory; 0 if one sample does not."""
        element = element_of(format_of(self.precision, precision))
        return max(largest_batch(self._source.memory, device, element), *self._own(device), 0)

    def _own(self, device: Device) -> Sequence[int]:
        """The sizes that this very device has trained with."""
        return self.batch_sizes if device.name == self.device.name else ()

    def _here(self, batch_size: int) -> tuple[Interval, str, str]:
        """A step on the device that measured: measured, or on the line between two sizes that were."""
        known, kernels = self.measured.get(batch_size), self._on(self.device, batch_size, None)
        middle = line({size: each.middle for size, each in self.measured.items()}, batch_size, least=kernels.floor)
        wide = _BETWEEN if self.batch_sizes[0] < batch_size < self.batch_sizes[-1] else _BEYOND
        seconds = known or Interval(middle / wide, middle, middle * wide)
        waiting, host = line(self._source.waiting, batch_size), 0.0
        if self.device.kind == "cpu":
            host = waiting + self._beside.middle
        limit = _limit(kernels, exactly(seconds.middle - host), exactly(host), waiting)
        return seconds, MEASURED if known else f"predicted from {self.label}", limit

    def _there(
        self, device: Device, batch_size: int, per_operation: float | None, form: str | None
    ) -> tuple[Interval, str, str]:
        """A step on another device."""
        rows = rows_at(self._source.steps, batch_size)
        kernels = self._on(device, batch_size, form)
        on_device, transfer = kernels.seconds * self._correction(device), exactly(0.0)
        host = OTHER_HOST * line(self._source.waiting, batch_size)
        waiting = host.middle
        if device.kind in _LAUNCHED:
            host += self._launches(launched(rows), per_operation)
            transfer = transfer_seconds(rows) if device.kind != "mps" else transfer
        on_device += transfer
        low = max(on_device.low, host.low, kernels.floor)
        middle = max(low, _overlapped(on_device.middle, host.middle))
        seconds = Interval(low, middle, max(middle, _overlapped(on_device.high, host.high)))
        limit = _limit(kernels, on_device, host, waiting, transfer.middle)
        known = limit in ("launches", "data") or kernels.bound <= _MOST_BOUND * kernels.seconds.middle
        if device.kind == "cuda" and known:
            return seconds, f"predicted from {self.label}", limit
        return Interval(low, low, seconds.high), AT_BEST, limit

    def _on(self, device: Device, batch_size: int, form: str | None) -> KernelSum:
        key = device.name, batch_size, form
        if key not in self._sums:
            kernels = self._kernels.setdefault(device.name, Kernels(device))
            self._sums[key] = kernels.of(rows_at(self._source.steps, batch_size), form)
        return self._sums[key]

    def _launches(self, operations: float, per_operation: float | None) -> Interval:
        """What the host takes for the launches of a step, and for the loop, Python and autograd beside them."""
        if self.device.kind == "cpu":
            return host_seconds(operations, self._beside, per_operation)
        expected = host_seconds(operations, None, per_operation)
        if per_operation is not None:
            return expected
        shortest = min(each.middle for each in self.measured.values())  # the host takes no longer than any step
        return Interval(0.6 * min(shortest, expected.high), min(shortest, expected.high), 1.1 * shortest)

    @cached_property
    def _beside(self) -> Interval:
        """Seconds of a step on this CPU outside of its operations, from the smallest batch, in which these are shortest."""
        size = self.batch_sizes[0]
        rows, step = self._source.steps[size].rows, self.measured[size]
        known = self._source.waiting[size] + sum(row.seconds for row in rows)
        rest = Interval(*(end - known for end in (step.low, step.middle, step.high)))
        return beside_operations(rest, sum(row.calls for row in rows))

    def _correction(self, device: Device) -> float:
        """From one GPU to another: by which factor the kernels here took longer than predicted, if these limited a step."""
        if self.device.kind != "cuda" or device.kind != "cuda" or self.device.sms is None:
            return 1.0
        size = self.batch_sizes[-1]
        expected, step = self._on(self.device, size, None), self.measured[size].middle
        shortest = min(each.middle for each in self.measured.values())
        if step < 1.5 * shortest and expected.seconds.middle < step:  # launches may have limited every size
            return 1.0
        factor = step / expected.seconds.middle if expected.seconds.middle else 1.0
        return min(max(factor, 1 / _LARGEST_CORRECTION), _LARGEST_CORRECTION)


def _overlapped(device: float, host: float) -> float:
    """The time of two that run at the same time, and wait for each other now and then."""
    longer, shorter = max(device, host), min(device, host)
    return longer * (1 + (shorter / longer) ** _OVERLAP) ** (1 / _OVERLAP) if longer > 0 else 0.0


def _limit(kernels: KernelSum, device: Interval, host: Interval, waiting: float, transfer: float = 0.0) -> str:
    """What takes most of a step."""
    if host.middle > device.middle:
        return "data" if waiting > host.middle / 2 else "launches"
    if transfer > device.middle / 2:
        return "data"
    return "compute" if kernels.compute >= kernels.seconds.middle / 2 else "memory"


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
