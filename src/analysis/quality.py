"""How good the trained networks are: a metric at each batch size, and which sizes are shown to be worse than the best.

The noise of a metric is what runs with other seeds differ by. With one seed, it is the standard error of an accuracy on
the samples of its set, and as much again for the seed. Of another metric with one seed the noise is not known.

The best of many equal sizes is the luckiest one. So each of the others is compared with it at a confidence by which all
comparisons together hold (Bonferroni).
"""

import math
from collections.abc import Mapping, Sequence
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
    error = _standard_errors(sizes, key, means) if declared.unit == FRACTION else None
    if freedom := sum(len(values) - 1 for values in found.values()):
        pooled = math.sqrt(sum(float(np.var(v)) * len(v) for v in found.values()) / freedom)
        pooled = max(pooled, *(error or {}).values(), 0.0)  # seeds that agree by chance tell no more than their samples
        t = float(stdtrit(freedom, confidence)) * pooled
        allowed = {size: t * math.sqrt(1 / len(v) + 1 / len(found[best])) for size, v in found.items()}
    elif error:
        z = math.sqrt(2) * float(ndtri(confidence))  # what seeds differ by is taken to be as large
        allowed = {size: z * math.hypot(error[size], error[best]) for size in means}
    else:
        allowed = None
    return Quality(declared, means, allowed, max(map(len, found.values())))


def _standard_errors(
    sizes: Mapping[int, Sequence[Run]], key: str, means: Mapping[int, float]
) -> dict[int, float] | None:
    """Of an accuracy at each size, by how many samples it was measured on; None where that is not known.

    The rule of succession keeps the error of an accuracy of 0 or 1 above 0.
    """
    if not all(0 <= mean <= 1 for mean in means.values()):  # an accuracy of somebody's own, in percent
        return None
    tested = {s: next(run for run in sizes[s] if key in run.metrics) for s in means}
    counts = {s: positive(at(run.record, f"evaluated.{key.partition('/')[0]}")) for s, run in tested.items()}
    if not all(counts.values()):
        return None
    smooth = {s: (means[s] * n + 1) / (n + 2) for s, n in counts.items() if n}
    return {s: math.sqrt(p * (1 - p) / (counts[s] or 1)) for s, p in smooth.items()}


def training_words(runs: Sequence[Run]) -> str:
    """`2 epochs`, or `this training` where the runs trained for different times."""
    epochs = {positive(run.record.get("epochs")) for run in runs if run.metrics}
    number = epochs.pop() if len(epochs) == 1 else None
    return count(round(number), "epoch") if number and number >= 1 else "this training"
