"""Lines that fit a terminal."""

import pytest

from batchscope.records import terminal
from batchscope.records.terminal import wrapped


def test_a_line_breaks_before_the_signs_between_its_items():
    line = (
        "median step 55.4 ms; mean 57.2 ms = data 0.298 + transfer 0.148 + forward 16.4 + backward 36.6 + other 0.966"
    )
    first, second = wrapped([line], 80)
    assert f"{first} {second.strip()}" == line
    assert len(first) <= 80
    assert second.startswith("  + ")


def test_other_text_breaks_at_any_space_and_keeps_its_margin():
    lines = wrapped(["  one two three", ""], 11)
    assert lines == ["  one two", "    three", ""]


def test_a_word_that_is_too_long_stays_whole():
    assert wrapped(["see outputs/runs/2026-11-22_08-33-39/run.json"], 20) == [
        "see",
        "  outputs/runs/2026-11-22_08-33-39/run.json",
    ]


@pytest.mark.parametrize(("said", "width"), [("80", 80), ("", 140)])
def test_the_width_is_that_of_the_terminal(said, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", said)
    monkeypatch.setattr(terminal.sys, "__stdout__", None)
    assert terminal.columns() == width
