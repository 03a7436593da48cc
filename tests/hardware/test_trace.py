"""What a trace of torch's profiler says of the device, on fabricated events; and real traces without Kineto's messages."""

import gzip
import json
import os
import random
from typing import Any

import pytest
import torch

from batchscope.hardware.trace import (
    ProfilerUnavailableError,
    StepProfiler,
    calls,
    compressed,
    device_seconds,
    idle,
    step_spans,
)

Events = list[dict[str, Any]]


def operation(name: str, start: float, end: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": end - start, "pid": 1, "tid": tid}


def kernel(number: int, launch: float, start: float, end: float, tid: int = 1, cat: str = "kernel") -> Events:
    """A launch on the host, and its work on the device."""
    args = {"correlation": number}
    call = {
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "ts": launch,
        "dur": 1,
        "pid": 1,
        "tid": tid,
        "args": args,
    }
    work = {"cat": cat, "name": f"kernel_{number}", "ts": start, "dur": end - start, "pid": 0, "tid": 7, "args": args}
    return [call, work]


def step(number: int, start: float, end: float) -> dict[str, Any]:
    name = f"ProfilerStep#{number}"
    return {"cat": "user_annotation", "name": name, "ts": start, "dur": end - start, "pid": 1, "tid": 1}


# Two steps of 1000 µs: the forward pass on thread 1, the backward pass on thread 2; the device runs behind the host.
def two_steps() -> Events:
    events: Events = []
    for n, at in enumerate((0, 1000)):
        events += [
            step(n, at, at + 990),
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
    random.Random(0).shuffle(events)  # the order in a trace is nobody's promise
    return events


def test_the_outermost_operations_are_found_by_thread_and_with_the_time_of_their_kernels() -> None:
    found = [(call.name, call.device_us) for call in calls(two_steps())]
    assert found == [("aten.linear", 200), ("aten.mm", 100), ("aten.mm", 50), ("aten._fused_adamw_", 100)] * 2


def test_the_outermost_of_the_asked_operations_lie_in_others() -> None:
    assert [call.name for call in calls(two_steps(), ["aten.addmm"])] == ["aten.addmm"] * 2


def test_each_operation_of_a_step_gets_the_time_of_its_own_kernels() -> None:
    names = ["aten.addmm", "aten.mm", "aten.mm", "aten._fused_adamw_"]
    seconds, others = device_seconds(two_steps(), names)
    assert seconds == pytest.approx([200e-6, 100e-6, 50e-6, 100e-6])
    assert others == pytest.approx(0)


def test_where_the_numbers_of_calls_differ_they_share_their_time_alike() -> None:
    seconds, _ = device_seconds(two_steps(), ["aten.mm", "aten.mm", "aten.mm"])
    assert seconds == pytest.approx([50e-6] * 3)


def test_kernels_that_no_operation_launched_are_counted_beside() -> None:
    events = two_steps() + [
        event for n in range(2) for event in kernel(90 + n, 1000 * n + 600, 1000 * n + 600, 1000 * n + 640)
    ]
    seconds, others = device_seconds(events, ["aten.addmm", "aten.mm", "aten.mm", "aten._fused_adamw_"])
    assert sum(seconds) == pytest.approx(450e-6)
    assert others == pytest.approx(40e-6)


def test_a_trace_without_steps_or_kernels_has_no_times() -> None:
    assert device_seconds([], ["aten.mm"]) == ([0.0], 0.0)
    assert idle([operation("aten::mm", 0, 10)]) is None


def test_gaps_lie_between_the_operations_whose_kernels_they_part() -> None:
    found = idle(two_steps())
    assert found is not None
    assert found.gaps == {
        ("aten.mm", "aten.mm"): [50, 50],
        ("aten.mm", "aten._fused_adamw_"): [300, 300],
        ("aten._fused_adamw_", "aten.linear"): [200],
    }
    assert found.busy_us == 900


def test_kernels_at_the_same_time_are_busy_once() -> None:
    events = [*kernel(1, 0, 0, 100), *kernel(2, 1, 50, 80), *kernel(3, 2, 90, 150), *kernel(4, 3, 200, 210)]
    found = idle(events)
    assert found is not None
    assert found.busy_us == 160
    assert found.gaps == {("no operation (kernel_3)", "no operation (kernel_4)"): [50]}


def test_a_copy_is_no_kernel() -> None:
    found = idle([*kernel(1, 0, 0, 100), *kernel(2, 1, 100, 180, cat="gpu_memcpy"), *kernel(3, 2, 190, 200)])
    assert found is not None
    assert found.busy_us == 110


def test_a_trace_that_fits_is_kept_whole() -> None:
    data, steps = compressed({"traceEvents": two_steps(), "schemaVersion": 1})
    assert steps == 2
    trace = json.loads(gzip.decompress(data))
    assert trace["schemaVersion"] == 1
    assert len(step_spans(trace["traceEvents"])) == 2


def test_a_large_trace_keeps_its_first_steps() -> None:
    rng = random.Random(0)
    noise = [operation(f"aten::{rng.random()}", 1000 * n + k, 1000 * n + k + 1) for n in range(8) for k in range(200)]
    trace = {"traceEvents": [*(step(n, 1000 * n, 1000 * n + 990) for n in range(8)), *noise]}
    whole, steps = compressed(trace)
    assert steps == 8
    data, kept = compressed(trace, max_bytes=len(whole) // 2)
    assert 1 <= kept <= 4
    assert len(data) <= len(whole) // 2
    assert max(float(event["ts"]) for event in json.loads(gzip.decompress(data))["traceEvents"]) < 1000 * kept
    assert compressed(trace, max_bytes=100) == (b"", 0)


def test_a_real_trace_has_its_steps_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    profiler = StepProfiler(torch.device("cpu"))
    profiler.start()
    for _ in range(2):
        profiler.begin_step()
        torch.ones(4, 4).mm(torch.ones(4, 4))
        profiler.end_step()
    trace = profiler.stop()
    assert len(step_spans(trace["traceEvents"])) == 2
    assert [call.name for call in calls(trace["traceEvents"], ["aten.mm"])] == ["aten.mm"] * 2
    assert capfd.readouterr().err == ""
    assert profiler.stop() == {"traceEvents": []}


def test_other_messages_of_that_time_are_printed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    profiler = StepProfiler(torch.device("cpu"))
    start = torch.profiler.profile.start
    monkeypatch.setattr(torch.profiler.profile, "start", lambda self: (os.write(2, b"a disk fails\n"), start(self)))
    profiler.start()
    profiler.stop()
    assert capfd.readouterr().err == "a disk fails\n"


def test_a_second_profiler_does_not_start() -> None:
    other = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with other, pytest.raises(ProfilerUnavailableError, match="another profiler is active"):
        StepProfiler(torch.device("cpu")).start()


def test_what_torch_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any) -> None:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr(torch.profiler.profile, "start", refuse)
    with pytest.raises(ProfilerUnavailableError, match="INSUFFICIENT_PRIVILEGES"):
        StepProfiler(torch.device("cpu")).start()
