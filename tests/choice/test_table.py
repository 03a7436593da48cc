"""The table: what has room in a terminal, and how a bound, a prediction and a measurement are written."""

import pytest

from batchscope.choice import table
from batchscope.choice.money import Prices
from batchscope.choice.rows import Question, Target, rows
from tests.choice.paper import H100, L4, T4, TPU, Training

TARGETS = [Target("t4", T4), Target("l4", L4), Target("h100", H100), Target("tpu-v5e", TPU)]
QUESTION = Question(20, prices=Prices({"t4": 0.5, "l4": 0.8, "h100": 2.5}, "$"))


def found(question=QUESTION, training=None):
    return rows([training or Training(flops=1e9)], TARGETS, question)[0]


def cells(label, question=QUESTION):
    shown = table.columns(found(question), question)
    place = [cell.split()[0] for cell in dict(shown)["device"]].index(label)
    return {heading: column[place] for heading, column in shown}


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_it_fits_and_says_what_has_no_room(width):
    lines = table.to_text(found(), QUESTION, width)
    assert max(map(len, lines)) <= width
    assert len({len(line.rstrip()) for line in lines[:1]}) == 1
    assert all(word in lines[0] for word in ("device", "20 epochs", "cost", "known"))
    assert ("without" in lines[-1] or "have them" in lines[-1]) == (width < 140)


def test_a_measured_row():
    assert cells("cpu") == {
        "device": "cpu (here)",
        "batch": "8",
        "samples/s": "100",
        "an epoch": "9.17 min",
        "20 epochs": "3.0–3.1 h",
        "cost": "–",
        "energy": "",
        "memory": "0.11 of 15 GiB",
        "limit": "compute",
        "known": "measured",
    }


def test_a_predicted_row_has_an_interval_and_two_digits():
    row = cells("t4")
    assert (row["20 epochs"], row["an epoch"], row["samples/s"]) == ("6.5–8.4 min", "6.9 s", "8,000")
    assert (row["cost"], row["energy"], row["known"]) == ("$0.054–$0.070", "≤ 4.0 Wh", "predicted from cpu")


def test_a_bound_is_never_written_as_a_prediction():
    row = cells("tpu-v5e")
    assert (row["20 epochs"], row["an epoch"], row["samples/s"]) == ("≥ 5.1 min", "≥ 370 ms", "≤ 150,000")
    assert row["energy"] == row["cost"] == ""
    assert row["known"] == "bound: at best"


def test_columns_without_a_value_are_left_out():
    question = Question(1)
    assert "cost" not in dict(table.columns(found(question), question))


def test_markdown_has_every_column():
    lines = table.to_markdown(found(), QUESTION)
    assert len(lines) == 2 + 5
    assert lines[0].startswith("| device | batch | samples/s | an epoch | 20 epochs | cost | energy | memory |")
    assert len({line.count("|") for line in lines}) == 1
