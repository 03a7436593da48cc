"""What the devices, the ranks and the rule of the bottleneck add to a run's summary, and the summary in words."""

from typing import Any

import lightning
import pytest

from batchscope.callbacks._run_summary import device_facts, predicted_knee, rank_facts, report
from batchscope.callbacks._setting import setting_of
from batchscope.hardware.bottleneck import Bottleneck
from batchscope.hardware.probes import usable_cores
from batchscope.options.compose import check_command_line
from tests.support.third_party_modules import Stranger

PARTS_MS = {"data_wait": 0.05, "transfer": 0.02, "forward": 0.31, "backward": 0.52, "optimizer": 0.21, "other": 0.13}


def summary(**facts: Any) -> dict[str, Any]:
    """A step of 1.24 ms with 512 samples, on a CPU, and whatever else is known."""
    rate = 512 / 1.24e-3
    cost = {"updates": 1, "batch_size": 512, "step_ms": 1.24, "step_ms_median": 1.24, "parts_ms": PARTS_MS}
    cost |= {"samples_per_sec": rate, "samples_per_sec_mean": rate}
    return {**cost, "title": "X", "device": "cpu", "device_name": "", "precision": "32-true", **facts}


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
    assert predicted_knee(Bottleneck(kind, share, "clear", ""), 64, device) == knee


def test_the_report_says_all_that_is_known() -> None:
    run, step, rates, bottleneck, advice = report(
        summary(
            title="cnn · mnist",
            device="cuda",
            device_name="NVIDIA H200",
            flops_per_sec=10.3e12,
            peak_flops_per_sec=53e12,
            mfu=10.3 / 53,
            sm_activity_pct=41.0,
            memory_peak_gib=0.4,
            joules_per_sample=0.9e-3,
            bottleneck={
                "kind": "host",
                "share": 0.52,
                "certainty": "probable",
                "evidence": "52 % of the step is overhead",
                "advice": "Raise it.",
                "predicted_knee": 2048,
            },
        )
    ).splitlines()
    assert run == "cnn · mnist · batch 512 · cuda (NVIDIA H200) · 32-true · 1 step measured"
    assert step == (
        "median step 1.24 ms; mean 1.24 ms = data 0.0500 + transfer 0.0200 + forward 0.310 + backward 0.520 + "
        "optimizer 0.210 + other 0.130"
    )
    assert rates.split(" · ") == [
        "413,000 samples/s at the median step, 413,000 over all steps",
        "10.3 TFLOP/s, MFU 19.4 % of the 53 TFLOP/s measured here",
        "SM activity 41 %",
        "peak 0.400 GiB",
        "900 µJ/sample",
    ]
    assert bottleneck == "bottleneck: probably host: 52 % of the step is overhead. The knee is predicted near 2,048."
    assert advice == "Raise it."


def test_the_report_has_the_whole_fit_the_slow_steps_and_what_the_device_did() -> None:
    whole = {"samples_per_sec_fit": 390_123.0, "step_ms_p99": 2.5, "stalls": 2, "stall_seconds": 0.412}
    gpu = {"device": "cuda", "utilization_pct": 98.0, "sm_activity_pct": 41.0}
    gpu |= {"memory_peak_gib": 0.4, "memory_reserved_gib": 0.6}
    lowered = {"throttled_pct": 34.0, "throttled_power_pct": 33.0, "throttled_thermal_pct": 2.0}
    line = report(summary(**whole, **gpu, **lowered, throttled_hardware_pct=0.0)).splitlines()[-1]
    assert line.split(" · ") == [
        "413,000 samples/s at the median step, 413,000 over all steps, 390,000 over the whole fit",
        "p99 step 2.50 ms",
        "2 stalls took 0.412 s",
        "a kernel ran in 98 % of the time",
        "SM activity 41 %",
        "clocks lowered in 34 % of the time (power 33 %, thermal 2 %)",
        "peak 0.400 GiB (0.600 reserved)",
    ]


@pytest.mark.parametrize(("cores", "words"), [(2, "2 cores"), (1, "1 core"), (1.5, "1.5 cores")])
def test_a_cpu_has_processor_time(cores: float, words: str) -> None:
    line = report(summary(processor_time_pct=96.4, cores=cores)).splitlines()[-1]
    assert line.endswith(f" · processor time 96 % of {words}")


def test_processor_time_comes_with_the_cores_that_it_is_of() -> None:
    facts = device_facts({"device/processor_time_mean_pct": 96.0, "device/throttled_mean_pct": 3.0}, {})
    assert facts == {"processor_time_pct": 96.0, "cores": usable_cores(), "throttled_pct": 3.0}


def test_clocks_that_are_hardly_ever_lowered_are_not_worth_a_word() -> None:
    assert "clocks" not in report(summary(throttled_pct=0.5, throttled_power_pct=0.5))


def test_what_is_not_known_is_left_out_of_the_report() -> None:
    assert report(summary()).splitlines()[-1] == "413,000 samples/s at the median step, 413,000 over all steps"


def test_a_small_rate_has_three_significant_digits_too() -> None:
    text = report(summary(samples_per_sec=0.2, samples_per_sec_mean=0.1234))
    assert text.splitlines()[-1] == "0.200 samples/s at the median step, 0.123 over all steps"


def test_the_report_of_several_ranks_names_the_slowest_one_and_what_communication_adds() -> None:
    facts = rank_facts([1.0, 2.5])
    lines = report(summary(**facts, communication_ms=0.31, gradient_bytes=1_700_000)).splitlines()
    assert lines[-2] == (
        "2 ranks, global batch 1,024, samples/s of all ranks; mean step: fastest rank 1.00 ms, slowest rank 2.50 ms (rank 1)"
    )
    assert lines[-1] == (
        "communication: 0.310 ms (25 %) of the mean step is not hidden behind the backward pass, for 1.7 MB of gradients"
    )


@pytest.mark.parametrize(("words", "experiment"), [([], None), (["experiment=diagnose"], "diagnose")])
def test_a_run_of_a_diagnosis_is_known_as_one_so_that_it_is_not_advised_to_start_one(
    words: list[str], experiment: str | None
) -> None:
    (config,) = check_command_line(words, multirun=False, run_dir="x")
    module = Stranger()
    module.batchscope_config = config
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    assert setting_of(trainer, {"batch_size": 8}, None).experiment == experiment
