"""The table of updates and its views: exact times in, exact rates, means and masks out."""

import math

import numpy
import pytest

from batchscope.callbacks._cost import compute_cost, compute_metrics
from batchscope.callbacks._table import DISTURBED, FIRST, INVALID, PARTIAL, RECORDED, WARMUP, UpdateTable
from batchscope.callbacks._timer import HostClock
from batchscope.callbacks._windows import Windows
from tests.support.tables import batch, table_of


def table_with(*batches, warmup: int = 0, last_step: int = 0) -> UpdateTable:
    table = UpdateTable(warmup, Windows(0), last_step)
    table.add(batches, HostClock())
    return table


# --- rows -------------------------------------------------------------------------------------------------------------


def test_the_batches_of_an_update_are_one_row_also_when_they_come_in_two_bunches_and_a_table_grows() -> None:
    table = table_with(last_step=5)
    bunches = [(batch(5, 1, forward=1), batch(5, 1, forward=2))]
    bunches += [(batch(6, 1, forward=4), batch(7, 1, forward=8), batch(7, 1, forward=16))]
    bunches += [(batch(8, 1, forward=32),), ()]
    assert [len(table.add(bunch, HostClock())) for bunch in bunches] == [0, 2, 1, 0]
    for n in range(9, 2500):
        table.add([batch(n, forward=n)], HostClock())
    assert table.rows["step"].tolist() == list(range(6, 2500))
    assert table.rows["samples"].tolist()[:4] == [3, 1, 2, 4]
    assert table.step_ms() == pytest.approx([7, 8, 48, *range(9, 2500)])


def test_every_row_says_why_it_may_not_count() -> None:
    batches = [batch(n, 4, recorded=n == 2, forward=-5 if n == 5 else 10) for n in range(1, 8)]
    table = table_with(*batches, batch(8, 1, forward=10), warmup=3)
    expected = [FIRST | WARMUP, WARMUP | RECORDED, WARMUP, 0, INVALID, 0, 0, PARTIAL]
    assert table.flags().tolist() == [flags | DISTURBED for flags in expected]  # no window covers them
    assert numpy.flatnonzero(table.after_warmup()).tolist() == [3, 5, 6, 7]
    assert numpy.flatnonzero(table.in_median()).tolist() == [3, 5, 6]


def test_no_update_is_partial_where_sizes_vary_though_one_of_them_is_the_mean() -> None:
    table = table_of([10] * 50, [10, 20, 30, 40, 50] * 10)
    assert table.whole_batch_size() == 30
    assert not (table.flags() & PARTIAL).any()


# --- the cost ---------------------------------------------------------------------------------------------------------

# As under a schedule of accumulation: 3,200 samples/s in each phase; no update size has half of the samples.
GROWING_MS, GROWING = [10] * 4 + [20] * 2 + [40], [32] * 4 + [64] * 2 + [128]
# The steps in ms, and their samples → entries of the cost.
STEPS = {
    "a whole batch over the median step": (
        [10, 12, 30, 5],
        [100, 100, 100, 20],
        {"batch_size": 100, "step_ms_median": 12, "samples_per_sec": 100 / 0.012, "batches_per_sec": 1 / 0.012},
    ),
    "the mean of all steps": ([10, 30, 5], [9, 9, 2], {"samples_per_sec_mean": 20 / 0.045, "step_ms": 15}),
    "a last batch with a sample more": ([10, 10, 10], [32, 32, 33], {"batch_size": 32}),
    "short batches and whole ones": ([100, 20, 20], [1000, 200, 200], {"batch_size": 1000, "step_ms_median": 100}),
    "sizes that vary": (
        [10, 20, 30],
        [8, 10, 12],
        {
            "batch_size": 10,
            "batch_size_varies": True,
            "update_size_varies": True,
            "step_ms_median": 20,
            "samples_per_sec": 500,
        },
    ),
    "sizes that vary, with the time": (
        GROWING_MS,
        GROWING,
        {"batch_size": 55, "step_ms_median": 10, "samples_per_sec": 3200, "batches_per_sec": 7 / 0.12},
    ),
    "a step that a clock has broken": ([10, math.nan, -3, math.inf, 12, 11], 4, {"step_ms_median": 11, "updates": 3}),
    "the p99 is of whole batches": ([*range(1, 102), 500], [9] * 101 + [7], {"step_ms_p99": 100}),
}
# The batches, and options of compute_cost → entries of the cost.
BATCHES = {
    "the samples of all ranks and the steps of one": (
        [batch(n, 40, forward=10) for n in (1, 2, 3)],
        {"replicas": 3},
        {"samples_per_sec": 12_000, "samples_per_sec_mean": 12_000, "batches_per_sec": 100},
    ),
    "accumulated batches are one step": (
        [batch(n, 16, forward=10) for n in (1, 1, 1, 2, 2, 2, 3, 3, 3)],
        {},
        {"batch_size": 16, "batches": 3, "samples_per_sec": 1600, "batches_per_sec": 100},
    ),
    "time steps follow the rate": (
        [batch(n, 4, timesteps=28, forward=ms) for n, ms in enumerate((1, 10, 10, 100), start=1)],
        {},
        {"timesteps_per_sec": 7 * 400},
    ),
    "the parts are means that add up; pauses are beside them": (
        [
            batch(1, forward=9),
            batch(2, data_wait=2, forward=1, pause=8, backward=3),
            batch(3, data_wait=4, forward=3, optimizer=5),
        ],
        {},
        {
            "parts_ms": {"data_wait": 3, "transfer": 0, "forward": 2, "backward": 1.5, "optimizer": 2.5, "other": 0},
            "step_ms": 9,
            "excluded_ms": 4,
        },
    ),
}


