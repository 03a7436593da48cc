"""A row for each device: its batch size, its times, what it costs, and where each number comes from."""

import pytest

from batchscope.choice.money import Prices
from batchscope.choice.rows import Question, Target, checks, rows
from tests.choice.paper import GIB, H100, L4, T4, TPU, Training, device

TARGETS = [Target("t4", T4), Target("l4", L4), Target("h100", H100), Target("tpu", TPU)]


def found(question=None, training=None, targets=TARGETS):
    table, left_out = rows([training or Training()], targets, question or Question(2))
    return {row.label: row for row in table}, {one.label: one.reason for one in left_out}


def test_what_is_here_is_measured_and_starts_at_once():
    table, _ = found()
    assert (table["cpu"].how, table["cpu"].here, table["cpu"].start_up) == ("measured", True, 0.0)
    assert (table["t4"].how, table["t4"].here, table["t4"].start_up) == ("predicted", False, 300.0)
    assert table["tpu"].is_bound


def test_the_training_is_all_steps_of_all_epochs_and_the_start_up():
    row = found(Question(3, start_up=60.0, batch_size=128))[0]["t4"]
    assert row.epoch.middle == pytest.approx(430 * row.step.seconds.middle)  # 55,000 samples, the last batch counts
    assert row.training.high == pytest.approx(60 + 3 * row.epoch.high)


def test_the_batch_is_the_smallest_whose_rate_is_near_the_best():
    assert found()[0]["cpu"].batch_size == 8  # as fast at every size
    assert found(training=Training(flops=1e9))[0]["l4"].batch_size == 32  # below, launches are most of a step


def test_a_device_that_is_not_here_may_take_up_to_8_times_the_largest_measured_size():
    table, _ = found(training=Training(flops=1e3, batch_sizes=(8, 32)))
    assert (table["cpu"].batch_size, table["h100"].batch_size) == (8, 256)
    table, _ = found(training=Training(flops=1e3, train_samples=100))
    assert table["h100"].batch_size == 512  # no larger than was measured where that is the whole training set


def test_a_batch_size_can_be_the_same_for_all():
    assert {row.batch_size for row in found(Question(2, batch_size=64))[0].values()} == {64}


def test_the_batch_fits_into_memory():
    training = Training(bytes_per_sample=0.05 * GIB)
    table, _ = found(training=training)
    assert table["t4"].batch_size == 256 <= table["t4"].largest
    smaller = found(training=Training(bytes_per_sample=2.5 * GIB))[0]["t4"]
    assert smaller.batch_size == smaller.largest == 5  # below the measured sizes


def test_a_device_that_is_too_small_is_left_out_with_its_need():
    table, left_out = found(training=Training(bytes_per_sample=20 * GIB))
    assert set(table) == {"h100"}
    assert left_out["t4"] == "needs 160 GiB at batch size 8, and has 16 GiB"


def test_a_precision_that_a_device_lacks_leaves_it_out():
    table, left_out = found(Question(2, precision="bf16-mixed"))
    assert left_out == {"t4": "no bf16 in its hardware"}
    assert "l4" in table


def test_a_device_that_is_here_has_one_row():
    table, _ = rows([Training(), Training(device=L4)], TARGETS, Question(2))
    assert sorted(row.label for row in table) == ["cpu", "cuda", "h100", "t4", "tpu"]


def test_money_is_paid_for_the_start_up_too():
    row = found(Question(2, prices=Prices({"t4": 3.6}), start_up=100.0))[0]["t4"]
    assert row.cost is not None
    assert row.cost.low == pytest.approx(0.001 * row.training.low)
    assert found(Question(2))[0]["t4"].cost is None


def test_energy_is_an_upper_bound_and_absent_of_a_bound():
    table, _ = found(Question(2, start_up=0.0))
    assert table["t4"].joules == pytest.approx(70 * table["t4"].training.high)
    assert table["cpu"].joules is None  # no power limit is known
    watt = rows([Training()], [Target("tpu", device("x", "tpu", tdp=200.0))], Question(1))[0]
    assert next(row for row in watt if row.is_bound).joules is None


def test_the_fastest_is_first_and_bounds_are_last():
    table = list(found(training=Training(flops=1e9))[0].values())
    assert [row.label for row in table] == ["h100", "l4", "t4", "cpu", "tpu"]


def test_the_narrower_prediction_is_taken():
    workloads = [Training(), Training(device=L4, width=1.1)]
    row = next(row for row in rows(workloads, [Target("h100", H100)], Question(1))[0] if row.label == "h100")
    assert row.step.seconds.high / row.step.seconds.middle == pytest.approx(1.1)


def test_every_measured_device_is_predicted_from_the_others():
    found = checks([Training(), Training(device=L4)], Question(1))
    assert [(check.label, check.source) for check in found[::4]] == [("cpu", "cuda"), ("cuda", "cpu")]
    assert all(check.holds for check in found)
    wrong = checks([Training(), Training(device=L4, flops=1e9)], Question(1))
    assert not any(check.holds for check in wrong if check.batch_size == 512)
