"""The answer of `batchscope choose` for one training: a table of devices, three sentences at most, and notes.

The device whose training ends first by the middles of the intervals is called the first one where it is shown to be
faster than every other (interval.py), and the best guess where others may be first as well. Devices that take at most
5 % longer tie with it. Of these one that is here is recommended, then the cheapest, then the fastest.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pandas as pd

from ..analysis.noise import CONFIDENCE
from ..records.formatting import count, memory, percent
from ..records.terminal import wrapped
from .interval import SURE, Interval, digits, times_longer
from .measured import Training
from .rows import Question, Row, rows

_TIE = 0.05  # by which a time may be longer than the shortest, so that place and cost decide


class Answer:
    """What a training takes on each device, and which one to take.

    Raises:
        UserError: for a batch size that was not measured, and a precision that cannot be predicted.
    """

    def __init__(self, training: Training, question: Question):
        self.training = training
        self.epochs = question.epochs or training.epochs or 1
        self.question = replace(question, precision=question.precision or training.precision)
        self.rows, self.larger, self.left_out = rows(training, self.question, self.epochs)
        first, *later = self.rows
        tied = [row for row in self.rows if row.total.middle <= (1 + _TIE) * first.total.middle]
        self.tied = sorted(tied, key=lambda row: (not row.here, row.cost.middle if row.cost else math.inf))
        self.taken = self.tied[0]
        may_be = may_be_first(first.total, [row.total for row in later])
        self.may_be_first = [first, *(later[number] for number in may_be)]  # alone where it is shown to be the first

    def sentences(self) -> list[str]:
        """Which device is first, what the best one here or elsewhere takes, and the cheapest where prices are known."""
        said = (self._first(), self._other_place(), self._cheapest())
        return [f"{line[0].upper()}{line[1:]}." for line in said if line]

    def _first(self) -> str:
        """The first device or those that tie, what the training takes, and how slower devices compare."""
        taken, rivals = self.taken, [row.name for row in self.may_be_first if row not in self.tied]
        slower = [row for row in self.rows if row not in self.tied and row not in self.may_be_first]
        is_first = len(self.tied) == 1 and not rivals
        compared = slower[:1] if is_first else []
        other_place = [row for row in slower if row.here != taken.here][:1]
        compared += [row for row in other_place if row not in compared]
        who = f"{taken.name} first" if is_first else f"best guess {taken.name}"
        takes = f"{count(self.epochs, 'epoch')} {'takes' if self.epochs == 1 else 'take'} {taken}"
        if len(self.tied) > 1:
            who, takes = f"tie of {', '.join(row.name for row in self.tied)}", f"{takes} on {taken.name}"
        takes = ", ".join([takes, *(_as_fast(row, taken) for row in compared)])
        also = f"; may be first as well: {', '.join(rivals)}" if rivals else ""
        return f"{who}: {takes}{also}"

    def _other_place(self) -> str:
        """What the best device here takes where another is taken, else the best one elsewhere."""
        taken = self.taken
        other = next((row for row in self.rows if row.here != taken.here), None)
        if other is None:
            return ""
        if taken.here:
            return f"{other.name}, the best elsewhere, takes {other}"
        start = f"{taken.name} takes longer than {other.total - taken.training} to start"
        return f"{other.name} takes {other}, and is done first if {start}"

    def _cheapest(self) -> str:
        priced = [(row.cost, row) for row in self.rows if row.cost is not None]
        if not priced:
            return ""
        (cost, best), *others = sorted(priced, key=lambda of_row: of_row[0].middle)
        rivals = [others[number][1].name for number in may_be_first(cost, [cost for cost, _ in others])]
        also = f"; may be as cheap: {', '.join(rivals)}" if rivals else ""
        return f"{best.name} is {'probably ' if rivals else ''}the cheapest of those with a price: {best}{also}"

    def table(self) -> pd.DataFrame:
        """A row for each device, the fastest first; a column without a value is left out."""
        cells = [
            {
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
        head, notes = wrapped(self._head(), width), wrapped(self.notes(), width)
        said = wrapped([" ".join(self.sentences())], width, indent=0)
        parts = (head, self.table().to_string(line_width=width).splitlines(), said, notes)
        return "\n\n".join("\n".join(lines) for lines in parts if lines)

    def _head(self) -> list[str]:
        """The training, what was measured, and what is assumed."""
        training, question, size = self.training, self.question, self.rows[0].batch_size
        here = "; ".join(source.device.names[0] for source in training.sources)
        batches, all_of_them = training.batches(size), math.ceil(training.train_samples / size)
        part = f"{count(batches, 'batch', 'batches')} of the " if batches < all_of_them else ""
        work = f"{count(self.epochs, 'epoch')} of {part}{training.train_samples:,} samples at batch size {size:,}"
        return [
            f"{training.title}: {work}, training steps alone",
            f"measured on {here}; intervals of {percent(CONFIDENCE)}, of ratios {percent(SURE)}",
            (
                f"assumed elsewhere: {question.start_up_s:g} s to start, a host as fast as this one, "
                f"precision {question.precision}"
            ),
        ]

    def notes(self) -> list[str]:
        """The best larger batch size, what makes the answer less certain, and the devices that are left out."""
        notes = []
        if row := self.larger:
            at = f"{row.name} at batch size {row.batch_size:,}"
            notes.append(f"a larger batch is faster, and may need more epochs: {at} takes {row}")
        for source in self.training.sources:
            if share := source.others_share:
                took = f"while other programs took {percent(share)} of the processor"
                allow = "its intervals allow for what they took in the windows that are used"
                notes.append(f"{source.device.names[0]} was measured {took}: {allow}")
        if not (self.question.epochs or self.training.epochs):
            notes.append("The runs name no common number of epochs, and one is assumed: write --epochs.")
        return [*notes, *self.training.doubts, *self.left_out]

    def as_json(self) -> dict[str, Any]:
        """Everything in plain containers: seconds, bytes, and what is paid."""
        question, larger = self.question, self.larger
        return {
            "title": self.training.title,
            "epochs": self.epochs,
            "train_samples": self.training.train_samples,
            "limit_train_batches": self.training.limit,
            "batch_size": self.rows[0].batch_size,
            "assumed": {"start_up_s": question.start_up_s, "precision": question.precision},
            "devices": [_as_json(row) for row in self.rows],
            "larger_batch": larger and _as_json(larger),
            "recommended": self.taken.label,
            "tied": [row.label for row in self.tied],
            "may_be_first": [row.label for row in self.may_be_first],
            "sentences": self.sentences(),
            "notes": self.notes(),
        }


def may_be_first(first: Interval, others: Sequence[Interval]) -> list[int]:
    """The numbers of the other times (or costs) that are not shown to be more than the one that is taken for the least."""
    return [number for number, other in enumerate(others) if times_longer(other, first).low <= 1]


def _as_fast(row: Row, taken: Row) -> str:
    """`40 times as fast as the CPU here (25 to 60)`."""
    ratio = times_longer(row.total, taken.total)
    return f"{digits(ratio.value)} times as fast as {row.name} ({digits(ratio.low)} to {digits(ratio.high)})"


def _memory(row: Row) -> str:
    """What a step needs, of what there is."""
    if row.step.memory is None or not row.device.memory_gib:
        return ""
    return f"{digits(row.step.memory.middle / 2**30)} of {memory(row.device.memory_gib * 2**30)}"


def _as_json(row: Row) -> dict[str, Any]:
    return {"label": row.label, "known": row.known, **asdict(row)}
