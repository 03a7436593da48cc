"""Time to target: the training time after which the runs of each batch size reach the target of experiment=time_to_target.

A run reaches its target between its last validation below the target and its first validation at the target. A size is later
than another if the mean over the seeds of log(its last validation below ÷ the other's arrival) is shown to be above 0. Separate
runs of the same thing on a CPU differ by 10 %, so that times are no more exact than rates are (noise.py). Where several sizes may
be first, the size with the smallest typical time is the best guess.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import stdtrit

from ..records.formatting import count, duration, option_value, significant
from ..records.learning_rate import rate_words
from ..records.metrics import metric
from ..records.values import at, number, positive
from .noise import CONFIDENCE, SEPARATE_RUNS_SD, WORTH
from .run import LEARNING_RATE, Run
from .text import and_


@dataclass(frozen=True)
class Arrival:
    """When a run reached the target."""

    run: Run
    after: float  # seconds of training until the last validation below the target
    seconds: float  # seconds of training until the target; infinite if it was not reached
    samples: float  # samples until the target; infinite if it was not reached


@dataclass(frozen=True)
class Arrivals:
    """The arrivals of a group of runs at one target: for each batch size the first of each seed, whatever its learning rate."""

    target: str  # `val/acc 98 %`
    best: str  # the best value of all runs, as text; empty if it is not known
    sizes: Mapping[int, Mapping[str, Arrival]]  # by batch size, then by seed
    other_targets: int = 0  # runs that were trained to another target, which do not count

    @cached_property
    def typical(self) -> dict[int, Arrival]:
        """The arrival of the seed with the median time, for each size at which more than half of the seeds have arrived."""
        sizes = sorted(self.sizes.items())
        ordered = {size: sorted(seeds.values(), key=lambda arrival: arrival.seconds) for size, seeds in sizes}
        middle = {size: arrivals[len(arrivals) // 2] for size, arrivals in ordered.items()}
        return {size: arrival for size, arrival in middle.items() if math.isfinite(arrival.seconds)}

    @cached_property
    def arrived(self) -> dict[int, int]:
        """The number of seeds of each size that have arrived, smallest size first."""
        sizes = sorted(self.sizes.items())
        return {size: sum(math.isfinite(arrival.seconds) for arrival in seeds.values()) for size, seeds in sizes}

    @property
    def best_guess(self) -> int | None:
        """The size with the smallest typical time; if no size has one, the size of the first arrival."""
        first_s = {size: min(run.seconds for run in seeds.values()) for size, seeds in sorted(self.sizes.items())}
        typical_s = {size: arrival.seconds for size, arrival in self.typical.items()}
        arrived = [size for size, seconds in first_s.items() if math.isfinite(seconds)]
        return min(arrived, key=lambda size: (typical_s.get(size, math.inf), first_s[size]), default=None)

    @property
    def winner(self) -> int | None:
        """The best guess, if there are other sizes and all are shown to be later."""
        guess = self.best_guess
        others = self.sizes.keys() - {guess}
        return guess if guess and others and all(self._is_later(size, guess) for size in others) else None

    def _is_later(self, size: int, other: int) -> bool:
        """Whether a size is shown to arrive after another. A pair is a seed with which at least one of the sizes arrived."""
        arrivals, other_arrivals = self.sizes[size], self.sizes[other]
        pairs = [(arrival, other_arrivals[seed]) for seed, arrival in arrivals.items() if seed in other_arrivals]
        pairs = [pair for pair in pairs if any(math.isfinite(arrival.seconds) for arrival in pair)]
        if not pairs or any(not late.after or math.isinf(early.seconds) for late, early in pairs):
            return False
        logs = [math.log(late.after / early.seconds) for late, early in pairs]
        return statistics.fmean(logs) > _log_reach(logs, len(self.sizes))

    @property
    def lines(self) -> list[str]:
        """Sentences on the size that was first, or the best guess; and on the sizes that did not reach the target."""
        guess = self.best_guess
        others = [f"Left out: {count(self.other_targets, 'run')} to another target."] if self.other_targets else []
        if guess is None:
            best = f": the best was {self.best}" if self.best else ""
            return [
                f"No run reached {self.target}{best}. Take an easier target, or more time (search.minutes).",
                *others,
            ]
        arrived, seeds = self.arrived[guess], len(self.sizes[guess])
        words = f"{arrived} of {seeds} seeds" if arrived < seeds else f"{seeds} seeds" if seeds > 1 else "one seed"
        first, prefix = (" first", "" if self.winner else "Best guess: ") if len(self.sizes) > 1 else ("", "")
        lines = [f"{prefix}{guess:,} reached {self.target}{first} ({words}){self._time_words(guess)}."]
        missed = [size for size, seeds in self.arrived.items() if not seeds]
        return [*lines, *([f"{and_(missed)} did not reach it."] if missed else []), *others]

    def _time_words(self, size: int) -> str:
        if (arrival := self.typical.get(size)) is None:
            return ""
        rate, scaled = arrival.run.settings.get(LEARNING_RATE), rate_words(arrival.run.record).partition(" (")[0]
        words = f", after {duration(arrival.seconds)} of training and {significant(arrival.samples)} samples"
        words += f", at {LEARNING_RATE}={option_value(rate)}" if rate is not None else ""
        return f"{words} (scaled to {scaled})" if scaled else words


def least_time_ratio(sizes: int) -> float:
    """Return the factor by which the times of two runs have to differ to be told apart, among runs of so many sizes."""
    return math.exp(_log_reach([0.0], sizes))


def _log_reach(logs: Sequence[float], sizes: int) -> float:
    """Return how far the mean log ratio of pairs of runs may exceed the truth, with 95 % confidence for all other sizes together.

    The variance of a pair is that of the rates of two runs, plus the excess of that between seeds; its degrees of freedom are
    those of Welch and Satterthwaite.
    """
    n = len(logs)
    rate_variance = 2 * SEPARATE_RUNS_SD**2
    excess = max(0.0, float(np.var(logs, ddof=1)) - rate_variance) if n > 1 else 0.0
    variance = rate_variance + excess
    freedom = variance**2 / (rate_variance**2 / WORTH + excess**2 / max(1, n - 1))
    confidence = 1 - (1 - CONFIDENCE) / 2 / max(1, sizes - 1)
    return float(stdtrit(freedom, confidence)) * math.sqrt(variance / n)


def find_arrivals(sizes: Mapping[int, Sequence[Run]]) -> Arrivals | None:
    """Return the arrivals of the runs of each size at the target of most runs; None where no run was trained to a target."""
    all_runs = [(size, run, _target(run)) for size, runs in sizes.items() for run in runs]
    targets = Counter(target for *_, target in all_runs if target is not None)
    if not targets:
        return None
    key, value = target = targets.most_common(1)[0][0]
    declared, target_runs = metric(key), [(size, run) for size, run, of_run in all_runs if of_run == target]
    arrivals = [(size, _arrival(run)) for size, run in target_runs]
    arrivals.sort(key=lambda pair: (pair[1].seconds, -pair[1].after))  # the first one of each seed counts
    by_size: dict[int, dict[str, Arrival]] = {size: {} for size in sorted(size for size, _ in target_runs)}
    for size, arrival in arrivals:
        by_size[size].setdefault(str(arrival.run.settings.get("seed")), arrival)
    bests = [run_best for _, run in target_runs if (run_best := number(at(run.record, "target.best"))) is not None]
    best = min(bests, key=lambda run_best: abs(run_best - value), default=None)  # for runs that did not reach it
    best_text, others = "" if best is None else declared.exact(best), targets.total() - len(target_runs)
    return Arrivals(f"{declared.key} {declared.exact(value)}", best_text, by_size, others)


def _target(run: Run) -> tuple[str, float] | None:
    """Return the metric and the value to which a run was trained; None for a run without a target."""
    value = number(at(run.record, "target.value"))
    return None if value is None else (str(at(run.record, "target.metric")), value)


def _arrival(run: Run) -> Arrival:
    seconds, samples = (run.values.get(key) for key in ("time_to_target_s", "samples_to_target"))
    if seconds is None or samples is None:
        return Arrival(run, positive(at(run.record, "target.seconds")) or 0.0, math.inf, math.inf)
    return Arrival(run, positive(at(run.record, "target.after_seconds")) or 0.0, seconds, samples)
