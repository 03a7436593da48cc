"""The times of the device in a trace of torch's profiler: fabricated events, and traces of real steps."""

import random
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from batchscope.hardware.trace import StepProfiler, busy_us, device_seconds, step_starts

Events = list[dict[str, Any]]


def operation(name: str, start: float, end: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": end - start, "pid": 1, "tid": tid}


def kernel(number: int, launch: float, start: float, end: float, tid: int = 1, cat: str = "kernel") -> Events:
    """A launch on the host, and its work on the device."""
    args = {"correlation": number}
    call = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launch, "dur": 1, "pid": 1, "tid": tid}
    work = {"cat": cat, "name": f"kernel_{number}", "ts": start, "dur": end - start, "pid": 0, "tid": 7}
    return [call | {"args": args}, work | {"args": args}]


def two_steps() -> Events:
    """Two steps of 1000 µs: the forward pass on thread 1, the backward pass on thread 2; the device runs behind the host."""
    events: Events = []
    for n, at in enumerate((0, 1000)):
        events += [
            {"cat": "user_annotation", "name": f"ProfilerStep#{n}", "ts": at, "dur": 990, "pid": 1, "tid": 1},
            operation("aten::linear", at + 10, at + 60),
            operation("aten::addmm", at + 20, at + 50),
            *kernel(10 * n + 1, at + 30, at + 100, at + 300),
            operation("aten::mm", at + 110, at + 150, tid=2),
            *kernel(10 * n + 2, at + 120, at + 300, at + 400, tid=2),
            operation("aten::mm", at + 160, at + 190, tid=2),
            *kernel(10 * n + 3, at + 170, at + 450, at + 500, tid=2),
            operation("aten::_fused_adamw_", at + 700, at + 760),
            *kernel(10 * n + 4, at + 710, at + 800, at + 900),
        ]
    random.Random(0).shuffle(events)  # the order of events in a trace is not specified
    return events


def test_operations_get_the_time_of_their_kernels():
    seconds, rest = device_seconds(two_steps(), ["aten.addmm", "aten.mm", "aten.mm", "aten._fused_adamw_"])
    assert [*seconds, rest] == pytest.approx([200e-6, 100e-6, 50e-6, 100e-6, 0])
    # Where the numbers of calls differ, they share alike:
    seconds, rest = device_seconds(two_steps(), ["aten.mm"] * 3)
    assert [*seconds, rest] == pytest.approx([50e-6] * 3 + [300e-6])  # the rest: kernels of no listed operation
    assert device_seconds([], ["aten.mm"]) == ([0.0], 0.0)


def test_the_copy_of_a_batch_is_no_time_of_an_operation():
    events = two_steps()
    for n, at in enumerate((0, 1000)):
        call, work = kernel(10 * n + 5, at + 4, at + 5, at + 95, cat="gpu_memcpy")
        batch = [operation("aten::mm", at + 3, at + 6), call, work | {"name": "Memcpy HtoD (Pinned -> Device)"}]
        alone = kernel(10 * n + 6, at + 7, at + 95, at + 99, cat="gpu_memcpy")
        events += [*batch, alone[0], alone[1] | {"name": "Memcpy HtoD (Pageable -> Device)"}]
    names = ["aten.addmm", "aten.mm", "aten.mm", "aten._fused_adamw_"]
    assert device_seconds(events, names) == device_seconds(two_steps(), names)


@pytest.mark.parametrize("batches", [0, 1])
def test_a_copy_from_the_host_that_was_recorded_is_the_time_of_its_operation(batches: int) -> None:
    events = two_steps()
    for n, at in enumerate((0, 1000)):
        for number in range(batches + 1):  # first the copies of the batch
            call, work = kernel(10 * n + 5 + number, at + 4 + 4 * number, at + 910, at + 930 + number, cat="gpu_memcpy")
            copy = operation("aten::_to_copy", at + 3 + 4 * number, at + 6 + 4 * number)
            events += [copy, call, work | {"name": "Memcpy HtoD (Pageable -> Device)"}]
        events += [operation("aten::_to_copy", at + 62, at + 66), *kernel(10 * n + 9, at + 63, at + 960, at + 970)]
    seconds, rest = device_seconds(events, ["aten.addmm", "aten._to_copy", "aten._to_copy"])
    assert [*seconds, rest] == pytest.approx([200e-6, (20 + batches) * 1e-6, 10e-6, 250e-6])


def test_the_device_is_busy_while_a_kernel_runs():
    assert busy_us([operation("aten::mm", 0, 10)]) is None
    assert busy_us(two_steps()) == 900
    events = [*kernel(1, 0, 0, 100), *kernel(2, 1, 50, 80), *kernel(3, 2, 90, 150), *kernel(4, 3, 200, 210)]
    # Kernels at the same time, and a copy.
    assert busy_us([*events, *kernel(5, 3, 150, 180, cat="gpu_memcpy")]) == 160


def traced(steps: int) -> tuple[StepProfiler, Events]:
    """A profiler that traces two steps, after `steps` steps; and its events."""
    profiler = StepProfiler(torch.device("cpu"), steps=2)
    profiler.start()
    for _ in range(steps):
        torch.ones(4, 4).mm(torch.ones(4, 4))
        profiler.step()
    profiler.stop()
    return profiler, profiler.trace()["traceEvents"]


@pytest.mark.parametrize("steps", [3, 5])
def test_a_trace_has_its_steps_after_the_warm_up_and_no_other_ones(steps):
    profiler, events = traced(steps)
    assert profiler.error is None
    assert len(step_starts(events)) == 2
    assert sum(event.get("name") == "aten::mm" for event in events) == 2
    assert not torch.autograd._profiler_enabled()


def test_why_there_is_no_trace_is_said(monkeypatch):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        profiler, events = traced(3)
    assert (profiler.error, events) == ("another profiler is active", [])
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", Mock())  # as Kineto's on a full disk
    profiler, events = traced(3)
    assert (profiler.error, events) == ("the folder for temporary files cannot take it", [])
    monkeypatch.setattr(torch.profiler.profile, "start", Mock(side_effect=RuntimeError("CUPTI_ERROR")))
    profiler, events = traced(3)
    assert (profiler.error, events) == ("RuntimeError: CUPTI_ERROR", [])
