"""Intervals in words: units, digits, and bounds."""

import pytest

from batchscope.choice import words
from batchscope.choice.seconds import Interval, exactly


@pytest.mark.parametrize(
    ("interval", "text"),
    [
        (Interval(126, 180, 240), "2.1–4.0 min"),
        (exactly(49), "49 s"),
        (Interval(7000, 9000, 12000), "1.9–3.3 h"),
        (Interval(0.0021, 0.003, 0.0044), "2.1–4.4 ms"),
        (Interval(200000, 300000, 900000), "2.3–10 d"),
        (Interval(26, 60, 140), "26–140 s"),
    ],
)
def test_a_time_has_one_unit_and_two_digits(interval, text):
    assert words.time(interval) == text


def test_a_bound_shows_its_low_end_alone():
    assert words.time(Interval(12, 60, 600), bound=True) == "≥ 12 s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(300, "5 min"), (7200, "2 h"), (100, "100 s"), (5400, "90 min"), (90, "90 s"), (0.5, "500 ms")],
)
def test_a_time_that_is_known_is_said_as_it_was_written(seconds, text):
    assert words.one_time(seconds) == text


def test_devices_have_titles():
    assert words.title_of("cpu", here=True) == "the CPU here"
    assert words.title_of("cpu 2", here=True) == "the CPU 2 here"
    assert words.title_of("t4") == "T4"
    assert words.sentence(words.title_of("cuda", here=True)) == "The GPU here."
    assert words.listed(["a", "b", "c"]) == "a, b and c"
