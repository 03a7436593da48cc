"""What the devices, the ranks and the rule of the bottleneck add to a run's summary."""

from dataclasses import replace

import lightning
import pytest

from batchscope.callbacks._analysis import (
    Observations,
    bottleneck_facts,
    device_facts,
    is_optimizer_traffic,
    is_tf32_faster,
)
from batchscope.callbacks._setting import setting_of
from batchscope.hardware.advice import Setting
from batchscope.hardware.calibration import Calibration
from batchscope.options.compose import check_command_line
from batchscope.records.operations import OperationRow
from tests.support.third_party_modules import Stranger


def test_what_was_sampled_of_the_device_has_its_name_in_the_summary() -> None:
    sampled = {"energy_j": 50.0, "seconds": 10.0, "device/memory_peak_gib": 0.5}
    facts = device_facts(sampled, {"seconds": 8.0, "samples": 4_000})
    energy = {"joules_per_sample": pytest.approx(5.0 * 8.0 / 4_000)}
    assert facts == energy | {"memory_peak_gib": 0.5}
    sampled = {"device/processor_time_mean_pct": 96.0, "device/throttled_mean_pct": 3.0}
    expected = {"processor_time_pct": 96.0, "throttled_pct": 3.0}
    assert device_facts(sampled, {}) == expected


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


PARTS_MS = {"data_wait": 8.0, "forward": 2.0}
COST = {"parts_ms": PARTS_MS, "work_ms_median": 2.0, "step_ms_median": 10.0, "step_ms_p90": 11.0, "updates": 100}
COST |= {"device": "cpu", "batch_size": 8}


def test_the_record_of_a_run_on_a_busy_machine_has_no_verdict_and_no_advice() -> None:
    setting = Setting(pipeline="workers", num_workers=0, cores=4)
    found = bottleneck_facts(COST, None, Observations(), setting)["bottleneck"]
    assert (found["kind"], found["advice"]) == ("input", "data.pipeline=memory")
    assert found["advice_effect"] == "takes each batch from tensors in memory at once"
    assert "busy" not in found
    found = bottleneck_facts(COST, None, Observations(others_shares=[0.43]), setting)["bottleneck"]
    assert (found["kind"], found["certainty"], found["busy"]) == ("unclear", "unclear", True)
    assert found["evidence"] == "other programs took 43 % of the processor: close them and run again"
    assert "advice" not in found


def test_the_optimizers_traffic_is_known_by_the_bytes_of_its_operations() -> None:
    step = [OperationRow("mm", "", "forward", "fp32", cold_bytes=4e6), OperationRow("adamw", "", "optimizer", "fp32")]
    assert not is_optimizer_traffic(step)
    assert is_optimizer_traffic([*step, OperationRow("adamw", "", "optimizer", "fp32", cold_bytes=5e6)])
    assert not is_optimizer_traffic([])


PRODUCT = OperationRow("aten.mm", "", "forward", "fp32", flops=3e9)
CONVOLUTION = OperationRow("aten.convolution", "", "forward", "fp32", flops=4e9)  # TF32 by default


@pytest.mark.parametrize(
    ("operations", "form", "tf32", "faster"),
    [
        ([PRODUCT], "none", 60e12, True),
        ([PRODUCT], "none", 10e12, False),  # as a card without tensor cores
        ([PRODUCT], "tf32", 60e12, False),  # it is set
        ([PRODUCT, CONVOLUTION], "none", 60e12, False),
        ([replace(PRODUCT, dtype="bf16")], "none", 60e12, False),
        ([], "none", 60e12, False),
    ],
)
def test_tf32_is_faster_where_it_was_measured_so_and_most_of_the_flops_are_products_in_float32(
    operations: list[OperationRow], form: str, tf32: float, faster: bool
) -> None:
    calibration = Calibration("cuda", "a GPU", None, "2.15", None, {"fp32": 10e12, "tf32": tf32})
    assert is_tf32_faster(operations, calibration, form) is faster
    assert not is_tf32_faster(operations, None, form)


def test_a_kernel_that_runs_all_the_time_leaves_nothing_to_the_host() -> None:
    read = {"device": "cuda", "utilization_pct": 100.0, "parts_ms": {"forward": 10.0}}
    product = replace(PRODUCT, seconds=1e-4)
    found = bottleneck_facts(COST | read | {"work_ms_median": 10.0}, None, Observations([product]), Setting("cuda"))[
        "bottleneck"
    ]
    assert found["shares"].get("host", 0.0) == 0.0
