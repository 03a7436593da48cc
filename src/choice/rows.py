"""The time, memory and cost of a training on each device, at one batch size that all devices can take."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..analysis.selection import ENOUGH_SHARE
from ..errors import UserError
from ..hardware.datasheet import Datasheet, card_names
from ..records.formatting import memory
from .interval import Interval, exactly
from .measured import Training
from .memory import USABLE
from .step import Step, step_here, step_on

MAX_EXTRAPOLATION = 8  # largest predicted batch size ÷ largest measured one
FLOAT32 = "32-true"  # as Lightning calls float32


@dataclass(frozen=True)
class Question:
    """The user's options, and the assumptions about devices that are not here."""

    cards: Sequence[Datasheet]  # to predict
    epochs: int | None = None  # None: as many as the runs were to train, or 1
    batch_size: int | None = None  # a measured one; None: the largest that all devices can take
    prices: Mapping[str, float] = field(default_factory=dict)  # of an hour, by label; of a device here also by kind
    start_up_s: float = 0.0  # until a device that is not here can train
    precision: str | None = None  # as of `step_on`


@dataclass(frozen=True)
class Row:
    """A device with the training's time and cost: training steps alone, without validation."""

    device: Datasheet
    here: bool
    batch_size: int
    step: Step
    training: Interval  # seconds of all epochs
    total: Interval  # training and start-up
    cost: Interval | None  # None where no price is known

    @property
    def label(self) -> str:
        """The short name of the device: `cpu`, `t4`."""
        return self.device.short[0]

    @property
    def name(self) -> str:
        """The name of the device in a sentence: `the CPU here`, `T4`."""
        return f"the {self.label.upper()} here" if self.here else self.label.upper()

    @property
    def provenance(self) -> str:
        """`measured` or `predicted`."""
        return "measured" if self.here else "predicted"

    @property
    def shortage(self) -> str:
        """Why a step may not fit into a card's memory; empty if it surely fits, or the need is unknown."""
        needs, has = self.step.memory, self.device.memory_gib * 2**30
        if self.here or needs is None or needs.high <= USABLE * has:
            return ""
        return f"may need {memory(needs.high)} at batch size {self.batch_size:,}, and has {memory(has)}"

    def __str__(self) -> str:
        return f"{self.total} ({self.provenance}{f', cost {self.cost.span()}' if self.cost else ''})"


def compare_devices(training: Training, question: Question, epochs: int) -> tuple[list[Row], Row | None, list[str]]:
    """Return a row for each device, the fastest first; the best larger batch; and a line for each device without a row.

    The batch size is the largest that all devices can take, without devices that cannot train at all. The best larger batch is the
    smallest within 10 % of the shortest time; None if none saves 10 %, or the user asks for a size.

    Raises:
        UserError: for a batch size that was not measured, and for another precision if steps were not measured in float32.
    """
    sizes = {size for source in training.sources for size in source.sizes}
    check_measured(question, f"{training.title} was", sizes, training.precision)
    devices = [source.device for source in training.sources]
    devices += [card for card in question.cards if card not in devices]
    rows_of_devices, left_out = [], []
    for device in devices:
        try:
            rows_of_devices.append(rows_by_size(training, device, question, epochs))
        except UserError as error:
            left_out.append(f"{device.short[0]} {error}")
    usable = [row for device_rows in rows_of_devices for row in device_rows.values() if not row.shortage]
    usable_sizes = [row.batch_size for row in usable]
    size = question.batch_size or max(usable_sizes, key=lambda size: (usable_sizes.count(size), size))
    rows = []
    for device_rows in rows_of_devices:
        if (row := device_rows.get(size)) is None:
            left_out.append(f"{next(iter(device_rows.values())).label} was not measured at batch size {size:,}")
        elif row.shortage:
            left_out.append(f"{row.label} {row.shortage}")
        else:
            rows.append(_with_capacity(row, device_rows))
    rows.sort(key=lambda row: row.total.middle)
    return rows, None if question.batch_size else _best_larger(usable, rows[0]), left_out


