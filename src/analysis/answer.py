"""Which batch size to take: the rules, and the sentences that say what they found.

1. What is not known does not decide. Sizes are compared by the 90 % interval of the ratio of their rates (noise.py).
2. A sentence is as strong as the interval: nothing is called faster where the interval holds equality. The fastest, at
   most and at least hold with 98 % confidence, because the best size is chosen by the same numbers.
3. Recommended is the smallest size that is shown to reach 90 % of the best rate. Where a smaller one may reach it, or
   another one may beat the best by more than 10 %, the answer is undecided. Doubt never leads to a larger size.
4. Of trained runs, only sizes whose metric is not shown to be worse than the best can be recommended (quality.py).
5. On a busy machine there is no answer, but what to do.
6. Of runs that were trained to a target (target.py), the size that reached it first is the answer. What the noise scale says
   (progress.py) stands beside the rates, and measured times to a target beside that.

`decide` has the rules for any rates; a sweep calls it while it measures. `answer` puts a group of runs into words. Each
sentence that states something has a claim beside it, so that it can be checked against a longer measurement.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..records.formatting import percent
from .groups import Group
from .noise import STATED, Rates, Ratio
from .progress import Progress, progress_of
from .quality import Quality, quality_of, training_words
from .target import Arrivals, arrivals_at_common_value, arrivals_of
from .text import KNOWN, and_, at_least, busy_line, times_as_fast

ENOUGH = 0.9  # of the best rate
TIMED = "experiment=throughput"  # the option of a sweep of timed runs
VAGUE = KNOWN  # a ratio to the best that is not known to ± 10 % is shown as such, and named


@dataclass(frozen=True)
class Decision:
    """What the rules find. `size` is None where the answer is undecided."""

    size: int | None
    best: int  # with the highest known rate
    between: list[int]  # the sizes between which the answer is undecided, smallest first; empty if it is decided
    ratios: dict[int, Ratio]  # of the rate of each size to that of `best`
    fastest: int | None  # the best size, if it is shown to be faster than all others

    @property
    def vague(self) -> list[int]:
        """The sizes whose ratio to the best is not known to ± 10 %."""
        return [size for size, ratio in self.ratios.items() if ratio.reach > VAGUE]


def decide(rates: Rates, sizes: Collection[int] | None = None) -> Decision | None:
    """Apply rules 1 to 3 to some sizes, by default to all; None where the rate of none is known."""
    among = sorted(rates.settings if sizes is None else sizes)
    known = [size for size in among if math.isfinite(rates.reach(size))]
    if not known:
        return None
    best = max(known, key=rates.rate)
    ratios = {size: rates.ratio(size, best) for size in among}
    size = min(s for s, ratio in ratios.items() if s == best or ratio.low >= ENOUGH)
    smaller = [s for s, ratio in ratios.items() if s < size and ratio.high >= ENOUGH]
    faster = [s for s, ratio in ratios.items() if s not in (size, best) and ratio.high > 1 + VAGUE]
    between = sorted({size, *smaller, *faster}) if smaller or faster else []
    others = [rates.ratio(s, best, STATED) for s in among if s != best]  # of equal ones, one is the best by chance
    fastest = best if others and all(ratio.high < 1 for ratio in others) else None
    return Decision(None if between else size, best, between, ratios, fastest)


@dataclass(frozen=True)
class Answer:
    """The answer for one group of runs that differ in batch size."""

    group: Group
    lines: list[str]  # sentences, the answer first
    decision: Decision | None = None  # None on a busy machine, or where no rate is known
    overall: Decision | None = None  # the same of all sizes, whatever their quality
    claims: list[dict[str, Any]] = field(default_factory=list)  # what the sentences state
    repeat: list[str] = field(default_factory=list)  # options of the command that decides it; empty if it is decided
    progress: Progress | None = None
    arrivals: Arrivals | None = None

    @property
    def rates(self) -> Rates:
        """The rates of the sizes."""
        return self.group.rates

    @property
    def size(self) -> int | None:
        """The recommended batch size."""
        return self.decision.size if self.decision else None

    @property
    def candidate(self) -> int | None:
        """The recommended size; where the answer is undecided, the smallest that it may be and whose rate is known."""
        between = self.decision.between if self.decision else []
        return self.size or min((s for s in between if math.isfinite(self.rates.reach(s))), default=None)

    @property
    def vague(self) -> list[int]:
        """The sizes whose rate is not known well enough to be compared: all of them on a busy machine."""
        return list(self.group.sizes) if self.overall is None else self.overall.vague


def answer(group: Group, metrics: Sequence[str] = ()) -> Answer | None:
    """The answer for a group; None where fewer than two sizes were measured that were asked for.

    `metrics` are those of the test or validation, the most telling one first.
    """
    sizes = {size: group.sizes[size] for size in group.asked}
    rates, arrivals = group.rates, arrivals_of(sizes)
    if len(sizes) < (1 if arrivals else 2):
        return None
    if rates.busy is not None:
        line = busy_line(rates.busy, "batch size is recommended", "repeat the sweep")
        return Answer(group, [line], repeat=[] if arrivals else _timed(sizes), arrivals=arrivals)
    quality = None if arrivals else next((found for key in metrics if (found := quality_of(sizes, key))), None)
    overall = decide(rates, sizes)
    decision = decide(rates, quality.as_good) if quality else overall
    if overall is None or decision is None:
        if arrivals:
            return Answer(group, arrivals.lines, overall=overall, arrivals=arrivals)
        line = "No rate is known well enough to compare sizes: the runs measured too few steps."
        return Answer(group, [line], overall=overall, repeat=_timed(sizes))
    progress = progress_of(sizes, rates, is_early=quality is None and arrivals is None)
    said = progress.lines if progress else []
    if arrivals:
        decision = replace(overall, size=arrivals.winner, between=[] if arrivals.winner else arrivals.contenders)
        lines = [*arrivals.lines, *said]
        return Answer(group, lines, decision, overall, progress=progress, arrivals=arrivals)
    repeat: list[str] = []
    if quality and quality.allowed is None and decision.size not in (None, quality.best):
        decision = replace(decision, size=None, between=sorted({decision.size or 0, quality.best}))
    if decision.size is None:
        by_chance = quality is not None and quality.allowed is None and quality.best in decision.between
        repeat = ["seed=0,1,2", _sizes(decision.between)] if by_chance else _timed(decision.between)
    sentences = list(_sentences(group, decision, overall, quality))
    common = arrivals_at_common_value(sizes)
    measured = common.lines[:1] if common and common.winner else []
    lines = [*(line for line, *_ in sentences), *measured, *said]
    return Answer(group, lines, decision, overall, [c for _, *claims in sentences for c in claims], repeat, progress)


def _timed(sizes: Iterable[int]) -> list[str]:
    return [TIMED, _sizes(sizes)]


def _sizes(sizes: Iterable[int]) -> str:
    return f"data.batch_size={','.join(map(str, sizes))}"


# --- the sentences: each is a line, and what it claims --------------------------------------------------------------

_Said = tuple[Any, ...]  # a line, then its claims


def _sentences(group: Group, decision: Decision, overall: Decision, quality: Quality | None) -> Iterator[_Said]:
    rates = group.rates
    if decision.size is None:
        yield (_undecided(decision, quality),)
    else:
        yield _decided(rates, decision, overall, quality)
    if quality:
        yield from _price(group, decision, overall.best, quality)
        yield (quality.best_words({size: f"{size:,}" for size in quality.values}),)
    else:
        yield ("Accuracy was not measured: train these sizes before you choose.",)
    seen = group.medians("samples_seen").values() if quality else ()
    if seen and max(seen) > 1.1 * min(seen):
        yield ("The sizes saw different numbers of samples, which changes the metric.",)
    if vague := [size for size in overall.vague if size not in decision.between]:
        yield (f"Not known to ± 10 %, and marked with ?: the rate at {and_(vague)}.",)
    if line := _larger(group, decision, overall):
        yield (line,)


def _claim(kind: str, size: int, **facts: Any) -> dict[str, Any]:
    return {"kind": kind, "batch_size": size, **facts}


def _decided(rates: Rates, decision: Decision, overall: Decision, quality: Quality | None) -> _Said:
    """`512 is the fastest; 64 gives 84 % of it.`"""
    size, fastest, among = decision.size or 0, decision.fastest, sorted(decision.ratios)
    claims = [_claim("reaches", size, share=ENOUGH, among=among)]
    best = f"with the best {quality.metric.key}" if quality else ""
    of_those = f" of those {best}" if len(among) < len(overall.ratios) else ""
    if len(among) == 1:
        return (f"{size:,} is the only size {best}.", *claims)
    if fastest is None:
        return (f"{size:,} is enough: it gives at least {percent(ENOUGH)} of the best rate{of_those}.", *claims)
    claims.append(_claim("fastest", fastest, among=among))
    if size != fastest:
        share, claim = _share(rates, size, fastest)
        line = f"{size:,} is enough: it gives {share} of the rate of {fastest:,}, the fastest{of_those}."
        return (line, *claims, claim)
    others = [s for s in among if s < size] or [s for s in among if s > size]  # the best of the smaller ones is named
    other = max(others, key=lambda s: decision.ratios[s].value)
    share, claim = _share(rates, other, size)
    return (f"{size:,} is the fastest{of_those}; {other:,} gives {share} of it.", *claims, claim)


def _share(rates: Rates, size: int, of: int) -> tuple[str, dict[str, Any]]:
    """A share that is as exact as it is known: `84 %`, or `at most 70 %`."""
    ratio = rates.ratio(size, of)
    if ratio.reach <= VAGUE:
        return percent(ratio.value), _claim("share", size, of=of, share=ratio.value)
    share = math.ceil(100 * rates.ratio(size, of, STATED).high) / 100
    return f"at most {percent(share)}", _claim("at_most", size, of=of, share=share)


def _undecided(decision: Decision, quality: Quality | None) -> str:
    between, best, smallest = decision.between, decision.best, decision.between[0]
    begin = f"Undecided between {and_(between)}"
    if quality and quality.allowed is None and quality.best in between:
        return f"{begin}: {quality.best:,} has the best {quality.metric.key}."
    is_small = decision.ratios[smallest].low < ENOUGH  # the doubt is whether it is enough
    one = smallest if is_small else max(between, key=lambda size: decision.ratios[size].high)
    ratio = decision.ratios[one]
    wanted = f"{percent(ENOUGH)} would be enough" if is_small else f"{percent(1 + VAGUE)} would be worth it"
    span = f"{100 * ratio.low:.0f} to {percent(ratio.high)}" if ratio.high < 10 else "an unknown share"
    return f"{begin}: {one:,} gives {span} of the rate of {best:,}; {wanted}."


def _price(group: Group, decision: Decision, fast: int, quality: Quality) -> Iterator[_Said]:
    """What a faster size that trains worse would gain and lose."""
    chosen = decision.size
    if chosen is None or quality.allowed is None or fast in quality.as_good or fast not in quality.values:
        return
    ratio = group.rates.ratio(fast, chosen, STATED)
    if ratio.low > 1:
        exact = {"kind": "share", "share": ratio.value} if ratio.reach <= VAGUE else {}
        claim = _claim("at_least", fast, of=chosen, share=at_least(ratio)) | exact
        loss, trained = quality.loss_words(fast, chosen), training_words(group.runs)
        line = f"{fast:,} is {times_as_fast(ratio)} and loses {loss} after {trained}."
        yield (line, claim, _claim("worse", fast, metric=quality.metric.key))


def _larger(group: Group, decision: Decision, overall: Decision) -> str:
    """Whether a size that did not run may be faster; empty where nothing is known of that."""
    largest, limit, whole = max(overall.ratios), group.out_of_memory, group.largest_possible
    rest = [ratio.high for size, ratio in overall.ratios.items() if size != largest]
    if decision.size != largest or overall.fastest != largest or max(rest) > 1 - VAGUE / 2:
        return f"{limit:,} ran out of memory." if limit else ""
    rises = f"The rate still rises at {largest:,}"
    if limit and limit <= 2 * largest:
        return f"{rises}, and {limit:,} ran out of memory."
    if whole is not None and whole < 2 * largest:
        return f"{rises}; the training set has {whole:,}."
    return f"{rises}: {2 * largest:,} may be faster."
