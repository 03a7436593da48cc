"""The answer for one training: its table, its sentences, which device is first or may be, and what is assumed."""

import json
from dataclasses import replace
from functools import partial

import pytest

from batchscope.choice.answer import Answer
from batchscope.choice.cards import find_card
from batchscope.choice.interval import Interval, digits, exactly, times_longer
from batchscope.choice.measured import read_trainings
from batchscope.choice.rows import Question, check_prices
from batchscope.choice.step import step_on
from batchscope.errors import UserError
from tests.choice.trainings import mlp, write_training

CARDS = [find_card(name) for name in ("t4", "l4", "h100")]
ALIKE = [find_card(name) for name in ("h100", "h200")]  # they differ in nothing that a tiny step needs


def training(folder, **facts):
    ((found,), _) = read_trainings([write_training(folder, **facts)])
    return found


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """Seconds on the CPU."""
    return training(tmp_path_factory.mktemp("light"))


@pytest.fixture(scope="module")
def heavy(tmp_path_factory):
    """An hour on the CPU, seconds on a GPU."""
    return training(tmp_path_factory.mktemp("heavy"), rows=partial(mlp, width=4096), parts=(0, 0, 0.3, 0.6, 0.1, 0))


def answer(found, cards=CARDS, **asked):
    return Answer(found, Question(cards, **asked))


def answer_of_times(found, monkeypatch, prices=None, **times):
    """The answer if the devices of these labels take such times, whatever they are."""
    known, prices = answer(found, [*CARDS, find_card("h200")], batch_size=8), prices or {}
    made = [
        replace(row(known, label), total=time, training=time, cost=time * prices[label] if label in prices else None)
        for label, time in times.items()
    ]
    monkeypatch.setattr("batchscope.choice.answer.rows", lambda training, question: (made, []))
    return answer(found)


def row(found, label):
    return next(each for each in found.rows if each.label == label)


def ends(low, high):
    return f"({digits(low)} to {digits(high)})"


def test_the_fastest_is_first_and_is_taken_the_cheapest_is_the_last_sentence(heavy):
    found = answer(heavy, epochs=20, prices={"t4": 0.5, "h100": 50.0})
    h100, t4, here = (row(found, label) for label in ("h100", "t4", "cpu"))
    assert [each.label for each in found.rows] == ["h100", "l4", "t4", "cpu"]
    assert (found.taken, found.may_be_first) == (h100, [h100])
    first, second, third = found.sentences()
    assert first.startswith(f"H100 first: 20 epochs take {h100.total} (predicted, cost {h100.cost.span()}), ")
    assert second.startswith(
        f"The CPU here takes {here.total} (measured), and is done first if H100 takes longer than about "
    )
    assert third == f"T4 is the cheapest of those with a price: {t4}."
    table = found.table()
    assert list(table["cost"]) == [h100.cost.span(), "", t4.cost.span(), ""]
    assert dict(table["known"]) == dict.fromkeys(["h100", "l4", "t4"], "predicted") | {"cpu (here)": "measured"}
    assert "and start-up" not in table


def test_what_is_assumed_and_known_is_said_and_the_text_fits_the_terminal(heavy):
    text = answer(heavy, start_up_s=60).text(200)
    assert "measured: cpu (AMD EPYC, 2 threads) at batch sizes 8, 64, 512" in text
    assert "assumed elsewhere: 60 s to start, a host as fast as this one, precision 32-true" in text
    assert "times and costs: in 90 of 100 cases within the interval; ratios: in 95" in text
    for width in (80, 140):
        assert max(map(len, answer(heavy, epochs=20).text(width).splitlines())) <= width


def test_the_first_one_is_compared_with_the_next_and_with_the_other_place(heavy):
    found = answer(heavy)
    l4, here = (times_longer(row(found, label).total, found.taken.total) for label in ("l4", "cpu"))
    said = f", {digits(l4.value)} times as fast as L4 {ends(l4.low, l4.high)}"
    said += f", {digits(here.value)} times as fast as the CPU here {ends(here.low, here.high)}."
    assert found.sentences()[0].endswith(said)


def test_beside_other_programs_it_answers_and_says_under_the_table_how_much_they_took(tmp_path):
    wide = {"rows": partial(mlp, width=4096), "parts": (0, 0, 0.3, 0.6, 0.1, 0), "windows": 12}
    alone, beside = (answer(training(tmp_path / str(o), others=o, **wide)) for o in (0.0, 0.6))
    (said,) = {*beside.notes()} - {*alone.notes()}
    assert said == (
        "the CPU here was measured while other programs took 60 % of the processor: in the moments that its times are of, "
        "they may have lowered its rate by 55 %, and its intervals are wider by that"
    )
    assert beside.as_json()["recommended"] == "h100" and beside.sentences()[0].startswith("H100 first: ")
    quiet, busy = (row(each, "cpu").total for each in (alone, beside))
    assert busy.middle == pytest.approx(quiet.middle)  # no guess at a quiet machine
    assert (busy.low, busy.high) == pytest.approx((0.45 * quiet.low, quiet.high / 0.45))


