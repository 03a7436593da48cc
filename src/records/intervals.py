"""Confidence intervals of measured times: of a median, and of the ratio of two measurements.

Successive steps are not independent: a slow moment of the machine slows many of them. An interval that ignores this is
several times too short. Coverage on simulated series: `tests/records/test_intervals.py`.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy
from numpy.typing import ArrayLike, NDArray

from .formatting import percent

TIME_LIMIT = "time limit"  # why a timed run has ended
_TOO_FEW = 10  # values, to estimate an autocorrelation from
_TRIMMED = 0.2  # of the log ratios at each end: a few disturbed stretches do not widen the interval
_TRIMMED_FROM = 8  # stretches; what is left of fewer is too little to know a spread from
_MOST_ALIKE = 0.8  # autocorrelation of neighbours: of few values, more cannot be told from a drift
_SLOWER = (
    0.5  # of the spread between values is that between series of other hours (benchmarks/results/repeated_sweep.md)
)
_EXACT = 100  # values up to which the binomial distribution is summed


def known_to(precision: float) -> str:
    """Why a timed run has ended: `known to ± 5 %`."""
    return f"known to ± {percent(precision, digits=0 if precision >= 0.01 else 1)}"


def median_interval(values: ArrayLike, confidence: float = 0.95) -> tuple[float, float]:
    """The interval that holds the median of the process that made these successive values, shape (N,).

    Its ends are order statistics: no distribution is assumed. The number of values is divided by the autocorrelation
    time of their signs about the median, so that values that follow each other count as fewer. Values that are not
    finite are left out. `(-inf, inf)` where so few values, or so alike ones, cannot reach the confidence; six
    independent values reach 95 %.
    """
    series = numpy.asarray(values, float).ravel()
    series = series[numpy.isfinite(series)]
    n = len(series)
    independent = int(n / _autocorrelation_time(series)) if n else 0
    rank = _lowest_rank(independent, confidence)
    if rank < 1:
        return -math.inf, math.inf
    place = max(1, math.floor(n * (rank - 0.5) / independent + 0.5))
    ordered = numpy.sort(series)
    return float(ordered[place - 1]), float(ordered[n - place])


def ratio_interval(
    a_stretches: Sequence[float], b_stretches: Sequence[float], confidence: float = 0.95, paired: bool = False
) -> tuple[float, float, float]:
    """The ratio b ÷ a of two measurements in stretches, and its interval: `(ratio, low, high)`.

    Each value is the median step, or the rate, of one stretch. The interval is of the mean of log ratios, from eight
    stretches on of the trimmed mean (Yuen 1974), which one disturbed stretch in five changes little. It holds what varies
    between stretches.

    Args:
        a_stretches: positive values; others are left out.
        b_stretches: the same.
        confidence: of the interval.
        paired: the values with the same index are of the same round: what slows both is not in the ratio. A pair with
            an unusable value is left out.

    Returns:
        `(nan, 0, inf)` without usable values. The interval is `(0, inf)` where a side has fewer than two.
    """
    a, b = _logs(a_stretches), _logs(b_stretches)
    if paired:
        length = min(len(a), len(b))
        differences = b[:length] - a[:length]
        center, error, freedom = _trimmed_mean(differences[numpy.isfinite(differences)])
    else:
        (a_center, a_error, a_freedom), (b_center, b_error, b_freedom) = (
            _trimmed_mean(logs[numpy.isfinite(logs)]) for logs in (a, b)
        )
        center, error = b_center - a_center, math.hypot(a_error, b_error)
        freedom = 0.0
        if a_freedom > 0 and b_freedom > 0:  # Welch–Satterthwaite
            spread = a_error**4 / a_freedom + b_error**4 / b_freedom
            freedom = error**4 / spread if spread else a_freedom + b_freedom
    if math.isnan(center):
        return math.nan, 0.0, math.inf
    ratio = math.exp(center)
    if freedom <= 0:
        return ratio, 0.0, math.inf
    reach = math.exp(min(student_t((1 + confidence) / 2, freedom) * error, 700.0))
    return ratio, ratio / reach, ratio * reach


def drifting_interval(
    values: Sequence[float], confidence: float = 0.95, slower: float = _SLOWER
) -> tuple[float, float, float]:
    """The center of successive values, shape (N,), whose neighbours resemble each other, and its interval.

    The interval is that of `ratio_interval`, widened by the autocorrelation of neighbours as if the values were an
    autoregressive process of first order, and by what changes more slowly than the series lasts: a machine whose speed
    varies within seconds varies within hours, too. Returns `(center, low, high)`; values that are not positive are left out.

    Args:
        values: positive values.
        confidence: of the interval.
        slower: of the spread between the values, how much series of other hours differ by; 0 for ratios within rounds,
            which have no drift in them.
    """
    logs = _logs(values)
    logs = logs[numpy.isfinite(logs)]
    center, low, high = ratio_interval([1.0] * len(logs), numpy.exp(logs).tolist(), confidence, paired=True)
    deviations = logs - logs.mean() if len(logs) else logs
    if not low > 0 or not (total := float((deviations**2).sum())):
        return center, low, high
    alike = float((deviations[1:] * deviations[:-1]).sum()) / total + 1 / len(
        logs
    )  # the estimate is low by about 1 / N
    alike = min(max(alike, 0.0), _MOST_ALIKE)
    within = math.log(high / center) * math.sqrt((1 + alike) / (1 - alike))
    beyond = slower * float(logs.std(ddof=1)) * NormalDist().inv_cdf((1 + confidence) / 2)
    reach = math.exp(math.hypot(within, beyond))
    return center, center / reach, center * reach


def student_t(probability: float, freedom: float) -> float:
    """The quantile of Student's t distribution, for a probability above 0.5 (Hill 1970, to about five digits)."""
    two_tails = 2 * (1 - probability)
    if freedom < 2:  # exact at 1; between 1 and 2 the heavier tail
        return math.tan(math.pi * (probability - 0.5))
    if freedom < 3:  # exact at 2
        return (2 * probability - 1) * math.sqrt(2 / (1 - (2 * probability - 1) ** 2))
    n = freedom
    a = 1 / (n - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * n
    y = (d * two_tails) ** (2 / n)
    if y > 0.05 + a:
        x = -NormalDist().inv_cdf(two_tails / 2)
        y = x * x
        c += 0.3 * (n - 4.5) * (x + 0.6) if n < 5 else 0.0
        c += (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b
        y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
        y = math.expm1(a * y * y)
    else:
        y = ((1 / (((n + 6) / (n * y) - 0.089 * d - 0.822) * (n + 2) * 3) + 0.5 / (n + 4)) * y - 1) * (n + 1) / (
            n + 2
        ) + 1 / y
    return math.sqrt(n * y)


def _autocorrelation_time(series: NDArray[numpy.float64]) -> float:
    """How many successive values count as one, at least 1: by Geyer's initial monotone sequence, on the signs.

    The signs about the median decide how far its order statistics spread; a few huge values do not hide the others.
    """
    n = len(series)
    if n < _TOO_FEW:
        return 1.0
    signs = numpy.sign(series - numpy.median(series))
    signs -= signs.mean()
    spectrum = numpy.fft.rfft(signs, 2 * n)
    covariance = numpy.fft.irfft(spectrum * spectrum.conj())[:n]
    if covariance[0] <= 0:  # all values are alike
        return 1.0
    pairs = (covariance / covariance[0])[: n - n % 2].reshape(-1, 2).sum(1)
    ended = numpy.flatnonzero(pairs <= 0)
    pairs = numpy.minimum.accumulate(pairs[: ended[0]] if len(ended) else pairs)
    return max(1.0, float(2 * pairs.sum() - 1))


def _lowest_rank(n: int, confidence: float) -> int:
    """The largest k for which the k-th smallest and k-th largest of n values enclose the median; 0 if there is none."""
    tail = (1 - confidence) / 2
    if n > _EXACT:
        return math.floor((n + 1 - math.sqrt(n) * NormalDist().inv_cdf(1 - tail)) / 2)
    below, rank = 0.0, 0
    while rank <= n:
        below += math.comb(n, rank) / 2**n
        if below > tail:
            break
        rank += 1
    return rank


def _logs(values: Sequence[float]) -> NDArray[numpy.float64]:
    found = numpy.asarray(values, float).ravel()
    with numpy.errstate(divide="ignore", invalid="ignore"):
        return numpy.where(found > 0, numpy.log(found), numpy.nan)


def _trimmed_mean(values: NDArray[numpy.float64]) -> tuple[float, float, float]:
    """The trimmed mean, its standard error by the winsorized variance, and its degrees of freedom."""
    n = len(values)
    if n == 0:
        return math.nan, math.nan, 0.0
    cut = int(_TRIMMED * n) if n >= _TRIMMED_FROM else 0
    ordered = numpy.sort(values)
    kept = n - 2 * cut
    center = float(ordered[cut : n - cut].mean())
    if n < 2:
        return center, 0.0, 0.0
    winsorized = numpy.clip(ordered, ordered[cut], ordered[n - cut - 1])
    error = math.sqrt(float(winsorized.var(ddof=1)) * (n - 1) / (kept * (kept - 1)))
    return center, error, kept - 1.0
