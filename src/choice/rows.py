"""What a training takes on each device, at the batch size that suits the device."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..analysis.selection import ENOUGH
from ..errors import UserError
from ..hardware.datasheet import Datasheet
from ..records.formatting import memory
from .interval import Interval, exactly
from .measured import Training
from .memory import USABLE
from .step import Step, step_here, step_on

MAX_EXTRAPOLATION = 8  # times the largest size that ran
FULL = "32-true"  # as Lightning calls float32


@dataclass(frozen=True)
class Question:
    """What the user wants to know, and what is assumed of devices that are not here."""

    cards: Sequence[Datasheet]  # to compare with
    epochs: int | None = None  # None: as many as the runs were to train, or 1
    batch_size: int | None = None  # a measured one, the same for every device; None: each device has its own
    prices: Mapping[str, float] = field(default_factory=dict)  # of an hour, by label; of one that is here also by kind
    start_up_s: float = 0.0  # until a device that is not here can train
    precision: str | None = None  # as of `step_on`


@dataclass(frozen=True)
class Row:
    """A device, and what the training takes on it: steps alone, without validation."""

    device: Datasheet
    here: bool
    batch_size: int
    step: Step
    training: Interval  # seconds of all epochs
    total: Interval  # the same and the start-up
    cost: Interval | None  # None where no price is known
    others_share: float | None = None  # of the processor, that other programs took, if it is worth a word
    lowered_by: float = 0.0  # as of `Measured`

    @property
    def label(self) -> str:
        """Its short name: `cpu`, `t4`."""
        return self.device.short[0]

    @property
    def name(self) -> str:
        """What a sentence calls it: `the CPU here`, `T4`."""
        return f"the {self.label.upper()} here" if self.here else self.label.upper()

    @property
    def known(self) -> str:
        """How its times are known."""
        return "measured" if self.here else "predicted"

    def __str__(self) -> str:
        return f"{self.total} ({self.known}{f', cost {self.cost.span()}' if self.cost else ''})"


def rows(training: Training, question: Question) -> tuple[list[Row], list[str]]:
    """A row for each device, the fastest first, and a line for each device that cannot train it.

    Raises:
        UserError: for a batch size that was not measured, and for another precision of steps that were not in float32.
    """
    sizes = {size for source in training.sources for size in source.sizes}
    check_measured(question, f"{training.title} was", sizes, training.precision)
    if question.precision == training.precision:
        question = replace(question, precision=None)
    devices = [source.device for source in training.sources]
    for card in question.cards:
        if card not in devices:
            devices.append(card)
    found, left_out = [], []
    for device in devices:
        try:
            found.append(_row(training, device, question))
        except UserError as error:
            left_out.append(f"{device.short[0]} {error}")
    return sorted(found, key=lambda row: row.total.middle), left_out


def check_measured(question: Question, which: str, sizes: Collection[int], precision: str) -> None:
    """Raises UserError for a batch size or a precision that measured steps do not answer, of a training that `which` names."""
    if question.batch_size not in (None, *sizes):
        known = ", ".join(f"{size:,}" for size in sorted(sizes))
        raise UserError(f"--batch-size: got {question.batch_size:,}; {which} measured at {known}")
    if question.precision not in (None, precision) and precision != FULL:
        raise UserError(f"--precision: {which} measured in {precision}, takes steps in {FULL}")


def check_prices(here: Sequence[Datasheet], question: Question) -> None:
    """Raises UserError for a price that no device has, of those that are here and the cards to compare with."""
    names = [_priced_as(device, True, question.prices) for device in here]
    names += [_priced_as(card, False, question.prices) for card in question.cards]
    if unused := [name for name in question.prices if name not in names]:
        known = ", ".join(dict.fromkeys(device.short[0] for device in (*here, *question.cards)))
        got = f"{unused[0]}={question.prices[unused[0]]:g}"
        raise UserError(f"--price: got {got}, the price of no device that is compared; takes those of {known}")


def _priced_as(device: Datasheet, here: bool, prices: Mapping[str, float]) -> str | None:
    """The name that a device has among the prices: its own one, or the kind of one that is here."""
    names = (device.short[0], device.kind) if here else (device.short[0],)
    return next((name for name in names if name in prices), None)


def _row(training: Training, device: Datasheet, question: Question) -> Row:
    steps = _steps(training, device, question)
    source = next((source for source in training.sources if source.device is device), None)
    here = source is not None
    sizes = [size for size, step in steps.items() if here or _fits(step, device)]
    if not sizes:
        size, step = next(iter(steps.items()))
        needs = memory(step.memory.high) if step.memory else "more"
        raise UserError(f"may need {needs} at batch size {size:,}, and has {memory(device.memory_gib * 2**30)}")
    rates = {size: size / steps[size].seconds.middle for size in sizes}
    size = next(size for size in sizes if rates[size] >= ENOUGH * max(rates.values()))
    epochs = question.epochs or training.epochs or 1
    seconds = steps[size].seconds * (math.ceil(training.train_samples / size) * epochs)
    total = seconds if here else seconds + exactly(question.start_up_s)
    priced_as = _priced_as(device, here, question.prices)
    cost = None if priced_as is None else total * (question.prices[priced_as] / 3600)
    row = Row(device, here, size, steps[size], seconds, total, cost)
    if source is None:
        return row
    return replace(row, others_share=source.others_share, lowered_by=source.sizes[size].lowered_by)


def _steps(training: Training, device: Datasheet, question: Question) -> dict[int, Step]:
    """A step at each batch size in question, smallest first.

    These are the measured sizes; for a device that is not here, also their doublings, as far as records are trusted.
    """
    own = next((source for source in training.sources if source.device is device), None)
    sizes = sorted({size for source in ([own] if own else training.sources) for size in source.sizes})
    most = min(training.train_samples, MAX_EXTRAPOLATION * sizes[-1])
    while own is None and 2 * sizes[-1] <= most:
        sizes.append(2 * sizes[-1])
    if question.batch_size is not None:
        sizes = [size for size in sizes if size == question.batch_size]
    if not sizes:
        raise UserError(f"was not measured at batch size {question.batch_size:,}")
    if own is not None:
        return {size: step_here(own, size) for size in sizes}
    return {size: _best_known(training, device, size, question) for size in sizes}


def _best_known(training: Training, device: Datasheet, size: int, question: Question) -> Step:
    """The narrowest of the predictions from the devices that are here."""
    found = [step_on(source, device, size, question.precision) for source in training.sources]
    return min(found, key=lambda step: step.seconds.high / max(step.seconds.low, 1e-12))


def _fits(step: Step, device: Datasheet) -> bool:
    """Whether a step surely fits into a card's memory, where both are known."""
    return step.memory is None or step.memory.high <= USABLE * device.memory_gib * 2**30
