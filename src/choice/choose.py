"""The answer to `batchscope choose`: rows, one recommendation, and the checks of devices that were measured."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UserError, printable
from ..records.formatting import count, percent
from ..records.terminal import columns, wrapped
from . import table
from .launches import host_of
from .precision import format_of
from .recommend import Recommendation, pays_from, recommend
from .rows import Check, LeftOut, Question, Row, Target, checks, labels, rows
from .seconds import Interval, exactly
from .words import listed, one_time, time

if TYPE_CHECKING:
    from .step import Workload

SCHEMA = 1  # of the JSON document
_MOST_NAMED = 8  # devices in a note


@dataclass(frozen=True)
class Choice:
    """What `batchscope choose` says."""

    title: str
    question: Question
    train_samples: int
    measured: list[tuple[str, str, list[int]]]  # each device that is here: its label, its name, its batch sizes
    rows: list[Row]
    left_out: list[LeftOut]
    warning: str  # why not to trust the answer; empty for none
    recommendation: Recommendation
    pays: list[str]
    checks: list[Check]
    notes: list[str]

    def text(self, width: int | None = None) -> str:
        """Everything for a terminal of so many columns, its own width by default."""
        width = width or columns()
        lines = wrapped(self._head(), width)
        lines += ["", *table.to_text(self.rows, self.question, width)]
        lines += [
            "",
            *wrapped(
                filter(None, [self.warning, " ".join(self.recommendation.lines), " ".join(self.pays)]), width, indent=0
            ),
        ]
        if self.left_out or self.notes:
            lines += ["", *wrapped([*table.left_out_lines(self.left_out), *self.notes], width)]
        if self.checks:
            lines += ["", *wrapped(list(self._check_lines()), width)]
        return "\n".join(lines)

    def markdown(self) -> str:
        """The same as a page, with the whole table and the plot."""
        parts = [
            f"# Which device for {self.title}",
            "\n".join(self._head()[1:]),
            "\n".join(table.to_markdown(self.rows, self.question)),
            *filter(None, [self.warning]),
            " ".join([*self.recommendation.lines, *self.pays]),
            "![Time to train on each device](choice.png)",
        ]
        remarks = [*table.left_out_lines(self.left_out), *self.notes, *self._check_lines()]
        text = "\n\n".join([*parts, *(["\n".join(f"- {line}" for line in remarks)] if remarks else [])]) + "\n"
        return text.replace("<", "&lt;")  # nothing that a record says of itself is HTML

    def as_json(self) -> dict[str, Any]:
        """Everything in plain containers: seconds, bytes, joules; an interval is `[low, middle, high]`."""
        question = self.question
        return {
            "schema": SCHEMA,
            "title": self.title,
            "epochs": question.epochs,
            "train_samples": self.train_samples,
            "deadline_s": question.deadline,
            "budget": question.budget,
            "currency": question.prices.currency or None,
            "prices_per_hour": dict(question.prices.per_hour),
            "prices_source": question.prices.source or None,
            "start_up_s": question.start_up,
            "precision": question.precision,
            "host": question.host,
            "confidence": 0.8,
            "measured": [
                {"label": label, "device": name, "batch_sizes": sizes} for label, name, sizes in self.measured
            ],
            "devices": [_row_as_json(row) for row in self.rows],
            "left_out": [{"label": one.label, "reason": one.reason} for one in self.left_out],
            "warning": self.warning or None,
            "recommended": self.recommendation.label,
            "too_close_to_call": self.recommendation.too_close,
            "recommendation": " ".join([*self.recommendation.lines, *self.pays]),
            "checks": [_check_as_json(check) for check in self.checks],
            "notes": self.notes,
        }

    def _head(self) -> list[str]:
        """The training, where it was measured, and what is assumed."""
        question = self.question
        here = listed([f"{label} ({name})" for label, name, _ in self.measured])
        sizes = sorted({size for _, _, found in self.measured for size in found})
        epochs = f"{count(question.epochs, 'epoch')} of {self.train_samples:,} samples"
        assumed = [f"{epochs}{f' ({question.epochs_from})' if question.epochs_from else ''}, training steps alone"]
        if any(row.start_up for row in self.rows):
            assumed.append(f"{one_time(question.start_up)} to start a device that is not here (--start-up)")
        lines = [self.title, f"measured on {here} at batch sizes {', '.join(f'{size:,}' for size in sizes)}"]
        lines.append(f"assumed: {'; '.join(assumed)}; intervals hold 80 %")
        if question.prices.source:
            lines.append(f"prices: {question.prices.source}")
        return lines

    def _check_lines(self) -> Iterator[str]:
        """A line for each measured device and each other one that it was predicted from."""
        for (label, source), found in itertools.groupby(self.checks, lambda check: (check.label, check.source)):
            each = list(found)
            steps = "; ".join(map(_check_text, each))
            yield (
                f"check: a step on {label}, predicted from {source}: {steps}. "
                f"{sum(check.holds for check in each)} of {len(each)} hold."
            )


def _check_text(check: Check) -> str:
    bound = check.predicted.how.startswith("bound")
    said = time(check.predicted.seconds, bound)
    measured = time(exactly(check.measured.middle), count=table.MEASURED_DIGITS)
    return f"batch {check.batch_size:,} {said}{' at best' if bound else ''} ({measured} measured)"


def choose(
    workloads: Sequence["Workload"],
    targets: Sequence[Target],
    question: Question,
) -> Choice:
    """Compare devices for one training.

    Args:
        workloads: the training as it was measured on each device that is here.
        targets: the devices on paper to compare with.
        question: what is asked and assumed.

    Raises:
        UserError: if a step cannot be predicted at all.
    """
    first = workloads[0]
    if first.train_samples < 1:
        raise UserError(
            "choose: no record says how many samples an epoch has; give the data num_samples, and run the sweep again"
        )
    if question.batch_size is not None and question.batch_size > first.train_samples:
        raise UserError(f"--batch-size: got {question.batch_size:,}, and an epoch has {first.train_samples:,} samples")
    host_of(question.host)  # what is wrong for every device is no reason to leave one out
    format_of(first.precision, question.precision)
    found, left_out = rows(workloads, targets, question)
    if not found:
        raise UserError(f"choose: no device is left: {'; '.join(table.left_out_lines(left_out))}")
    return Choice(
        title=first.title,
        question=question,
        train_samples=first.train_samples,
        measured=[
            (label, one.device.name, sorted(one.batch_sizes))
            for label, one in zip(labels(workloads), workloads, strict=True)
        ],
        rows=found,
        left_out=left_out,
        warning=_warning(workloads),
        recommendation=recommend(found, question),
        pays=pays_from(found, workloads, question),
        checks=checks(workloads, question),
        notes=[
            *dict.fromkeys(printable(line) for one in workloads for line in one.notes),
            *_batches(found, workloads, question),
        ],
    )


def _warning(workloads: Sequence["Workload"]) -> str:
    """A line if the answer rests on what was measured beside other programs."""
    shares = [one.busy for one in workloads if one.busy is not None]
    if not shares:
        return ""
    return (
        f"Measured on a busy machine: other programs took up to {percent(min(1.0, max(shares)))} of its processor. Its times "
        "are too long, and the answer may be another one when it is quiet."
    )


def _batches(rows: Sequence[Row], workloads: Sequence["Workload"], question: Question) -> list[str]:
    """That devices have different batch sizes, and which of these were not measured."""
    sizes = {row.batch_size for row in rows}
    if question.batch_size is not None or len(sizes) < 2:
        return []
    most = max(size for workload in workloads for size in workload.batch_sizes)
    beyond = [row.label for row in rows if row.batch_size > most]
    line = f"a larger batch may need more epochs; --batch-size {min(sizes)} compares all devices at the same size"
    verb = "has" if len(beyond) == 1 else "have"
    named = listed(beyond) if len(beyond) <= _MOST_NAMED else f"{len(beyond)} devices"
    return [f"{line}; {named} {verb} sizes beyond the measured ones" if beyond else line]


def _row_as_json(row: Row) -> dict[str, Any]:
    return {
        "label": row.label,
        "device": row.device.name,
        "here": row.here,
        "known": row.step.how,
        "bound": row.is_bound,
        "batch_size": row.batch_size,
        "largest_batch_size": row.largest,
        "step_s": _ends(row.step.seconds, row.is_bound),
        "samples_per_sec": _ends(row.samples_per_sec, row.is_bound, above=True),
        "epoch_s": _ends(row.epoch, row.is_bound),
        "training_s": _ends(row.training, row.is_bound),
        "start_up_s": row.start_up,
        "energy_at_most_j": row.joules,
        "cost": None if row.cost is None else _ends(row.cost, row.is_bound),
        "memory_bytes": _ends(row.step.memory_bytes, False),
        "memory_total_bytes": row.device.memory_bytes or None,
        "limit": row.step.limit,
    }


def _ends(interval: Interval, bound: bool, above: bool = False) -> list[float | None]:
    """`[low, middle, high]`; of a bound only the end that holds."""
    if bound:
        return [None, None, interval.high] if above else [interval.low, None, None]
    return [interval.low, interval.middle, interval.high]


def _check_as_json(check: Check) -> dict[str, Any]:
    return {
        "label": check.label,
        "predicted_from": check.source,
        "batch_size": check.batch_size,
        "known": check.predicted.how,
        "step_s": _ends(check.predicted.seconds, check.predicted.how.startswith("bound")),
        "measured_s": _ends(check.measured, False),
        "holds": check.holds,
    }
