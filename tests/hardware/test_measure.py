"""A calibration is measured undisturbed, in the units of its names, and if possible in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from batchscope.hardware import contention, measure, timing
from batchscope.hardware.calibration import Calibration
from batchscope.hardware.devices import cache_bytes
from batchscope.hardware.measure import calibrate, find_calibration

CPU = torch.device("cpu")
MEASURED = Calibration("cpu", "a CPU", "AVX2", torch.__version__, 1, {"fp32": 1e11}, launch_us=2.0)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.slow
def test_this_machines_processor_is_measured(monkeypatch):
    monkeypatch.setattr(measure, "_PASSES_S", 0.0)
    switches = torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
    random_state = torch.get_rng_state()
    found = calibrate(CPU)
    assert found.device == "cpu" and found.threads == torch.get_num_threads()
    assert found.matmul_flops_per_sec["fp32"] > 1e8
    assert found.memory_bytes_per_sec > 1e8
    assert found.cache_bytes == cache_bytes(CPU)
    assert 0.1 < found.launch_us < 1000
    assert torch.get_rng_state().equal(random_state)
    assert (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision) == switches


def test_rates_become_a_calibration_in_the_units_of_its_names_and_others_are_watched_meanwhile(monkeypatch):
    class Others(contention.Contention):
        def __exit__(self, *exception: object) -> None:
            self.finding = "others did something"

    rates = {"bf16": 9e14, "memory": 3e10, "launches": 250_000.0, "transfers": 5e10}
    monkeypatch.setattr(contention, "Contention", Others)
    monkeypatch.setattr(timing, "best_rates", lambda candidates, seconds: rates)
    made = calibrate(CPU)
    assert made.matmul_flops_per_sec == {"bf16": 9e14}
    assert (made.memory_bytes_per_sec, made.launch_us, made.h2d_bytes_per_sec) == (3e10, 4.0, 5e10)
    assert made.disturbed == "others did something"


# --- a process of its own ---

GROWTH = """
import resource, torch
from batchscope.hardware.measure import find_calibration
torch.set_num_threads(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = find_calibration(torch.device("cpu"), measure=True)
assert found.threads == 1 and found.matmul_flops_per_sec["fp32"] > 1e9
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("empty_cache")
def test_what_measuring_takes_is_not_in_this_processs_peak() -> None:
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) < 2**16  # KiB


@pytest.mark.parametrize(
    "ending",
    [OSError("no more processes"), subprocess.CalledProcessError(1, "python"), "", "no JSON", json.dumps({"a": 1})],
    ids=str,
)
@pytest.mark.usefixtures("empty_cache")
def test_where_the_process_fails_this_one_measures(ending: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        if isinstance(ending, str):
            return subprocess.CompletedProcess([], 0, stdout=ending)
        raise ending

    monkeypatch.setattr(measure.subprocess, "run", run)
    monkeypatch.setattr(measure, "calibrate", lambda device: MEASURED)
    assert find_calibration(CPU, measure=True) is MEASURED


@pytest.mark.usefixtures("empty_cache")
def test_a_measurement_is_made_and_said_only_where_it_is_permitted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "a library's greeting\n" + json.dumps(MEASURED.to_dict())
    monkeypatch.setattr(measure.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=said))
    monkeypatch.setattr(measure, "calibrate", lambda device: pytest.fail("measured in this process"))
    assert find_calibration(CPU, measure=False) is None
    assert capsys.readouterr().out == ""
    assert find_calibration(CPU, measure=True) == MEASURED
    assert capsys.readouterr().out == "measuring what this cpu can do; once, some seconds …\n"
