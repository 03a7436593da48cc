"""The answer for a group of runs that differ in batch size: which size to take, as sentences and as claims.

1. The rule is that of selection.py. For trained runs it applies to the candidates: the sizes whose metric is as good as the
   best one (quality.py). For runs that train to a target, the answer is the size that reached it first (target.py).
2. A sentence is as strong as its interval. The intervals of an answer hold together with 95 % confidence.
3. Sizes that share passes are compared at equal load (noise.py), so their ratios need no allowance for other programs. The
   answer states the load.

Each sentence that states a number has a claim beside it, so that it can be checked against a longer measurement.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .._system import command_line
from ..options.purpose import ENDLESS, timed_experiment
from ..records.formatting import percent
from ..records.rates import load_words
from ..records.values import at, table
from .groups import Group, loads_by_setting
from .methods import is_trained
from .noise import simultaneous
from .quality import Quality, first_quality, why_none
from .run import OUT_OF_MEMORY, SEED, Run
from .selection import ENOUGH_SHARE, Rule, Selection, select
from .target import Arrivals, find_arrivals
from .text import and_, at_least, choice_words, times_as_fast

_RISES = 0.05  # the rate "still rises" if the largest size is faster than all others by this fraction


@dataclass(frozen=True)
class Answer:
    """The answer for one group of runs."""

    group: Group
    lines: list[str]  # sentences, the answer first; empty for a group of one batch size
    size: int | None = None  # the chosen size, or the best guess
    rule: Rule = "undecided"
    selection: Selection | None = None  # among the candidates; None without a rate or with a target
    overall: Selection | None = None  # among all sizes
    claims: list[dict[str, Any]] = field(default_factory=list)  # what the sentences state
    repeat: str = ""  # options of the command whose runs would tell more; empty if none would
    quality: Quality | None = None
    arrivals: Arrivals | None = None

    @property
    def compares_sizes(self) -> bool:
        """Whether batch sizes are compared, or the times to a target."""
        return len(self.group.sizes) > 1 or self.arrivals is not None


def decide(
    group: Group, metrics: Sequence[str] = (), enough: float = ENOUGH_SHARE, margin: float | None = None
) -> Answer:
    """Return the answer for a group; `enough` is the share of the best rate that a size has to reach.

    `metrics` are those of the test or the validation, the most telling one first; `margin` is that of `find_quality`.
    """
    sizes = group.sizes
    overall = select(group.rates, sizes, enough)
    if arrivals := find_arrivals(sizes):
        size = arrivals.winner or arrivals.best_guess
        rule: Rule = "shown" if arrivals.winner else "best_guess" if size else "undecided"
        return Answer(group, arrivals.lines, size, rule, None, overall, arrivals=arrivals)
    if len(sizes) < 2:
        is_alone = len({*sizes, *group.without_rate}) < 2 or any(run.is_to_target for run in group.runs)
        is_alone |= not (sizes or any(run.status == "finished" for run in group.runs))  # a remark on all runs says it
        only = f"Only {next(iter(sizes)):,}" if sizes else "No batch size"
        was = "tested" if sizes and not group.timed else "measured"
        return Answer(group, [] if is_alone else [f"{only} was {was}, so there is nothing to compare."])
    quality = first_quality(sizes, metrics, margin)
    selection = select(group.rates, quality.candidates, enough) if quality else overall
    if overall is None or selection is None:
        best = quality.metric.key if quality and overall else ""
        of_sizes, them = (f" of the sizes with the best {best}", "them") if best else ("", "sizes")
        why = "single steps were not kept, or too few were measured"
        imprecise = f"No rate{of_sizes} is known well enough to compare {them}: {why}."
        lines = [imprecise if group.rates.settings else "No rate was measured."]
        lines += [_best_words(quality)] if quality else []
        return Answer(group, lines, overall=overall, repeat=_repeat(group, None, quality), quality=quality)
    if quality and selection.size is not None and not quality.is_shown(selection.size):
        selection = replace(selection, rule="best_guess")
    sentences = list(_sentences(group, selection, overall, quality, metrics))
    lines, claims = [line for line, *_ in sentences], [claim for _, *stated in sentences for claim in stated]
    repeat = _repeat(group, selection, quality)
    return Answer(group, lines, selection.size, selection.rule, selection, overall, claims, repeat, quality)


def _best_words(quality: Quality) -> str:
    return quality.best_words({size: f"{size:,}" for size in quality.values})


def _repeat(group: Group, selection: Selection | None, quality: Quality | None) -> str:
    """Return the options of a command that would tell more; empty where the answer is shown or all sizes ran side by side."""
    if "script" in table(group.runs[0].record.get("config")):
        return ""  # the flags of a run of `batchscope run` are those of its script
    if selection and quality and quality.seeds == 1:
        size, rates = selection.size, group.rates
        doubtful = [s for s in quality.doubtful if s in rates.settings]
        if size is None or not quality.is_shown(size) or any(rates.rate(s) > rates.rate(size) for s in doubtful):
            return f"seed=0,1,2 {_size_option(quality.values)}"
    if selection and (selection.rule == "shown" or group.rates.is_side_by_side):
        return ""
    options, seeds = [*_timing_options(group.runs[0])], []
    if at(group.runs[0].record, "config.callbacks.until_known") and len(options) == 1:  # a repeat tells nothing new
        if selection is None or len({run.settings.get(SEED) for run in group.runs}) > 1:
            return ""
        seeds = ["seed=0,1,2"]
    return command_line([*options, *seeds, _size_option(group.sizes)])


# experiment=throughput is not put on top of these experiments.
_ALONE = ("null", "throughput", "find_batch_size", "find_lr", "diagnose", "time_to_target")


def _timing_options(run: Run) -> Iterator[str]:
    """Yield the options that time the steps of a run's training: experiment=throughput on top of the run's experiment."""
    value = next((override.partition("=")[2] for override in run.overrides if override.startswith("experiment=")), "")
    experiments = re.findall(r"[\w./-]+", value)
    names = [name for name in experiments if name not in _ALONE]
    is_own_search = bool(at(run.record, "config.search")) and names == experiments  # by an experiment of the user
    yield timed_experiment([] if is_own_search else names)
    typed_keys = {key for key, equals, _ in (override.partition("=") for override in run.overrides) if equals}
    yield from (f"{key}={end}" for key, end in ENDLESS.items() if key in typed_keys)
    if at(run.record, "config.timing") is False:  # with timing=false no run is visited
        yield "timing=auto"


def _size_option(sizes: Iterable[int]) -> str:
    return f"data.batch_size={','.join(map(str, sorted(sizes)))}"


# --- the sentences: each is a line, and what it claims --------------------------------------------------------------

_Sentence = tuple[Any, ...]  # a line, then its claims


def _sentences(
    group: Group, selection: Selection, overall: Selection, quality: Quality | None, metrics: Sequence[str]
) -> Iterator[_Sentence]:
    """Yield all sentences, the choice first; without `quality` no metric decides."""
    unknown = sorted(group.sizes.keys() - overall.shares.keys())
    among = quality.candidate_words if quality else " whose rate is known"
    among += " whose rate is known" if quality and {*unknown} & {*quality.candidates} else ""
    is_subset = bool(unknown) or len(selection.shares) < len(overall.shares)
    yield _choice(group, selection, among, is_subset)
    yield from _neighbours(group, selection, overall)
    if quality:
        yield from _price(group, selection, quality)
        yield (_best_words(quality),)
    elif tested := [key for key in metrics if any(key in run.metrics for run in group.runs)]:
        yield (f"{why_none(tested, 'sizes')}: the speed alone decides.",)
    elif any(map(is_trained, group.runs)):
        yield ("No metric of a validation or a test is known: the speed alone decides.",)
    else:
        yield ("Accuracy was not measured: train these sizes before you choose.",)
    if unknown:
        yield (f"Not known well enough to be compared: {and_(unknown)}.",)
    rates, loads = group.rates, loads_by_setting(group.rates)
    if rates.passes and rates.load is not None:
        yield ("On a quiet machine the rates and MFU may be higher.",)
    elif loads and not rates.passes:
        yield (f"Of {and_([*loads])} the rates are those beside {load_words(max(loads.values()))} at most.",)


def _claim(kind: str, size: int, **facts: Any) -> dict[str, Any]:
    return {"kind": kind, "batch_size": size, **facts}


def _choice(group: Group, selection: Selection, among: str, is_subset: bool) -> _Sentence:
    """Return what the chosen size gives, and is sure to give; `among` says which sizes were compared, if `is_subset`."""
    size, subset = selection.size, f" of the sizes{among}" if is_subset else ""
    words = choice_words(selection, "sweep", subset, group.rates.load if group.rates.passes else None)
    if size is None:
        return (words,)
    share, sure = selection.shares[size].value, selection.sure[size]
    if len(selection.shares) == 1:
        words = f"{'Best guess ' if selection.rule == 'best_guess' else ''}{size:,}: the only size{among}."
    return words, _claim("share", size, of=selection.best, estimated=share, sure=sure)


def _neighbours(group: Group, selection: Selection, overall: Selection) -> Iterator[_Sentence]:
    """Yield what the next smaller size gives, and whether a larger one may be faster: `128 gives 83 to 93 % of the rate of …`."""
    smaller = max((size for size in selection.shares if size < (selection.size or 0)), default=selection.best)
    share, words, claims = selection.shares[smaller], list[str](), list[dict[str, Any]]()
    if smaller != selection.best and share.span:
        words.append(
            f"{smaller:,} gives {100 * share.low:.0f} to {percent(share.high)} of the rate of {selection.best:,}"
        )
        claims.append(_claim("interval", smaller, of=selection.best, low=share.low, high=share.high))
    if words := [*words, *filter(None, [_larger(group, selection, overall)])]:
        yield ("; ".join(words) + ".", *claims)


def _larger(group: Group, selection: Selection, overall: Selection) -> str:
    """Say whether a size that did not run may be faster; empty where that is not known."""
    largest, smaller = max(overall.shares), {size: share.value for size, share in overall.shares.items()}
    del smaller[largest]
    limit = next((size for size, why in group.without_rate.items() if why == OUT_OF_MEMORY), None)
    out_of_memory = f"{limit:,} ran out of memory" if limit else ""
    is_best = largest in selection.shares and overall.best == largest
    if not is_best or max(smaller.values(), default=1.0) > 1 - _RISES:
        return out_of_memory
    if group.rates.ratio(largest, max(smaller, key=smaller.__getitem__)).low <= 1:
        return ""
    if limit and largest < limit <= 2 * largest:
        return f"{largest:,} still rises, and {out_of_memory}"
    has_failed = any(largest < size <= 2 * largest for size in group.without_rate)
    epochs = (-(-run.train_samples // run.processes) for run in group.runs if run.train_samples)  # samples a rank
    if largest >= (epoch := min(epochs, default=math.inf)):  # there is no larger batch
        return ""
    is_possible = not has_failed and 2 * largest <= epoch
    return f"{largest:,} still rises" + f": {2 * largest:,} may be faster" * is_possible


def _price(group: Group, selection: Selection, quality: Quality) -> Iterator[_Sentence]:
    """Yield what the fastest size that is no candidate would gain and lose."""
    chosen, rejected = selection.size, (quality.values.keys() & {*group.rates.settings}) - {*quality.candidates}
    if chosen is None or not rejected:
        return
    fast = max(rejected, key=group.rates.rate)
    ratio = group.rates.ratio(fast, chosen, simultaneous(1))
    if ratio.low > 1:
        claims = [_claim("at_least", fast, of=chosen, share=at_least(ratio))]
        claims += [_claim("worse", fast, metric=quality.metric.key)] if quality.is_worse(fast) else []
        rates = {run.values.get("learning_rate") for size in (fast, quality.best) for run in group.sizes[size]}
        beside = " at the same learning rate" if len(rates) == 1 and None not in rates else ""
        yield (f"{fast:,} is {times_as_fast(ratio)} {chosen:,} and {quality.price(fast)}{beside}.", *claims)
