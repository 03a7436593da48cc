"""Every measured number has three significant digits, whatever its size and unit."""

import pytest

from batchscope.records.formatting import count, duration, option_value, percent, significant, with_prefix


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (61234, "61,200"),
        (843.2, "843"),
        (99.96, "100"),
        (8.434, "8.43"),
        (0.01234, "0.0123"),
        (0, "0.00"),
        (-5, "-5.00"),
    ],
)
def test_a_number_has_three_significant_digits(value: float, text: str) -> None:
    assert significant(value) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (10.34e12, "FLOP/s", "10.3 TFLOP/s"),
        (0.0009, "J", "900 µJ"),
        (4.22e-7, "s", "422 ns"),
        (999.96, "B", "1 kB"),
        (12, "", "12"),
        (0, "J", "0 J"),
    ],
)
def test_an_si_prefix_leaves_three_digits_before_the_unit(value: float, unit: str, text: str) -> None:
    assert with_prefix(value, unit) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0032, "3.2 ms"), (45.04, "45 s"), (720, "12 min"), (5400, "1.5 h"), (1.234, "1.23 s")]
)
def test_a_duration_has_the_unit_that_suits_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_fraction_is_shown_as_a_percentage() -> None:
    assert (percent(0.353), percent(0.9846, digits=1)) == ("35 %", "98.5 %")


def test_a_noun_agrees_with_its_number() -> None:
    assert (count(1, "step"), count(1200, "step")) == ("1 step", "1,200 steps")


@pytest.mark.parametrize(
    ("value", "text"), [(True, "true"), (None, "null"), (0.004, "0.004"), ([1, None], "[1,null]"), ("cpu", "cpu")]
)
def test_an_option_is_shown_as_it_is_typed(value: object, text: str) -> None:
    assert option_value(value) == text
