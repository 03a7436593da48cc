"""How good the trained networks are: a metric at each batch size, and which sizes are shown to be worse than the best.

The noise of a metric is what runs with other seeds differ by. With one seed, it is the standard error of an accuracy on
the samples of its set, and as much again for the seed. Of another metric with one seed the noise is not known.

The best of many equal sizes is the luckiest one. So each of the others is compared with it at a confidence by which all
comparisons together hold (Bonferroni).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri, stdtrit

from ..records.formatting import count, significant
from ..records.metrics import FRACTION, Metric, metric
from ..records.values import at, positive
from .run import Run
from .text import and_

_CONFIDENCE = 0.98  # that all sizes which are said to be worse are worse


@dataclass(frozen=True)
class Quality:
    """A metric of trained runs by batch size. `allowed` is None where its noise is not known."""

    metric: Metric
    values: Mapping[int, float]  # means over the runs of a size
    allowed: Mapping[int, float] | None  # by how much each size may be below the best without being shown to be worse
    seeds: int  # runs of a size, at most

    @property
    def best(self) -> int:
        """The size with the best value."""
        return (max if self.metric.higher_is_better else min)(self.values, key=lambda size: self.values[size])

    @property
    def as_good(self) -> list[int]:
        """The sizes that are not shown to be worse than the best; all of them where the noise is not known."""
        return [s for s in self.values if self.allowed is None or self.loss(s) <= self.allowed[s]]

    def loss(self, size: int) -> float:
        """By how much the metric of a size is worse than the best, at least 0."""
        return abs(self.values[self.best] - self.values[size])

    def best_words(self, names: Mapping[int, str], at: str = "at") -> str:
        """The best value and where it is, by the names of the sizes; and which others are not shown to be worse."""
        others = [names[size] for size in self.as_good if size != self.best]
        alike = f"; {and_(others)} {'is' if len(others) == 1 else 'are'} not shown to be worse" if others else ""
        if self.allowed is None:
            alike = "; how far that differs by chance is not known"
        value, seeds = self.metric.text(self.values[self.best]), "" if self.seeds > 1 else " (one seed)"
        return f"Best {self.metric.key}: {value} {at} {names[self.best]}{alike}{seeds}."

    def loss_words(self, size: int, than: int) -> str:
        """By how much a size is worse than another: `10 points` of an accuracy, `0.12 of val/loss` of another metric."""
        loss = abs(self.values[than] - self.values[size])
        if self.metric.unit != FRACTION:
            return f"{significant(loss)} of {self.metric.key}"
        points = 100 * loss
        return f"{points:.0f} points" if points >= 9.5 else f"{points:.1f} points"


def quality_of(sizes: Mapping[int, Sequence[Run]], key: str) -> Quality | None:
    """The metric of the sizes that have it; None where fewer than two do, or no direction of it is better."""
    found = {s: [run.metrics[key] for run in runs if key in run.metrics] for s, runs in sizes.items()}
    found = {size: values for size, values in found.items() if values}
    declared = metric(key)
    if len(found) < 2 or declared.higher_is_better is None:
        return None
    means = {size: float(np.mean(values)) for size, values in found.items()}
    best = (max if declared.higher_is_better else min)(means, key=lambda size: means[size])
    confidence = 1 - (1 - _CONFIDENCE) / (len(found) - 1)
    is_share = declared.unit == FRACTION and all(0 <= mean <= 1 for mean in means.values())  # and not in percent
    tested = _tested(sizes, key, means) if is_share else {}
    if freedom := sum(len(values) - 1 for values in found.values()):
        pooled = math.sqrt(sum(float(np.var(v)) * len(v) for v in found.values()) / freedom)
        pooled = max(pooled, *(1 / count for count in tested.values()), 0.0)  # no less than one sample
        t = float(stdtrit(freedom, confidence)) * pooled
        allowed = {size: t * math.sqrt(1 / len(v) + 1 / len(found[best])) for size, v in found.items()}
    elif tested:
        error = {size: _standard_error(means[size], count) for size, count in tested.items()}
        allowed = {size: float(ndtri(confidence)) * math.hypot(error[size], error[best]) for size in means}
    else:
        allowed = None
    return Quality(declared, means, allowed, max(map(len, found.values())))


def _tested(sizes: Mapping[int, Sequence[Run]], key: str, among: Iterable[int]) -> dict[int, float]:
    """The number of samples on which each size was tested; empty where that of one is not known."""
    runs = {size: next(run for run in sizes[size] if key in run.metrics) for size in among}
    counts = {size: positive(at(run.record, f"evaluated.{key.partition('/')[0]}")) for size, run in runs.items()}
    known = {size: count for size, count in counts.items() if count}
    return known if len(known) == len(counts) else {}


def _standard_error(accuracy: float, samples: float) -> float:
    """Of an accuracy of one seed; what seeds differ by is taken to be as large as the error of its samples.

    The rule of succession keeps the error of an accuracy of 0 or 1 above 0.
    """
    smooth = (accuracy * samples + 1) / (samples + 2)
    return math.sqrt(2 * smooth * (1 - smooth) / samples)


def training_words(runs: Sequence[Run]) -> str:
    """`2 epochs`, or `this training` where the runs trained for different times."""
    epochs = {positive(run.record.get("epochs")) for run in runs if run.metrics}
    number = epochs.pop() if len(epochs) == 1 else None
    return count(round(number), "epoch") if number and number >= 1 else "this training"
