"""A calibration is measured undisturbed, in the units of its names, and if possible in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from batchscope.hardware import measure
from batchscope.hardware.calibration import Calibration
from batchscope.hardware.contention import Contention
from batchscope.hardware.devices import cache_bytes
from batchscope.hardware.measure import as_calibration, calibrate, calibrate_in_subprocess, find_calibration
from batchscope.hardware.timing import Effort

CPU = torch.device("cpu")


def test_rates_become_a_calibration_in_the_units_of_its_names():
    identity = {"device": "cuda", "device_name": "GPU", "driver": None, "torch": "2.15", "threads": None}
    rates = {"products in bf16": 9e14, "small operations": 250_000.0, "host to device, pinned": 5e10}
    made = as_calibration(identity, rates)
    assert made.matmul_flops_per_sec == {"bf16": 9e14}
    assert made.launch_us == 4.0
    assert made.h2d_pinned_bytes_per_sec == 5e10
    assert made.h2d_bytes_per_sec is None and made.copy_bytes_per_sec is None
    assert made.memory_bytes_per_sec is None and made.cache_bytes is None


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        ({"memory copy": 2e10, "memory traffic": 3e10}, 3e10),
        ({"memory copy": 2e10, "memory traffic": 1e10}, 2e10),
        ({"memory copy": 2e10}, 2e10),
    ],
)
def test_the_best_traffic_of_any_kind_is_the_roof_of_memory(rates, best):
    made = as_calibration({"device": "cpu", "device_name": "CPU", "torch": "2.15", "driver": None, "threads": 1}, rates)
    assert (made.memory_bytes_per_sec, made.copy_bytes_per_sec) == (best, 2e10)


@pytest.mark.slow
def test_this_machines_processor_is_measured(monkeypatch):
    monkeypatch.setattr(measure, "QUICK", Effort(0.02, 0.001, 0.01))
    switches = torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
    random_state = torch.get_rng_state()
    lines = []
    found = calibrate(CPU, quick=True, say=lines.append)
    assert found.device == "cpu" and found.threads == torch.get_num_threads()
    assert found.matmul_flops_per_sec["fp32"] > 1e8
    assert found.memory_bytes_per_sec >= found.copy_bytes_per_sec > 1e8
    assert found.cache_bytes == cache_bytes(CPU)
    assert 0.1 < found.launch_us < 1000
    assert lines[0] == "measuring cpu: products in fp32"
    assert torch.get_rng_state().equal(random_state)
    assert (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision) == switches


def test_the_measurement_itself_is_watched(monkeypatch):
    during = []

    class Others(Contention):
        def __exit__(self, *exception):
            self.finding = "others did something"

    def rates(*args, **kwargs):
        during.append(True)
        return {"products in fp32": 1e11}

    monkeypatch.setattr(measure, "Contention", Others)
    monkeypatch.setattr(measure, "best_rates", rates)
    assert calibrate(CPU).disturbed == "others did something"
    assert during


# --- a process of its own ---


MEASURED = Calibration("cpu", "a CPU", "AVX2", torch.__version__, 1, {"fp32": 1e11}, launch_us=2.0)


GROWTH = """
import resource, torch
from batchscope.hardware.measure import calibrate_in_subprocess
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

    monkeypatch.setattr(measure.subprocess, "run", run)
    monkeypatch.setattr(measure, "load_or_measure", lambda device: MEASURED)
    assert calibrate_in_subprocess(CPU) is MEASURED


def test_what_the_process_says_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "a library's greeting\n" + json.dumps(MEASURED.to_dict())
    monkeypatch.setattr(measure.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=said))
    monkeypatch.setattr(measure, "load_or_measure", lambda device: pytest.fail("measured in this process"))
    assert calibrate_in_subprocess(CPU) == MEASURED


@pytest.mark.parametrize(("cached", "may"), [(MEASURED, True), (None, True), (None, False)])
def test_a_measurement_is_made_and_said_only_where_it_is_needed_and_permitted(
    cached: Calibration | None, may: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "cached_calibration", lambda device: cached)
    monkeypatch.setattr(measure, "calibrate_in_subprocess", lambda device: MEASURED)
    assert find_calibration(CPU, may) is (MEASURED if may else None)
    said = "measuring what this cpu can do; once, some seconds …\n"
    assert capsys.readouterr().out == (said if may and cached is None else "")
