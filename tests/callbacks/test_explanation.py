"""An explanation of what was measured, on fabricated operations and traces: times by device, gaps, bounds, the verdict."""

import math
from typing import Any

import pytest
import torch

from batchscope.callbacks import _explanation
from batchscope.callbacks._explanation import Measured, explain
from batchscope.callbacks._operation_table import explanation_text
from batchscope.callbacks._table import UpdateTable
from batchscope.callbacks._timer import HostClock
from batchscope.callbacks._windows import Window, Windows
from batchscope.hardware.calibration import Calibration
from batchscope.hardware.operations import Operation, OperationRecorder
from tests.hardware.test_trace import two_steps
from tests.support.tables import batch

STEP = [
    Operation("aten.addmm", "forward", "layer", "fp32", 1, 2e6, 1e6, 1e6, 5e-6),
    Operation("aten.mm", "backward", "layer", "fp32", 1, 2e6, 1e6, 0, 5e-6),
    Operation("aten.mm", "backward", "head", "fp32", 1, 2e6, 1e6, 0, 5e-6),
    Operation("aten._fused_adamw_", "optimizer", "", "fp32", 1, 0, 4e6, 4e6, 5e-6),
]
GPU = Calibration("cuda", "NVIDIA X", "1", "2", None, {"fp32": 1e11}, memory_bytes_per_sec=1e11, launch_us=5.0)
CPU = Calibration.from_dict({**GPU.to_dict(), "device": "cpu"})
PLAIN = {"forward": 0.9, "other": 0.1}  # ms


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_explanation, "device_name", lambda device: f"a {device.type}")


def measured(device: str, *steps: dict[str, float], others: float = math.nan, **changes: Any) -> Measured:
    """Twenty steps of 1 ms, or these, with the operations above; on a GPU they were traced, too."""
    table, made = UpdateTable(1, Windows(1)), list(steps) or [PLAIN] * 20
    table.add([batch(n, 8, **ms) for n, ms in enumerate([PLAIN, *made], start=1)], HostClock())
    window = Window(1, end=len(table), seconds=1.0, others_share=others, disturbed=others > 0.1)
    table.windows.all.append(window)
    recorder = OperationRecorder()
    recorder.steps = [list(STEP)]
    known: dict[str, Any] = {"calibration": CPU if device == "cpu" else GPU, "recorder": recorder}
    known |= {"events": two_steps() if device == "cuda" else ()}
    return Measured("net", torch.device(device), "32-true", table, **(known | changes))


def test_on_a_gpu_an_operation_has_the_time_of_its_kernels_and_the_bound_of_its_work() -> None:
    step = explain(measured("cuda"))
    found = {(cost.module, cost.name): (cost.seconds, cost.floor_seconds) for cost in step.operations}
    assert found["layer", "aten.addmm"] == pytest.approx((200e-6, 2e-5))  # of 2 MFLOP, not of a launch
    assert found["layer", "aten.mm"][0] == pytest.approx(100e-6)
    assert found["head", "aten.mm"][0] == pytest.approx(50e-6)
    assert found["", "aten._fused_adamw_"] == pytest.approx((100e-6, 4e-5))  # of 4 MB
    assert step.trace_steps == 2


def test_on_a_gpu_the_idle_share_is_that_of_a_step_which_is_not_traced() -> None:
    step = explain(measured("cuda"))
    assert step.idle_share == pytest.approx(1 - 450e-6 / 1e-3)
    first = step.gaps[0]
    assert (first.after, first.before, first.calls) == ("aten.mm", "aten._fused_adamw_", 1)
    assert first.seconds == first.longest_seconds == pytest.approx(300e-6)
    text = explanation_text(step)
    assert "no kernel runs in 55 % of a step" in text
    assert "\nno kernel runs after  until" in text


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ({"forward": 1.0}, "host"),  # in 55 % of the step no kernel runs, and nothing is waited for
        ({"forward": 0.5, "data_wait": 0.5}, "input"),
        ({"forward": 0.5, "transfer": 0.5}, "transfer"),
        ({"forward": 0.3, "data_wait": 0.1}, "compute"),  # a kernel runs all the time: waiting for data is hidden
    ],
)
def test_on_a_gpu_the_bottleneck_is_that_of_the_busy_share_and_the_waits(parts: dict[str, float], kind: str) -> None:
    found = explain(measured("cuda", *[parts] * 20)).bottleneck
    assert found is not None and found["kind"] == kind


