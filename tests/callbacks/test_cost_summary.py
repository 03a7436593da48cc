"""Sums, shares and the words they are told in: exact numbers in, exact numbers out."""

from typing import Any

import pytest

from batchscope.callbacks._cost_summary import CostSummary, device_facts, predicted_knee, report
from batchscope.callbacks._stopwatch import PARTS
from batchscope.hardware.bottleneck import Bottleneck


def update(ms: float, samples: int = 10, **parts: float) -> dict[str, float]:
    """An update of so many ms, all of it forward unless told otherwise."""
    return {**dict.fromkeys(PARTS, 0.0), "forward": ms, **parts, "samples": samples, "timesteps": 0, "batches": 1}


def summary_of(*steps: tuple[float, int], processes: int = 1) -> dict[str, Any]:
    """Of steps of so many ms and samples."""
    cost = CostSummary(warmup=0)
    for ms, samples in steps:
        cost.add(update(ms, samples))
    return cost.summary(processes)


def test_the_rate_is_a_whole_batch_over_the_median_step_and_the_mean_rate_has_a_name_of_its_own() -> None:
    summary = summary_of((10, 100), (12, 100), (30, 100), (5, 20))
    assert (summary["batch_size"], summary["step_ms_median"]) == (100, 12)
    assert summary["samples_per_sec"] == pytest.approx(100 / 0.012)
    assert summary["batches_per_sec"] == pytest.approx(1 / 0.012)
    assert summary["samples_per_sec_mean"] == pytest.approx(320 / 0.057)
    assert summary["step_ms"] == pytest.approx(57 / 4)


def test_a_few_slow_steps_leave_the_rate_alone() -> None:
    assert summary_of((10, 40), (10, 40), (1000, 40))["samples_per_sec"] == pytest.approx(4000)


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


def test_the_samples_of_all_processes_count_and_the_steps_of_one() -> None:
    summary = summary_of((10, 40), (10, 40), processes=3)
    assert summary["samples_per_sec"] == summary["samples_per_sec_mean"] == pytest.approx(3 * 4000)
    assert summary["batches_per_sec"] == pytest.approx(100)


def test_a_step_of_accumulated_batches_is_one_step_of_all_their_samples() -> None:
    cost = CostSummary(warmup=0)
    for batches, ms in ((4, 40.0), (4, 40.0), (1, 10.0)):
        cost.add({**update(ms, 16 * batches), "batches": batches})
    summary = cost.summary()
    assert (summary["batch_size"], summary["samples_per_sec"]) == (16, pytest.approx(1600))
    assert summary["batches_per_sec"] == pytest.approx(100)


def test_time_steps_follow_the_rate() -> None:
    cost = CostSummary(warmup=0)
    for ms in (10, 10, 100):
        cost.add({**update(ms, 4), "timesteps": 28})
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


def test_energy_is_by_the_samples_trained_on_while_it_was_measured() -> None:
    sampled = {"energy_j": 50.0, "seconds": 10.0, "energy_source": "counter", "device/memory_peak_gib": 0.5}
    facts = device_facts(sampled, {"seconds": 8.0, "samples": 4_000})
    assert facts["joules_per_sample"] == pytest.approx(5.0 * 8.0 / 4_000)
    assert facts["memory_peak_gib"] == 0.5
    assert "utilization_pct" not in facts


@pytest.mark.parametrize(
    ("kind", "share", "device", "knee"),
    [
        ("host", 0.5, "cuda", 128),  # half idle: twice the batch fills it
        ("host", 0.9, "cuda", 1024),  # ten times, to the next power of two
        ("host", 0.5, "cpu", 2048),  # 19 times
        ("host", 0.01, "cpu", None),  # past the knee already
        ("compute", 0.9, "cuda", None),
        ("input", 0.9, "cpu", None),
    ],
)
def test_the_knee_is_predicted_where_the_host_limits(kind: str, share: float, device: str, knee: int | None) -> None:
    assert predicted_knee(Bottleneck(kind, share, ""), 64, device) == knee


def test_the_report_says_all_that_is_known() -> None:
    cost = CostSummary(warmup=0)
    cost.add(update(0.31, 512, data_wait=0.05, transfer=0.02, backward=0.52, optimizer=0.21, other=0.13))
    facts = {
        "title": "cnn · mnist", "device": "cuda", "device_name": "NVIDIA H200", "precision": "32-true",
        "flops_per_sec": 10.3e12, "peak_flops_per_sec": 53e12, "mfu": 10.3 / 53, "sm_activity_pct": 41.0,
        "memory_peak_gib": 0.4, "joules_per_sample": 0.9e-3,
        "limiter": {"kind": "host", "share": 0.52, "advice": "Raise it.", "predicted_knee": 2048},
    }  # fmt: skip
    run, step, rates, limit = report({**cost.summary(), **facts}).splitlines()
    assert run == "cnn · mnist · batch 512 · cuda (NVIDIA H200) · 32-true · 1 step measured"
    assert (
        step
        == "median step 1.24 ms; mean 1.24 ms = data 0.05 + transfer 0.02 + forward 0.31 + backward 0.52 + optimizer 0.21 + other 0.13"
    )
    assert rates.split(" · ") == [
        "412,903 samples/s at the median step, 412,903 over all steps",
        "10.3 TFLOP/s, MFU 19.4% of the 53 TFLOP/s measured here",
        "device busy 41 %",
        "peak 0.4 GiB",
        "900 µJ/sample",
    ]
    assert limit == "limited by: host. Raise it. The knee is predicted near 2,048."


def test_what_is_not_known_is_left_out_of_the_report() -> None:
    cost = CostSummary(warmup=0)
    cost.add(update(1.0))
    text = report({**cost.summary(), "title": "X", "device": "cpu", "device_name": "", "precision": "32-true"})
    assert text.splitlines()[-1] == "10,000 samples/s at the median step, 10,000 over all steps"


def test_a_rate_of_less_than_ten_keeps_two_digits() -> None:
    cost = CostSummary(warmup=0)
    cost.add(update(10_000.0, 2))
    text = report({**cost.summary(), "title": "X", "device": "cpu", "device_name": "", "precision": "32-true"})
    assert text.splitlines()[-1] == "0.2 samples/s at the median step, 0.2 over all steps"
