"""The answer of `batchscope choose` for one training: a table of devices, three sentences at most, and notes.

The device whose training ends first by the middles of the intervals is taken. Of devices that take at most 5 % longer, one
that is here is taken, then the cheapest, then the fastest. It is called the first one where it is shown to be faster than
every other (interval.py). It is the best guess where others may be first as well. Where another is shown to be faster than
it, the answer says so, and why it is taken.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from ..analysis.noise import CONFIDENCE, Ratio
from ..errors import UserError
from ..records.formatting import count, percent
from ..records.terminal import wrapped
from .interval import SURE, Interval, digits, exactly, times_longer
from .measured import Training
from .rows import Question, Row, rows

_ALIKE = 0.05  # by which a time may be longer than the shortest, so that place and cost decide
_LITTLE = 0.005  # of a rate: no percent
_MOST_NAMED = 4  # devices in a sentence


class Answer:
    """What a training takes on each device, and which one to take.

    Raises:
        UserError: for a batch size that was not measured, a precision that cannot be predicted, or if no device is left.
    """

    def __init__(self, training: Training, question: Question):
        self.training, self.question = training, question
        self.epochs = question.epochs or training.epochs or 1
        self.rows, self.left_out = rows(training, question)
        if not self.rows:
            raise UserError(f"choose: no device is left: {'; '.join(self.left_out)}")
        first, *later = self.rows
        alike = [row for row in self.rows if row.total.middle <= (1 + _ALIKE) * first.total.middle]
        self.taken = min(
            alike, key=lambda row: (not row.here, row.cost.middle if row.cost else math.inf, row.total.middle)
        )
        may_be = may_be_first(first.total, [row.total for row in later])
        self.may_be_first = [first, *(later[number] for number in may_be)]  # alone where it is shown to be the first

    def sentences(self) -> list[str]:
        """Which device is first, what the best one here or elsewhere takes, and the cheapest where prices are known."""
        return [
            f"{line[0].upper()}{line[1:]}." for line in (self._first(), self._other_place(), self._cheapest()) if line
        ]

    def _first(self) -> str:
        """The device that is taken, what it takes, how it compares with slower ones, and how sure it is that it is first."""
        taken = self.taken
        takes = f"{count(self.epochs, 'epoch')} {'takes' if self.epochs == 1 else 'take'} {taken}"
        takes = ", ".join([takes, *(_as_fast(ratio, row.name) for ratio, row in self._compared())])
        rivals = [row for row in self.may_be_first if row is not taken]
        if taken not in self.may_be_first:
            first, why = self.rows[0], self._why_not_the_first()
            near = f"within {percent(_ALIKE)} of {first.name} ({first.total}), {'the first' if len(rivals) == 1 else 'the best guess'}"
            return f"take {taken.name}: {takes}; {near}, and {why}"
        if not rivals:
            return f"{taken.name} first: {takes}" if len(self.rows) > 1 else f"take {taken.name}: {takes}"
        named = [f"{row.name} ({row.total})" for row in rivals[:_MOST_NAMED]]
        named += [f"{more} more"] if (more := len(rivals) - _MOST_NAMED) > 0 else []
        return f"best guess {taken.name}: {takes}; may be first as well: {', '.join(named)}"

    def _compared(self) -> list[tuple[Ratio, Row]]:
        """How many times as long others take: the next one where none may be first as well, and the best at the other place."""
        taken = self.taken
        ratios = [
            (times_longer(row.total, taken.total), row)
            for row in self.rows
            if row is not taken and row not in self.may_be_first
        ]
        found = [min(ratios, key=lambda each: each[0].low)] if ratios and self.may_be_first == [taken] else []
        other_place = [each for each in ratios if each[1].here != taken.here][:1]
        return found + [each for each in other_place if each not in found]

    def _why_not_the_first(self) -> str:
        if self.taken.here and not self.rows[0].here:
            return "here"
        return "cheaper" if self.rows[0].cost else "its price is known"

    def _other_place(self) -> str:
        """What the best device here takes where another is taken, else the best one elsewhere; and the start-up."""
        taken, start_up = self.taken, self.question.start_up_s
        other = next((row for row in self.rows if row.here != taken.here), None)
        if other is None:
            return ""
        assumed = f"{exactly(start_up) if start_up else 'no time'} to start a device elsewhere is assumed (--start-up)"
        if taken.here:
            return f"{other.name}, the best elsewhere, takes {other}; {assumed}"
        start = f"{taken.name} takes longer than about {(other.total - taken.training).about()} to start"
        return f"{other.name} takes {other}, and is done first if {start}; {assumed}"

    def _cheapest(self) -> str:
        priced = [(row.cost.middle, row) for row in self.rows if row.cost is not None]
        best = min(priced, key=lambda each: each[0], default=(0.0, None))[1]
        if best is None:
            return ""
        return f"{best.name} is the cheapest of those with a price{'' if best is self.taken else f': {best}'}"

    def table(self) -> pd.DataFrame:
        """A row for each device, the fastest first; a column without a value is left out."""
        cells = [
            {
                "batch": f"{row.batch_size:,}",
                count(self.epochs, "epoch"): str(row.training),
                "and start-up": str(row.total) if self.question.start_up_s else "",
                "cost": row.cost.span() if row.cost else "",
                "memory": _memory(row),
                "limit": row.step.limit,
                "known": row.known,
            }
            for row in self.rows
        ]
        found = pd.DataFrame(cells, index=[f"{row.label} (here)" if row.here else row.label for row in self.rows])
        return found.loc[:, found.astype(bool).any()]

    def text(self, width: int) -> str:
        """Everything for a terminal of so many columns."""
        table = self.table().to_string().splitlines()
        head = wrapped([*self._head(), *self.training.doubts], width)
        said = wrapped([" ".join(self.sentences())], width, indent=0)
        return "\n\n".join("\n".join(lines) for lines in (head, table, said, wrapped(self.notes(), width)) if lines)

    def _head(self) -> list[str]:
        """The training, what was measured, and what is assumed."""
        training, question = self.training, self.question
        places = [
            f"{source.device.short[0]} ({source.device.names[0]}) at batch sizes {', '.join(f'{size:,}' for size in source.sizes)}"
            for source in training.sources
        ]
        start_up = exactly(question.start_up_s) if question.start_up_s else "no time"
        precision = question.precision or training.precision
        return [
            f"{training.title}: {count(self.epochs, 'epoch')} of {training.train_samples:,} samples, training steps alone",
            f"measured: {', '.join(places)}",
            f"assumed elsewhere: {start_up} to start, a host as fast as this one, precision {precision}",
            f"times and costs: in {100 * CONFIDENCE:.0f} of 100 cases within the interval; ratios: in {100 * SURE:.0f}",
        ]

    def notes(self) -> list[str]:
        """What other programs took, the devices that are left out, and that batch sizes differ."""
        sizes = {row.batch_size for row in self.rows}
        differ = f"a larger batch may need more epochs; --batch-size {min(sizes)} compares all at the same size"
        busy = [_beside_others(row) for row in self.rows if row.others_share]
        return [*busy, *self.left_out, *([differ] if len(sizes) > 1 else [])]

    def as_json(self) -> dict[str, Any]:
        """Everything in plain containers: seconds, bytes, and what is paid."""
        question = self.question
        return {
            "title": self.training.title,
            "epochs": self.epochs,
            "train_samples": self.training.train_samples,
            "assumed": {
                "start_up_s": question.start_up_s,
                "precision": question.precision or self.training.precision,
            },
            "devices": [{"label": row.label, "known": row.known, **asdict(row)} for row in self.rows],
            "recommended": self.taken.label,
            "may_be_first": [row.label for row in self.may_be_first],
            "sentences": self.sentences(),
            "notes": [*self.training.doubts, *self.notes()],
        }


def may_be_first(first: Interval, others: Sequence[Interval]) -> list[int]:
    """The numbers of the other times that are not shown to be longer than the one that is taken for the shortest."""
    return [number for number, other in enumerate(others) if times_longer(other, first).low <= 1]


def _as_fast(ratio: Ratio, name: str) -> str:
    """`40 times as fast as the CPU here (25 to 60)`; a number near 1 with more digits, so that it does not seem to be 1."""
    value, low, high = (f"{end:.4g}" if end < 1.1 else digits(end) for end in (ratio.value, ratio.low, ratio.high))
    return f"{value} times as fast as {name} ({low} to {high})"


def _beside_others(row: Row) -> str:
    """What other programs took meanwhile, and what that means for the times."""
    took = f"{row.name} was measured while other programs took {percent(row.others_share or 0.0)} of the processor"
    if row.lowered_by < _LITTLE:
        return f"{took}: its times are of the moments in which they took little"
    may_have = f"they may have lowered its rate by {percent(row.lowered_by)}, and its intervals are wider by that"
    return f"{took}: in the moments that its times are of, {may_have}"


def _memory(row: Row) -> str:
    """What a step needs, of what there is."""
    if row.step.memory is None or not row.device.memory_gib:
        return ""
    return f"{digits(row.step.memory.middle / 2**30)} of {row.device.memory_gib:.3g} GiB"
