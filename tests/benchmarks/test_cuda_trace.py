"""The search for synchronisations in a trace finds those, all those, and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "cuda_trace.py"


def event(name: str, ts: float, category: str = "cuda_runtime") -> dict:
    return {"ph": "X", "name": name, "cat": category, "ts": ts, "dur": 5}


def search(tmp_path: Path, *events: dict) -> subprocess.CompletedProcess[str]:
    """Search a trace whose steps last from 100 to 200."""
    steps = {"ph": "X", "name": "ProfilerStep#7", "cat": "user_annotation", "ts": 100, "dur": 100}
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": [steps, {"ph": "M", "name": "process_name"}, *events]}))
    command = [sys.executable, str(SCRIPT), "--file", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "name", ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"]
)
def test_a_call_that_waits_is_found(name: str, tmp_path: Path) -> None:
    done = search(tmp_path, event(name, 150))
    assert done.returncode == 1
    assert f"{name} at 50 µs for 5 µs" in done.stdout


def test_launches_copies_and_queries_do_not_wait(tmp_path: Path) -> None:
    names = ["cudaLaunchKernel", "cudaMemcpyAsync", "cudaEventQuery", "cudaEventRecord", "cudaStreamWaitEvent"]
    done = search(tmp_path, *(event(name, 150) for name in names), event("cudaStreamSynchronize", 150, "cpu_op"))
    assert done.returncode == 0
    assert "no call in these steps waits" in done.stdout


def test_what_happens_outside_of_the_steps_is_not_theirs(tmp_path: Path) -> None:
    assert search(tmp_path, event("cudaDeviceSynchronize", 99), event("cudaDeviceSynchronize", 200)).returncode == 0
