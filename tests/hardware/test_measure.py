"""A calibration is measured undisturbed, if possible in a process of its own, and once for each device, driver and torch."""

import json
import os
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from batchscope.hardware import measure, microbenchmarks
from batchscope.hardware.calibration import Calibration
from batchscope.hardware.devices import cache_bytes
from batchscope.hardware.measure import (
    cached_calibration,
    calibrate,
    find_calibration,
    identity,
    load_or_measure,
    store,
)

CPU = torch.device("cpu")
MEASURED = Calibration("cpu", "a CPU", "AVX2", torch.__version__, 1, {"fp32": 1e11}, launch_us=2.0)


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
    rates = {"bf16": 9e14, "memory": 3e10, "launches": 250_000.0}
    monkeypatch.setattr(measure, "disturbance", lambda device, noise: "others did something")
    monkeypatch.setattr(microbenchmarks, "best_rates", lambda candidates, seconds: rates)
    made = calibrate(CPU)
    assert made.matmul_flops_per_sec == {"bf16": 9e14}
    assert (made.memory_bytes_per_sec, made.launch_us) == (3e10, 4.0)
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
@pytest.mark.usefixtures("cache")
def test_what_measuring_takes_is_not_in_this_processs_peak() -> None:
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) < 2**16  # KiB


@pytest.mark.parametrize(
    "ending",
    [OSError("no more processes"), subprocess.CalledProcessError(1, "python"), "", "no JSON", json.dumps({"a": 1})],
    ids=str,
)
@pytest.mark.usefixtures("cache")
def test_where_the_process_fails_this_one_measures(ending: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        if isinstance(ending, str):
            return subprocess.CompletedProcess([], 0, stdout=ending)
        raise ending

    monkeypatch.setattr(measure.subprocess, "run", run)
    monkeypatch.setattr(measure, "calibrate", lambda device: MEASURED)
    assert find_calibration(CPU, measure=True) is MEASURED


@pytest.mark.usefixtures("cache")
def test_what_lies_in_the_current_folder_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "_PROGRAM", "import json")
    monkeypatch.setattr(measure, "calibrate", lambda device: MEASURED)
    find_calibration(CPU, measure=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("cache")
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


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "batchscope"


@pytest.fixture
def measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Every measurement that is made; none takes any time."""
    made = []

    def fake(device: torch.device) -> Calibration:
        made.append(device)
        return Calibration(**identity(device), matmul_flops_per_sec={"fp32": 1e11}, memory_bytes_per_sec=1e10)

    monkeypatch.setattr(measure, "calibrate", fake)
    return made


CHANGES = {
    "torch": lambda patch: patch.setattr(torch, "__version__", "9.9"),
    "threads": lambda patch: patch.setattr(torch, "get_num_threads", lambda: 77),
    "fewer instructions": lambda patch: patch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41"),
    "a machine with the same home": lambda patch: patch.setattr("platform.node", lambda: "another"),
}


def test_a_device_is_measured_once_in_each_setting(
    measured: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert cached_calibration(CPU) is None
    first = load_or_measure(CPU)
    assert load_or_measure(CPU) == cached_calibration(CPU) == first
    assert measured == [CPU]
    for name, change in CHANGES.items():
        with monkeypatch.context() as patch:
            change(patch)
            assert cached_calibration(CPU) is None, name


DAMAGED = ["", "[]", '{"device": "cpu"}', "\xff\xfe", "[" * 100_000]
DAMAGED += [
    f'{{"device": "cpu", "device_name": "x", "torch": "1", "matmul_flops_per_sec": {{"fp32": {number}}}}}'
    for number in ("null", "1" + "0" * 400)
]


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: content[-20:])
def test_a_damaged_cache_is_ignored_with_one_warning_and_measured_again(
    measured: list[torch.device], cache: Path, content: str
) -> None:
    load_or_measure(CPU)
    (file,) = cache.iterdir()
    file.write_bytes(content.encode("latin-1"))
    with pytest.warns(UserWarning, match=f"{file.name} is damaged, and is ignored"):
        assert load_or_measure(CPU).matmul_flops_per_sec == {"fp32": 1e11}
    assert len(measured) == 2
    assert cached_calibration(CPU) is not None


def test_a_cache_that_cannot_be_written_is_done_without(measured: list[torch.device], cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    assert load_or_measure(CPU).matmul_flops_per_sec == {"fp32": 1e11}


def test_what_was_measured_while_others_computed_is_used_for_some_minutes(cache: Path) -> None:
    store(Calibration(**identity(CPU), matmul_flops_per_sec={"fp32": 1e11}, disturbed="others used 43 % of the CPU"))
    assert cached_calibration(CPU) is not None
    (file,) = cache.iterdir()
    for age in (measure.DISTURBED_S + 1, -60):
        os.utime(file, (time.time() - age,) * 2)
        assert cached_calibration(CPU) is None


def test_a_gpu_is_told_apart_by_its_uuid_its_power_limit_and_its_driver(
    measured: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    properties, nvml = types.SimpleNamespace(uuid="1234"), cast(Any, types.ModuleType("pynvml"))
    nvml.limit_mw, nvml.version, nvml.NVMLError = 700_000, "570.1", RuntimeError
    nvml.nvmlInit = lambda: None
    nvml.nvmlSystemGetDriverVersion = lambda: nvml.version
    nvml.nvmlDeviceGetHandleByUUID = lambda name: name
    nvml.nvmlDeviceGetPowerManagementLimit = lambda handle: nvml.limit_mw
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.version, "hip", None)
    device = torch.device("cuda")
    found = load_or_measure(device)
    assert (found.uuid, found.power_limit_w, found.driver) == ("1234", 700, "570.1")
    assert cached_calibration(device) == found
    for thing, name, value in ((properties, "uuid", "5678"), (nvml, "limit_mw", 500_000), (nvml, "version", "580.2")):
        monkeypatch.setattr(thing, name, value)
        assert cached_calibration(device) is None, name
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    assert identity(device)["driver"] is None


def test_without_xdg_the_cache_is_in_the_home_folder(
    measured: list[torch.device], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    load_or_measure(CPU)
    assert len(list((tmp_path / ".cache" / "batchscope").iterdir())) == 1


@pytest.mark.parametrize("home", [None, "/dev/null"], ids=["unknown", "not even root can make a folder there"])
def test_without_a_home_the_cache_is_among_temporary_files_unless_another_user_owns_it(
    home: str | None, measured: list[torch.device], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: Any) -> None:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    user, folder = os.getuid(), tmp_path / f"batchscope-{os.getuid()}"
    assert load_or_measure(CPU) == cached_calibration(CPU)
    assert folder.stat().st_mode & 0o777 == 0o700
    before = sorted(folder.iterdir())
    (tmp_path / f"batchscope-{user + 1}").symlink_to(folder)
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert cached_calibration(CPU) is None
    load_or_measure(CPU)
    assert sorted(folder.iterdir()) == before
    assert len(measured) == 2
