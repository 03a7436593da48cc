"""Intervals hold what they are of as often as they say: on simulated series with fixed seeds, independent or not."""

import math
from collections.abc import Callable

import numpy
import pytest
from numpy.random import Generator
from numpy.typing import NDArray

from batchscope.records.intervals import drifting_interval, median_interval, ratio_interval, student_t

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


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("n", [3, 5, 12])
def test_the_interval_of_a_ratio_holds_it_as_often_as_it_says(n: int, paired: bool) -> None:
    random, held = numpy.random.default_rng(n), 0
    for _ in range(600):
        rounds = random.normal(0, 0.2 if paired else 0.0, n)  # what slows both in a round
        a, b = (numpy.exp(rounds + random.normal(center, 0.05, n)) for center in (0.0, math.log(1.1)))
        ratio, low, high = ratio_interval(a, b, paired=paired)
        assert low <= ratio <= high
        held += low <= 1.1 <= high
    assert held / 600 >= 0.93


def test_rounds_that_slow_both_widen_only_the_ratio_that_does_not_know_them() -> None:
    rounds = numpy.array([1, 1.5, 0.8, 2, 1.1])
    a, b = rounds * [1, 1.01, 0.99, 1.005, 1], rounds * 1.1
    _, low, high = ratio_interval(a, b, paired=True)
    assert 1.07 < low < high < 1.13
    _, low, high = ratio_interval(a, b)
    assert low < 0.8
    assert high > 1.4


def test_one_disturbed_stretch_in_five_moves_the_ratio_little() -> None:
    a = [1, 1.02, 0.99, 1, 1, 1.01, 0.98, 1.01, 1, 0.99]
    ratio, low, high = ratio_interval(a, [1.1, 1.1, 1.1, 9, 1.1, 1.1, 8, 1.1, 1.1, 1.1], paired=True)
    assert ratio == pytest.approx(1.1, rel=0.02)
    assert 1.05 < low < high < 1.2


def test_one_stretch_does_not_say_how_much_stretches_vary() -> None:
    assert ratio_interval([2], [3]) == (pytest.approx(1.5), 0, math.inf)
    assert ratio_interval([2], [3, 3, 3]) == (pytest.approx(1.5), 0, math.inf)
    assert ratio_interval([2], [3], paired=True) == (pytest.approx(1.5), 0, math.inf)


def test_unusable_stretches_are_left_out_and_without_any_there_is_no_ratio() -> None:
    assert ratio_interval([1, math.nan, 1, -1, 0], [2, 2, 2, 2, 2], paired=True) == (pytest.approx(2),) * 3
    ratio, low, high = ratio_interval([], [math.nan])
    assert math.isnan(ratio)
    assert (low, high) == (0, math.inf)


@pytest.mark.parametrize(
    ("probability", "freedom", "quantile"),
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 3, 3.182),
        (0.95, 9, 1.833),
        (0.9995, 4, 8.610),
        (0.995, 30, 2.750),
    ],
)
def test_quantiles_of_students_t_are_those_of_the_tables(probability: float, freedom: float, quantile: float) -> None:
    assert student_t(probability, freedom) == pytest.approx(quantile, rel=4e-4)


@pytest.mark.parametrize(
    ("alike", "count", "least"), [(0.0, 12, 0.92), (0.5, 12, 0.8), (0.5, 30, 0.86), (0.7, 30, 0.8)]
)
def test_the_interval_of_a_drifting_series_holds_its_center(alike: float, count: int, least: float) -> None:
    random = numpy.random.default_rng(0)
    held = 0
    for _ in range(1000):
        noise = random.normal(size=count + 50)
        for place in range(1, len(noise)):
            noise[place] = alike * noise[place - 1] + math.sqrt(1 - alike**2) * noise[place]
        _, low, high = drifting_interval(numpy.exp(0.1 * noise[50:]).tolist())
        held += low <= 1 <= high
    assert held / 1000 >= least


def test_a_series_of_equal_values_has_no_spread() -> None:
    assert drifting_interval([2.0] * 8) == (pytest.approx(2.0),) * 3


def test_one_value_has_no_interval() -> None:
    assert drifting_interval([2.0, math.nan, -1.0])[1:] == (0.0, math.inf)