def test_where_disturbed_windows_are_dropped_it_says_that_the_times_are_of_the_others(tmp_path):
    (said,) = (
        each for each in answer(training(tmp_path, windows=12, others=0.6, quiet=6)).notes() if "other pro" in each
    )
    assert said == (
        "the CPU here was measured while other programs took 30 % of the processor: its times are of the moments in which "
        "they took little"
    )


def test_no_start_up_is_assumed_so_that_only_the_user_lets_one_decide(light):
    found = answer(light, epochs=1)
    here, taken = row(found, "cpu"), found.taken
    assert taken is not here and row(found, "h100").total == row(found, "h100").training
    assert "no time to start a device elsewhere is assumed (--start-up)" in found.sentences()[1]
    slow = answer(light, epochs=1, start_up_s=here.total.middle - taken.training.middle + 60)
    assert (slow.taken.label, slow.sentences()[0].count("times as fast as")) == ("cpu", 1)
    assert slow.sentences()[1].startswith("H100, the best elsewhere, takes ")
    alike = answer(light, CARDS[2:], epochs=1, start_up_s=here.total.middle - row(found, "h100").total.middle)
    assert (alike.taken.label, {each.label for each in alike.may_be_first}) == ("cpu", {"cpu", "h100"})  # here first


@pytest.mark.parametrize(
    ("elsewhere", "said"),
    [(Interval(30, 92, 110), "about 10 s (0 to 72) to start"), (exactly(80), "about 22 s to start")],
)
def test_how_long_a_start_may_take_is_a_middle_with_its_interval(light, monkeypatch, elsewhere, said):
    cpu = Interval(102, 102, 102)
    found = answer_of_times(light, monkeypatch, t4=elsewhere, cpu=cpu)
    assert f"is done first if T4 takes longer than {said}; " in found.sentences()[1]


def test_all_steps_of_all_epochs_are_the_training_and_its_start_up_is_paid_too(heavy):
    t4 = row(answer(heavy, epochs=3, batch_size=64, start_up_s=100, prices={"t4": 3.6}), "t4")
    steps = 3 * 860  # the last batch of 55,000 samples counts
    assert t4.training.middle == pytest.approx(steps * t4.step.seconds.middle)
    assert t4.total.middle == pytest.approx(t4.training.middle + 100)
    assert t4.cost.low == pytest.approx(0.001 * t4.total.low)


@pytest.mark.parametrize(
    ("prices", "taken"), [({}, "h200"), ({"h100": 2.0, "h200": 3.0}, "h100"), ({"h200": 3.0}, "h200")]
)
def test_of_devices_within_5_percent_the_cheapest_is_taken_then_the_fastest(light, prices, taken):
    found = answer(light, ALIKE, batch_size=8, prices=prices)
    other = {"h100": "h200", "h200": "h100"}[taken]
    assert found.taken.label == taken and {taken, other} <= {each.label for each in found.may_be_first}
    first = found.sentences()[0]
    assert first.startswith(f"Best guess {taken.upper()}: ") and f"; may be first as well: {other.upper()} (" in first


@pytest.mark.parametrize(
    ("second", "may_be"),
    [(Interval(13, 14, 15), []), (Interval(10, 14, 19), ["h200"]), (Interval(1, 14, 15), ["h200"])],
    ids=["apart", "overlapping", "whose low end alone is far"],
)
def test_another_may_be_first_where_the_ratio_of_both_intervals_does_not_exclude_it(light, monkeypatch, second, may_be):
    found = answer_of_times(light, monkeypatch, h100=Interval(9, 10, 11), h200=second)
    assert (found.taken.label, found.as_json()["may_be_first"]) == ("h100", ["h100", *may_be])
    assert found.sentences()[0].startswith("Best guess H100: " if may_be else "H100 first: ")


def test_a_ratio_that_is_shown_does_not_read_as_1(light, monkeypatch):
    found = answer_of_times(light, monkeypatch, h100=exactly(10), h200=Interval(10.04, 10.05, 10.06))
    assert "1.005 times as fast as H200 (1.003 to 1.007)" in found.sentences()[0]


@pytest.mark.parametrize(
    ("prices", "why"),
    [({"h100": 2.0, "l4": 1.0}, "cheaper"), ({"l4": 1.0}, "its price is known")],
)
def test_one_that_is_shown_to_be_slower_but_is_within_5_percent_is_taken_with_the_reason(
    light, monkeypatch, prices, why
):
    times = {"h100": exactly(100), "l4": exactly(104), "t4": exactly(200)}
    found = answer_of_times(light, monkeypatch, prices, **times)
    assert (found.taken.label, found.as_json()["may_be_first"]) == ("l4", ["h100"])
    (first, *_) = found.sentences()
    assert first.startswith("Take L4: 2 epochs take 1.7 min (predicted, cost 100); ")
    assert first.endswith(f"; within 5 % of H100 (1.7 min), the first, and {why}.")


