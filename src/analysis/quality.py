"""How good the trained networks are: a metric at each batch size, and which sizes are candidates for the answer.

The *loss* of a size is by how much its metric is worse than the best one. Its *sure loss* is the upper end of the one-sided
simultaneous 95 % interval of that against the best of all others (Hsu 1981; K − 1 comparisons, Šidák). A candidate is a size
whose loss is at most a margin and whose sure loss is at most three; the best always is one. So in doubt a size is none.

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

_MARGINS = 3  # that the sure loss of a candidate has at most
_POINT, _OF_ERROR = 0.01, 1 / 3  # the margin of a fraction: this, or this part of the best one's error if that is less,
_SAMPLES = 2  # but not less than these of the test, which resolves no less where the best has hardly an error
_OF_VALUE = 0.02  # the margin of another metric, as a part of the best value
_PRIOR = 4.0  # degrees of freedom by which the variance of two tests moderates that of the seeds
_ONE_SEED = 2.0  # of the variance: what a seed shifts as a whole is assumed to be as much again, until it is measured


@dataclass(frozen=True)
class Quality:
    """A metric of trained runs by batch size. `sure` is None where its noise is not known."""

    metric: Metric
    values: Mapping[int, float]  # means over the seeds of a size
    margin: float  # in the unit of the metric
    sure: Mapping[int, float] | None  # the sure loss of each size
    seeds: int  # of a size, at most
    is_share: bool = False  # whether the values are fractions of 1, and not percentages or other numbers

    @property
    def best(self) -> int:
        """The size with the best value."""
        return (max if self.metric.higher_is_better else min)(self.values, key=lambda size: self.values[size])

    def loss(self, size: int) -> float:
        """By how much the metric of a size is worse than the best, at least 0."""
        return abs(self.values[self.best] - self.values[size])

    @property
    def doubtful(self) -> list[int]:
        """The sizes that are no candidates only because their sure loss is too large; none where the noise is not known."""
        sure, best = self.sure or {}, self._within(0.0)  # several sizes may be the best
        return [s for s in self._within(self.margin) if s not in best and sure.get(s, 0.0) > _MARGINS * self.margin]

    @property
    def candidates(self) -> list[int]:
        """The best size, and those that are as good: by estimate alone where the noise is not known."""
        return [size for size in self._within(self.margin) if size not in self.doubtful]

    @property
    def candidate_words(self) -> str:
        """` within 0.32 points of the best test/acc`, of several candidates; ` with the best test/acc`, of one."""
        several = len(self.candidates) > 1
        return f" {f'within {self._amount(self.margin)} of' if several else 'with'} the best {self.metric.key}"

    def _within(self, loss: float) -> list[int]:
        return [size for size in self.values if self.loss(size) <= loss + 1e-9 * self.margin]

    def is_shown(self, size: int) -> bool:
        """Whether it is shown that a size loses no more than a candidate may, against any other."""
        return self.sure is not None and self.sure.get(size, math.inf) <= _MARGINS * self.margin

    def best_words(self, names: Mapping[int, str], at: str = "at") -> str:
        """The best value and where it is, by the names of the sizes; and which others are as good, or may be."""
        within = f" within {self._amount(self.margin)} of it"
        near, doubtful = ([names[s] for s in of if s != self.best] for of in (self.candidates, self.doubtful))
        alike = [f"{and_(near)} {'is' if len(near) == 1 else 'are'}{within}"] if near else []
        alike += [f"{and_(doubtful)} may be{'' if near else within}"] if doubtful else []
        alike += ["how far that differs by chance is not known"] if self.sure is None else []
        value, seeds = self.metric.text(self.values[self.best]), "" if self.seeds > 1 else " (one seed)"
        return f"Best {'; '.join([f'{self.metric.key}: {value} {at} {names[self.best]}', *alike])}{seeds}."

    def is_worse(self, size: int) -> bool:
        """Whether a size is shown to be worse than the best: the lower end of the interval of its loss lies above 0."""
        return self.sure is not None and 2 * self.loss(size) > self.sure[size]

    def price(self, size: int) -> str:
        """What a size that is no candidate loses: `loses 2.1 points against 32`, `may lose up to 0.90 points against 32`."""
        of = f"{'' if self.is_share else f' of {self.metric.key}'} against {self.best:,}"
        if self.sure is not None and size in self.doubtful:
            return f"may lose up to {self._amount(self.sure[size])}{of}"
        return f"loses {self._amount(self.loss(size))}{of}{'' if self.is_worse(size) else ' by estimate'}"

    def _amount(self, loss: float) -> str:
        """`10 points` of an accuracy, `0.12` of another metric."""
        digits = 0 if loss >= 0.095 else 1 if loss >= 0.0095 else 2
        return f"{100 * loss:.{digits}f} points" if self.is_share else significant(loss)


def quality_of(sizes: Mapping[int, Sequence[Run]], key: str, margin: float | None = None) -> Quality | None:
    """The metric of the sizes that have it; None where fewer than two do, or no direction of it is better.

    `margin` is that of a fraction, or a part of the best value of another metric; None for the rule.
    """
    found = {s: runs for s, of_size in sizes.items() if (runs := [run for run in of_size if key in run.metrics])}
    declared = metric(key)
    if len(found) < 2 or declared.higher_is_better is None:
        return None
    rows = [
        (_seed(run, number), size, run.metrics[key]) for size, runs in found.items() for number, run in enumerate(runs)
    ]
    cells = pd.DataFrame(rows, columns=["seed", "size", "value"]).pivot_table("value", "seed", "size")
    values = cells.mean()
    best = values.max() if declared.higher_is_better else values.min()
    is_share = declared.unit == FRACTION and bool(values.between(0, 1).all())  # and not in percent
    samples = max(_tested(runs, key) or 0.0 for runs in found.values())
    error = max(_OF_ERROR * (1 - best), _SAMPLES / samples if samples else 0.0)
    rule = min(_POINT, error) if is_share else _OF_VALUE
    most = float((rule if margin is None else margin) * (1 if is_share else abs(best)))
    pairs = itertools.combinations(found, 2)
    known = {(a, b): _of_tests(found[a], found[b], key) if is_share else None for a, b in pairs}
    sure = _sure(cells if declared.higher_is_better else -cells, known)
    return Quality(declared, values.to_dict(), most, sure, int(cells.count().max()), is_share)


def why_none(metrics: Sequence[str], of: str) -> str:
    """Why `quality_of` has none of some metrics that runs have: `Of test/acc fewer than two sizes have a value`."""
    few = [key for key in metrics if metric(key).higher_is_better is not None]
    why = f"fewer than two {of} have a value" if few else "it is not known whether more is better"
    return f"Of {and_(few or metrics)} {why}"


def of_seeds(runs: Sequence[Run], key: str) -> list[float]:
    """A metric by seed: the mean of the runs that repeat one."""
    values: dict[str, list[float]] = {}
    for number, run in enumerate(runs):
        values.setdefault(_seed(run, number), []).append(run.metrics[key])
    return [statistics.fmean(of_seed) for of_seed in values.values()]


def _seed(run: Run, number: int) -> str:
    return str(run.settings.get(SEED, f"run {number}"))


def interval_of(runs: Sequence[Run], key: str) -> tuple[float, float]:
    """The ends of the 90 % interval of the mean of a metric over the seeds of one size; NaN where its noise is not known.

    One seed has the noise of its tested samples. Several have that of their seeds, which that of the tests moderates.
    """
    values = np.array(of_seeds(runs, key))
    mean, n, samples = float(values.mean()), len(values), _tested(runs, key)
    is_share = metric(key).unit == FRACTION and bool(((values >= 0) & (values <= 1)).all())
    of_tests = _of_share(mean, samples) if is_share and samples else None
    prior = 0.0 if of_tests is None else _PRIOR
    if of_tests is None and n == 1:
        return math.nan, math.nan
    variance = (prior * (of_tests or 0.0) + float(((values - mean) ** 2).sum())) / (prior + n - 1)
    half = (stdtrit(prior + n - 1, 0.95) if n > 1 else ndtri(0.95)) * math.sqrt(variance / n)
    return (max(0.0, mean - half), min(1.0, mean + half)) if is_share else (mean - half, mean + half)


def _sure(cells: pd.DataFrame, known: Mapping[tuple[int, int], float | None]) -> dict[int, float] | None:
    """The sure losses, by a metric of which more is better; None unless the noise of each difference is known.

    `cells` has a row for each seed and a column for each size, `known` the variance of two runs of each pair by their tests.
    """
    confidence = (1 + simultaneous(cells.shape[1] - 1)) / 2
    counts, means = cells.count().to_dict(), cells.mean().to_dict()
    residuals, freedom = cells - cells.mean(), sum(counts.values()) - len(counts)
    if cells.notna().to_numpy().all():
        residuals, freedom = residuals.sub(residuals.mean(axis=1), axis=0), freedom - len(cells) + 1
    of_seeds = 2 * float(np.nansum(residuals.to_numpy() ** 2))  # × freedom
    sure = dict.fromkeys(itertools.chain(*known), 0.0)
    for (a, b), of_tests in known.items():
        prior = 0.0 if of_tests is None else _PRIOR
        if not prior + freedom:
            return None
        variance = (prior * (of_tests or 0.0) + of_seeds) / (prior + freedom)
        variance *= (1 if freedom else _ONE_SEED) * (1 / counts[a] + 1 / counts[b]) / 2
        half = float(stdtrit(prior + freedom, confidence) if freedom else ndtri(confidence)) * math.sqrt(variance)
        sure[a], sure[b] = max(sure[a], means[b] - means[a] + half), max(sure[b], means[a] - means[b] + half)
    return sure


def _of_tests(a: Sequence[Run], b: Sequence[Run], key: str) -> float | None:
    """The variance of a difference of two runs by the samples of their tests; None where nobody knows how many these are."""
    same = [v for one in a for two in b if key == TEST_ACCURACY and (v := _of_disagreement(one, two)) is not None]
    if same:
        return float(np.mean(same))
    sizes = [(float(np.mean([run.metrics[key] for run in runs])), _tested(runs, key)) for runs in (a, b)]
    known = [_of_share(value, n) for value, n in sizes if n]
    return sum(known) if len(known) == len(sizes) else None


def _of_share(share: float, samples: float) -> float:
    """The variance of a share of so many samples, by the rule of succession, so never 0."""
    smooth = (share * samples + 1) / (samples + 2)
    return smooth * (1 - smooth) / samples


def _of_disagreement(a: Run, b: Run) -> float | None:
    """McNemar's variance, with half a sample added on either side (Agresti and Min 2005); None if these are not known."""
    fingerprint, other = (at(run.record, "dataset.fingerprint") for run in (a, b))
    one, two = a.correct, b.correct
    are_known = isinstance(one, np.ndarray) and isinstance(two, np.ndarray) and fingerprint not in (None, "unknown")
    if not are_known or fingerprint != other or len(one) != len(two):
        return None
    n, n10, n01 = len(one), int((one & ~two).sum()), int((two & ~one).sum())
    return (n10 + n01 + 1 - (n10 - n01) ** 2 / n) / n**2


def _tested(runs: Sequence[Run], key: str) -> float | None:
    """The number of samples that a size was tested on; None for a metric of a Task that is no mean over them.

    Of a LightningModule nobody knows what is one: its accuracies are taken for shares of the samples.
    """
    stage, _, name = key.partition("/")
    counts = (
        positive(at(run.record, f"evaluated.{stage}"))
        for run in runs
        if not isinstance(means := run.record.get("sample_means"), list) or name in means
    )
    return next(filter(None, counts), None)
