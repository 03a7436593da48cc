"""How good the trained networks are: a metric at each batch size, and which sizes are candidates for the answer.

The *loss* of a size is by how much its metric is worse than the best one. Its *sure loss* is the upper end of the one-sided
simultaneous 95 % interval of its loss against the best of all others (Hsu 1981; K − 1 comparisons, Šidák). A candidate is a
size whose loss is at most one margin and whose sure loss is at most three. The best size always is one, a doubtful size never.

Two runs differ by the noise of their tests: by the samples that only one of them answers right (McNemar), else by two binomials.
With several seeds, the runs of a seed are a block (as a pass in noise.py), and the tests moderate the variance of the residuals.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.special import ndtri, stdtrit

from ..records.formatting import significant
from ..records.metrics import FRACTION, Metric, metric
from ..records.values import at, positive
from .noise import simultaneous
from .run import SEED, TEST_ACCURACY, Run
from .text import and_

_MARGINS = 3  # the largest sure loss of a candidate, in margins
# The margin of a fraction is 0.01, or a third of the best size's error if that is less, but at least two samples of the test.
_POINT, _ERROR_SHARE, _SAMPLES = 0.01, 1 / 3, 2  # a test resolves no less than two samples
_VALUE_SHARE = 0.02  # the margin of another metric, as a fraction of the best value
_PRIOR = 4.0  # degrees of freedom by which the variance of two tests moderates that of the seeds
_ONE_SEED = 2.0  # factor of the variance: the effect of a seed is assumed to add as much again, until it is measured


@dataclass(frozen=True)
class Quality:
    """A metric of trained runs by batch size."""

    metric: Metric
    values: Mapping[int, float]  # means over the seeds of a size
    margin: float  # in the unit of the metric
    sure: Mapping[int, float] | None  # the sure loss of each size; None where the noise of the metric is not known
    seeds: int  # the most seeds of a size
    is_share: bool = False  # whether the values are fractions of 1, and not percentages or other numbers

    @property
    def best(self) -> int:
        """The size with the best value."""
        return (max if self.metric.higher_is_better else min)(self.values, key=lambda size: self.values[size])

    def loss(self, size: int) -> float:
        """Return by how much the metric of a size is worse than the best, at least 0."""
        return abs(self.values[self.best] - self.values[size])

    @property
    def doubtful(self) -> list[int]:
        """The sizes that are no candidates only because their sure loss is too large; empty where the noise is not known."""
        sure, best = self.sure or {}, self._within(0.0)  # several sizes may be the best
        return [s for s in self._within(self.margin) if s not in best and sure.get(s, 0.0) > _MARGINS * self.margin]

    @property
    def candidates(self) -> list[int]:
        """The best size, and the sizes that are as good: by estimate alone where the noise is not known."""
        return [size for size in self._within(self.margin) if size not in self.doubtful]

    @property
    def candidate_words(self) -> str:
        """` within 0.32 points of the best test/acc` for several candidates, ` with the best test/acc` for one."""
        several = len(self.candidates) > 1
        return f" {f'within {self._amount(self.margin)} of' if several else 'with'} the best {self.metric.key}"

    def _within(self, loss: float) -> list[int]:
        return [size for size in self.values if self.loss(size) <= loss + 1e-9 * self.margin]

    def is_shown(self, size: int) -> bool:
        """Whether the sure loss of a size is known, and no larger than that of a candidate may be."""
        return self.sure is not None and self.sure.get(size, math.inf) <= _MARGINS * self.margin

    def best_words(self, names: Mapping[int, str], at: str = "at") -> str:
        """Say what the best value is, which size has it, and which sizes are or may be as good; `names` has a name for each size."""
        within = f" within {self._amount(self.margin)} of it"
        near, doubtful = ([names[s] for s in sizes if s != self.best] for sizes in (self.candidates, self.doubtful))
        clauses = [f"{and_(near)} {'is' if len(near) == 1 else 'are'}{within}"] if near else []
        clauses += [f"{and_(doubtful)} may be{'' if near else within}"] if doubtful else []
        clauses += ["how far that differs by chance is not known"] if self.sure is None else []
        value, seeds = self.metric.text(self.values[self.best]), "" if self.seeds > 1 else " (one seed)"
        return f"Best {'; '.join([f'{self.metric.key}: {value} {at} {names[self.best]}', *clauses])}{seeds}."

    def is_worse(self, size: int) -> bool:
        """Whether a size is shown to be worse than the best: the lower end of the interval of its loss lies above 0."""
        return self.sure is not None and 2 * self.loss(size) > self.sure[size]

    def price(self, size: int) -> str:
        """Say what a size that is no candidate loses: `loses 2.1 points against 32`, `may lose up to 0.90 points against 32`."""
        against = f"{'' if self.is_share else f' of {self.metric.key}'} against {self.best:,}"
        if self.sure is not None and size in self.doubtful:
            return f"may lose up to {self._amount(self.sure[size])}{against}"
        return f"loses {self._amount(self.loss(size))}{against}{'' if self.is_worse(size) else ' by estimate'}"

    def _amount(self, loss: float) -> str:
        """Format a loss: `10 points` for an accuracy, `0.12` for another metric."""
        digits = 0 if loss >= 0.095 else 1 if loss >= 0.0095 else 2
        return f"{100 * loss:.{digits}f} points" if self.is_share else significant(loss)


def first_quality(sizes: Mapping[int, Sequence[Run]], metrics: Sequence[str], margin: float | None) -> Quality | None:
    """Return the quality by the first of the metrics that has one; None where none has."""
    return next(filter(None, (find_quality(sizes, key, margin) for key in metrics)), None)


def find_quality(sizes: Mapping[int, Sequence[Run]], key: str, margin: float | None = None) -> Quality | None:
    """Return the quality by one metric; None where fewer than two sizes have the metric, or it has no better direction.

    `margin` is a fraction of 1 for a metric that is a fraction, else a fraction of the best value; None stands for the rule.
    """
    tested = {s: kept for s, runs in sizes.items() if (kept := [run for run in runs if key in run.metrics])}
    declared = metric(key)
    if len(tested) < 2 or declared.higher_is_better is None:
        return None
    rows = [(_seed(run, n), size, run.metrics[key]) for size, runs in tested.items() for n, run in enumerate(runs)]
    cells = pd.DataFrame(rows, columns=["seed", "size", "value"]).pivot_table("value", "seed", "size")
    values = cells.mean()
    best = values.max() if declared.higher_is_better else values.min()
    is_share = declared.unit == FRACTION and bool(values.between(0, 1).all())  # and not in percent
    samples = max(_tested_samples(runs, key) or 0.0 for runs in tested.values())
    error = max(_ERROR_SHARE * (1 - best), _SAMPLES / samples if samples else 0.0)
    rule = min(_POINT, error) if is_share else _VALUE_SHARE
    absolute_margin = float((rule if margin is None else margin) * (1 if is_share else abs(best)))
    pairs = itertools.combinations(tested, 2)
    variances = {(a, b): _test_variance(tested[a], tested[b], key) if is_share else None for a, b in pairs}
    sure = _sure_losses(cells if declared.higher_is_better else -cells, variances)
    return Quality(declared, values.to_dict(), absolute_margin, sure, int(cells.count().max()), is_share)


def why_none(metrics: Sequence[str], alternatives: str) -> str:
    """Say why `find_quality` is None for metrics that runs have: `Of test/acc fewer than two sizes have a value`."""
    directed = [key for key in metrics if metric(key).higher_is_better is not None]
    why = f"fewer than two {alternatives} have a value" if directed else "it is not known whether more is better"
    return f"Of {and_(directed or metrics)} {why}"


def seed_means(runs: Sequence[Run], key: str) -> list[float]:
    """Return a metric by seed, as the mean of the runs with that seed."""
    values: dict[str, list[float]] = {}
    for number, run in enumerate(runs):
        values.setdefault(_seed(run, number), []).append(run.metrics[key])
    return [*map(statistics.fmean, values.values())]


def _seed(run: Run, number: int) -> str:
    return str(run.settings.get(SEED, f"run {number}"))


def metric_interval(runs: Sequence[Run], key: str) -> tuple[float, float]:
    """Return the ends of the 90 % interval of a metric's mean over the seeds of one size; NaN where its noise is not known.

    The noise of one seed is that of its tested samples. That of several seeds is estimated from them, moderated by their tests.
    """
    values = np.array(seed_means(runs, key))
    mean, n, samples = float(values.mean()), len(values), _tested_samples(runs, key)
    is_share = metric(key).unit == FRACTION and bool(((values >= 0) & (values <= 1)).all())
    test_variance = _share_variance(mean, samples) if is_share and samples else None
    prior = 0.0 if test_variance is None else _PRIOR
    if test_variance is None and n == 1:
        return math.nan, math.nan
    variance = (prior * (test_variance or 0.0) + float(((values - mean) ** 2).sum())) / (prior + n - 1)
    half = (stdtrit(prior + n - 1, 0.95) if n > 1 else ndtri(0.95)) * math.sqrt(variance / n)
    return (max(0.0, mean - half), min(1.0, mean + half)) if is_share else (mean - half, mean + half)


def _sure_losses(cells: pd.DataFrame, variances: Mapping[tuple[int, int], float | None]) -> dict[int, float] | None:
    """Return the sure losses for a metric of which more is better; None unless the noise of each difference is known.

    `cells` has a row for each seed and a column for each size, `variances` for each pair what `_test_variance` returns.
    """
    confidence = (1 + simultaneous(cells.shape[1] - 1)) / 2
    counts, means = cells.count().to_dict(), cells.mean().to_dict()
    residuals, freedom = cells - cells.mean(), sum(counts.values()) - len(counts)
    if cells.notna().to_numpy().all():
        residuals, freedom = residuals.sub(residuals.mean(axis=1), axis=0), freedom - len(cells) + 1
    squares = 2 * float(np.nansum(residuals.to_numpy() ** 2))  # the variance of a difference by the seeds × freedom
    sure = dict.fromkeys(itertools.chain(*variances), 0.0)
    for (a, b), test_variance in variances.items():
        prior = 0.0 if test_variance is None else _PRIOR
        if not prior + freedom:
            return None
        variance = (prior * (test_variance or 0.0) + squares) / (prior + freedom)
        variance *= (1 if freedom else _ONE_SEED) * (1 / counts[a] + 1 / counts[b]) / 2
        half = float(stdtrit(prior + freedom, confidence) if freedom else ndtri(confidence)) * math.sqrt(variance)
        sure[a], sure[b] = max(sure[a], means[b] - means[a] + half), max(sure[b], means[a] - means[b] + half)
    return sure


def _test_variance(a: Sequence[Run], b: Sequence[Run], key: str) -> float | None:
    """Return the variance of the difference of two runs by their test samples; None where the number of samples is not known."""
    pairs = itertools.product(a, b) if key == TEST_ACCURACY else ()
    paired = [variance for pair in pairs if (variance := _mcnemar_variance(*pair)) is not None]
    if paired:
        return float(np.mean(paired))
    sides = [(float(np.mean([run.metrics[key] for run in runs])), _tested_samples(runs, key)) for runs in (a, b)]
    variances = [_share_variance(share, samples) for share, samples in sides if samples]
    return sum(variances) if len(variances) == len(sides) else None


def _share_variance(share: float, samples: float) -> float:
    """Return the variance of a share of so many samples, by the rule of succession, so never 0."""
    smooth = (share * samples + 1) / (samples + 2)
    return smooth * (1 - smooth) / samples


def _mcnemar_variance(a: Run, b: Run) -> float | None:
    """Return McNemar's variance, with half a sample added on either side (Agresti and Min 2005); None for unpaired answers."""
    fingerprint_a, fingerprint_b = (at(run.record, "dataset.fingerprint") for run in (a, b))
    right_a, right_b = a.correct, b.correct
    if not (isinstance(right_a, np.ndarray) and isinstance(right_b, np.ndarray)):
        return None
    if fingerprint_a in (None, "unknown") or fingerprint_a != fingerprint_b or len(right_a) != len(right_b):
        return None
    n, n10, n01 = len(right_a), int((right_a & ~right_b).sum()), int((right_b & ~right_a).sum())
    return (n10 + n01 + 1 - (n10 - n01) ** 2 / n) / n**2


def _tested_samples(runs: Sequence[Run], key: str) -> float | None:
    """Return the number of samples that a size was tested on; None for a metric of a Task that is no mean over samples.

    The record of a LightningModule does not say which metrics are such means: its accuracies are taken for shares of the samples.
    """
    stage, _, name = key.partition("/")
    counts = (
        positive(at(run.record, f"evaluated.{stage}"))
        for run in runs
        if not isinstance(means := run.record.get("sample_means"), list) or name in means
    )
    return next(filter(None, counts), None)