def test_of_two_that_are_faster_than_the_one_taken_neither_is_called_the_first(light, monkeypatch):
    times = {"h100": Interval(99, 100, 101), "h200": Interval(100, 101, 102), "cpu": exactly(104.5)}
    found = answer_of_times(light, monkeypatch, **times)
    assert (found.taken.label, found.as_json()["may_be_first"]) == ("cpu", ["h100", "h200"])
    assert found.sentences()[0].endswith("; within 5 % of H100 (1.6–1.7 min), the best guess, and here.")


@pytest.mark.parametrize(("longer", "taken"), [(1.049, "l4"), (1.051, "h100")])
def test_a_device_is_near_the_first_if_it_takes_at_most_5_percent_longer(light, monkeypatch, longer, taken):
    times = {"h100": exactly(100), "l4": exactly(100 * longer)}
    assert answer_of_times(light, monkeypatch, {"h100": 2.0, "l4": 1.0}, **times).taken.label == taken


def test_a_price_is_that_of_a_card_or_of_the_kind_of_a_device_that_is_here(tmp_path):
    here = training(tmp_path, device="cuda", name="NVIDIA L4")
    asked = Question(CARDS, prices={"cuda": 1.0, "t4": 2.0})
    check_prices([each.device for each in here.sources], asked)
    assert [bool(row(Answer(here, asked), label).cost) for label in ("l4", "t4", "h100")] == [True, True, False]


def test_the_batch_is_the_smallest_whose_rate_is_near_the_best_of_those_that_fit(tmp_path, heavy):
    found = answer(heavy)
    assert {each.label: each.batch_size for each in found.rows} == {"h100": 1024, "l4": 2048, "t4": 1024, "cpu": 8}
    assert "more epochs; --batch-size" in " ".join(found.notes())
    assert {each.batch_size for each in answer(heavy, batch_size=64).rows} == {64}
    greedy = training(tmp_path, memory=lambda size: {"parameters": 1e6, "saved": 0.1e9 * size})
    assert row(answer(greedy), "t4").batch_size <= 64


def test_a_device_that_cannot_train_it_is_left_out_with_the_reason(tmp_path):
    huge = training(tmp_path, memory=lambda size: {"parameters": 30 * 2.0**30, "saved": 1e6})
    assert answer(huge).left_out == [
        "t4 may need 38.3 GiB at batch size 8, and has 16 GiB",
        "l4 may need 38.3 GiB at batch size 8, and has 24 GiB",
    ]
    assert answer(huge, precision="bf16-mixed").left_out[0] == "t4 has no hardware for bf16"


def test_a_precision_that_cannot_be_predicted_is_refused(tmp_path):
    mixed = training(tmp_path, precision="bf16-mixed")
    assert row(answer(mixed, precision="bf16-mixed"), "h100") == row(answer(mixed), "h100")
    with pytest.raises(UserError, match="--precision: cnn · mnist was measured in bf16-mixed"):
        answer(mixed, precision="tf32")


def test_a_device_that_is_here_has_one_row_and_the_narrower_prediction_is_taken(tmp_path):
    write_training(tmp_path / "cpu")
    write_training(tmp_path / "gpu", device="cuda", name="NVIDIA L4")
    ((both,), _) = read_trainings([tmp_path])
    found = answer(both, batch_size=8)
    assert sorted(each.label for each in found.rows) == ["cpu", "h100", "l4", "t4"]
    steps = [step_on(source, CARDS[0], 8).seconds for source in both.sources]
    assert row(found, "t4").step.seconds == min(steps, key=lambda seconds: seconds.high / seconds.low)


def test_a_card_that_is_asked_for_twice_has_one_row(heavy):
    assert [each.label for each in answer(heavy, [*CARDS, find_card("h100")]).rows] == ["h100", "l4", "t4", "cpu"]


def test_json_has_every_number(heavy):
    asked = answer(heavy, epochs=20, prices={"t4": 0.5})
    found = json.loads(json.dumps(asked.as_json(), allow_nan=False))
    devices, t4 = {each["label"]: each for each in found["devices"]}, row(asked, "t4")
    assert [devices["t4"][name]["high"] for name in ("training", "cost")] == [t4.training.high, t4.cost.high]
    assert t4.cost.high == pytest.approx(t4.total.high * 0.5 / 3600)
    assert {(each["known"], each["here"]) for each in devices.values()} == {("predicted", False), ("measured", True)}
    assert (found["recommended"], found["epochs"], found["assumed"]["start_up_s"]) == ("h100", 20, 0)
