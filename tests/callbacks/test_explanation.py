"""An explanation of what was measured, on fabricated operations and traces: times by device, gaps, floors, the verdict."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from batchscope.callbacks import _explanation
from batchscope.callbacks._explanation import Measured, explain
from batchscope.callbacks._operation_table import as_text
from batchscope.hardware.calibration import Calibration
from batchscope.hardware.contention import Noise
from batchscope.hardware.operations import Operation, OperationRecorder
from tests.hardware.test_trace import two_steps

STEP = [
    Operation("aten.addmm", "forward", "layer", "fp32", 1, 2e6, 1e6, 1e6, 5e-6),
    Operation("aten.mm", "backward", "layer", "fp32", 1, 2e6, 1e6, 0, 5e-6),
    Operation("aten.mm", "backward", "head", "fp32", 1, 2e6, 1e6, 0, 5e-6),
    Operation("aten._fused_adamw_", "optimizer", "", "fp32", 1, 0, 4e6, 4e6, 5e-6),
]
GPU = Calibration(
    device="cuda",
    device_name="NVIDIA X",
    driver="1",
    torch="2",
    threads=None,
    matmul_flops_per_sec={"fp32": 1e11},
    memory_bytes_per_sec=1e11,
    launch_us=5.0,
)
CPU = Calibration.from_dict({**GPU.to_dict(), "device": "cpu"})


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_explanation, "device_name", lambda device: f"a {device.type}")


def measured(device: str, batch: float = 9e-4, other: float = 1e-4, steps: int = 20, **changes: Any) -> Measured:
    """Steps of 1 ms with the operations above; on a GPU they were traced, too."""
    recorder = OperationRecorder()
    recorder.steps = [list(STEP)]
    known: dict[str, Any] = {"title": "net", "device": torch.device(device), "precision": "32-true", "batch_size": 8}
    known |= {"updates": [{"batch": batch, "other": other}] * steps, "recorder": recorder}
    known |= {"calibration": CPU if device == "cpu" else GPU, "events": two_steps() if device == "cuda" else ()}
    return Measured(**(known | changes))


def test_on_a_gpu_an_operation_has_the_time_of_its_kernels_and_the_floor_of_its_work() -> None:
    step = explain(measured("cuda"))
    found = {(cost.module, cost.name): cost for cost in step.operations}
    assert found["layer", "aten.addmm"].seconds == pytest.approx(200e-6)
    assert found["layer", "aten.mm"].seconds == pytest.approx(100e-6)
    assert found["head", "aten.mm"].seconds == pytest.approx(50e-6)
    assert found["layer", "aten.addmm"].floor_seconds == pytest.approx(2e-5)  # of 2 MFLOP, not of a launch
    assert found["", "aten._fused_adamw_"].floor_seconds == pytest.approx(4e-5)  # of 4 MB
    assert step.trace_steps == 2


def test_on_a_gpu_the_idle_share_is_that_of_a_step_which_is_not_traced() -> None:
    step = explain(measured("cuda"))
    assert step.idle_share == pytest.approx(1 - 450e-6 / 1e-3)
    first = step.gaps[0]
    assert (first.after, first.before, first.calls) == ("aten.mm", "aten._fused_adamw_", 1)
    assert first.seconds == first.longest_seconds == pytest.approx(300e-6)
    text = as_text(step)
    assert "no kernel runs in 55 % of a step" in text
    assert "\nno kernel runs after  until" in text


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ({"batch": 1e-3}, "host"),  # in 55 % of the step no kernel runs, and nothing is waited for
        ({"batch": 5e-4, "data_wait": 5e-4}, "input"),
        ({"batch": 5e-4, "transfer": 5e-4}, "transfer"),
        ({"batch": 3e-4, "data_wait": 1e-4}, "compute"),  # a kernel runs all the time: waiting for data is hidden
    ],
)
def test_on_a_gpu_the_bottleneck_is_that_of_the_busy_share_and_the_waits(parts: dict[str, float], kind: str) -> None:
    found = explain(measured("cuda", updates=[parts] * 20)).bottleneck
    assert found is not None
    assert found["kind"] == kind


def test_a_gpu_whose_kernels_the_profiler_may_not_see_has_counted_operations_and_a_note() -> None:
    step = explain(measured("cuda", events=[event for event in two_steps() if event["cat"] != "kernel"]))
    assert (step.is_timed, step.idle_share, step.total.flops) == (False, None, 6e6)
    assert "the trace has no kernel, so the operations are not timed" in step.notes
    text = as_text(step)
    assert "costliest" not in text and "layer" in text


def test_on_mps_operations_are_counted_and_not_timed() -> None:
    step = explain(measured("mps"))
    assert (step.is_timed, step.total.seconds) == (False, 0)
    assert any("on mps" in note for note in step.notes)


def test_on_a_cpu_an_operation_takes_at_least_a_launch() -> None:
    step = explain(measured("cpu"))
    assert {cost.floor_seconds for cost in step.operations} == {2e-5, 4e-5}
    assert step.notes == []


def test_on_a_cpu_the_step_is_the_update_of_median_length_and_elsewhere_the_mean() -> None:
    updates: Sequence[dict[str, float]] = [{"batch": 1e-3}, {"batch": 8e-3, "data_wait": 1e-3}, {"batch": 2e-3}]
    assert explain(measured("cpu", updates=updates)).step_seconds == pytest.approx(2e-3)
    step = explain(measured("cuda", updates=updates))
    assert (step.step_seconds, step.waiting_seconds) == pytest.approx((4e-3, 1e-3 / 3))


@pytest.mark.parametrize(("room", "noted"), [(1e-5, True), (1.9e-5, False)])
def test_operations_that_take_longer_than_their_step_are_scaled_to_it(room: float, noted: bool) -> None:
    step = explain(measured("cpu", batch=room))  # recorded: 2e-5
    assert [each.seconds for each in step.operations] == pytest.approx([room / 4] * 4)
    assert step.outside_seconds == pytest.approx(0, abs=1e-12)
    assert any("their times and shares are scaled to it" in note for note in step.notes) == noted


def test_on_a_gpu_kernels_that_overlap_are_scaled_to_the_time_in_which_one_runs() -> None:
    step = explain(measured("cuda", batch=1e-4, other=0))
    assert step.idle_share == 0
    assert step.total.seconds == pytest.approx(1e-4)


def test_a_busy_machine_is_a_note_and_has_no_verdict_but_what_to_do() -> None:
    step = explain(measured("cpu", others=0.43, noise=Noise(0.43, 0.0)))
    assert any(note.startswith("other programs used 43 % of the processor meanwhile") for note in step.notes)
    assert step.bottleneck is not None
    assert (step.bottleneck["kind"], step.bottleneck["busy"]) == ("unclear", True)
    text = as_text(step, width=200)
    assert "\nbusy: other programs took 43 % of the processor: close them and run again\n" in text
    assert "limit" not in text


def test_unsteady_steps_make_no_clear_verdict_as_in_a_run() -> None:
    steady, slow = {"batch": 9e-4, "other": 1e-4}, {"batch": 2e-3, "other": 1e-4}
    found = explain(measured("cpu", updates=[steady] * 80 + [slow] * 20)).bottleneck
    assert found is not None
    assert found["certainty"] == "probable"
    assert found["evidence"].endswith("one step in ten takes 2.1 times the median")


def test_within_a_run_that_says_what_limits_it_there_is_no_second_verdict() -> None:
    assert explain(measured("cpu", is_judged=False)).bottleneck is None


def test_operations_that_could_not_be_counted_are_one_note() -> None:
    found = measured("cpu")
    assert found.recorder is not None
    found.recorder.error = ValueError("a tensor of a kind of its own")
    step = explain(found)
    assert step.operations == []
    assert "the operations could not be counted: a tensor of a kind of its own" in step.notes
    assert as_text(step).startswith("net, batches of 8")
