"""The plot: points against cost or lines of time, and no bound that looks like a prediction."""

import pytest
from matplotlib import rc_context

from batchscope.analysis.plot_style import RC
from batchscope.choice.money import Prices
from batchscope.choice.plot import choice_plot, choice_png
from batchscope.choice.rows import Question, Target, rows
from tests.choice.paper import H100, L4, T4, TPU, Training

TARGETS = [Target("t4", T4), Target("l4", L4), Target("h100", H100), Target("tpu", TPU)]
PRICES = Prices({"t4": 0.5, "l4": 0.8, "h100": 2.5}, "$")


def figure(question, flops=5e9):
    found = rows([Training(flops=flops)], TARGETS, question)[0]
    with rc_context(RC):
        return choice_plot(found, question, "cnn · mnist", "l4")


def texts(axes):
    return [text.get_text() for text in axes.texts if text.get_text()]


def test_without_prices_each_device_is_a_line():
    (axes,) = figure(Question(20)).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["h100", "l4", "t4", "cpu (here)", "tpu"]
    assert axes.get_title(loc="left") == "cnn · mnist: 20 epochs"
    assert axes.get_xlabel() == "time to train, with 5 min to start a device that is not here"


def test_with_prices_each_device_has_a_point_and_its_name():
    (axes,) = figure(Question(20, prices=PRICES, budget=5.0, deadline=7200)).axes
    assert {"h100", "l4", "t4", "cpu (here)"} <= set(texts(axes))
    assert "tpu" not in texts(axes)  # it has no price
    assert {"budget $5", " deadline 2 h"} <= set(texts(axes))
    assert "nothing" in [label.get_text() for label in axes.get_yticklabels()]


@pytest.mark.parametrize("question", [Question(1, start_up=0), Question(10**6), Question(3, prices=PRICES)])
@pytest.mark.parametrize("flops", [1e3, 1e13])
def test_times_of_any_size_have_a_few_ticks_that_can_be_said(question, flops):
    (axes,) = figure(question, flops).axes
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    assert 1 <= len(ticks) <= 12
    assert not any("e" in tick for tick in ticks)


def test_it_is_a_png():
    question = Question(20)
    found = rows([Training()], TARGETS, question)[0]
    assert choice_png(found, question, "x", None).startswith(b"\x89PNG")