def assert_has(cost, expected) -> None:
    assert {key: cost[key] for key in expected} == {key: pytest.approx(value) for key, value in expected.items()}


@pytest.mark.parametrize(("step_ms", "samples", "expected"), STEPS.values(), ids=STEPS)
def test_the_cost_of_steps(step_ms, samples, expected) -> None:
    assert_has(compute_cost(table_of(step_ms, samples)), expected)


@pytest.mark.parametrize(("batches", "options", "expected"), BATCHES.values(), ids=BATCHES)
def test_the_cost_of_batches(batches, options, expected) -> None:
    assert_has(compute_cost(table_with(*batches), **options), expected)


def test_disturbed_steps_leave_the_median_and_stay_in_the_mean_where_enough_are_undisturbed() -> None:
    table = table_of([10] * 6 + [30] * 10, disturbed_from=6)
    cost = compute_cost(table)
    assert table.flags()[-1] == DISTURBED
    summary = {"steps": 10, "mean_s": pytest.approx(0.03), "samples": 4.0, "wait_share": 0.0, "disturbed": True}
    assert table.summarize_window(table.windows.all[1]) == summary
    assert_has(cost, {"step_ms_median": 10, "work_ms_median": 10, "step_ms_p99": 10, "step_ms_interval": [10, 10]})
    assert_has(cost, {"undisturbed_steps": 6, "updates": 16, "step_ms": 360 / 16})
    cost_of_few = compute_cost(table_of([10] * 5 + [30] * 10, disturbed_from=5))
    assert cost_of_few["step_ms_median"] == pytest.approx(30) and "undisturbed_steps" not in cost_of_few


def test_what_a_fit_does_not_have_is_no_fact_of_its_cost() -> None:
    cost = compute_cost(table_of([10]))
    absent = {
        "batch_size_varies",
        "update_size_varies",
        "batches",
        "excluded_ms",
        "step_ms_interval",
        "undisturbed_steps",
    }
    assert not (absent | {"timesteps_per_sec"}) & cost.keys()
    for updates in (0, 1, 5):  # no more than the warm-up
        assert compute_cost(table_with(*(batch(n, forward=10) for n in range(1, updates + 1)), warmup=5)) == {}


def test_a_schedule_of_accumulation_makes_updates_of_many_sizes_and_not_batches() -> None:
    counts = (1, 1, 1, 1, 2, 2, 4)
    updates = [(number, n < count) for number, count in enumerate(counts, start=1) for n in range(1, count + 1)]
    batches = [batch(number - waits, 64, forward=10) for number, waits in updates]
    cost = compute_cost(table_with(*batches, batch(8, 16, forward=10)))
    assert (cost["batch_size"], cost.get("batch_size_varies"), cost["update_size_varies"]) == (64, None, True)


# --- other views ------------------------------------------------------------------------------------------------------


