"""Which batch size to take: the rules, and the sentences that say what they found.

1. What is not known does not decide. Sizes are compared by the 90 % interval of the ratio of their rates (noise.py).
2. A sentence is as strong as the interval: nothing is called faster where the interval holds equality. What a sentence
   states as certain holds with 98 % confidence, because the best size is chosen by the same numbers.
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
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..records.formatting import percent
from .groups import Group
from .noise import CONFIDENCE, STATED, Rates, Ratio
from .progress import Progress, progress_of
from .quality import Quality, quality_of, training_words
from .target import Arrivals, arrivals_of
from .words import KNOWN, and_, at_least, busy_line, times_as_fast

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


def decide(rates: Rates, sizes: Collection[int] | None = None, confidence: float = CONFIDENCE) -> Decision | None:
    """Apply rules 1 to 3 to some sizes, by default to all; None where the rate of none is known."""
    among = sorted(rates.settings if sizes is None else sizes)
    known = [size for size in among if math.isfinite(rates.reach(size))]
    if not known:
        return None
    best = max(known, key=rates.rate)
    ratios = {size: rates.ratio(size, best, confidence) for size in among}
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
    rates: Rates
    decision: Decision | None  # None on a busy machine, or where no rate is known
    overall: Decision | None  # the same of all sizes, whatever their quality
    quality: Quality | None
    lines: list[str] = field(default_factory=list)  # sentences, the answer first
    claims: list[dict[str, Any]] = field(default_factory=list)  # what the sentences state
    repeat: list[str] = field(default_factory=list)  # options of the command that decides it; empty if it is decided
    progress: Progress | None = None
    arrivals: Arrivals | None = None

    @property
    def size(self) -> int | None:
        """The recommended batch size."""
        return self.decision.size if self.decision else None

    @property
    def candidate(self) -> int | None:
        """The recommended size; where the answer is undecided, the smallest that it may be and whose rate is known."""
        between = self.decision.between if self.decision else []
        return self.size or min((s for s in between if math.isfinite(self.rates.reach(s))), default=None)

    @cached_property
    def vague(self) -> list[int]:
        """The sizes whose rate is not known well enough to be compared: all of them on a busy machine."""
        return list(self.group.sizes) if self.overall is None else self.overall.vague


def answer(group: Group, metrics: Sequence[str] = ()) -> Answer | None:
    """The answer for a group; None where fewer than two sizes were measured that were asked for.

    `metrics` are those of the test or validation, the most telling one first.
    """
    asked = group.asked
    sizes = {size: group.sizes[size] for size in asked}
    arrivals = arrivals_of(sizes)
    if len(asked) < 2 and not (asked and arrivals and arrivals.is_aim):
        return None
    rates = group.rates
    quality = next((found for key in metrics if (found := quality_of(sizes, key))), None)
    if rates.busy is not None:
        return _busy(group, rates, quality, arrivals)
    overall = decide(rates, asked)
    decision = decide(rates, quality.as_good) if quality else overall
    if overall is None or decision is None:
        line = "No rate is known well enough to compare sizes: the runs measured too few steps."
        return Answer(group, rates, None, overall, quality, [line], repeat=_timed(asked))
    progress = progress_of(sizes, rates, is_early=quality is None and arrivals is None)
    further = [*(progress.lines if progress else []), *_judged(progress, arrivals)]
    if arrivals and arrivals.is_aim:
        decision = replace(overall, size=arrivals.winner, between=[] if arrivals.winner else arrivals.contenders)
        lines = [*arrivals.lines, *further]
        return Answer(group, rates, decision, overall, None, lines, progress=progress, arrivals=arrivals)
    if quality and quality.allowed is None and decision.size is not None and decision.size != quality.best:
        between = sorted({decision.size, quality.best})
        decision = replace(decision, size=None, between=between)
    words = _Words(group, rates, decision, overall, quality)
    lines = [*words.lines, *(arrivals.lines if arrivals else []), *further]
    return Answer(group, rates, decision, overall, quality, lines, words.claims, words.repeat, progress, arrivals)


def _judged(progress: Progress | None, arrivals: Arrivals | None) -> list[str]:
    """What the size that the noise scale says to be first took, beside the one that was measured to be."""
    if progress is None or arrivals is None or (winner := arrivals.winner) is None:
        return []
    said = progress.first(progress.known or [winner])
    took, best = arrivals.typical(said[0]), arrivals.typical(winner)
    if len(said) > 1 or said[0] == winner or took is None or best is None:
        return []
    return [f"It took {took.seconds / best.seconds:.1f} times as long as {winner:,}, which counts."]


def _busy(group: Group, rates: Rates, quality: Quality | None, arrivals: Arrivals | None) -> Answer:
    line = busy_line(rates.busy or 0, "batch size is recommended", "repeat the sweep")
    repeat = [] if arrivals and arrivals.is_aim else _timed(group.asked)
    return Answer(group, rates, None, None, quality, [line], repeat=repeat, arrivals=arrivals)


class _Words:
    """The sentences about one group, each with its claim."""

    def __init__(self, group: Group, rates: Rates, decision: Decision, overall: Decision, quality: Quality | None):
        self.group, self.rates, self.quality = group, rates, quality
        self.decision, self.overall = decision, overall
        self.lines: list[str] = []
        self.claims: list[dict[str, Any]] = []
        self.repeat: list[str] = []
        self.named: set[int] = set()  # sizes in the first sentence beside the recommended one
        if decision.size is None:
            self._undecided()
        else:
            self._decided(decision.size)
        self._price()
        self._accuracy()
        self._samples()
        self._vague()
        self._larger()

    def _claim(self, kind: str, size: int, **facts: Any) -> None:
        self.claims.append({"kind": kind, "batch_size": size, **facts})

    def _decided(self, size: int) -> None:
        """`512 is the fastest; 64 gives 84 % of it.`"""
        decision = self.decision
        self._claim("reaches", size, share=ENOUGH, among=sorted(decision.ratios))
        best = f"with the best {self.quality.metric.key}" if self.quality else ""
        among = f" of those {best}" if len(decision.ratios) < len(self.overall.ratios) else ""
        if len(decision.ratios) == 1:
            self.lines.append(f"{size:,} is the only size {best}.")
        elif decision.fastest == size:
            self._claim("fastest", size, among=sorted(decision.ratios))
            self.lines.append(f"{size:,} is the fastest{among}{self._next(size)}.")
        elif decision.fastest is not None:
            self._claim("fastest", decision.fastest, among=sorted(decision.ratios))
            share, fastest = self._share(size, decision.fastest), decision.fastest
            self.lines.append(f"{size:,} is enough: it gives {share} of the rate of {fastest:,}, the fastest{among}.")
        else:
            self.lines.append(f"{size:,} is enough: no other size{among} is more than 10 % faster.")

    def _next(self, size: int) -> str:
        """What the best of the smaller sizes gives, else the best of the larger ones."""
        others = [s for s in self.decision.ratios if s < size] or [s for s in self.decision.ratios if s > size]
        other = max(others, key=lambda s: self.decision.ratios[s].value)
        self.named.add(other)
        return f"; {other:,} gives {self._share(other, size)} of it"

    def _share(self, size: int, of: int) -> str:
        """A share that is as exact as it is known: `84 %`, or `at most 70 %`."""
        ratio = self.rates.ratio(size, of)
        if ratio.reach <= VAGUE:
            self._claim("share", size, of=of, share=ratio.value)
            return percent(ratio.value)
        share = math.ceil(100 * self.rates.ratio(size, of, STATED).high) / 100
        self._claim("at_most", size, of=of, share=share)
        return f"at most {percent(share)}"

    def _undecided(self) -> None:
        between, ratios = self.decision.between, self.decision.ratios
        quality = self.quality
        if quality and quality.allowed is None and quality.best in between:
            self.lines.append(
                f"Undecided between {and_(between)}: {quality.best:,} has the best {quality.metric.key}, and how far that "
                "differs by chance is not known."
            )
            self.repeat = ["seed=0,1,2", _sizes(between)]
            return
        best, smallest = self.decision.best, between[0]
        one, other = (smallest, best) if smallest != best else (between[-1], smallest)
        ratio = ratios[one]
        wanted = f"{percent(ENOUGH)} would be enough" if one == smallest else f"{percent(1 + VAGUE)} would be worth it"
        span = f"{100 * ratio.low:.0f} to {percent(ratio.high)}" if ratio.high < 10 else "an unknown share"
        self.lines.append(
            f"Undecided between {and_(between)}: {one:,} gives {span} of the rate of {other:,}; {wanted}."
        )
        self.repeat = _timed(between)

    def _price(self) -> None:
        """What a faster size that trains worse would gain and lose."""
        fast, quality, chosen = self.overall.best, self.quality, self.decision.size
        if quality is None or chosen is None or quality.allowed is None or fast in quality.as_good:
            return
        if fast not in quality.values:
            return
        ratio = self.rates.ratio(fast, chosen, STATED)
        if ratio.low <= 1:
            return
        is_known = ratio.reach <= VAGUE
        self._claim(
            "share" if is_known else "at_least", fast, of=chosen, share=ratio.value if is_known else at_least(ratio)
        )
        trained = training_words(self.group.runs)
        self._claim("worse", fast, metric=quality.metric.key)
        self.lines.append(
            f"{fast:,} is {times_as_fast(ratio)} and loses {quality.loss_words(fast, chosen)} after {trained}."
        )

    def _accuracy(self) -> None:
        quality = self.quality
        if quality is None:
            sizes = {s for s in (self.decision.size, self.decision.fastest, *self.decision.between) if s} | self.named
            which = "both" if len(sizes) == 2 else "them" if len(sizes) > 2 else "with it and a smaller one"
            self.lines.append(f"Accuracy was not measured: train {which} before you choose.")
            return
        best = quality.values[quality.best]
        line = f"Best {quality.metric.key}: {quality.metric.text(best)} at {quality.best:,}"
        others = [size for size in quality.as_good if size != quality.best]
        if quality.allowed is not None and others:
            line += f"; {and_(others)} {'is' if len(others) == 1 else 'are'} not shown to be worse"
        seeds = "" if quality.seeds > 1 else " (one seed)"
        self.lines.append(f"{line}{seeds}.")

    def _samples(self) -> None:
        """Whether the sizes saw as many samples, and were updated as often with them."""
        seen = self.group.medians("samples_seen").values() if self.quality else ()
        if seen and max(seen) > 1.1 * min(seen):
            self.lines.append("The sizes saw different numbers of samples, which changes the metric.")
        elif update := self.group.samples_an_update:
            line = f"Every update takes {update:,} samples at each size"
            compared = f"{line}: the metric compares equal samples and equal updates."
            self.lines.append(compared if self.quality else f"{line}.")

    def _vague(self) -> None:
        vague = [size for size in self.overall.vague if size not in self.decision.between]
        if vague:
            self.lines.append(f"Not known to ± 10 %, and marked with ?: the rate at {and_(vague)}.")

    def _larger(self) -> None:
        """Whether a size that did not run may be faster."""
        largest, group = max(self.overall.ratios), self.group
        rest = [ratio.high for size, ratio in self.overall.ratios.items() if size != largest]
        limit = group.out_of_memory
        if self.decision.size != largest or max(rest) > 1 - VAGUE / 2:
            if limit:
                self.lines.append(f"{limit:,} ran out of memory.")
        elif limit and limit <= 2 * largest:
            self.lines.append(f"The rate still rises at {largest:,}, and {limit:,} ran out of memory.")
        elif group.largest_possible is not None and group.largest_possible <= largest:
            self.lines.append(f"The rate still rises at {largest:,}, which is the whole training set.")
        elif group.largest_possible is not None and group.largest_possible < 2 * largest:
            self.lines.append(f"The rate still rises at {largest:,}; the training set has {group.largest_possible:,}.")
        else:
            self.lines.append(f"The rate still rises at {largest:,}: {2 * largest:,} may be faster.")


def _timed(sizes: Sequence[int]) -> list[str]:
    return [TIMED, _sizes(sizes)]


def _sizes(sizes: Sequence[int]) -> str:
    return f"data.batch_size={','.join(map(str, sizes))}"
