"""Intervals have their nominal coverage: simulated series with fixed seeds, independent or autocorrelated."""

import math

import numpy
import pytest

from batchscope.records.intervals import median_interval


def series(random, n, phi):
    """Simulate an AR(1) series with the coefficient `phi`."""
    noise, values = random.normal(size=n + 100), numpy.zeros(n + 100)
    for i in range(1, n + 100):
        values[i] = phi * values[i - 1] + noise[i]
    return numpy.exp(0.1 * values[100:])


@pytest.mark.parametrize(("phi", "n", "least"), [(0, 6, 0.93), (0, 400, 0.93), (0.5, 100, 0.92), (0.9, 400, 0.9)])
def test_the_interval_of_a_median_holds_it_as_often_as_it_says(phi, n, least):
    random = numpy.random.default_rng(n)
    intervals = [median_interval(series(random, n, phi)) for _ in range(400)]
    assert numpy.mean([low <= 1 <= high for low, high in intervals]) >= least
    assert numpy.mean([math.isfinite(low) for low, _ in intervals]) >= 0.95
    if (phi, n) == (0, 400):  # no wider than necessary
        widths = [high - low for low, high in intervals]
        assert numpy.mean(widths) < 1.25 * 2 * 1.96 * 0.1 * math.sqrt(math.pi / 2 / 400)


def test_six_finite_values_reach_95_percent_and_five_do_not_and_equal_ones_have_no_width():
    assert median_interval([1, 2, 3, 4, 5]) == median_interval([]) == (-math.inf, math.inf)
    assert median_interval([1, 2, 3, 4, 5], confidence=0.9) == (1, 5)
    assert median_interval([math.nan, 3, 1, math.inf, 2, 6, 5, 4]) == (1, 6)
    assert median_interval([2.0] * 50) == (2.0, 2.0)
