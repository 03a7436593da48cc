"""What a training would take on each device: time, energy and money, at the batch size that suits the device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import UserError
from ..records.formatting import memory
from .device import Device
from .money import Prices
from .seconds import Interval, exactly
from .words import title_of

if TYPE_CHECKING:
    from .step import StepPrediction, Workload

MAX_EXTRAPOLATION = 8  # times the largest size that ran
NEAR = 0.95  # of the best rate: the smallest batch that reaches it is taken
START_UP_S = 300.0  # of a device that is not here: a machine is rented, boots, and gets the environment and the data


@dataclass(frozen=True)
class Question:
    """What the user wants to know, and what is assumed."""

    epochs: int
    epochs_from: str = ""  # where the number comes from, for the table
    deadline: float | None = None  # seconds
    budget: float | None = None  # in the prices' currency
    prices: Prices = field(default_factory=lambda: Prices({}))
    start_up: float = START_UP_S
    batch_size: int | None = None  # the same for every device; None: each device has its own
    host: str | None = None  # the processor beside a GPU
    precision: str | None = None  # None: the precision that was measured


@dataclass(frozen=True)
class Target:
    """A device in question. Its label is what the user calls it: `cpu`, `t4`."""

    label: str
    device: Device


@dataclass(frozen=True)
class Row:
    """A device, and what the training takes on it. Seconds are of training steps, without validation."""

    label: str
    device: Device
    here: bool
    batch_size: int
    largest: int  # batch size that the memory holds
    step: "StepPrediction"
    epoch: Interval
    training: Interval  # all epochs, and the start-up
    start_up: float
    joules: float | None  # of all epochs, at most: at the highest power limit
    cost: Interval | None  # None: no price is known

    @property
    def is_bound(self) -> bool:
        """Whether the times are what the device takes at best; then only the low ends say something."""
        return self.step.how.startswith("bound")

    @property
    def title(self) -> str:
        """What a sentence calls it: `the CPU here`, `T4`."""
        return title_of(self.label, self.here)

    @property
    def how(self) -> str:
        """`measured`, `predicted` or `bound`."""
        return self.step.how.split()[0].rstrip(":")

    @property
    def samples_per_sec(self) -> Interval:
        """The rate of whole batches."""
        step = self.step.seconds
        return Interval(self.batch_size / step.high, self.batch_size / step.middle, self.batch_size / step.low)


@dataclass(frozen=True)
class LeftOut:
    """A device without a row, and why."""

    label: str
    reason: str


@dataclass(frozen=True)
class Check:
    """A device that was measured, predicted from another one that was."""

    label: str
    source: str
    batch_size: int
    predicted: "StepPrediction"
    measured: Interval

    @property
    def holds(self) -> bool:
        """Whether the measured step lies in the predicted interval; a bound holds where the step is not shorter."""
        times = self.predicted.seconds
        below = self.predicted.how.startswith("bound") or self.measured.middle <= times.high
        return times.low <= self.measured.middle and below


def rows(
    workloads: Sequence["Workload"], targets: Sequence[Target], question: Question
) -> tuple[list[Row], list[LeftOut]]:
    """A row for each device that was measured and for each target, the fastest first; and the devices without one.

    Args:
        workloads: the same training as it was measured on each device that is here.
        targets: devices on paper. One that is here is measured, and has no second row.
        question: the batch size, the prices and so on.
    """
    measured = {workload.device.name for workload in workloads}
    asked = [Target(label, each.device) for label, each in zip(labels(workloads), workloads, strict=True)]
    asked += [target for target in targets if target.device.name not in measured]
    found: list[Row] = []
    left_out: list[LeftOut] = []
    for target in asked:
        try:
            found.append(_row(workloads, target, question, target.device.name in measured))
        except UserError as error:
            left_out.append(LeftOut(target.label, str(error).removeprefix(f"{target.device.name} ")))
    return sorted(found, key=lambda row: (row.is_bound, row.training.middle)), left_out


def labels(workloads: Sequence["Workload"]) -> list[str]:
    """What each device that is here is called; with a number where two have the same name, as a CPU with 1 and 2 threads."""
    names = [workload.label for workload in workloads]
    return [f"{name} {at + 1}" if names.count(name) > 1 else name for at, name in enumerate(names)]


def checks(workloads: Sequence["Workload"], question: Question) -> list[Check]:
    """Each measured device at each batch size, predicted from each other one."""
    found = []
    named = list(zip(labels(workloads), workloads, strict=True))
    for label, target in named:
        for source, workload in named:
            if workload is not target:
                for size, seconds in sorted(target.measured.items()):
                    predicted = workload.on(target.device, size, host=question.host)
                    found.append(Check(label, source, size, predicted, seconds))
    return found


def step_on(workloads: Sequence["Workload"], device: Device, size: int, question: Question) -> "StepPrediction":
    """A step as it was measured on the device; or predicted from the workload that knows it best."""
    own = _own(workloads, device)
    if own is not None:
        return own.on(device, size, precision=question.precision)
    found = [each.on(device, size, host=question.host, precision=question.precision) for each in workloads]
    return min(found, key=lambda step: (step.how.startswith("bound"), step.seconds.high / max(step.seconds.low, 1e-12)))


def _own(workloads: Sequence["Workload"], device: Device) -> "Workload | None":
    """The workload that was measured on this device."""
    return next((workload for workload in workloads if workload.device.name == device.name), None)


def _row(workloads: Sequence["Workload"], target: Target, question: Question, here: bool) -> Row:
    first = _own(workloads, target.device) or workloads[0]
    largest = first.largest_batch_size(target.device, question.precision)
    size = _batch_size(workloads, target.device, question, largest)
    step = step_on(workloads, target.device, size, question)
    if not step.fits:
        needed, there = memory(step.memory_bytes.middle), memory(target.device.memory_bytes)
        raise UserError(f"needs {needed} at batch size {size:,}, and has {there}")
    start_up = 0.0 if here else question.start_up
    epoch = step.seconds * math.ceil(first.train_samples / size)
    steps = epoch * question.epochs
    training = steps + exactly(start_up)
    per_hour, watts = question.prices.per_hour, target.device.tdp_w
    price = per_hour.get(target.label, per_hour.get(target.device.name))
    return Row(
        label=target.label,
        device=target.device,
        here=here,
        batch_size=size,
        largest=largest,
        step=step,
        epoch=epoch,
        training=training,
        start_up=start_up,
        joules=steps.high * watts if watts and not step.how.startswith("bound") else None,
        cost=None if price is None else training * (price / 3600),
    )


def _batch_size(workloads: Sequence["Workload"], device: Device, question: Question, largest: int) -> int:
    """The size that was asked for; or the smallest whose rate is near the best of those that come into question.

    These are the measured sizes; for a device that is not here, also their doublings, as far as records are trusted.
    """
    if question.batch_size is not None:
        return question.batch_size
    own = _own(workloads, device)
    measured = sorted({size for each in ([own] if own else workloads) for size in each.batch_sizes})
    most = min(largest, workloads[0].train_samples, MAX_EXTRAPOLATION * measured[-1])
    sizes = [size for size in measured if size <= largest] or [largest or measured[0]]
    while own is None and len(measured) > 1 and 2 * sizes[-1] <= most:
        sizes.append(2 * sizes[-1])
    rates = {size: size / step_on(workloads, device, size, question).seconds.middle for size in sizes}
    return next(size for size in sorted(rates) if rates[size] >= NEAR * max(rates.values()))
