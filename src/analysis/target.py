"""Time to target: after which training time the runs of each batch size have reached the target of their training.

A run has reached it between its last validation below it and the first one at it. A size is later than another one if the mean
over the seeds of log(last validation below it ÷ the other's arrival) is shown to be above 0. Separate runs of the same thing on a
CPU differ by 10 %, so that times are no more exact than rates are (noise.py). Where several sizes may be first, the one with the
smallest typical time is the best guess. The target is that of experiment=time_to_target.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import stdtrit

from ..records.formatting import duration, option_value, significant
from ..records.learning_rate import rate_words
from ..records.metrics import metric
from ..records.values import at, number, positive
from .noise import BETWEEN, CONFIDENCE, WORTH
from .run import LEARNING_RATE, Run
from .text import and_


@dataclass(frozen=True)
class Arrival:
    """When a run has reached the target; `seconds` is infinite if it has not, and `after` the time until which it had not."""

    run: Run
    after: float
    seconds: float
    samples: float


@dataclass(frozen=True)
class Arrivals:
    """The arrivals of a group of runs at one target, by batch size: the first of each seed, whatever its learning rate."""

    target: str  # `val/acc 98 %`
    best: str  # value of all runs, as text; empty if it is not known
    sizes: Mapping[int, Mapping[str, Arrival]]

    @cached_property
    def typical(self) -> dict[int, Arrival]:
        """The arrival of the seed with the median time, for each size at which more than half of the seeds have arrived."""
        ordered = {size: sorted(of.values(), key=lambda run: run.seconds) for size, of in sorted(self.sizes.items())}
        middle = {size: arrivals[len(arrivals) // 2] for size, arrivals in ordered.items()}
        return {size: arrival for size, arrival in middle.items() if math.isfinite(arrival.seconds)}

    @cached_property
    def arrived(self) -> dict[int, int]:
        """How many seeds of each size have arrived, smallest size first."""
        return {size: sum(math.isfinite(one.seconds) for one in of.values()) for size, of in sorted(self.sizes.items())}

    @property
    def best_guess(self) -> int | None:
        """The size with the smallest typical time; of sizes that arrived with a few seeds alone the one that arrived first."""
        first = {size: min(run.seconds for run in of.values()) for size, of in sorted(self.sizes.items())}
        typical = {size: arrival.seconds for size, arrival in self.typical.items()}
        arrived = [size for size, seconds in first.items() if math.isfinite(seconds)]
        return min(arrived, key=lambda size: (typical.get(size, math.inf), first[size]), default=None)

    @property
    def winner(self) -> int | None:
        """The best guess, if there are other sizes and all are shown to be later."""
        guess = self.best_guess
        others = self.sizes.keys() - {guess}
        return guess if guess and others and all(self._is_later(size, guess) for size in others) else None

    def _is_later(self, size: int, other: int) -> bool:
        """Whether a size is shown to arrive after another one. Each seed with which one of them has arrived is a pair."""
        of, of_other = self.sizes[size], self.sizes[other]
        pairs = [(run, of_other[seed]) for seed, run in of.items() if seed in of_other]
        pairs = [pair for pair in pairs if any(math.isfinite(run.seconds) for run in pair)]
        if not pairs or any(not run.after or math.isinf(than.seconds) for run, than in pairs):
            return False
        logs = [math.log(run.after / than.seconds) for run, than in pairs]
        return statistics.fmean(logs) > _reach(logs, len(self.sizes))

    @property
    def lines(self) -> list[str]:
        """What the runs show: the size that was first, or the best guess; and the sizes that did not reach the target."""
        guess = self.best_guess
        if guess is None:
            best = f": the best was {self.best}" if self.best else ""
            return [f"No run reached {self.target}{best}. Take an easier target, or more time (search.minutes)."]
        arrived, seeds = self.arrived[guess], len(self.sizes[guess])
        words = f"{arrived} of {seeds} seeds" if arrived < seeds else f"{seeds} seeds" if seeds > 1 else "one seed"
        first, begin = (" first", "" if self.winner else "Best guess: ") if len(self.sizes) > 1 else ("", "")
        lines = [f"{begin}{guess:,} reached {self.target}{first} ({words}){self._after(guess)}."]
        never = [size for size, arrived in self.arrived.items() if not arrived]
        return [*lines, f"{and_(never)} did not reach it."] if never else lines

    def _after(self, size: int) -> str:
        if (arrival := self.typical.get(size)) is None:
            return ""
        rate, scaled = arrival.run.settings.get(LEARNING_RATE), rate_words(arrival.run.record).partition(" (")[0]
        words = f", after {duration(arrival.seconds)} of training and {significant(arrival.samples)} samples"
        words += f", at {LEARNING_RATE}={option_value(rate)}" if rate is not None else ""
        return f"{words} (scaled to {scaled})" if scaled else words


def apart(sizes: int) -> float:
    """By which factor two runs have to differ in time to be told apart, among runs of so many sizes."""
    return math.exp(_reach([0.0], sizes))


def _reach(logs: Sequence[float], sizes: int) -> float:
    """How far the mean log ratio of pairs of runs may exceed the truth, with 95 % confidence for all other sizes together.

    The variance of a pair is what the rates of two runs differ by, and what seeds differ by beyond that; its degrees of freedom are
    those of Welch and Satterthwaite.
    """
    n = len(logs)
    of_rates = 2 * BETWEEN**2
    beyond = max(0.0, float(np.var(logs, ddof=1)) - of_rates) if n > 1 else 0.0
    variance = of_rates + beyond
    freedom = variance**2 / (of_rates**2 / WORTH + beyond**2 / max(1, n - 1))
    confidence = 1 - (1 - CONFIDENCE) / 2 / max(1, sizes - 1)
    return float(stdtrit(freedom, confidence)) * math.sqrt(variance / n)


def arrivals_of(sizes: Mapping[int, Sequence[Run]]) -> Arrivals | None:
    """The arrivals of the runs of each size; None where none was trained to a target."""
    runs = [(size, run) for size, of in sizes.items() for run in of]
    runs = [(size, run) for size, run in runs if number(at(run.record, "target.value")) is not None]
    if not runs:
        return None
    first = runs[0][1].record["target"]
    declared = metric(str(first.get("metric")))
    bests = [best for _, run in runs if (best := number(at(run.record, "target.best"))) is not None]
    target = f"{declared.key} {declared.exact(float(first['value']))}"
    known = [(size, _arrival(run)) for size, run in runs]
    found: dict[int, dict[str, Arrival]] = {size: {} for size in sorted(size for size, _ in runs)}
    known.sort(key=lambda pair: (pair[1].seconds, -pair[1].after))  # the first one of each seed
    for size, arrival in known:
        found[size].setdefault(str(arrival.run.settings.get("seed")), arrival)
    best = min(
        bests, key=lambda value: abs(value - float(first["value"])), default=None
    )  # of no run that has reached it
    return Arrivals(target, "" if best is None else declared.exact(best), found)


def _arrival(run: Run) -> Arrival:
    seconds, samples = (run.values.get(key) for key in ("time_to_target_s", "samples_to_target"))
    if seconds is None or samples is None:
        return Arrival(run, positive(at(run.record, "target.seconds")) or 0.0, math.inf, math.inf)
    return Arrival(run, positive(at(run.record, "target.after_seconds")) or 0.0, seconds, samples)
