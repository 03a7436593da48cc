"""The whole answer: as text, as a page and as JSON."""

import json

import pytest

from batchscope.choice.choose import choose
from batchscope.choice.money import Prices
from batchscope.choice.rows import Question, Target
from tests.choice.paper import H100, L4, T4, TPU, Training

TARGETS = [Target("t4", T4), Target("h100", H100), Target("tpu", TPU)]
PRICES = Prices({"t4": 0.5, "h100": 2.5}, "$", "a provider, 2026-01-01")
QUESTION = Question(20, "trainer.max_epochs", deadline=7200, prices=PRICES)


@pytest.fixture
def found():
    return choose([Training(flops=1e9, notes=("a note",)), Training(device=L4, flops=1e9)], TARGETS, QUESTION)


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_text_fits_the_terminal(found, width):
    assert max(map(len, found.text(width).splitlines())) <= width


def test_the_text_says_what_was_measured_and_what_is_assumed(found):
    text = found.text(300)
    assert "measured on cpu (AMD EPYC, 2 threads) and cuda (L4) at batch sizes 8, 32, 128, 512" in text
    assert "assumed: 20 epochs of 55,000 samples (trainer.max_epochs), training steps alone; 5 min to start" in text
    assert "prices: a provider, 2026-01-01" in text
    assert "a note" in text


def test_a_measured_device_stands_beside_its_prediction(found):
    lines = [line for line in found.text(1000).splitlines() if line.startswith("check: ")]
    assert len(lines) == 2
    assert lines[1].startswith("check: a step on cuda, predicted from cpu: batch 8 0.67–1.5 ms (1.00 ms measured); ")
    assert lines[1].endswith("4 of 4 hold.")


def test_different_batch_sizes_are_said_to_differ():
    text = choose([Training()], TARGETS, QUESTION).text(300)
    assert "a larger batch may need more epochs; --batch-size 8 compares all devices at the same size" in text
    assert "h100 and tpu have sizes beyond the measured ones" in text
    assert "more epochs" not in choose([Training()], TARGETS, Question(20, batch_size=64)).text(300)


def test_the_page_has_the_whole_table_and_the_plot(found):
    page = found.markdown()
    assert page.startswith("# Which device for cnn · mnist · 32-true\n")
    assert "| device | batch |" in page
    assert "![Time to train on each device](choice.png)" in page


def test_json_has_every_number_and_no_middle_of_a_bound(found):
    answer = json.loads(json.dumps(found.as_json(), allow_nan=False))
    devices = {one["label"]: one for one in answer["devices"]}
    assert set(devices) == {"cpu", "cuda", "t4", "h100", "tpu"}
    assert devices["tpu"]["bound"] is True
    assert devices["tpu"]["training_s"][1:] == [None, None]
    assert devices["tpu"]["samples_per_sec"][:2] == [None, None]
    low, middle, high = devices["t4"]["training_s"]
    assert low < middle < high
    assert devices["t4"]["cost"][1] == pytest.approx(middle * 0.5 / 3600)
    assert answer["recommended"] == "cuda"
    assert answer["confidence"] == 0.8
    assert len(answer["checks"]) == 8
    assert (answer["epochs"], answer["deadline_s"], answer["currency"]) == (20, 7200, "$")


def test_a_busy_machine_is_said_before_the_answer():
    found = choose([Training(busy=0.86)], TARGETS, QUESTION)
    assert found.as_json()["warning"].startswith("Measured on a busy machine: other programs took up to 86 % of its")
    text = found.text(300)
    assert text.index("Measured on a busy machine") < text.index(found.recommendation.lines[0])
    assert choose([Training()], TARGETS, QUESTION).as_json()["warning"] is None
