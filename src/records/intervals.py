"""The confidence interval of the median of successive times.

Successive steps are not independent: a slow moment of the machine slows many of them. An interval that ignores this is
several times too short. Coverage on simulated series: `tests/records/test_intervals.py`.
"""

import math

import numpy
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtrik

TIME_LIMIT = "time limit"  # the reason that a timed run gives for its end
_MIN_VALUES = 10  # from fewer values no autocorrelation is estimated


def median_interval(values: ArrayLike, confidence: float = 0.95) -> tuple[float, float]:
    """Return the confidence interval of the median of the process that made these successive values, shape (N,).

    Its ends are order statistics: no distribution is assumed. The number of values is divided by the autocorrelation
    time of their signs about the median, so that correlated values count as fewer. Values that are not finite are left
    out. The interval is `(-inf, inf)` where too few values, or too correlated ones, cannot reach the confidence; six
    independent values reach 95 %.
    """
    series = numpy.asarray(values, float).ravel()
    series = series[numpy.isfinite(series)]
    n = len(series)
    independent = int(n / _autocorrelation_time(series)) if n else 0
    rank = _lowest_rank(independent, confidence)
    if rank < 1:
        return -math.inf, math.inf
    k = max(1, math.floor(n * (rank - 0.5) / independent + 0.5))
    ordered = numpy.sort(series)
    return float(ordered[k - 1]), float(ordered[n - k])


def _autocorrelation_time(series: NDArray[numpy.float64]) -> float:
    """Return how many successive values count as one, at least 1, by Geyer's initial monotone sequence on the signs.

    The signs about the median determine the spread of its order statistics, and a few huge values do not dominate them.
    """
    n = len(series)
    if n < _MIN_VALUES:
        return 1.0
    signs = numpy.sign(series - numpy.median(series))
    signs -= signs.mean()
    spectrum = numpy.fft.rfft(signs, 2 * n)
    covariance = numpy.fft.irfft(spectrum * spectrum.conj())[:n]
    if covariance[0] <= 0:  # all values are alike
        return 1.0
    pairs = (covariance / covariance[0])[: n - n % 2].reshape(-1, 2).sum(1)
    nonpositive = numpy.flatnonzero(pairs <= 0)
    pairs = numpy.minimum.accumulate(pairs[: nonpositive[0]] if len(nonpositive) else pairs)
    return max(1.0, float(2 * pairs.sum() - 1))


def _lowest_rank(n: int, confidence: float) -> int:
    """Return the largest k so that the k-th smallest and k-th largest of n values enclose the median; 0 if there is none."""
    tail = (1 - confidence) / 2
    return 1 + math.floor(bdtrik(tail, n, 0.5)) if 0.5**n <= tail else 0
