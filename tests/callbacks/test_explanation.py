"""An explanation of a fit, on fabricated operations and traces: times by device, bounds, the verdict, its tables."""

import math
from dataclasses import replace

import pytest
import torch

from batchscope.callbacks._cost import compute_cost, median_step
from batchscope.callbacks._explanation import explain, explanation_text
from batchscope.callbacks._measured import Measured
from batchscope.callbacks._table import UpdateTable
from batchscope.callbacks._timer import HostClock, clock_for
from batchscope.callbacks._windows import Window, Windows
from batchscope.hardware.advice import Setting
from batchscope.hardware.calibration import Calibration
from batchscope.records.operations import OperationRow
from tests.hardware.test_trace import two_steps
from tests.support.explanations import cost, explanation
from tests.support.tables import batch

STEP = [
    OperationRow("aten.addmm", "layer", "forward", "fp32", (), 1, 2e6, 1e6, 1e6, 5e-6),
    OperationRow("aten.mm", "layer", "backward", "fp32", (), 1, 2e6, 1e6, 0, 5e-6),
    OperationRow("aten.mm", "head", "backward", "fp32", (), 1, 2e6, 1e6, 0, 5e-6),
    OperationRow("aten._fused_adamw_", "", "optimizer", "fp32", (), 1, 0, 4e6, 4e6, 5e-6),
]
GPU = Calibration("cuda", "NVIDIA X", "1", "2", None, {"fp32": 1e11}, memory_bytes_per_sec=1e11, launch_us=5.0)
CPU = replace(GPU, device="cpu")
PLAIN = {"forward": 0.9, "other": 0.1}  # ms


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 200 columns."""
    monkeypatch.setenv("COLUMNS", "200")


def explained(device: str, *steps, others=math.nan, events=None, operations=STEP, bottleneck=None, machine=None):
    """The explanation of a fit of these steps, or of twenty of 1 ms, with the operations of STEP; on a GPU with a trace."""
    timed_parts = clock_for(torch.device(device)).parts
    table, steps_ms = UpdateTable(1, Windows(1), parts=timed_parts), list(steps) or [PLAIN] * 20
    table.add([batch(n, 8, **ms) for n, ms in enumerate([PLAIN, *steps_ms], start=1)], HostClock())
    table.windows.all.append(Window(1, end=len(table), seconds=1.0, others_share=others, disturbed=others > 0.1))
    events = events if events is not None else two_steps() if device == "cuda" else []
    has_kernels = device == "cuda" and any(event["cat"] == "kernel" for event in events)
    measured = Measured(
        "net",
        device,
        f"a {device}",
        "32-true",
        compute_cost(table) | table.windows.summarize(),
        Setting(),
        operations=operations,
        not_recorded="the parameters are sharded",
        median_parts_ms=median_step(table),
        median_steps=int(table.in_median().sum()),
        kernel_s=450e-6 if has_kernels else None,
    )
    machine = machine or (CPU if device == "cpu" else GPU)
    return explain(measured, machine, bottleneck, operations, events)


def test_on_a_gpu_an_operation_has_the_time_of_its_kernels_and_a_step_is_idle_in_between() -> None:
    step = explained("cuda")
    times = {(cost.module, cost.name): (cost.seconds, cost.floor_seconds) for cost in step.operations}
    assert times["layer", "aten.addmm"] == pytest.approx((200e-6, 2e-5))  # the bound of 2 MFLOP, not of a launch
    assert times["layer", "aten.mm"][0] == pytest.approx(100e-6)
    assert times["head", "aten.mm"][0] == pytest.approx(50e-6)
    assert times["", "aten._fused_adamw_"] == pytest.approx((100e-6, 4e-5))  # of 4 MB
    assert step.trace_steps == 2
    assert step.idle_share == pytest.approx(1 - 450e-6 / 1e-3)  # the share of a step without the trace
    assert "no kernel runs in 55 % of a step" in explanation_text(step)


WITHOUT_KERNELS = [event for event in two_steps() if event["cat"] != "kernel"]


@pytest.mark.parametrize(
    ("device", "how", "flops", "note"),
    [
        ("cuda", {"events": WITHOUT_KERNELS}, 6e6, "the trace has no kernel, so the operations are not timed"),
        ("mps", {}, 6e6, "on mps the operations are not timed"),
        ("cpu", {"operations": []}, 0, "the operations could not be counted: the parameters are sharded"),
    ],
)
def test_operations_without_times_are_counted_and_a_note_says_why(device, how, flops, note) -> None:
    step = explained(device, **how)
    assert (step.is_timed, step.idle_share, step.total.flops, step.total.seconds) == (False, None, flops, 0)
    assert step.notes == [note]
    text = explanation_text(step)
    assert text.startswith("net, batches of 8") and "costliest" not in text
    assert ("\nlayer " in text) == bool(flops)


def test_peaks_that_others_have_lowered_bound_nothing() -> None:
    step = explained("cpu", machine=replace(CPU, disturbed="others used 43 % of the CPU"))
    assert step.total.floor_seconds == 0
    assert step.notes[0].startswith("the device's peak is not known: others used 43 % of the CPU; no lower bounds")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_step_is_the_update_of_median_length(device: str) -> None:
    step = explained(device, {"forward": 1}, {"forward": 8}, {"forward": 1, "data_wait": 0.5, "other": 0.5})
    seconds = (step.step_seconds, step.between_seconds, step.waiting_seconds)
    assert (seconds, step.steps, step.batch_size) == (pytest.approx((2e-3, 1e-3, 5e-4)), 3, 8)


def test_on_mps_the_work_is_not_between_two_batches_although_it_is_in_no_part_of_its_own() -> None:
    step = explained("mps", *[{"data_wait": 0.1, "other": 0.9}] * 20)
    assert (step.step_seconds, step.between_seconds) == (pytest.approx(1e-3), pytest.approx(1e-4))


def test_operations_between_two_batches_count_once() -> None:
    norm = OperationRow("aten.norm", "", "other", "fp32", (), 1, 0, 1e6, 0, 40e-6)
    step = explained("cpu", operations=[*STEP, norm])
    assert step.between_seconds == pytest.approx(60e-6)  # of 100 µs
    assert step.outside_seconds == pytest.approx(880e-6)  # of 900 µs beside four operations of 5 µs


def test_the_heading_has_the_evidence() -> None:
    busy = {"kind": "unclear", "certainty": "unclear", "share": 0.0, "evidence": "others took 43 %", "busy": True}
    text = explanation_text(explained("cpu", others=0.43, bottleneck=busy))
    assert "\nlimit: others took 43 %\n" in text


# --- the tables -------------------------------------------------------------------------------------------------------

NUMBERS = {"calls": 1234, "flops": 1.23e9, "bytes": 1.23e8, "cold_bytes": 1.23e7, "seconds": 1.23, "floor_seconds": 0.5}
EVIDENCE = "86 % of the step is arithmetic: 4 GFLOP, at 41 % of the peak measured here; most of it in convolution"


def test_every_module_has_its_numbers_and_a_line_has_its_words_though_the_terminal_is_narrow(monkeypatch) -> None:
    attention = "aten._scaled_dot_product_flash_attention_for_cpu_backward"
    operations = [
        cost("model.encoder.layers.11.self_attention.output_projection", "backward", attention, **NUMBERS),
        cost("model.features.0", "forward", "aten.convolution", **NUMBERS),
        cost("", "optimizer", "aten._fused_adamw_", **NUMBERS),
    ]
    bottleneck = {"kind": "compute", "share": 0.86, "certainty": "clear", "evidence": EVIDENCE}
    notes = ["the trace is " + "very " * 40 + "long"]
    monkeypatch.setenv("COLUMNS", "80")
    step = replace(explanation(*operations), bottleneck=bottleneck, notes=notes)
    lines = explanation_text(step).splitlines()
    assert max(map(len, lines)) <= 80
    assert f"limit: {EVIDENCE}" in " ".join(" ".join(lines).split())
    (heading,) = [line for line in lines if line.startswith("module")]
    assert heading.split() == ["module", "share", "time", "calls", "FLOPs", "bytes", "bound/time"]
    (row,) = [line for line in lines if "…" in line and " bwd " in line]
    assert "attention_for_cpu_backward" in row
    (row,) = [line for line in lines if line.startswith("model.features.0 ")]
    assert row.split()[1:] == ["12", "%", "1.23", "s", "1,234", "1.23", "G", "123", "MB", "41", "%"]


def test_no_row_is_of_zeros() -> None:
    rows = [cost("body", **NUMBERS | {"seconds": 9.0}), cost("head", **NUMBERS | {"seconds": 0.04})]
    text = explanation_text(explanation(*rows))
    assert "\nbody " in text and "head" not in text and " 0 %" not in text


def test_the_bound_of_a_module_and_of_the_step_is_that_of_all_their_operations() -> None:
    half = NUMBERS | {"seconds": 1.0, "floor_seconds": 0.25}
    step = explanation(cost("body.0", **half), cost("body.1", **half), cost("head", **half))
    assert step.total.floor_seconds == 0.75
    assert [(row.place, row.floor_seconds, row.of_floor) for row in step.modules(2)] == [
        ("body", 0.5, 0.25),
        ("head", 0.25, 0.25),
    ]
