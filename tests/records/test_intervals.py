"""Intervals hold what they are of as often as they say: on simulated series with fixed seeds, independent or not."""

import math
from collections.abc import Callable

import numpy
import pytest
from numpy.random import Generator
from numpy.typing import NDArray

from batchscope.records.intervals import median_interval

Series = Callable[[Generator, int], NDArray]


def independent(random: Generator, n: int) -> NDArray:
    return random.lognormal(0, 0.2, n)


def autoregressive(phi: float) -> Series:
    def series(random: Generator, n: int) -> NDArray:
        noise, values = random.normal(size=n + 100), numpy.zeros(n + 100)
        for i in range(1, n + 100):
            values[i] = phi * values[i - 1] + noise[i]
        return numpy.exp(0.1 * values[100:])

    return series


def bursty(random: Generator, n: int) -> NDArray:
    """A fifth of the steps takes half as long again, in bursts of about ten."""
    burst, values = False, []
    for at in random.random(n + 100):
        burst = at >= 1 / 10 if burst else at < 1 / 40
        values.append(1.5 if burst else 1.0)
    return (numpy.array(values) * random.lognormal(0, 0.03, n + 100))[100:]


@pytest.mark.parametrize(
    ("series", "n", "least"),
    [
        pytest.param(independent, 6, 0.93, id="six independent steps"),
        pytest.param(independent, 30, 0.93, id="30 independent steps"),
        pytest.param(independent, 400, 0.93, id="400 independent steps"),
        pytest.param(autoregressive(0.5), 100, 0.92, id="steps that resemble the one before"),
        pytest.param(autoregressive(0.9), 400, 0.9, id="steps that hardly change"),
        pytest.param(bursty, 400, 0.9, id="bursts"),
    ],
)
def test_the_interval_of_a_median_holds_it_as_often_as_it_says(series: Series, n: int, least: float) -> None:
    random = numpy.random.default_rng(n)
    median = float(numpy.median(series(random, 40_000)))
    intervals = [median_interval(series(random, n)) for _ in range(400)]
    assert numpy.mean([low <= median <= high for low, high in intervals]) >= least
    assert numpy.mean([math.isfinite(low) for low, _ in intervals]) >= 0.95


def test_the_interval_of_independent_values_is_not_wider_than_it_has_to_be() -> None:
    random = numpy.random.default_rng(0)
    widths = [numpy.diff(median_interval(independent(random, 400)))[0] for _ in range(100)]
    assert numpy.mean(widths) < 1.25 * 2 * 1.96 * 0.2 * math.sqrt(math.pi / 2 / 400)


def test_values_that_follow_each_other_count_as_fewer() -> None:
    slow = numpy.repeat(numpy.random.default_rng(0).lognormal(0, 0.1, 40), 10)
    shuffled = numpy.random.default_rng(1).permutation(slow)
    assert numpy.diff(median_interval(slow)) > 2 * numpy.diff(median_interval(shuffled))


def test_six_values_reach_95_percent_and_five_do_not() -> None:
    assert median_interval([3, 1, 2, 6, 5, 4]) == (1, 6)
    assert median_interval([1, 2, 3, 4, 5]) == median_interval([]) == (-math.inf, math.inf)
    assert median_interval([1, 2, 3, 4, 5], confidence=0.9) == (1, 5)


def test_values_that_are_not_finite_are_left_out_and_equal_ones_have_no_width() -> None:
    assert median_interval([math.nan, 3, 1, math.inf, 2, 6, 5, 4]) == (1, 6)
    assert median_interval([2.0] * 50) == (2.0, 2.0)
