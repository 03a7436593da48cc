"""A calibration is measured undisturbed, if possible in a process of its own, and once for each device, driver and torch."""

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from batchscope.hardware import measure, microbenchmarks
from batchscope.hardware.calibration import Calibration
from batchscope.hardware.devices import cache_bytes
from batchscope.hardware.measure import cached_calibration, find_calibration, identity, load_or_measure, store

CPU = torch.device("cpu")
MEASURED = Calibration("cpu", "a CPU", "AVX2", torch.__version__, 1, {"fp32": 1e11}, launch_us=2.0)


@pytest.mark.slow
def test_this_machines_processor_is_measured() -> None:
    switches = torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
    random_state = torch.get_rng_state()
    found = measure.calibrate(CPU)
    assert found.device == "cpu" and found.threads == torch.get_num_threads()
    assert found.matmul_flops_per_sec["fp32"] > 1e8
    assert found.memory_bytes_per_sec > 1e8
    assert found.cache_bytes == cache_bytes(CPU)
    assert 0.1 < found.launch_us < 1000
    assert torch.get_rng_state().equal(random_state)
    assert (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision) == switches


def test_rates_become_a_calibration_in_the_units_of_its_names_and_others_are_watched_meanwhile(monkeypatch) -> None:
    rates = {"bf16": 9e14, "memory": 3e10, "launches": 250_000.0}
    monkeypatch.setattr(measure, "disturbance", lambda device, noise: "others did something")
    monkeypatch.setattr(microbenchmarks, "best_rates", lambda candidates, seconds: rates)
    made = measure.calibrate(CPU)
    assert made.matmul_flops_per_sec == {"bf16": 9e14}
    assert (made.memory_bytes_per_sec, made.launch_us) == (3e10, 4.0)
    assert made.disturbed == "others did something"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "batchscope"


@pytest.fixture
def measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Every measurement that this process makes; none takes any time."""
    made = []

    def fake(device: torch.device) -> Calibration:
        made.append(device)
        return Calibration(**identity(device), matmul_flops_per_sec={"fp32": 1e11}, memory_bytes_per_sec=1e10)

    monkeypatch.setattr(measure, "calibrate", fake)
    return made


@pytest.mark.parametrize(
    ("said", "times"),
    [
        pytest.param("a library's greeting\n" + json.dumps(MEASURED.to_dict()), 0, id="a calibration"),
        pytest.param("", 1, id="nothing"),
        pytest.param("no JSON", 1, id="no JSON"),
        pytest.param('{"a": 1}', 1, id="no calibration"),
        pytest.param(OSError("no more processes"), 1, id="no process"),
        pytest.param(subprocess.CalledProcessError(1, "python"), 1, id="an error"),
    ],
)
def test_a_process_measures_where_that_is_permitted_and_where_it_fails_this_one(
    said: Any, times: int, measured: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(line: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert line[1] == "-P"  # nothing from the current folder
        assert line[-2:] == ["cpu", str(torch.get_num_threads())]
        if isinstance(said, str):
            return subprocess.CompletedProcess([], 0, stdout=said)
        raise said

    monkeypatch.setattr(measure.subprocess, "run", run)
    assert find_calibration(CPU, measure=False) is None
    assert capsys.readouterr().out == ""
    found = find_calibration(CPU, measure=True)
    assert capsys.readouterr().out == "measuring what this cpu can do; once, some seconds …\n"
    assert (found == MEASURED, len(measured)) == (not times, times)
    if times:
        assert find_calibration(CPU, measure=True) == cached_calibration(CPU) == found
        assert capsys.readouterr().out == ""


CHANGES = {
    "torch": lambda patch: patch.setattr(torch, "__version__", "9.9"),
    "threads": lambda patch: patch.setattr(torch, "get_num_threads", lambda: 77),
    "fewer instructions": lambda patch: patch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41"),
    "a machine with the same home": lambda patch: patch.setattr("platform.node", lambda: "another"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_device_is_measured_once_in_each_setting(name: str, measured: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert load_or_measure(CPU) == load_or_measure(CPU) == cached_calibration(CPU)
    assert measured == [CPU]
    CHANGES[name](monkeypatch)
    assert cached_calibration(CPU) is None


def test_a_gpu_is_told_apart_by_its_uuid_its_power_limit_and_its_driver(measured, nvml, monkeypatch) -> None:
    device = torch.device("cuda")
    found = load_or_measure(device)
    assert (found.uuid, found.power_limit_w, found.driver) == (nvml.seen.uuid, 700, "570.1")
    assert cached_calibration(device) == found
    for thing, name, value in ((nvml.seen, "uuid", "5678"), (nvml, "limit_mw", 500_000), (nvml, "version", "580.2")):
        with monkeypatch.context() as patch:
            patch.setattr(thing, name, value)
            assert cached_calibration(device) is None, name
    nvml.refused.add("nvmlInit")
    assert identity(device)["driver"] is None


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_cache_is_ignored_with_one_warning_and_measured_again(measured, cache: Path, content: bytes) -> None:
    load_or_measure(CPU)
    (file,) = cache.iterdir()
    file.write_bytes(content)
    with pytest.warns(UserWarning, match=f"{file.name} is damaged, and is ignored"):
        load_or_measure(CPU)
    assert len(measured) == 2
    assert cached_calibration(CPU) is not None


def test_a_cache_that_cannot_be_written_is_done_without(measured: list[torch.device], cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    assert load_or_measure(CPU).matmul_flops_per_sec == {"fp32": 1e11}


def test_what_was_measured_while_others_computed_is_used_for_some_minutes(cache: Path) -> None:
    store(Calibration(**identity(CPU), matmul_flops_per_sec={"fp32": 1e11}, disturbed="others used 43 % of the CPU"))
    (file,) = cache.iterdir()
    for age, is_used in ((0, True), (measure.DISTURBED_S - 60, True), (measure.DISTURBED_S + 1, False), (-60, False)):
        os.utime(file, (time.time() - age,) * 2)
        assert (cached_calibration(CPU) is not None) == is_used, age


@pytest.mark.parametrize("home", ["home", "nowhere", None])
@pytest.mark.usefixtures("measured")
def test_without_xdg_the_cache_is_in_the_home_folder_or_among_temporary_files(
    home: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: Any) -> None:
        raise KeyError("getpwuid(): uid not found")

    (tmp_path / "home").mkdir()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if home is not None:
        monkeypatch.setenv("HOME", str(tmp_path / home))
    temporary = tmp_path / f"batchscope-{os.getuid()}"
    folder = tmp_path / "home" / ".cache" / "batchscope" if home == "home" else temporary
    assert load_or_measure(CPU) == cached_calibration(CPU)
    assert folder.stat().st_mode & 0o777 == 0o700
    if folder == temporary:  # nothing is read from or written to another user's
        before = sorted(folder.iterdir())
        user = os.getuid() + 1
        (tmp_path / f"batchscope-{user}").symlink_to(folder)
        monkeypatch.setattr(os, "getuid", lambda: user)
        assert cached_calibration(CPU) is None
        load_or_measure(CPU)
        assert sorted(folder.iterdir()) == before