def test_steps_that_changed_since_they_were_recorded_are_told_by_how_much() -> None:
    recorded = [batch(n, recorded=n > 1, forward=20) for n in (1, 2, 3)]
    plain = [batch(n, forward=ms) for n, ms in enumerate((10, 10, 11, 12, 90), start=4)]
    table = table_with(*recorded, *plain)
    for traced in ([], [batch(n, recorded=True, forward=70) for n in range(12, 15)]):  # a trace at the end of the fit
        table.add(traced, HostClock())
        # One long step does not count.
        assert [table.drift_since_recording(ms) for ms in (36.0, 5.0, 11.5)] == pytest.approx([3.0, 0.5, 1.0])
    table = table_with(*recorded, *(batch(n, forward=60) for n in (4, 5, 6)))
    assert table.drift_since_recording(60.0) == pytest.approx(3.0)  # the recorded updates did less
    assert table_with(*(batch(n, forward=10) for n in range(1, 9))).drift_since_recording(30.0) == 1.0


def test_a_longer_wait_for_data_is_no_change_of_the_step() -> None:
    steps = [
        batch(n, recorded=n in (2, 3), data_wait=100 * (n > 8), transfer=50 * (n > 8), forward=10) for n in range(1, 20)
    ]
    table = table_with(*steps)
    assert table.drift_since_recording(compute_cost(table)["work_ms_median"]) == pytest.approx(1.0)
    late = table_with(*[batch(n, recorded=n in (2, 3), data_wait=100 * (n < 9), forward=10) for n in range(1, 20)])
    assert late.drift_since_recording(compute_cost(late)["work_ms_median"]) == pytest.approx(1.0)


def test_updates_of_another_number_of_batches_are_no_change_of_the_step_and_not_what_was_recorded() -> None:
    def update(number: int, count: int, recorded: bool = False) -> list:
        return [batch(number - (n < count), recorded=recorded, forward=10) for n in range(1, count + 1)]

    recorded = [entry for number in (1, 2, 3) for entry in update(number, 1, number > 1)]
    once = table_with(*recorded, *(entry for number in range(4, 10) for entry in update(number, 1)))
    twice = table_with(*recorded, *(entry for number in range(4, 10) for entry in update(number, 2)))
    assert [table.has_other_accumulation() for table in (once, twice)] == [False, True]
    assert [
        table.drift_since_recording(ms) for table, ms in ((once, 10.0), (twice, 20.0), (twice, 60.0))
    ] == pytest.approx([1, 1, 3])
    counts = zip(range(4, 11), (1, 1, 1, 1, 2, 2, 4), strict=True)
    growing = table_with(*recorded, *(entry for number, count in counts for entry in update(number, count)))
    assert growing.drift_since_recording(10.0) == pytest.approx(1)


def test_the_step_file_has_the_steps_of_a_whole_batch_in_their_windows() -> None:
    times = table_of([10, 20, 30, 5], [4, 4, 4, 1], disturbed_from=2).step_times()
    assert times.step_s == pytest.approx([0.01, 0.02, 0.03])
    assert (times.window.tolist(), times.disturbed.tolist()) == ([0, 2], [0, 1])
    assert table_with(batch(1, forward=5), batch(2, forward=10)).step_times() is None
    assert UpdateTable(0, Windows(0)).step_times() is None


def test_the_steps_of_the_step_file_are_of_one_size_where_sizes_vary() -> None:
    table = table_of(GROWING_MS, GROWING, disturbed_from=4)
    times, cost = table.step_times(), compute_cost(table)
    samples = cost["samples_per_sec"] * cost["step_ms_median"] / 1e3
    assert samples / times.means() == pytest.approx([3200, 3200])


def test_a_window_has_the_samples_of_its_own_steps_where_sizes_vary() -> None:
    table = table_of(GROWING_MS, GROWING, disturbed_from=4)
    summaries = [table.summarize_window(window) for window in table.windows.all]
    assert [summary["samples"] / summary["mean_s"] for summary in summaries] == pytest.approx([3200, 3200])


def test_the_curves_have_every_metric_that_a_step_has_and_no_other() -> None:
    batches = [batch(1, 10, forward=10), batch(2, 10, timesteps=5, data_wait=10, forward=30)]
    (first, _), (second, last) = compute_metrics(table_with(*batches).rows, 2, flops_per_sample=100.0)
    assert (first, second) == (1, 2)
    assert (last["time/step_ms"], last["time/forward_ms"]) == pytest.approx((40, 30))
    assert last["throughput/samples_per_sec"] == pytest.approx(2 * 10 / 0.04)
    assert last["throughput/flops_per_sec"] == pytest.approx(100 * 10 / 0.04)
    assert "throughput/mfu" not in last
    ((_, metrics),) = compute_metrics(table_with(batch(1, 0, forward=10)).rows, 1, flops_per_sample=100.0)
    assert {key for key in metrics if key.startswith("throughput/")} == {"throughput/batches_per_sec"}
