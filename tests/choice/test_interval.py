"""Intervals: sums, their text, and which of two is shorter."""

import pytest

from batchscope.choice.interval import CALLED_FROM, Interval, digits, exactly, probability_shorter


def test_ends_add_to_ends_because_kernels_share_their_device_and_calls_scale_them():
    assert Interval(1, 2, 4) + Interval(10, 20, 40) == Interval(11, 22, 44)
    assert Interval(1, 2, 4) * 3 == Interval(3, 6, 12)


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(126, 180, 240), "2.1–4.0 min"),
        (exactly(49), "49 s"),
        (Interval(7000, 9000, 12000), "1.9–3.3 h"),
        (Interval(0.0021, 0.003, 0.0044), "2.1–4.4 ms"),
        (Interval(2.1e-6, 3e-6, 4.4e-6), "2.1–4.4 µs"),
        (Interval(200000, 300000, 900000), "2.3–10 d"),
    ],
)
def test_a_time_has_one_unit_and_two_digits(interval, text):
    assert str(interval) == text


@pytest.mark.parametrize(("value", "text"), [(24_123, "24,000"), (0.0152, "0.015"), (0, "0"), (9.96, "10")])
def test_a_number_has_two_digits_that_count(value, text):
    assert digits(value) == text


@pytest.mark.parametrize(
    ("first", "second", "least", "most"),
    [
        (Interval(1, 2, 3), Interval(10, 20, 30), CALLED_FROM, 1),
        (Interval(0.8, 1, 1.25), Interval(1.2, 1.5, 1.9), CALLED_FROM, 1),  # ends may overlap
        (Interval(10, 20, 30), Interval(1, 2, 3), 0, 1 - CALLED_FROM),
        (Interval(1, 2, 3), Interval(1.5, 2.5, 3.5), 0.5, CALLED_FROM),
        (exactly(1), exactly(2), 1, 1),
        (exactly(2), exactly(2), 0.5, 0.5),
        (exactly(0), Interval(1, 2, 3), 1, 1),
    ],
)
def test_the_shorter_of_two_is_called_where_they_are_far_apart(first, second, least, most):
    assert least <= probability_shorter(first, second) <= most
