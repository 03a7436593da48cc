"""What a training takes on each device, at one batch size that all of them can take."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..analysis.selection import ENOUGH
from ..errors import UserError
from ..hardware.datasheet import Datasheet, card_names
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
    batch_size: int | None = None  # a measured one; None: the largest that all devices can take
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

    @property
    def shortage(self) -> str:
        """Why a step may not fit into a card's memory; empty where it surely does, and where nobody knows."""
        needs, has = self.step.memory, self.device.memory_gib * 2**30
        if self.here or needs is None or needs.high <= USABLE * has:
            return ""
        return f"may need {memory(needs.high)} at batch size {self.batch_size:,}, and has {memory(has)}"

    def __str__(self) -> str:
        return f"{self.total} ({self.known}{f', cost {self.cost.span()}' if self.cost else ''})"


def rows(training: Training, question: Question, epochs: int) -> tuple[list[Row], Row | None, list[str]]:
    """A row for each device, the fastest first; the best larger batch; a line for each device that has no row.

    The batch size is the largest that all devices can take, of those that can train at all. The best larger one is the
    smallest within 10 % of the shortest time; None where none saves 10 %, or a size is asked for.

    Raises:
        UserError: for a batch size that was not measured, and for another precision of steps that were not in float32.
    """
    sizes = {size for source in training.sources for size in source.sizes}
    check_measured(question, f"{training.title} was", sizes, training.precision)
    devices = [source.device for source in training.sources]
    devices += [card for card in question.cards if card not in devices]
    every, left_out = [], []
    for device in devices:
        try:
            every.append(by_size(training, device, question, epochs))
        except UserError as error:
            left_out.append(f"{device.short[0]} {error}")
    usable = [row for of_device in every for row in of_device.values() if not row.shortage]
    fitting = [row.batch_size for row in usable]
    size = question.batch_size or max(fitting, key=lambda size: (fitting.count(size), size))
    found = []
    for of_device in every:
        if (row := of_device.get(size)) is None:
            left_out.append(f"{next(iter(of_device.values())).label} was not measured at batch size {size:,}")
        elif row.shortage:
            left_out.append(f"{row.label} {row.shortage}")
        else:
            found.append(_with_capacity(row, of_device))
    found.sort(key=lambda row: row.total.middle)
    return found, None if question.batch_size else _best_larger(usable, found[0]), left_out


def _best_larger(usable: Sequence[Row], first: Row) -> Row | None:
    """The smallest larger batch within 10 % of the shortest time; None where none is as much faster than `first`."""
    size, most = first.batch_size, ENOUGH * first.total.middle
    faster = [row for row in usable if row.batch_size > size and row.total.middle < most]
    least = min((row.total.middle for row in faster), default=0.0)
    enough = [row for row in faster if ENOUGH * row.total.middle <= least]
    return min(enough, key=lambda row: (row.batch_size, row.total.middle), default=None)


def check_measured(question: Question, which: str, sizes: Collection[int], precision: str) -> None:
    """Raises UserError for a batch size or a precision that the steps of the training `which` do not answer."""
    if question.batch_size not in (None, *sizes):
        known = ", ".join(f"{size:,}" for size in sorted(sizes))
        raise UserError(f"--batch-size: got {question.batch_size:,}; {which} measured at {known}")
    if question.precision not in (None, precision) and precision != FULL:
        raise UserError(f"--precision: {which} measured in {precision}, takes steps in {FULL}")


def check_prices(here: Sequence[Datasheet], question: Question) -> None:
    """Raises UserError for a price that no device has, of those that are here and the cards to compare with."""
    known = [name for device in here for name in priced_as(device)]
    known = list(dict.fromkeys([*known, *(card.short[0] for card in question.cards)]))
    for name, price in question.prices.items():
        if name not in known:
            got = f"--price: got {name}={price:g}, the price of no device that is compared"
            raise UserError(f"{got}; takes those of {', '.join(known)}")


def priced_as(device: Datasheet) -> tuple[str, ...]:
    """The names by which `--price` may mean a device that is here: those of a known card, and its kind."""
    return (*(name for name in device.short if name in card_names()), device.kind)


def by_size(training: Training, device: Datasheet, question: Question, epochs: int) -> dict[int, Row]:
    """The rows of a device at the measured sizes, smallest first; of a card that is not here, also at doublings."""
    here = next((source for source in training.sources if source.device is device), None)
    if here is not None:
        steps = {size: step_here(here, size) for size in here.sizes}
    else:
        sizes = sorted({size for source in training.sources for size in source.sizes})
        most = min(training.train_samples, MAX_EXTRAPOLATION * sizes[-1])
        while 2 * sizes[-1] <= most:
            sizes.append(2 * sizes[-1])
        precision = None if question.precision == training.precision else question.precision
        steps = {size: _best_known(training, device, size, precision) for size in sizes}
    names = priced_as(device) if here else (device.short[0],)
    price = next((question.prices[name] for name in names if name in question.prices), None)
    found = {}
    for size, step in steps.items():
        seconds = step.seconds * (training.steps(size) * epochs)
        total = seconds if here else seconds + exactly(question.start_up_s)
        cost = None if price is None else total * (price / 3600)
        found[size] = Row(device, here is not None, size, step, seconds, total, cost)
    return found


def _best_known(training: Training, device: Datasheet, size: int, precision: str | None) -> Step:
    """The narrowest of the predictions from the devices that are here."""
    steps = [step_on(source, device, size, precision) for source in training.sources]
    return min(steps, key=lambda step: step.seconds.high / max(step.seconds.low, 1e-12))


def _with_capacity(row: Row, of_device: Mapping[int, Row]) -> Row:
    """The row, limited by `capacity` where the next larger batch would be faster by more than 10 %, and may not fit."""
    larger = next((other for other in of_device.values() if other.batch_size > row.batch_size), row)
    is_short = larger.shortage and larger.training.middle < ENOUGH * row.training.middle
    return replace(row, step=replace(row.step, limit="capacity")) if is_short else row
