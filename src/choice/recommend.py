"""One recommendation in words: which device to take, why, and what is too close to call.

The rule:

1. A device that surely misses the deadline or the budget is out: its whole interval lies beyond. A device whose price is
   unknown is out where there is a budget. What is known as a bound alone is never recommended.
2. With a deadline, the cheapest of the others is taken; a device that is here costs nothing unless it has a price.
   Without a deadline, the fastest is taken, with its start-up.
3. Two devices differ where one is called shorter (or cheaper) as in `seconds.py`, by more than 5 % of its middle;
   otherwise they are too close to call. A
   device that is here is then taken before one that is to be rented, then the cheapest where prices are known, then
   the fastest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..records.formatting import estimate
from .rows import Question, Row, step_on
from .seconds import CALLED_FROM, Interval, exactly, probability_shorter
from .words import listed, one_time, sentence, time

if TYPE_CHECKING:
    from .step import Workload

ALIKE = 1.05  # a device whose time is longer by less than this factor is as good
_MOST_NAMED = 4  # devices in a sentence
KEEPS, MAY, MISSES = "keeps", "may", "misses"


@dataclass(frozen=True)
class Recommendation:
    """The answer."""

    label: str | None  # of the device to take; None where none keeps the deadline and the budget
    too_close: list[str]  # labels of devices that cannot be told from it
    lines: list[str]  # sentences

    @property
    def text(self) -> str:
        """All sentences."""
        return " ".join(self.lines)


def is_less(one: Interval, other: Interval, one_is_bound: bool = False, other_is_bound: bool = False) -> bool:
    """Whether one is called less than the other, as `probability_shorter` has it; a bound is never less.

    A bound may be exceeded by any factor, so something is less than it only where it ends below the bound.
    """
    if one_is_bound or other_is_bound:
        return not one_is_bound and one.high < other.low
    return probability_shorter(one, other) >= CALLED_FROM


def recommend(rows: Sequence[Row], question: Question) -> Recommendation:
    """The device to take, by the rule above. `rows` are as `rows.rows` gives them."""
    known = [row for row in rows if not row.is_bound]
    states = [_state(row, question) for row in known]
    candidates = [row for row, state in zip(known, states, strict=True) if state == KEEPS]
    unsure = not candidates
    candidates = candidates or [row for row, state in zip(known, states, strict=True) if state == MAY]
    if not candidates:
        return Recommendation(None, [], _none_keeps(rows, question))
    priced = [row for row in candidates if math.isfinite(_cost(row).middle)]
    by_cost = question.deadline is not None and bool(priced)
    candidates, measure = (priced, _cost) if by_cost else (candidates, _training)
    best = min(candidates, key=lambda row: (measure(row).middle, row.training.middle))
    alike = [row for row in candidates if row is best or not _differs(measure(best), measure(row))]
    taken = min(alike, key=lambda row: (not row.here, _cost(row).middle, row.training.middle))
    close = [row for row in alike if row is not taken]
    lines = [_what_it_takes(taken, question), _why(taken, close, candidates, by_cost, unsure, question)]
    lines += _without_price(known, question)
    lines += [_too_close(taken, close, by_cost, question)] if close else []
    lines += _compared_with_here(taken, close, known)
    lines += [] if by_cost or taken.here else _cheaper(taken, close, known, question)
    lines += _at_best(taken, rows)
    return Recommendation(taken.label, [row.label for row in close], [sentence(line) for line in lines if line])


def _differs(best: Interval, other: Interval) -> bool:
    """Whether one is called less than the other, and by enough to matter."""
    return is_less(best, other) and other.middle > ALIKE * best.middle


def _training(row: Row) -> Interval:
    return row.training


def _cost(row: Row) -> Interval:
    """What is paid. A device that is here costs nothing, unless the user gives it a price."""
    if row.cost is not None:
        return row.cost
    return exactly(0.0 if row.here else math.inf)


def _state(row: Row, question: Question) -> str:
    states = [_within(row.training, question.deadline), _within(_cost(row), question.budget)]
    return next((state for state in (MISSES, MAY) if state in states), KEEPS)


def _within(value: Interval, limit: float | None) -> str:
    if limit is None or value.high <= limit:
        return KEEPS
    return MISSES if value.low > limit else MAY


def _limits(question: Question) -> str:
    """`the deadline of 2 h and the budget of $5`."""
    deadline = [f"the deadline of {one_time(question.deadline)}"] if question.deadline is not None else []
    budget = [f"the budget of {question.prices.text(question.budget)}"] if question.budget is not None else []
    return listed([*deadline, *budget])


def _what_it_takes(row: Row, question: Question) -> str:
    epochs = f"{question.epochs:,} epoch{'s' if question.epochs > 1 else ''}"
    took = time(row.training, between=" to ")
    price = f", for {_money(row, question)}" if row.cost is not None else ""
    return f"{row.title}: {epochs} take{'' if question.epochs > 1 else 's'} {took}{_with_start_up(row)}{price}"


def _with_start_up(row: Row) -> str:
    return f" with a start-up of {one_time(row.start_up)}" if row.start_up else ""


def _money(row: Row, question: Question) -> str:
    cost = _cost(row)
    low, high = question.prices.text(cost.low), question.prices.text(cost.high)
    return low if low == high else f"{low} to {high}"


def _why(
    taken: Row, close: Sequence[Row], candidates: Sequence[Row], by_cost: bool, unsure: bool, question: Question
) -> str:
    limits = _limits(question)
    if unsure:
        return f"no device surely keeps {limits}; this one may"
    if taken.here and taken.cost is None and (by_cost or (question.budget is not None and not close)):
        return f"it keeps {limits}, and nothing has to be paid"
    if len(candidates) == 1 and limits:
        return f"it is the only device that surely keeps {limits}"
    if close or len(candidates) == 1:
        return ""
    kept = f" that surely keeps {limits}" if limits else ""
    return f"it is the {'cheapest' if by_cost else 'fastest'} device{kept}"


def _without_price(known: Sequence[Row], question: Question) -> list[str]:
    """The devices that a budget leaves out because nobody has said what they cost."""
    found = [row for row in known if not math.isfinite(_cost(row).middle)]
    if question.budget is None or not found:
        return []
    return [
        f"a budget takes prices, and has none for {listed(_names(found))}: --price {found[0].label}=0.5/h gives one"
    ]


def _too_close(taken: Row, close: Sequence[Row], by_cost: bool, question: Question) -> str:
    shown = sorted(close, key=lambda row: row.training.middle)
    spans = [_money(row, question) if by_cost else time(row.training, between=" to ") for row in shown]
    named = [f"{row.title} ({span})" for row, span in zip(shown, spans, strict=True)][:_MOST_NAMED]
    if len(set(spans[:_MOST_NAMED])) == 1 and len(shown) > 1:
        named = [f"{listed([row.title for row in shown][:_MOST_NAMED])} ({spans[0]} each)"]
    more = [f"{len(shown) - _MOST_NAMED} more"] if len(shown) > _MOST_NAMED else []
    against = f"too close to call{' by cost' if by_cost else ''}: {taken.title} against {listed([*named, *more])}"
    if taken.here and not any(row.here for row in close):
        return f"{against}; {taken.title} has nothing to rent and to start"
    if all(row.cost is not None for row in (taken, *close)):
        return f"{against}; {taken.title} is the cheapest by the middle of the interval"
    return f"{against}; {taken.title} is the fastest by the middle of the interval, and prices (--price) may decide"


def _compared_with_here(taken: Row, close: Sequence[Row], known: Sequence[Row]) -> list[str]:
    """What the device that is here takes, where another is taken; and the best one elsewhere, where it is not."""
    others = [row for row in known if row is not taken and row not in close]
    here = [row for row in others if row.here]
    if not taken.here and here:
        best = min(here, key=lambda row: row.training.middle)
        return [f"{best.title} takes {time(best.training, between=' to ')}"]
    elsewhere = [row for row in others if not row.here]
    if taken.here and elsewhere and not close:
        best = min(elsewhere, key=lambda row: row.training.middle)
        took = f"{best.title} would take {time(best.training, between=' to ')}"
        if best.start_up > taken.training.high:
            return [f"{took}: its start-up of {one_time(best.start_up)} alone is longer"]
        return [f"{took}{_with_start_up(best)}"]
    return []


def _cheaper(taken: Row, close: Sequence[Row], known: Sequence[Row], question: Question) -> list[str]:
    """The cheapest device of those that cost something, where it is surely cheaper than the one that is taken."""
    others = [row for row in known if row.cost is not None and row is not taken and row not in close]
    if taken.cost is None or not others:
        return []
    best = min(others, key=lambda row: _cost(row).middle)
    if not is_less(_cost(best), _cost(taken)):
        return []
    return [f"{best.title} is cheaper: {time(best.training, between=' to ')} for {_money(best, question)}"]


def _at_best(taken: Row, rows: Sequence[Row]) -> list[str]:
    """The devices known as bounds that may be faster than the one taken."""
    found = [row for row in rows if row.is_bound and row.training.low < taken.training.high]
    if not found:
        return []
    named = [f"{row.title} {time(exactly(row.training.low))}" for row in found[:_MOST_NAMED]]
    more = [f"{len(found) - _MOST_NAMED} more"] if len(found) > _MOST_NAMED else []
    return [f"at best, and not predicted: {listed([*named, *more])}; only a run there can tell"]


def _none_keeps(rows: Sequence[Row], question: Question) -> list[str]:
    known = [row for row in rows if not row.is_bound]
    maybe = [row for row in rows if row.is_bound and _within(row.training, question.deadline) != MISSES]
    line = f"no device of the table keeps {_limits(question) or 'what was asked'}"
    if known:
        best = min(known, key=lambda row: row.training.middle)
        paid = f", for {_money(best, question)}" if best.cost is not None else ""
        line += f": {best.title}, the fastest, takes {time(best.training, between=' to ')}{_with_start_up(best)}{paid}"
    if maybe:
        line += f"; {listed([row.title for row in maybe[:_MOST_NAMED]])} may, at best"
    return [sentence(each) for each in (line, *_without_price(known, question))]


def pays_from(rows: Sequence[Row], workloads: Sequence["Workload"], question: Question) -> list[str]:
    """From which batch size on, and after how many epochs, a GPU of the table is faster than the CPU that is here."""
    cpus = [(row, workload) for row in rows for workload in workloads if _is_cpu_of(row, workload)]
    gpus = [row for row in rows if row.device.kind != "cpu" and not row.is_bound]
    if not cpus or not gpus:
        return []
    cpu, workload = cpus[0]
    sizes = sorted(workload.batch_sizes)
    first: dict[int | None, list[Row]] = {}
    for gpu in gpus:
        first.setdefault(_pays_from(gpu, workload, workloads, sizes, question), []).append(gpu)
    return [sentence(_from_batch_size(first, sizes)), *map(sentence, _from_epochs(cpu, gpus))]


def _is_cpu_of(row: Row, workload: "Workload") -> bool:
    return row.here and row.device.kind == "cpu" and workload.device.name == row.device.name


def _pays_from(
    gpu: Row,
    workload: "Workload",
    workloads: Sequence["Workload"],
    sizes: Sequence[int],
    question: Question,
) -> int | None:
    """The smallest size from which on every measured size has a shorter step on the GPU."""
    found = None
    for size in reversed(sizes):
        step, here = (step_on(workloads, device, size, question) for device in (gpu.device, workload.device))
        if not is_less(step.seconds, here.seconds, step.how.startswith("bound")):
            break
        found = size
    return found


def _from_batch_size(first: dict[int | None, list[Row]], sizes: Sequence[int]) -> str:
    ran = f"{sizes[0]:,} to {sizes[-1]:,}" if len(sizes) > 1 else f"{sizes[0]:,}"
    if list(first) == [None]:
        return f"no GPU of the table has a shorter step than the CPU at the batch sizes measured ({ran})"
    if list(first) == [sizes[0]]:
        return f"every GPU of the table has a shorter step than the CPU at each batch size measured ({ran})"
    paying = sorted((size, gpus) for size, gpus in first.items() if size is not None)
    named = [f"from batch size {size:,} on ({listed(_names(gpus))})" for size, gpus in paying]
    never = f"; at none ({listed(_names(first[None]))})" if None in first else ""
    return f"a GPU has a shorter step than the CPU {', '.join(named)}{never}"


def _names(gpus: Sequence[Row]) -> list[str]:
    names = [row.title for row in gpus]
    return names if len(names) <= _MOST_NAMED else [*names[: _MOST_NAMED - 1], f"{len(names) - _MOST_NAMED + 1} more"]


def _from_epochs(cpu: Row, gpus: Sequence[Row]) -> list[str]:
    """After how many epochs the fastest GPU has made up for its start-up."""
    gpu = min(gpus, key=lambda row: row.epoch.middle)
    if not gpu.start_up or cpu.epoch.low <= gpu.epoch.high:
        return []
    fewest = math.ceil(gpu.start_up / (cpu.epoch.high - gpu.epoch.low))
    most = math.ceil(gpu.start_up / (cpu.epoch.low - gpu.epoch.high))
    epochs = " to ".join(dict.fromkeys(map(estimate, (fewest, most))))
    after = f"{epochs} epoch{'' if most == 1 else 's'}"
    return [f"{gpu.title} makes up for its start-up of {one_time(gpu.start_up)} after {after}"]