def test_without_kernels_in_the_trace_operations_are_counted_and_not_timed() -> None:
    step = explain(measured("cuda", events=[event for event in two_steps() if event["cat"] != "kernel"]))
    assert (step.is_timed, step.idle_share, step.total.flops) == (False, None, 6e6)
    assert "the trace has no kernel, so the operations are not timed" in step.notes
    text = explanation_text(step)
    assert "costliest" not in text and "layer" in text
    step = explain(measured("mps"))
    assert (step.is_timed, step.total.seconds) == (False, 0)
    assert "on mps the operations are not timed" in step.notes


def test_on_a_cpu_an_operation_takes_at_least_a_launch() -> None:
    step = explain(measured("cpu"))
    assert {cost.floor_seconds for cost in step.operations} == {2e-5, 4e-5}
    assert step.notes == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_step_is_the_update_of_median_length(device: str) -> None:
    step = explain(measured(device, {"forward": 1}, {"forward": 8}, {"forward": 1, "data_wait": 0.5, "other": 0.5}))
    found = (step.step_seconds, step.between_seconds, step.waiting_seconds)
    assert (found, step.steps, step.batch_size) == (pytest.approx((2e-3, 1e-3, 5e-4)), 3, 8)


@pytest.mark.parametrize(("room_ms", "noted"), [(1e-2, True), (1.9e-2, False)])
def test_operations_that_take_longer_than_their_step_are_scaled_to_it(room_ms: float, noted: bool) -> None:
    step = explain(measured("cpu", *[{"forward": room_ms, "other": 0.1}] * 20))  # recorded: 2e-5 s
    assert [each.seconds for each in step.operations] == pytest.approx([room_ms / 4e3] * 4)
    assert step.outside_seconds == pytest.approx(0, abs=1e-10)
    assert any("their times and shares are scaled to it" in note for note in step.notes) == noted


def test_on_a_gpu_kernels_that_overlap_are_scaled_to_the_time_in_which_one_runs() -> None:
    step = explain(measured("cuda", *[{"forward": 0.1}] * 20))
    assert step.idle_share == 0
    assert step.total.seconds == pytest.approx(1e-4)


def test_a_busy_machine_is_a_note_and_has_no_verdict_but_what_to_do() -> None:
    step = explain(measured("cpu", others=0.43))
    assert any(note.startswith("other programs used 43 % of the processor meanwhile") for note in step.notes)
    assert step.bottleneck is not None
    assert (step.bottleneck["kind"], step.bottleneck["busy"]) == ("unclear", True)
    text = explanation_text(step, width=200)
    assert "\nbusy: other programs took 43 % of the processor: close them and run again\n" in text
    assert "limit" not in text


def test_unsteady_steps_make_no_clear_verdict_as_in_a_run() -> None:
    found = explain(measured("cpu", *[PLAIN] * 80, *[{"forward": 2.0, "other": 0.1}] * 20)).bottleneck
    assert found is not None
    assert found["certainty"] == "probable"
    assert found["evidence"].endswith("one step in ten takes 2.1 times the median")


def test_within_a_run_that_says_what_limits_it_there_is_no_second_verdict() -> None:
    assert explain(measured("cpu", is_judged=False)).bottleneck is None


def test_a_step_whose_operations_are_not_known_is_timed_and_says_why_in_its_verdict() -> None:
    step = explain(measured("cpu", recorder=None, not_recorded="the parameters are sharded"))
    assert step.operations == []
    assert step.bottleneck is not None and "(the parameters are sharded)" in step.bottleneck["evidence"]
    assert explanation_text(step).startswith("net, batches of 8")
