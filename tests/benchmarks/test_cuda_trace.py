"""The search of a trace for what waits finds that, all of it, and nothing else, and refuses a trace that cannot tell."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "cuda_trace.py"
_spec = importlib.util.spec_from_file_location("cuda_trace", SCRIPT)
cuda_trace = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cuda_trace)

CannotTell, waits = cuda_trace.CannotTell, cuda_trace.waits


def event(name: str, ts: float, category: str = "cuda_runtime", correlation: int | None = None) -> dict:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "name": name, "cat": category, "ts": ts, "dur": 5, "args": args}


def step(number: int, ts: float, category: str = "user_annotation") -> dict:
    return {"ph": "X", "name": f"ProfilerStep#{number}", "cat": category, "ts": ts, "dur": 100}


# Two steps, from 100 to 300, each of which launches a kernel.
STEPS = [
    {"ph": "M", "name": "process_name"},
    *(step(7, 100), event("cudaLaunchKernel", 110, correlation=1), event("a kernel", 130, "kernel", correlation=1)),
    *(step(8, 200), event("cudaLaunchKernel", 210, correlation=2), event("a kernel", 230, "kernel", correlation=2)),
]


@pytest.mark.parametrize(
    "name",
    [
        *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"),
        *("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "cuMemCreate"),
    ],
)
@pytest.mark.parametrize("category", ["cuda_runtime", "cuda_driver"])
def test_a_call_that_synchronises_or_allocates_is_found(name: str, category: str) -> None:
    assert waits([*STEPS, event(name, 250, category)]) == [f"{name} at 150 µs for 5 µs"]


def test_the_versions_of_a_drivers_call_are_the_same_call() -> None:
    names = ["cuMemAlloc_v2", "cuMemcpyDtoH_v2", "cuMemcpyDtoH_v2_ptds", "cuStreamSynchronize_ptsz"]
    assert len(waits([*STEPS, *(event(name, 250, "cuda_driver") for name in names)])) == 4


@pytest.mark.parametrize("direction", ["HtoD (Pageable -> Device)", "DtoH (Device -> Pageable)"])
def test_a_copy_of_pageable_memory_is_found_by_the_call_that_made_it(direction: str) -> None:
    copied_after_the_steps = event(f"Memcpy {direction}", 400, "gpu_memcpy", correlation=9)
    called = event("cudaMemcpyAsync", 150, correlation=9)
    assert waits([*STEPS, copied_after_the_steps, called]) == ["cudaMemcpyAsync of pageable memory at 50 µs for 5 µs"]


def test_launches_queries_and_copies_of_pinned_memory_do_not_wait() -> None:
    names = ["cudaMemcpyAsync", "cudaEventQuery", "cudaEventRecord", "cudaStreamWaitEvent", "cudaMemsetAsync"]
    copy = event("Memcpy HtoD (Pinned -> Device)", 160, "gpu_memcpy", correlation=9)
    others = [event("cudaStreamSynchronize", 150, "cpu_op"), event("cudaMemcpyAsync", 150, correlation=9), copy]
    assert waits([*STEPS, *(event(name, 150) for name in names), *others]) == []


def test_what_happens_outside_of_the_steps_is_not_theirs() -> None:
    assert waits([*STEPS, event("cudaDeviceSynchronize", 99), event("cudaDeviceSynchronize", 300)]) == []


def test_the_marks_on_the_devices_own_track_are_no_steps() -> None:
    assert waits([*STEPS, step(8, 300, "gpu_user_annotation"), event("cudaDeviceSynchronize", 350)]) == []


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([], "holds 0 steps"),
        ([event("cudaLaunchKernel", 110)], "holds 0 steps"),
        (STEPS[:4], "holds 1 steps, and 2 were asked for"),
        ([step(7, 100), step(8, 200)], "ProfilerStep#7 holds no call of CUDA"),
        ([*STEPS[:4], step(8, 200), event("aten::add", 210, "cpu_op")], "ProfilerStep#8 holds no call of CUDA"),
    ],
    ids=["empty", "no steps", "too few steps", "no CUDA", "CUDA in some steps only"],
)
def test_a_trace_that_cannot_tell_is_refused(events: list[dict], why: str) -> None:
    with pytest.raises(CannotTell, match=why):
        waits(events, steps=2)


@pytest.mark.parametrize(
    ("events", "code", "said"),
    [
        (STEPS, 0, "no call in 2 steps waits"),
        ([*STEPS, event("cudaMalloc", 150)], 1, "cudaMalloc at 50 µs"),
        ([], 2, "the trace holds 0 steps"),
    ],
    ids=["clean", "waits", "empty"],
)
def test_the_exit_code_says_how_it_came_out(tmp_path: Path, events: list[dict], code: int, said: str) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    command = [sys.executable, str(SCRIPT), "--file", str(file), "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert said in done.stdout + done.stderr
