"""Sums, means and the median of steps: exact numbers in, exact numbers out."""

from typing import Any

import numpy
import pytest

from batchscope.callbacks._cost_summary import COLUMNS, CostSummary, UpdateBuilder, Updates, step_metrics
from batchscope.callbacks._flops_meter import FlopsMeter
from batchscope.callbacks._stopwatch import PAUSE, Clock, Step


def update(ms: float, samples: int = 10, **others: float) -> Updates:
    """An update of so many ms, all of it forward by default."""
    held = dict.fromkeys(COLUMNS, 0.0) | {"forward": ms, "samples": samples, "batches": 1, **others}
    return numpy.array([list(held.values())])


def summary_of(*steps: tuple[float, int], world_size: int = 1) -> dict[str, Any]:
    """Of steps of so many ms and samples."""
    cost = CostSummary(warmup=0)
    for ms, samples in steps:
        cost.add(update(ms, samples))
    return cost.summary(world_size)


def test_the_rate_is_a_whole_batch_over_the_median_step_and_the_mean_rate_has_a_name_of_its_own() -> None:
    summary = summary_of((10, 100), (12, 100), (30, 100), (5, 20))
    assert (summary["batch_size"], summary["step_ms_median"]) == (100, 12)
    assert summary["samples_per_sec"] == pytest.approx(100 / 0.012)
    assert summary["batches_per_sec"] == pytest.approx(1 / 0.012)
    assert summary["samples_per_sec_mean"] == pytest.approx(320 / 0.057)
    assert summary["step_ms"] == pytest.approx(57 / 4)


def test_a_few_slow_steps_leave_the_rate_alone() -> None:
    assert summary_of((10, 40), (10, 40), (1000, 40))["samples_per_sec"] == pytest.approx(4000)


def test_a_stall_takes_three_times_the_median_and_50_ms_more() -> None:
    def stalls(*slow: float, usual: float) -> tuple[int, float]:
        summary = summary_of(*[(usual, 10)] * 9, *((ms, 10) for ms in slow))
        return summary["stalls"], summary["stall_seconds"]

    assert stalls(51, 60, 3, usual=2) == (1, pytest.approx((60 - 2) / 1e3))  # three times is not enough for short steps
    assert stalls(299, 301, 900, usual=100) == (2, pytest.approx((201 + 800) / 1e3))  # nor 50 ms for long ones
    assert stalls(usual=2) == (0, 0)


def test_a_stall_in_a_short_last_batch_counts_as_well() -> None:
    assert summary_of(*[(10, 100)] * 8, (2, 20), (500, 20))["stalls"] == 1


def test_the_p99_is_of_the_steps_with_a_whole_batch() -> None:
    summary = summary_of(*[(10 + i / 100, 100) for i in range(101)], (500, 7))
    assert summary["step_ms_p99"] == pytest.approx(10.99)


def test_the_rate_of_the_fit_has_every_sample_over_the_wall_time_of_the_fit() -> None:
    cost = CostSummary(warmup=2)
    for _ in range(5):
        cost.add(update(10, samples=40))
    summary = cost.summary(world_size=2, fit_seconds=4.0)
    assert (summary["samples_per_sec_fit"], summary["fit_seconds"]) == (2 * 5 * 40 / 4.0, 4.0)
    assert summary["samples"] == 3 * 40
    assert "samples_per_sec_fit" not in cost.summary()


def test_writing_is_beside_the_step_and_not_in_it() -> None:
    cost = CostSummary(warmup=0)
    cost.add(update(10))
    assert "writing_ms" not in cost.summary()
    cost.add(update(10, writing=4.0))
    assert (cost.summary()["writing_ms"], cost.summary()["step_ms"]) == (2.0, 10.0)


def test_the_spread_lies_around_the_median_however_few_the_steps() -> None:
    two = summary_of((30, 10), (52, 10))
    assert (two["step_ms_p10"], two["step_ms_median"], two["step_ms_p90"]) == pytest.approx((32.2, 41, 49.8))
    one = summary_of((30, 10))
    assert one["step_ms_p10"] == one["step_ms_median"] == one["step_ms_p90"] == 30


def test_an_epochs_short_last_batch_is_not_in_the_rate_even_if_there_are_as_many_of_them() -> None:
    summary = summary_of(*[(100, 1000), (20, 200), (20, 200)] * 3)
    assert (summary["batch_size"], summary["step_ms_median"]) == (1000, 100)
    assert summary["samples_per_sec"] == pytest.approx(1000 / 0.1)


def test_a_last_batch_that_holds_one_sample_more_is_not_the_batch_size() -> None:
    assert summary_of((10, 32), (10, 32), (10, 33))["batch_size"] == 32


