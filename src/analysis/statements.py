"""What a report says, in the order in which it says it: the answers first, then what sets groups apart."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..errors import cut
from ..records.course import course_words
from ..records.formatting import significant
from ..records.learning_rate import rate_words
from ..records.rates import RATE
from ..records.values import at, table
from .answer import Answer
from .between_groups import compare_settings, crossovers
from .groups import Group, SweepResults, rates_of
from .run import BATCH_SIZE, Run
from .text import and_

_LONGEST = 60  # characters of a reason


class Statement(NamedTuple):
    """Sentences that belong together, the most important one first."""

    lines: list[str]
    group: Group | None = None  # that they are about, if it is one of several
    command: str = ""  # the options of a command that would tell more; empty where there is none


def statements(
    sweep: SweepResults, answers: Sequence[Answer], metrics: Sequence[str], margin: float | None = None
) -> list[Statement]:
    """What the runs show; `metrics` are those of quality, the most telling one first, and `margin` is as in quality.py."""
    runs = sweep.runs
    said = [Statement(answer.lines, answer.group, " ".join(answer.repeat)) for answer in answers]
    unanswered = [Statement([line], group) for group in sweep.groups if (line := _too_few_sizes(group))]
    if said := [*said, *(Statement([line]) for line in crossovers(sweep))]:
        return [*said, *unanswered]
    if not any(RATE in run.values or run.status == "finished" for run in runs):
        [(reason, _)] = Counter(run.reason for run in runs).most_common(1)
        return [Statement([f"No run finished, so there is nothing to recommend. Most often: {reason}."])]
    if len(runs) == 1:
        rates, speed = rates_of({0: runs}), ""
        if rates.settings:
            speed = f": {significant(rates.rate(0))} samples/s at batch size {runs[0].batch_size:,}"
        return [Statement([f"One run only{speed}. Several batch sizes are needed for a recommendation."])]
    if unanswered:
        return unanswered
    lines = compare_settings(sweep, metrics, margin) if len(sweep.groups) > 1 else []
    if not lines:
        why = "All runs repeat one setting" if len(sweep.groups) == 1 else "Fewer than two settings were measured"
        return [Statement([f"{why}, so there is nothing to compare."])]
    return [Statement(lines)]


def _too_few_sizes(group: Group) -> str:
    """Why a group of several batch sizes has no answer; empty where it has, or is of one size."""
    to_target = any(run.is_to_target for run in group.runs)
    if to_target or len(group.sizes) > 1 or len({*group.sizes, *group.without_rate}) < 2:
        return ""
    only = f"Only {next(iter(group.sizes)):,}" if group.sizes else "No batch size"
    return f"{only} was measured, so there is nothing to compare."


def notes(sweep: SweepResults) -> Iterator[str]:
    """What could not be read, and which conclusions the runs do not allow."""
    yield from sweep.notes
    yield from _learning_rates(sweep.groups)
    without = [run.name for run in sweep.runs if run.status == "finished" and RATE not in run.values]
    if without:
        yield f"finished without a rate: {', '.join(without)}"
    yield from (f"{run.name}: {why}" for run in sweep.runs for why in (run.steps, run.correct) if isinstance(why, str))
    for run in sweep.runs:
        yield from (f"{run.name}: {words}" for words in course_words(table(run.record.get("throughput"))))
        for option, why in table(run.record.get("unread")).items():
            yield f"{run.name}: {' '.join(f'{option} had no effect: {why}'.split())}"


def _learning_rates(groups: Iterable[Group]) -> Iterator[str]:
    """How the learning rate follows the batch size in trained runs of several sizes, and of which models it does not."""
    rules, fixed = dict[str, None](), dict[str, None]()
    for group in groups:
        trained = [run for run in group.runs if run.metrics]
        if len({run.global_batch_size for run in trained}) < 2:
            continue
        words = [str(at(run.record, "lr_scaling.rule")) for run in trained if rate_words(run.record)]
        rates = {run.values.get("learning_rate") for run in trained}
        rules |= dict.fromkeys(words)
        if not words and len(rates) == 1 and None not in rates and _should_follow(trained[0]):
            fixed[str(at(trained[0].record, "model.class"))] = None
    if rules:
        yield f"the learning rate follows the batch size: optimizer.lr_scaling={and_([*rules], 'or')}"
    if fixed:
        yield f"the learning rate of {and_([*fixed])} does not follow the batch size"


def _should_follow(run: Run) -> bool:
    """Whether one expects a rule that scales the rate: of a LightningModule, which has its own rate, and where one was asked for."""
    is_own = at(run.record, "model.lightning_module") is True or "script" in table(run.record.get("config"))
    return is_own or run.settings.get("optimizer.lr_scaling", "none") != "none"


def failures(sweep: SweepResults) -> str:
    """Which runs did not finish, and why: `1,024: out of memory`; empty if all did."""
    reasons: dict[str, dict[str, None]] = {}
    for group in sweep.groups:
        for run in (run for run in group.runs if run.reason):
            reasons.setdefault(cut(run.reason, _LONGEST), {})[_name(run, group, sweep)] = None
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())


def _name(run: Run, group: Group, sweep: SweepResults) -> str:
    size = f"{run.batch_size:,}" if BATCH_SIZE in sweep.factors and run.batch_size else ""
    label = group.label if len(sweep.groups) > 1 else ""
    return " · ".join(filter(None, (label, size))) or f"run {run.name}"
