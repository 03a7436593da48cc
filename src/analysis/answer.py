"""The answer of a group of runs that differ in batch size: which size to take, in words, with what is claimed.

1. The rule is that of selection.py. Of trained runs it applies to the candidates, whose metric is as good as the best one
   (quality.py). Of runs that were trained to a target, the size that reached it first is the answer (target.py).
2. A sentence is as strong as its interval. The intervals of an answer hold together with 95 % confidence.
3. Sizes that share passes met the same load, so their ratios need no allowance for other programs. The load is said.
4. What the noise scale says (progress.py) stands beside the rates, and measured times to a target beside that. It decides
   where φ has no bias to speak of and leaves one of the candidates.

Each sentence that states something has a claim beside it, so that it can be checked against a longer measurement.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..records.formatting import count, percent
from ..records.values import at, positive
from .groups import Group
from .noise import Rates, load_of, simultaneous
from .progress import Progress, progress_of
from .quality import Quality, quality_of
from .run import Run
from .selection import ENOUGH, Rule, Selection, select
from .target import Arrivals, arrivals_at_common_value, arrivals_of
from .text import and_, at_least, choice_words, load_words, times_as_fast

TIMED = "experiment=throughput"  # the option of a sweep of timed runs
_SECONDS = "callbacks.until_known.seconds"
_RISES = 0.05  # by which the largest size is faster than the next one where the rate is said to rise


@dataclass(frozen=True)
class Answer:
    """The answer for one group of runs that differ in batch size."""

    group: Group
    lines: list[str]  # sentences, the answer first
    size: int | None = None  # chosen, or the best guess
    rule: Rule = "undecided"
    selection: Selection | None = None  # among the candidates; None without a rate or with a target
    overall: Selection | None = None  # among all sizes
    claims: list[dict[str, Any]] = field(default_factory=list)  # what the sentences state
    repeat: list[str] = field(default_factory=list)  # options of the command that would know more; empty if none would
    quality: Quality | None = None
    progress: Progress | None = None
    arrivals: Arrivals | None = None

    @property
    def rates(self) -> Rates:
        """The rates of the sizes."""
        return self.group.rates


def answer(
    group: Group, metrics: Sequence[str] = (), enough: float = ENOUGH, margin: float | None = None
) -> Answer | None:
    """The answer for a group; None where fewer than two sizes were measured that were asked for.

    Args:
        group: the runs.
        metrics: those of the test or validation, the most telling one first.
        enough: as in selection.py.
        margin: as in quality.py.
    """
    sizes = {size: group.sizes[size] for size in group.asked}
    arrivals = arrivals_of(sizes)
    if len(sizes) < (1 if arrivals else 2):
        return None
    overall = select(group.rates, sizes, enough)
    if arrivals:
        return _of_arrivals(group, arrivals, overall)
    if overall is None:
        line = "No rate is known well enough to compare sizes: single steps were not kept, or too few were measured."
        return Answer(group, [line], repeat=_timed(sizes))
    quality = next((known for key in metrics if (known := quality_of(sizes, key, margin))), None)
    selection = overall
    if quality:
        selection = select(group.rates, quality.candidates, enough)
        if selection is None:
            line = f"Of the sizes with the best {quality.metric.key}, {and_(quality.candidates)}, no rate is known."
            return Answer(group, [line], overall=overall, repeat=_timed(sizes), quality=quality)
    progress, common = progress_of(sizes, group.rates, is_early=quality is None), arrivals_at_common_value(sizes)
    first = progress.decided(selection.shares) if progress else None
    if common and common.winner not in (None, first):  # a measured time says more
        first = None
    if first is not None:
        selection = replace(selection, size=first, rule="shown")
    if quality and selection.size is not None and not quality.is_shown(selection.size):
        selection = replace(selection, rule="best_guess")
    said = list(_sentences(group, selection, overall, quality, first))
    lines, claims = [line for line, *_ in said], [claim for _, *of_line in said for claim in of_line]
    lines += common.lines[:1] if common and common.winner else []
    lines += progress.lines(is_decided=first is not None) if progress else []
    repeat = _repeat(group, selection, quality, sizes)
    return Answer(group, lines, selection.size, selection.rule, selection, overall, claims, repeat, quality, progress)


def _of_arrivals(group: Group, arrivals: Arrivals, overall: Selection | None) -> Answer:
    """The answer of runs that were trained to a target."""
    of_sizes = {size: group.sizes[size] for size in arrivals.sizes}
    progress = progress_of(of_sizes, group.rates) if overall else None
    size = arrivals.winner or arrivals.best_guess
    rule: Rule = "shown" if arrivals.winner else "best_guess" if size else "undecided"
    lines = [*arrivals.lines, *(progress.lines() if progress else [])]
    return Answer(group, lines, size, rule, None, overall, progress=progress, arrivals=arrivals)


def _repeat(group: Group, selection: Selection, quality: Quality | None, sizes: Iterable[int]) -> list[str]:
    """The options of a command that would know more; none where the answer is shown, or was measured in passes."""
    doubted = quality and not (selection.size and quality.is_shown(selection.size))
    if quality and quality.seeds == 1 and (doubted or _is_doubted(group.rates, selection.size, quality)):
        return ["seed=0,1,2", _sizes(quality.values)]
    if selection.rule == "shown":
        return []
    if group.rates.passes:
        return []
    seconds = [positive(at(run.record, f"config.{_SECONDS}")) or 0.0 for run in group.runs]
    was_timed = all(at(run.record, "throughput.ended") for run in group.runs)
    return [*_timed(sizes), *([f"{_SECONDS}={2 * max(seconds):g}"] if was_timed and max(seconds) else [])]


def _is_doubted(rates: Rates, chosen: int | None, quality: Quality) -> bool:
    """Whether a size with a higher rate than the chosen one is no candidate only because too little is known of its loss."""
    known = [size for size in quality.doubtful if size in rates.settings]
    return chosen is not None and any(rates.rate(size) > rates.rate(chosen) for size in known)


def _timed(sizes: Iterable[int]) -> list[str]:
    return [TIMED, _sizes(sizes)]


def _sizes(sizes: Iterable[int]) -> str:
    return f"data.batch_size={','.join(map(str, sorted(sizes)))}"


# --- the sentences: each is a line, and what it claims --------------------------------------------------------------

_Said = tuple[Any, ...]  # a line, then its claims


def _sentences(
    group: Group, selection: Selection, overall: Selection, quality: Quality | None, first: int | None
) -> Iterator[_Said]:
    """All of them, the choice first. `first` is the size that was chosen by its goodput, if one was."""
    unknown = sorted(set(group.asked) - set(overall.shares))
    best = f" with the best {quality.metric.key}" if quality else " whose rate is known"
    is_part = bool(unknown) or len(selection.shares) < len(overall.shares)
    yield _choice(group, selection, best, is_part, is_first=first is not None)
    if beside := list(filter(None, (_next_smaller(selection), _larger(group, selection, overall)))):
        yield ("; ".join(words for words, *_ in beside) + ".", *(claim for _, *claims in beside for claim in claims))
    if quality:
        yield from _price(group, selection, quality)
        yield (quality.best_words({size: f"{size:,}" for size in quality.values}),)
    else:
        yield ("Accuracy was not measured: train these sizes before you choose.",)
    seen = group.medians("samples_seen").values() if quality else ()
    if seen and max(seen) > 1.1 * min(seen):
        yield ("The sizes saw different numbers of samples, which changes the metric.",)
    if unknown:
        yield (f"Not known well enough to be compared: {and_(unknown)}.",)
    apart = [size for size in overall.shares if not group.rates.together(size, overall.best)]
    if apart and group.rates.passes:
        yield (f"Measured apart from {overall.best:,}, so that less is known of the ratio: {and_(apart)}.",)
    yield from _load(group)


def _claim(kind: str, size: int, **facts: Any) -> dict[str, Any]:
    return {"kind": kind, "batch_size": size, **facts}


def _choice(group: Group, selection: Selection, best_words: str, is_part: bool, is_first: bool) -> _Said:
    """The chosen size, what it gives and what it is sure to give; or that it reaches a given quality first."""
    size, of_those = selection.size, f" of those{best_words}" if is_part else ""
    load = group.rates.load if group.rates.passes else None
    if size is None:
        return (choice_words(selection, "sweep", of_those, load),)
    claim = _claim("share", size, of=selection.best, estimated=selection.shares[size].value, sure=selection.sure[size])
    if len(selection.shares) == 1:
        guess = "Best guess " if selection.rule == "best_guess" else ""
        return (f"{guess}{size:,}: the only size{best_words}.", claim)
    if is_first:
        return (_first_words(selection, size, of_those), claim, _claim("first", size, among=list(selection.shares)))
    return (choice_words(selection, "sweep", of_those, load), claim)


def _first_words(selection: Selection, size: int, of_those: str) -> str:
    """A size that was chosen by its goodput."""
    guess = "Best guess " if selection.rule == "best_guess" else ""
    share = "" if size == selection.best else f"{percent(selection.shares[size].value)} of "
    best = f"{share}the best measured rate{' of them' if of_those else ''}{f' ({selection.best:,})' if share else ''}"
    return f"{guess}{size:,}: by goodput the first{of_those} to reach a given quality, with {best} in this sweep."


def _load(group: Group) -> Iterator[_Said]:
    """What other programs mean for the rates; of runs that followed each other, beside which of them they ran."""
    rates = group.rates
    loads = {size: load for size in group.sizes if (load := load_of(rates.windows[rates.windows["setting"] == size]))}
    if rates.passes and rates.load is not None:
        yield ("On a quiet machine the rates and MFU may be higher.",)
    elif loads and not rates.passes:
        yield (f"Of {and_([*loads])} the rates are those beside {load_words(max(loads.values()))} at most.",)


def _next_smaller(selection: Selection) -> _Said | None:
    """`128 gives 83 to 93 %`: what one would lose by the next smaller size."""
    smaller = [size for size in selection.shares if size < (selection.size or 0)]
    if not smaller or smaller[-1] == selection.best or not (share := selection.shares[smaller[-1]]).span:
        return None
    words = f"{smaller[-1]:,} gives {100 * share.low:.0f} to {percent(share.high)}"
    return words, _claim("interval", smaller[-1], of=selection.best, low=share.low, high=share.high)


def _price(group: Group, selection: Selection, quality: Quality) -> Iterator[_Said]:
    """What the fastest size that is no candidate would gain and lose."""
    chosen, others = selection.size, (quality.values.keys() & {*group.rates.settings}) - {*quality.candidates}
    if chosen is None or not others:
        return
    fast = max(others, key=group.rates.rate)
    ratio = group.rates.ratio(fast, chosen, simultaneous(1))
    if ratio.low > 1:
        claim = _claim("at_least", fast, of=chosen, share=at_least(ratio))
        worse = [_claim("worse", fast, metric=quality.metric.key)] if quality.is_worse(fast) else []
        yield (
            f"{fast:,} is {times_as_fast(ratio)} and {quality.price(fast)} after {_trained(group.runs)}.",
            claim,
            *worse,
        )


def _trained(runs: Sequence[Run]) -> str:
    """`2 epochs at this learning rate`; `this training` where the runs trained for different times."""
    trained = [run for run in runs if run.metrics]
    epochs = {positive(run.record.get("epochs")) for run in trained}
    rates = {run.values.get("learning_rate") for run in trained}
    number = epochs.pop() if len(epochs) == 1 else None
    rate = "" if None in rates else " at this learning rate" if len(rates) == 1 else " at its learning rate"
    return (count(round(number), "epoch") if number and number >= 1 else "this training") + rate


def _larger(group: Group, selection: Selection, overall: Selection) -> _Said | None:
    """Whether a size that did not run may be faster; None where nothing is known of that."""
    largest, limit, whole = max(overall.shares), group.out_of_memory, group.largest_possible
    rest = [share.value for size, share in overall.shares.items() if size != largest]
    if largest not in selection.shares or overall.best != largest or max(rest, default=1.0) > 1 - _RISES:
        return (f"{limit:,} ran out of memory",) if limit else None
    second = max((size for size in overall.shares if size != largest), key=lambda size: overall.shares[size].value)
    if group.rates.ratio(largest, second).low <= 1:
        return None
    rises = f"{largest:,} still rises"
    if limit and limit <= 2 * largest:
        return (f"{rises}, and {limit:,} ran out of memory",)
    if failed := [size for size in group.without_rate if largest < size <= 2 * largest]:
        return (f"{rises}, and {failed[0]:,} was not measured",)
    if whole is not None and whole < 2 * largest:
        return (f"{rises}, and the training set has {whole:,}",)
    return (f"{rises}: {2 * largest:,} may be faster",)
