"""An explanation of a fit, on fabricated operations and traces: times by device, gaps, bounds, the verdict."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchscope.callbacks import _explanation
from batchscope.callbacks._explanation import explain
from batchscope.callbacks._operation_table import explanation_text
from batchscope.callbacks._table import UpdateTable
from batchscope.callbacks._timer import HostClock
from batchscope.callbacks._windows import Window, Windows
from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.hardware.calibration import Calibration
from batchscope.records.explanation import Explanation
from batchscope.records.operations import OperationRow
from tests.hardware.test_trace import two_steps
from tests.support.tables import batch

STEP = [
    OperationRow("aten.addmm", "layer", "forward", "fp32", (), 1, 2e6, 1e6, 1e6, 5e-6),
    OperationRow("aten.mm", "layer", "backward", "fp32", (), 1, 2e6, 1e6, 0, 5e-6),
    OperationRow("aten.mm", "head", "backward", "fp32", (), 1, 2e6, 1e6, 0, 5e-6),
    OperationRow("aten._fused_adamw_", "", "optimizer", "fp32", (), 1, 0, 4e6, 4e6, 5e-6),
]
GPU = Calibration("cuda", "NVIDIA X", "1", "2", None, {"fp32": 1e11}, memory_bytes_per_sec=1e11, launch_us=5.0)
CPU = Calibration.from_dict({**GPU.to_dict(), "device": "cpu"})
PLAIN = {"forward": 0.9, "other": 0.1}  # ms
BUSY = {"kind": "unclear", "certainty": "unclear", "share": 0.0, "evidence": "others took 43 %", "busy": True}


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_explanation, "device_name", lambda device: f"a {device.type}")


def explained(
    device: str,
    *steps: dict[str, float],
    others: float = math.nan,
    events: Any = None,
    operations: list[OperationRow] = STEP,
    bottleneck: Any = None,
) -> Explanation:
    """Twenty steps of 1 ms, or these, with the operations above; on a GPU they were traced, too."""
    table, made = UpdateTable(1, Windows(1)), list(steps) or [PLAIN] * 20
    table.add([batch(n, 8, **ms) for n, ms in enumerate([PLAIN, *made], start=1)], HostClock())
    table.windows.all.append(Window(1, end=len(table), seconds=1.0, others_share=others, disturbed=others > 0.1))
    monitor: Any = ThroughputMonitor()
    monitor.table, monitor.analysis = table, SimpleNamespace(calibration=CPU if device == "cpu" else GPU)
    monitor.recorded = SimpleNamespace(
        operations=lambda: operations,
        recorder=SimpleNamespace(steps=[operations]),
        why_no_operations="the parameters are sharded",
    )
    monitor.summary = {"title": "net", "precision": "32-true", "bottleneck": bottleneck, **table.windows.facts()}
    events = events if events is not None else two_steps() if device == "cuda" else []
    monitor.kernel_s = 450e-6 if device == "cuda" and any(event["cat"] == "kernel" for event in events) else None
    return explain(monitor, torch.device(device), events)


def test_on_a_gpu_an_operation_has_the_time_of_its_kernels_and_the_bound_of_its_work() -> None:
    step = explained("cuda")
    found = {(cost.module, cost.name): (cost.seconds, cost.floor_seconds) for cost in step.operations}
    assert found["layer", "aten.addmm"] == pytest.approx((200e-6, 2e-5))  # of 2 MFLOP, not of a launch
    assert found["layer", "aten.mm"][0] == pytest.approx(100e-6)
    assert found["head", "aten.mm"][0] == pytest.approx(50e-6)
    assert found["", "aten._fused_adamw_"] == pytest.approx((100e-6, 4e-5))  # of 4 MB
    assert step.trace_steps == 2


def test_on_a_gpu_the_idle_share_is_that_of_a_step_which_is_not_traced() -> None:
    step = explained("cuda")
    assert step.idle_share == pytest.approx(1 - 450e-6 / 1e-3)
    first = step.gaps[0]
    assert (first.after, first.before, first.calls) == ("aten.mm", "aten._fused_adamw_", 1)
    assert first.seconds == first.longest_seconds == pytest.approx(300e-6)
    text = explanation_text(step)
    assert "no kernel runs in 55 % of a step" in text
    assert "\nno kernel runs between" in text and "\nmm → _fused_adamw_ " in text


def test_without_kernels_in_the_trace_operations_are_counted_and_not_timed() -> None:
    step = explained("cuda", events=[event for event in two_steps() if event["cat"] != "kernel"])
    assert (step.is_timed, step.idle_share, step.total.flops) == (False, None, 6e6)
    assert "the trace has no kernel, so the operations are not timed" in step.notes
    text = explanation_text(step)
    assert "costliest" not in text and "layer" in text
    step = explained("mps")
    assert (step.is_timed, step.total.seconds) == (False, 0)
    assert "on mps the operations are not timed" in step.notes


def test_on_a_cpu_an_operation_takes_at_least_a_launch() -> None:
    step = explained("cpu")
    assert {cost.floor_seconds for cost in step.operations} == {2e-5, 4e-5}
    assert step.notes == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_step_is_the_update_of_median_length(device: str) -> None:
    step = explained(device, {"forward": 1}, {"forward": 8}, {"forward": 1, "data_wait": 0.5, "other": 0.5})
    found = (step.step_seconds, step.between_seconds, step.waiting_seconds)
    assert (found, step.steps, step.batch_size) == (pytest.approx((2e-3, 1e-3, 5e-4)), 3, 8)


@pytest.mark.parametrize(("room_ms", "noted"), [(1e-2, True), (1.9e-2, False)])
def test_operations_that_take_longer_than_their_step_are_scaled_to_it(room_ms: float, noted: bool) -> None:
    step = explained("cpu", *[{"forward": room_ms, "other": 0.1}] * 20)  # recorded: 2e-5 s
    assert [each.seconds for each in step.operations] == pytest.approx([room_ms / 4e3] * 4)
    assert step.outside_seconds == pytest.approx(0, abs=1e-10)
    assert any("their times and shares are scaled to it" in note for note in step.notes) == noted


def test_on_a_gpu_kernels_that_overlap_are_scaled_to_the_time_in_which_one_runs() -> None:
    step = explained("cuda", *[{"forward": 0.1}] * 20)
    assert step.idle_share == 0
    assert step.total.seconds == pytest.approx(1e-4)


def test_a_busy_machine_is_a_note_and_has_no_verdict_but_what_to_do() -> None:
    step = explained("cpu", others=0.43, bottleneck=BUSY)
    assert any(note.startswith("other programs used 43 % of the processor meanwhile") for note in step.notes)
    text = explanation_text(step, width=200)
    assert "\nbusy: others took 43 %\n" in text
    assert "limit" not in text


def test_a_step_whose_operations_are_not_known_is_timed_and_says_why() -> None:
    step = explained("cpu", operations=[])
    assert (step.operations, step.is_timed) == ([], False)
    assert "the operations could not be counted: the parameters are sharded" in step.notes
    assert explanation_text(step).startswith("net, batches of 8")