def test_where_the_sizes_of_batches_vary_the_batch_is_the_mean_one() -> None:
    summary = summary_of((10, 8), (20, 10), (30, 12))
    assert (summary["batch_size"], summary["step_ms_median"]) == (10, 20)
    assert summary["samples_per_sec"] == pytest.approx(10 / 0.02)


def test_the_samples_of_all_ranks_count_and_the_steps_of_one() -> None:
    summary = summary_of((10, 40), (10, 40), world_size=3)
    assert summary["samples_per_sec"] == summary["samples_per_sec_mean"] == pytest.approx(3 * 4000)
    assert summary["batches_per_sec"] == pytest.approx(100)


def test_a_step_of_accumulated_batches_is_one_step_of_all_their_samples() -> None:
    cost = CostSummary(warmup=0)
    for batches, ms in ((4, 40.0), (4, 40.0), (1, 10.0)):
        cost.add(update(ms, 16 * batches, batches=batches))
    summary = cost.summary()
    assert (summary["batch_size"], summary["samples_per_sec"]) == (16, pytest.approx(1600))
    assert summary["batches_per_sec"] == pytest.approx(100)


def test_time_steps_follow_the_rate() -> None:
    cost = CostSummary(warmup=0)
    for ms in (10, 10, 100):
        cost.add(update(ms, 4, timesteps=28))
    assert cost.summary()["timesteps_per_sec"] == pytest.approx(7 * 400)


def test_the_parts_are_means_that_add_up() -> None:
    cost = CostSummary(warmup=0)
    cost.add(update(1, data_wait=2, backward=3))
    cost.add(update(3, data_wait=4, optimizer=5))
    assert cost.summary()["parts_ms"] == {
        "data_wait": 3, "transfer": 0, "forward": 2, "backward": 1.5, "optimizer": 2.5, "other": 0
    }  # fmt: skip


@pytest.mark.parametrize(("updates", "counted"), [(1, [1]), (2, [2]), (5, [2, 3, 4, 5]), (6, [6]), (8, [6, 7, 8])])
def test_the_warm_up_is_left_out_as_far_as_there_is_more(updates: int, counted: list[int]) -> None:
    cost = CostSummary(warmup=5)
    for ms in range(1, updates + 1):
        cost.add(update(ms))
    summary = cost.summary()
    assert summary["updates"] == len(counted)
    assert summary["seconds"] == pytest.approx(sum(counted) / 1e3)


def test_asking_twice_counts_once() -> None:
    cost = CostSummary(warmup=5)
    for _ in range(3):
        cost.add(update(10))
    assert cost.summary() == cost.summary()


def test_no_update_no_summary() -> None:
    assert CostSummary(warmup=5).summary() == {}


def batches(*steps: tuple[int, float]) -> list[Step]:
    """Batches of one sample: the `global_step` after each, and its milliseconds."""
    return [Step(["forward", PAUSE], [0.0, ms / 1e3], samples=1, global_step=step, trained=True) for step, ms in steps]


def test_the_batches_of_an_update_are_joined_also_when_they_come_in_two_bunches() -> None:
    builder = UpdateBuilder(last_step=5)
    forward, samples = COLUMNS.index("forward"), COLUMNS.index("samples")
    expected = [([], []), ([6, 7], [(7, 3), (8, 1)]), ([8], [(48, 2)]), ([], [])]
    bunches = batches((5, 1), (5, 2)), batches((6, 4), (7, 8), (7, 16)), batches((8, 32)), batches()
    for bunch, (steps, held) in zip(bunches, expected, strict=True):
        found, updates = builder.add(bunch, Clock())
        assert found.tolist() == steps
        assert updates[:, [forward, samples]] == pytest.approx(numpy.array(held).reshape(-1, 2))


def test_a_metric_that_a_step_lacks_is_in_no_row_of_it() -> None:
    updates = numpy.concatenate([update(10), update(10, samples=0), update(0), update(20), update(40, timesteps=5)])
    meter = FlopsMeter(flops_per_sample=100.0)
    tables = step_metrics(numpy.arange(1, 6), updates, 2, meter)
    rates = [{key.removeprefix("throughput/") for key in table.keys if key.startswith("thr")} for table in tables]
    usual = {"batches_per_sec", "samples_per_sec", "flops_per_sec"}
    assert rates == [usual, {"batches_per_sec"}, set(), usual, usual | {"timesteps_per_sec"}]
    assert [table.steps.tolist() for table in tables] == [[1], [2], [3], [4], [5]]
    last = dict(zip(tables[-1].keys, tables[-1].values[0], strict=True))
    assert last["time/step_ms"] == last["time/forward_ms"] == 40
    assert last["throughput/samples_per_sec"] == pytest.approx(2 * 10 / 0.04)
    assert last["throughput/flops_per_sec"] == pytest.approx(100 * 10 / 0.04)