def _best_larger(usable: Sequence[Row], fastest: Row) -> Row | None:
    """Return the smallest larger batch within 10 % of the shortest time; None if none is 10 % faster than `fastest`."""
    size, limit = fastest.batch_size, ENOUGH_SHARE * fastest.total.middle
    faster = [row for row in usable if row.batch_size > size and row.total.middle < limit]
    shortest = min((row.total.middle for row in faster), default=0.0)
    near_shortest = [row for row in faster if ENOUGH_SHARE * row.total.middle <= shortest]
    return min(near_shortest, key=lambda row: (row.batch_size, row.total.middle), default=None)


def check_measured(question: Question, subject: str, sizes: Collection[int], precision: str) -> None:
    """Raise UserError for a batch size or a precision that the measured steps of the `subject` cannot answer."""
    if question.batch_size not in (None, *sizes):
        measured_sizes = ", ".join(f"{size:,}" for size in sorted(sizes))
        raise UserError(f"--batch-size: got {question.batch_size:,}; {subject} measured at {measured_sizes}")
    if question.precision not in (None, precision) and precision != FLOAT32:
        raise UserError(f"--precision: {subject} measured in {precision}, takes steps in {FLOAT32}")


def check_prices(measured_devices: Sequence[Datasheet], question: Question) -> None:
    """Raise UserError for a price that belongs to no device: neither to one that is here nor to a card of the question."""
    priced_names = [name for device in measured_devices for name in priced_as(device)]
    priced_names = list(dict.fromkeys([*priced_names, *(card.short[0] for card in question.cards)]))
    for name, price in question.prices.items():
        if name not in priced_names:
            message = f"--price: got {name}={price:g}, the price of no device that is compared"
            raise UserError(f"{message}; takes those of {', '.join(priced_names)}")


def priced_as(device: Datasheet) -> tuple[str, ...]:
    """Return the names of a device that is here for `--price`: the short names of a known card, and the kind."""
    return (*(name for name in device.short if name in card_names()), device.kind)


def rows_by_size(training: Training, device: Datasheet, question: Question, epochs: int) -> dict[int, Row]:
    """Return the rows of a device at the measured sizes, smallest first; those of a predicted card also at doubled sizes."""
    source = next((source for source in training.sources if source.device is device), None)
    if source is not None:
        steps = {size: step_here(source, size) for size in source.sizes}
    else:
        sizes = sorted({size for source in training.sources for size in source.sizes})
        largest = min(training.train_samples, MAX_EXTRAPOLATION * sizes[-1])
        while 2 * sizes[-1] <= largest:
            sizes.append(2 * sizes[-1])
        precision = None if question.precision == training.precision else question.precision
        steps = {size: _narrowest_prediction(training, device, size, precision) for size in sizes}
    names = priced_as(device) if source else (device.short[0],)
    price = next((question.prices[name] for name in names if name in question.prices), None)
    rows = {}
    for size, step in steps.items():
        seconds = step.seconds * (training.steps(size) * epochs)
        total = seconds if source else seconds + exactly(question.start_up_s)
        cost = None if price is None else total * (price / 3600)
        rows[size] = Row(device, source is not None, size, step, seconds, total, cost)
    return rows


def _narrowest_prediction(training: Training, device: Datasheet, size: int, precision: str | None) -> Step:
    """Return the prediction with the narrowest interval, of those from each device that is here."""
    steps = [step_on(source, device, size, precision) for source in training.sources]
    return min(steps, key=lambda step: step.seconds.high / max(step.seconds.low, 1e-12))


def _with_capacity(row: Row, device_rows: Mapping[int, Row]) -> Row:
    """Return the row with the limit `capacity` if the next larger batch would be more than 10 % faster and may not fit."""
    larger = next((other for other in device_rows.values() if other.batch_size > row.batch_size), row)
    is_short = larger.shortage and larger.training.middle < ENOUGH_SHARE * row.training.middle
    return replace(row, step=replace(row.step, limit="capacity")) if is_short else row
