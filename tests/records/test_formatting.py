"""Every measured number has three significant digits, whatever its size and unit."""

from collections.abc import Callable

import pytest

from batchscope.records.formatting import count, duration, memory, option_value, percent, significant, with_prefix

SHOWN: dict[Callable[..., str], dict[object, str]] = {
    significant: {61234: "61,200", 843.2: "843", 99.96: "100", 8.434: "8.43", 0.01234: "0.0123", 0: "0.00", -5: "-5.00"},
    duration: {0.0032: "3.2 ms", 45.04: "45 s", 720: "12 min", 5400: "1.5 h", 1.234: "1.23 s"},
    with_prefix: {
        (10.34e12, "FLOP/s"): "10.3 TFLOP/s", (0.0009, "J"): "900 µJ", (4.22e-7, "s"): "422 ns", (999.96, "B"): "1 kB",
        (12, ""): "12", (0, "J"): "0 J",
    },
    memory: {512: "0.5 KiB", 2**20: "1 MiB", 1010 * 2**20: "0.986 GiB", 999 * 2**20: "999 MiB"},
    percent: {0.353: "35 %", (0.9846, 1): "98.5 %"},
    count: {(1, "step"): "1 step", (1200, "step"): "1,200 steps"},
    option_value: {True: "true", None: "null", 0.004: "0.004", "cpu": "cpu"},
}  # fmt: skip


@pytest.mark.parametrize("shows", SHOWN, ids=lambda shows: shows.__name__)
def test_a_number_is_shown_with_the_digits_and_the_unit_that_suit_it(shows: Callable[..., str]) -> None:
    for value, text in SHOWN[shows].items():
        assert shows(*value if isinstance(value, tuple) else (value,)) == text


def test_a_list_is_shown_as_an_option_is_typed() -> None:
    assert option_value([1, None]) == "[1,null]"
