"""Probes: what they read of a GPU, a CPU and the process, and what they leave out."""

import sys
import time
import warnings

import psutil
import pytest
import torch

from batchscope.hardware import probes
from batchscope.hardware.device_memory import ALLOCATED, PEAK
from batchscope.hardware.nvml_readings import ENERGY, POWER, SM_CLOCK, THROTTLED, UTILIZATION
from batchscope.hardware.probes import CPU, PROCESSOR_TIME, RSS, probe_for
from tests.hardware.conftest import UUIDS
from tests.support.devices import Clock

CUDA = torch.device("cuda", 0)
OFFERED = {UTILIZATION: 40.0, POWER: 250.0, ENERGY: 1000.0, SM_CLOCK: 1980.0, THROTTLED: 0.0}


def read(probe: probes.Probe) -> dict[str, float]:
    """Without the process's memory, in silence."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {key: value for key, value in probe.read().items() if key != RSS}


@pytest.mark.parametrize(
    ("uuid", "visible", "utilization"),
    [
        pytest.param(UUIDS[0], None, 40.0, id="the first"),
        pytest.param(UUIDS[1], "1", 41.0, id="torch's first device is NVML's second"),
        pytest.param(f"GPU-{UUIDS[1]}", f"GPU-{UUIDS[1]}", 41.0, id="with a prefix"),
        pytest.param("4" * 8, "0", 41.0, id="a MIG instance, as torch spells it"),
        pytest.param(UUIDS[0], "MIG-33", 41.0, id="a MIG instance by its name"),
    ],
)
def test_a_gpu_is_found_by_its_uuid_and_read_in_the_units_of_the_keys(nvml, monkeypatch, uuid, visible, utilization):
    nvml.seen.uuid = uuid
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert read(probe_for(torch.device("cuda"))) == OFFERED | {UTILIZATION: utilization}


@pytest.mark.parametrize(
    ("reasons", "known", "throttled"),
    [
        pytest.param(0x3, 0x1FF, {THROTTLED: 0.0}, id="idle, and clocks that a user has set"),
        *(pytest.param(bit, 0x1FF, {THROTTLED: 100.0}, id=f"{bit:#x}") for bit in (0x4, 0x8, 0x20, 0x40, 0x80)),
        pytest.param(0x40, 0x1 | 0x4, {THROTTLED: 0.0}, id="a reason that the device does not report"),
        pytest.param(0x4, 0x1, {}, id="no reason that counts"),
        pytest.param(0x4, None, {}, id="it does not tell"),
    ],
)
def test_whether_the_clocks_are_lowered(nvml, reasons, known, throttled):
    nvml.reasons, nvml.reasons_known = reasons, known
    nvml.refused = {"nvmlDeviceGetSupportedClocksEventReasons"} if known is None else set()
    assert read(probe_for(CUDA)) == {key: value for key, value in OFFERED.items() if key != THROTTLED} | throttled


def test_a_refused_query_is_dropped_and_warned_of_once_and_never_raises(nvml, monkeypatch):
    probe, other = probe_for(CUDA), probe_for(CUDA)
    nvml.refused.add("nvmlDeviceGetPowerUsage")
    with pytest.warns(RuntimeWarning, match="device/power_w is left out: refused") as caught:
        readings = [each.read() for each in (probe, probe, other)]
    assert len(caught) == 1
    monkeypatch.setattr(probes, "_warned", set())
    readings.append(read(probe_for(CUDA)))  # also where warnings are errors
    nvml.refused.clear()
    assert all(POWER not in reading and UTILIZATION in reading for reading in [*readings, probe.read()])


@pytest.mark.parametrize("missing", ["library", "driver", "device"])
def test_without_nvml_the_process_is_read_and_there_is_one_warning(nvml, monkeypatch, missing):
    if missing == "library":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    nvml.refused = {"nvmlInit"} if missing == "driver" else set()
    nvml.seen.uuid = "of no device" if missing == "device" else UUIDS[0]
    with pytest.warns(RuntimeWarning, match="no readings of cuda:0, NVML is not available") as caught:
        assert [set(probe_for(CUDA).read()) for _ in range(2)] == [{RSS}] * 2
    assert len(caught) == 1


def test_the_real_library_has_what_is_used(nvml, monkeypatch):
    monkeypatch.delitem(sys.modules, "pynvml")
    pynvml = pytest.importorskip("pynvml")
    used = [*nvml.functions, *(name for name in vars(type(nvml)) if name.lower().startswith("nvml"))]
    assert [name for name in used if not hasattr(pynvml, name)] == []


@pytest.mark.usefixtures("nvml")
def test_amd_readings_are_torchs_and_what_is_not_available_is_left_out(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 55)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 0)  # not known
    assert read(probe_for(CUDA)) == {UTILIZATION: 55.0}
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: "N/A")
    with pytest.warns(RuntimeWarning, match="device/utilization_pct"):
        assert UTILIZATION not in probe_for(CUDA).read()


def test_process_cpu_and_memory(monkeypatch):
    clock, used = Clock(), iter([2.0, 2.5, 2.5, 2.6])
    monkeypatch.setattr(time, "process_time", lambda: next(used))
    probe = probe_for(torch.device("meta"), clock)
    seen = []
    for pause in (0, 0.25, 0.01, 0.25):
        clock.now += pause
        seen.append(probe.read())
    # Half a second in a quarter of one is two cores; the third reading comes too soon after the second.
    assert [reading.get(CPU) for reading in seen] == [None, pytest.approx(200), None, pytest.approx(40)]
    assert seen[-1][RSS] == pytest.approx(psutil.Process().memory_info().rss / 2**30, rel=0.1)
    assert set(seen[-1]) == {CPU, RSS}


@pytest.mark.parametrize(("cores", "seconds", "expected"), [(4, 0.5, 50.0), (2, 0.51, 100.0), (4, -0.1, 0.0)])
def test_processor_time_is_that_of_the_usable_cores(monkeypatch, cores, seconds, expected):
    clock, used = Clock(), iter([1.0, 1.0 + seconds])
    monkeypatch.setattr(probes, "usable_cores", lambda: cores)
    monkeypatch.setattr(probes, "own_seconds", lambda: next(used))
    probe = probe_for(torch.device("cpu"), clock)
    assert set(probe.read()) == {RSS, ALLOCATED, PEAK}
    clock.now += 0.25
    assert probe.read()[PROCESSOR_TIME] == pytest.approx(expected)
