"""The answer of `batchscope choose` for one training: a table of devices, three sentences at most, and notes.

The first device is the one whose total time has the smallest middle. A sentence calls it "first" if it is shown to be faster than
every other device (interval.py), and "best guess" if other devices may be first as well. Devices that take at most 5 % longer
tie with it. Among these a device that is here is recommended, then the cheapest, then the fastest.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pandas as pd

from ..analysis.noise import CONFIDENCE
from ..records.formatting import count, memory, percent
from ..records.terminal import wrapped
from .interval import SURE, Interval, digits, time_ratio
from .measured import Training
from .rows import Question, Row, compare_devices

_TIE_MARGIN = 0.05  # relative to the shortest time: within it, where a device is and its cost decide


class DeviceChoice:
    """The time of a training on each device, and the recommended device.

    Raises:
        UserError: for a batch size that was not measured, and for a precision that cannot be predicted.
    """

    def __init__(self, training: Training, question: Question):
        self.training = training
        self.epochs = question.epochs or training.epochs or 1
        self.question = replace(question, precision=question.precision or training.precision)
        self.rows, self.larger_batch, self.left_out = compare_devices(training, self.question, self.epochs)
        fastest, *slower = self.rows
        tied = [row for row in self.rows if row.total.middle <= (1 + _TIE_MARGIN) * fastest.total.middle]
        self.tied = sorted(tied, key=lambda row: (not row.here, row.cost.middle if row.cost else math.inf))
        self.recommended = self.tied[0]
        rivals = may_be_first(fastest.total, [row.total for row in slower])
        self.may_be_first = [fastest, *(slower[index] for index in rivals)]  # one row if it is shown to be the first

    def sentences(self) -> list[str]:
        """Return which device is first, the best device at the other place, and the cheapest device if prices are known."""
        sentences = (self._winner_sentence(), self._here_or_elsewhere_sentence(), self._price_sentence())
        return [f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences if sentence]

    def _winner_sentence(self) -> str:
        """Name the first device or those that tie, the time of the training, and how much slower other devices are."""
        recommended, rivals = self.recommended, [row.name for row in self.may_be_first if row not in self.tied]
        slower = [row for row in self.rows if row not in self.tied and row not in self.may_be_first]
        is_first = len(self.tied) == 1 and not rivals
        compared = slower[:1] if is_first else []
        best_at_other_place = [row for row in slower if row.here != recommended.here][:1]
        compared += [row for row in best_at_other_place if row not in compared]
        verdict = f"{recommended.name} first" if is_first else f"best guess {recommended.name}"
        duration = f"{count(self.epochs, 'epoch')} {'takes' if self.epochs == 1 else 'take'} {recommended}"
        if len(self.tied) > 1:
            verdict = f"tie of {', '.join(row.name for row in self.tied)}"
            duration += f" on {recommended.name}"
        duration = ", ".join([duration, *(_speedup(row, recommended) for row in compared)])
        rivals_clause = f"; may be first as well: {', '.join(rivals)}" if rivals else ""
        return f"{verdict}: {duration}{rivals_clause}"

    def _here_or_elsewhere_sentence(self) -> str:
        """Return the time of the best device elsewhere if one here is recommended, else that of the best device here."""
        recommended = self.recommended
        alternative = next((row for row in self.rows if row.here != recommended.here), None)
        if alternative is None:
            return ""
        if recommended.here:
            return f"{alternative.name}, the best elsewhere, takes {alternative}"
        condition = f"{recommended.name} takes longer than {alternative.total - recommended.training} to start"
        return f"{alternative.name} takes {alternative}, and is done first if {condition}"

    def _price_sentence(self) -> str:
        """Name the cheapest device with a price, and those that may be as cheap."""
        priced = [(row.cost, row) for row in self.rows if row.cost is not None]
        if not priced:
            return ""
        (least_cost, cheapest), *dearer = sorted(priced, key=lambda cost_and_row: cost_and_row[0].middle)
        rivals = [dearer[index][1].name for index in may_be_first(least_cost, [cost for cost, _ in dearer])]
        rivals_clause = f"; may be as cheap: {', '.join(rivals)}" if rivals else ""
        is_cheapest = f"is {'probably ' if rivals else ''}the cheapest of those with a price"
        return f"{cheapest.name} {is_cheapest}: {cheapest}{rivals_clause}"

    def table(self) -> pd.DataFrame:
        """Return a table with a row for each device, the fastest first; a column without values is left out."""
        cells = [
            {
                count(self.epochs, "epoch"): str(row.training),
                "and start-up": str(row.total) if self.question.start_up_s else "",
                "cost": row.cost.span() if row.cost else "",
                "memory": _memory_cell(row),
                "limit": row.step.limit,
                "known": row.provenance,
            }
            for row in self.rows
        ]
        table = pd.DataFrame(cells, index=[f"{row.label} (here)" if row.here else row.label for row in self.rows])
        return table.loc[:, table.astype(bool).any()]

    def text(self, width: int) -> str:
        """Return the whole text for a terminal of `width` columns."""
        header, notes = wrapped(self._header(), width), wrapped(self.notes(), width)
        sentences = wrapped([" ".join(self.sentences())], width, indent=0)
        parts = (header, self.table().to_string(line_width=width).splitlines(), sentences, notes)
        return "\n\n".join("\n".join(lines) for lines in parts if lines)

    def _header(self) -> list[str]:
        """Return the lines about the training, the measured devices, and the assumptions."""
        training, question, size = self.training, self.question, self.rows[0].batch_size
        device_names = "; ".join(source.device.names[0] for source in training.sources)
        batches, batches_of_whole_set = training.batches(size), math.ceil(training.train_samples / size)
        limit = f"{count(batches, 'batch', 'batches')} of the " if batches < batches_of_whole_set else ""
        workload = f"{count(self.epochs, 'epoch')} of {limit}{training.train_samples:,} samples at batch size {size:,}"
        assumptions = f"{question.start_up_s:g} s to start, a host as fast as this one, precision {question.precision}"
        return [
            f"{training.title}: {workload}, training steps alone",
            f"measured on {device_names}; intervals of {percent(CONFIDENCE)}, of ratios {percent(SURE)}",
            f"assumed elsewhere: {assumptions}",
        ]

    def notes(self) -> list[str]:
        """Return the best larger batch size, the reasons for doubt, and the devices that are left out."""
        notes = []
        if row := self.larger_batch:
            candidate = f"{row.name} at batch size {row.batch_size:,}"
            notes.append(f"a larger batch is faster, and may need more epochs: {candidate} takes {row}")
        for source in self.training.sources:
            if share := source.others_share:
                circumstance = f"while other programs took {percent(share)} of the processor"
                allowance = "its intervals allow for what they took in the windows that are used"
                notes.append(f"{source.device.names[0]} was measured {circumstance}: {allowance}")
        if not (self.question.epochs or self.training.epochs):
            notes.append("The runs name no common number of epochs, and one is assumed: write --epochs.")
        return [*notes, *self.training.doubts, *self.left_out]

    def as_json(self) -> dict[str, Any]:
        """Return the choice in plain containers: seconds, bytes, and costs in the currency of the prices."""
        question, larger = self.question, self.larger_batch
        return {
            "title": self.training.title,
            "epochs": self.epochs,
            "train_samples": self.training.train_samples,
            "limit_train_batches": self.training.limit_train_batches,
            "batch_size": self.rows[0].batch_size,
            "assumed": {"start_up_s": question.start_up_s, "precision": question.precision},
            "devices": [_row_as_json(row) for row in self.rows],
            "larger_batch": larger and _row_as_json(larger),
            "recommended": self.recommended.label,
            "tied": [row.label for row in self.tied],
            "may_be_first": [row.label for row in self.may_be_first],
            "sentences": self.sentences(),
            "notes": self.notes(),
        }


def may_be_first(least: Interval, others: Sequence[Interval]) -> list[int]:
    """Return the indices of the other intervals, times or costs, that are not shown to be larger than `least`."""
    return [index for index, interval in enumerate(others) if time_ratio(interval, least).low <= 1]


def _speedup(row: Row, recommended: Row) -> str:
    """Compare the recommended device with a row's: `40 times as fast as the CPU here (25 to 60)`."""
    ratio = time_ratio(row.total, recommended.total)
    return f"{digits(ratio.value)} times as fast as {row.name} ({digits(ratio.low)} to {digits(ratio.high)})"


def _memory_cell(row: Row) -> str:
    """Return the memory that a step needs and that of the device: `2.1 of 15 GiB`; empty where one is unknown."""
    if row.step.memory is None or not row.device.memory_gib:
        return ""
    gib = row.step.memory.middle / 2**30
    return f"{digits(gib) if gib >= 0.1 else memory(gib * 2**30)} of {memory(row.device.memory_gib * 2**30)}"


def _row_as_json(row: Row) -> dict[str, Any]:
    return {"label": row.label, "known": row.provenance, **asdict(row)}
