"""The recommendation: its rule, its words, and what it does not say."""

import re

import pytest

from batchscope.choice.money import Prices
from batchscope.choice.recommend import is_less, pays_from, recommend
from batchscope.choice.rows import Question, Target, rows
from batchscope.choice.seconds import Interval, exactly
from tests.choice.paper import H100, L4, T4, TPU, Training

TARGETS = [Target("t4", T4), Target("l4", L4), Target("h100", H100)]
PRICES = Prices({"t4": 0.5, "l4": 0.8, "h100": 2.5}, "$")
HEAVY = Training(flops=5e9)  # hours on the CPU, minutes on a GPU


def answer(question, training=None, targets=TARGETS):
    return recommend(rows([training or Training()], targets, question)[0], question)


def test_the_device_that_is_here_needs_no_start_up():
    found = answer(Question(2))
    assert found.label == "cpu"
    assert found.text == (
        "The CPU here: 2 epochs take 27 to 28 s. It is the fastest device. "
        "H100 would take 5.0 min: its start-up of 5 min alone is longer."
    )


def test_without_limits_the_fastest_is_taken():
    found = answer(Question(20, prices=PRICES), HEAVY)
    assert (found.label, found.too_close) == ("h100", [])
    assert found.text.startswith("H100: 20 epochs take 5.9 to 7.1 min with a start-up of 5 min, for $0.25 to $0.29.")
    assert "The CPU here takes 15 to 16 h." in found.lines
    assert "L4 is cheaper: 7.0 to 9.5 min for $0.094 to $0.13." in found.lines


def test_with_a_deadline_the_cheapest_that_keeps_it_is_taken():
    prices = Prices({**PRICES.per_hour, "t4": 5.0})
    found = answer(Question(20, deadline=7200, prices=prices), HEAVY)
    assert found.label == "l4"
    assert "It is the cheapest device that surely keeps the deadline of 2 h." in found.lines


def test_a_device_that_is_here_costs_nothing():
    found = answer(Question(20, deadline=24 * 3600, prices=PRICES), HEAVY)
    assert found.label == "cpu"
    assert "It keeps the deadline of 24 h, and nothing has to be paid." in found.lines


def test_a_deadline_without_prices_takes_what_is_here_if_it_is_kept():
    found = answer(Question(20, deadline=24 * 3600), HEAVY)
    assert found.label == "cpu"
    assert answer(Question(20, deadline=7200), HEAVY).label == "h100"


def test_with_a_budget_the_fastest_that_keeps_it_is_taken():
    prices = Prices({"t4": 0.5, "l4": 0.8, "h100": 250.0}, "$")
    found = answer(Question(20, budget=5.0, prices=prices), HEAVY)
    assert found.label == "l4"
    assert "It is the fastest device that surely keeps the budget of $5." in found.lines


def test_a_device_without_a_price_cannot_keep_a_budget():
    assert answer(Question(20, budget=5.0, prices=Prices({"t4": 0.5})), HEAVY).label == "t4"


def test_a_budget_without_prices_says_that_it_takes_some():
    found = answer(Question(20, budget=5.0))
    assert found.label == "cpu" and "It keeps the budget of 5, and nothing has to be paid." in found.lines
    assert any(line.startswith("A budget takes prices, and has none for ") for line in found.lines)


def test_what_cannot_be_told_apart_is_said():
    found = answer(Question(20, deadline=7200, prices=Prices({"t4": 0.42, "l4": 0.8}, "$")), HEAVY)
    assert (found.label, found.too_close) == ("l4", ["t4"])
    assert "Too close to call by cost: L4 against T4 ($0.088 to $0.15); L4 is the cheapest by the middle of the" in (
        found.text
    )


def test_what_is_here_is_taken_before_what_is_as_fast_and_has_to_be_rented():
    found = answer(Question(22), Training(width=3.0))
    assert found.label == "cpu"
    assert "h100" in found.too_close
    assert "the CPU here has nothing to rent and to start." in found.text


def test_nobody_keeps_the_limits():
    found = answer(Question(20, deadline=60), HEAVY)
    assert found.label is None
    assert found.text == (
        "No device of the table keeps the deadline of 60 s: H100, the fastest, takes 5.9 to 7.1 min with a start-up of "
        "5 min."
    )


def test_a_device_that_may_miss_the_deadline_is_said_to():
    found = answer(Question(20, deadline=390), HEAVY)
    assert found.label == "h100"
    assert "No device surely keeps the deadline of 6.5 min; this one may." in found.text


def test_a_bound_is_named_and_never_taken():
    found = answer(Question(2000, start_up=0), targets=[Target("tpu", TPU)])
    assert found.label == "cpu"
    assert re.search(r"At best, and not predicted: TPU \d+ s; only a run there can tell.", found.text)
    only = answer(Question(20, deadline=400), HEAVY, [Target("tpu", TPU)])
    assert only.label is None
    assert only.text.endswith("TPU may, at best.")


@pytest.mark.parametrize("question", [Question(2), Question(20, prices=PRICES), Question(20, deadline=60)])
def test_sentences_begin_and_end_as_such(question):
    for training in (Training(), HEAVY):
        for line in answer(question, training).lines:
            assert re.fullmatch(r"[A-Z].*[^.]\.", line)


class TestIsLess:
    def test_apart(self):
        assert is_less(Interval(1, 2, 3), Interval(4, 5, 6))

    def test_ends_may_overlap_where_the_ratio_is_known(self):
        assert is_less(Interval(0.8, 1, 1.25), Interval(1.2, 1.5, 1.9))

    def test_alike(self):
        assert not is_less(Interval(1, 2, 3), Interval(1.5, 2.5, 3.5))
        assert not is_less(Interval(4, 5, 6), Interval(1, 2, 3))

    def test_a_bound_is_never_less(self):
        assert not is_less(Interval(1, 2, 3), Interval(40, 50, 60), one_is_bound=True)
        assert is_less(Interval(1, 2, 3), Interval(4, 4, 4), other_is_bound=True)
        assert not is_less(Interval(1, 2, 3), Interval(2.5, 9, 10), other_is_bound=True)

    def test_nothing_to_pay_is_less_than_something(self):
        assert is_less(exactly(0.0), Interval(0.1, 0.2, 0.3))
        assert not is_less(exactly(0.0), exactly(0.0))


def pays(training, question=None, targets=TARGETS):
    workloads, question = [training], question or Question(2)
    return pays_from(rows(workloads, targets, question)[0], workloads, question)


def test_from_which_batch_size_a_gpu_pays():
    said = pays(Training(launches_s=4e-3))
    assert said[0] == "A GPU has a shorter step than the CPU from batch size 32 on (L4, H100 and T4)."
    assert pays(Training(launches_s=1.0))[0].startswith("No GPU of the table has a shorter step than the CPU")
    assert pays(HEAVY)[0].startswith("Every GPU of the table has a shorter step than the CPU at each batch size")


def test_after_how_many_epochs_a_gpu_makes_up_for_its_start_up():
    assert pays(Training())[1] == "H100 makes up for its start-up of 5 min after 22 to 23 epochs."
    assert len(pays(Training(), Question(2, start_up=0))) == 1


def test_without_a_gpu_there_is_nothing_to_say():
    assert pays(Training(), targets=[Target("tpu", TPU)]) == []
