"""A calibration in a process of its own: the same one, without its memory, and without fail."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from batchscope.hardware import calibrate_subprocess as apart
from batchscope.hardware.calibrate import Calibration
from batchscope.hardware.calibrate_subprocess import calibrate_in_subprocess

CPU = torch.device("cpu")
MEASURED = Calibration("cpu", "a CPU", "AVX2", torch.__version__, 1, {"fp32": 1e11}, launch_us=2.0)


GROWTH = """
import resource, torch
from batchscope.hardware.calibrate_subprocess import calibrate_in_subprocess
torch.set_num_threads(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = calibrate_in_subprocess(torch.device("cpu"))
assert found.threads == 1 and found.matmul_flops_per_sec["fp32"] > 1e9
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_what_measuring_takes_is_not_in_this_processs_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2**16  # KiB


@pytest.mark.parametrize(
    "ending",
    [OSError("no more processes"), subprocess.CalledProcessError(1, "python"), "", "no JSON", json.dumps({"a": 1})],
    ids=str,
)
def test_where_the_process_fails_this_one_measures(ending: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        if isinstance(ending, str):
            return subprocess.CompletedProcess([], 0, stdout=ending)
        raise ending

    monkeypatch.setattr(apart.subprocess, "run", run)
    monkeypatch.setattr(apart, "calibration", lambda device: MEASURED)
    assert calibrate_in_subprocess(CPU) is MEASURED


def test_what_the_process_says_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "a library's greeting\n" + json.dumps(MEASURED.to_dict())
    monkeypatch.setattr(apart.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=said))
    monkeypatch.setattr(apart, "calibration", lambda device: pytest.fail("measured in this process"))
    assert calibrate_in_subprocess(CPU) == MEASURED
