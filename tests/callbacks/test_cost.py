"""Sums, shares and the words they are told in: exact numbers in, exact numbers out."""

import pytest

from batchscope.callbacks.cost import CostSummary, device_facts, predicted_knee, report
from batchscope.callbacks.stopwatch import PARTS
from batchscope.hardware.limiter import Verdict


def update(ms: float, samples: int = 10, **parts: float) -> dict[str, float]:
    """An update of so many ms, all of it forward unless told otherwise."""
    return {**dict.fromkeys(PARTS, 0.0), "forward": ms, **parts, "samples": samples, "timesteps": 0, "batches": 1}


def test_rates_are_samples_over_the_time_they_took() -> None:
    cost = CostSummary(warmup=0)
    for ms, samples in ((10, 100), (10, 100), (5, 20)):
        cost.add(update(ms, samples))
    summary = cost.summary()
    assert summary["samples_per_sec"] == pytest.approx(220 / 0.025)
    assert summary["step_ms"] == pytest.approx(25 / 3)
    assert summary["step_ms_median"] == 10
    assert summary["batch_size"] == 100


def test_a_few_slow_steps_leave_the_median_rate_alone() -> None:
    cost = CostSummary(warmup=0)
    for ms in (10, 10, 1000):
        cost.add(update(ms, samples=40))
    assert cost.summary()["samples_per_sec_median"] == pytest.approx(4000)


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
    assert predicted_knee(Verdict(kind, share, ""), 64, device) == knee


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
        step == "step 1.24 ms = data 0.05 + transfer 0.02 + forward 0.31 + backward 0.52 + optimizer 0.21 + other 0.13"
    )
    assert rates.split(" · ") == [
        "412,903 samples/s",
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
    assert text.splitlines()[-1] == "10,000 samples/s"


def test_a_rate_of_less_than_ten_keeps_two_digits() -> None:
    cost = CostSummary(warmup=0)
    cost.add(update(10_000.0, 2))
    text = report({**cost.summary(), "title": "X", "device": "cpu", "device_name": "", "precision": "32-true"})
    assert text.splitlines()[-1] == "0.2 samples/s"
