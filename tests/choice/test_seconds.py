"""Intervals of time: sums, and which of two is shorter."""

import pytest

from batchscope.choice.seconds import CALLED_FROM, Interval, exactly, probability_shorter, total


def test_ends_add_to_ends_because_kernels_share_their_device() -> None:
    assert total([Interval(1, 2, 4), Interval(10, 20, 40)]) == Interval(11, 22, 44)


def test_no_times_take_no_time() -> None:
    assert total([]) == exactly(0)


def test_calls_scale_an_interval() -> None:
    assert Interval(1, 2, 4) * 3 == Interval(3, 6, 12)


def test_intervals_far_apart_are_called_and_alike_ones_are_not() -> None:
    assert probability_shorter(Interval(1, 2, 3), Interval(10, 20, 30)) > CALLED_FROM
    assert probability_shorter(Interval(10, 20, 30), Interval(1, 2, 3)) < 1 - CALLED_FROM
    assert probability_shorter(Interval(1, 2, 3), Interval(1, 2, 3)) == pytest.approx(0.5)


def test_exact_times_are_compared_without_doubt() -> None:
    assert probability_shorter(exactly(1), exactly(2)) == 1
    assert probability_shorter(exactly(2), exactly(2)) == 0.5
    assert probability_shorter(exactly(0), Interval(1, 2, 3)) == 1
