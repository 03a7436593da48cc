"""Probes: what they read and what they leave out; a fake plays NVML."""

import sys
import time
import types
import warnings

import psutil
import pytest
import torch

from batchscope.hardware import probes
from batchscope.hardware.device_memory import ALLOCATED, PEAK
from batchscope.hardware.nvml_readings import (
    ENERGY,
    POWER,
    SM_CLOCK,
    THROTTLED,
    UTILIZATION,
    gpu_queries,
)
from batchscope.hardware.probes import CPU, PROCESSOR_TIME, RSS, Probe, probe_for
from tests.support.devices import Clock

CUDA = torch.device("cuda", 0)
UUIDS = ["11111111-aaaa-0000-0000-000000000000", "22222222-bbbb-0000-0000-000000000000"]


class NVMLError(Exception):
    """As pynvml raises it."""


class FakeNvml(types.ModuleType):
    """The part of pynvml that is in use, for two GPUs and a MIG instance. A test changes its attributes."""

    NAMES = {
        "NVML_CLOCK_SM": 1,
        "nvmlClocksEventReasonSwPowerCap": 0x4,
        "nvmlClocksEventReasonHwSlowdown": 0x8,
        "nvmlClocksEventReasonSwThermalSlowdown": 0x20,
        "nvmlClocksEventReasonHwThermalSlowdown": 0x40,
        "nvmlClocksEventReasonHwPowerBrakeSlowdown": 0x80,
        "NVMLError": NVMLError,
    }

    def __init__(self):
        super().__init__("pynvml")
        vars(self).update(self.NAMES)
        self.refused = set()  # the functions that raise an error
        self.reasons, self.reasons_known = 0, 0x1FF  # why the clocks are lowered
        self.functions = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetHandleByUUID": self._handle,
            "nvmlDeviceGetUtilizationRates": lambda handle: types.SimpleNamespace(gpu=40 + handle),
            "nvmlDeviceGetPowerUsage": lambda handle: 250_000,
            "nvmlDeviceGetTotalEnergyConsumption": lambda handle: 1_000_000,
            "nvmlDeviceGetClockInfo": lambda handle, kind: {self.NVML_CLOCK_SM: 1_980}[kind],
            "nvmlDeviceGetSupportedClocksEventReasons": lambda handle: self.reasons_known,
            "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: self.reasons,
        }

    def __getattr__(self, name):
        if name not in self.functions:
            raise AttributeError(name)

        def call(*args):
            if name in self.refused:
                raise NVMLError("refused")
            return self.functions[name](*args)

        return call

    def _handle(self, uuid):
        known = {f"GPU-{uuid}": index for index, uuid in enumerate(UUIDS)} | {"MIG-33": 1, f"MIG-{'4' * 8}": 1}
        if uuid not in known:
            raise NVMLError("no such device")
        return known[uuid]


@pytest.fixture
def nvml(monkeypatch):
    """A fake driver, and torch's view of the first GPU that it may see."""
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    see(monkeypatch, UUIDS[0])
    return fake


def see(monkeypatch, uuid, visible=None):
    """What torch says of cuda:0, and CUDA_VISIBLE_DEVICES."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid=uuid))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.fixture(autouse=True)
def allocator(monkeypatch):
    """The allocator of a GPU that holds nothing."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {})


def nvidia(device=CUDA):
    return Probe(gpu_queries(device))


# --- NVIDIA ----------------------------------------------------------------------------------------------------------


def test_nvidia_readings_and_units(nvml):
    assert nvidia().read() == {UTILIZATION: 40.0, POWER: 250.0, ENERGY: 1000.0, SM_CLOCK: 1980.0, THROTTLED: 0.0}


@pytest.mark.parametrize(
    "uuid, visible, utilization",
    [
        (UUIDS[0], None, 40.0),
        (UUIDS[1], "1", 41.0),  # torch's first device is NVML's second
        (f"GPU-{UUIDS[1]}", f"GPU-{UUIDS[1]}", 41.0),
        ("4" * 8, "0", 41.0),  # of a MIG instance, as torch spells it
        (UUIDS[0], "MIG-33", 41.0),
    ],
)
def test_the_device_is_found_by_its_uuid(nvml, monkeypatch, uuid, visible, utilization):
    see(monkeypatch, uuid, visible)

    assert nvidia(torch.device("cuda")).read()[UTILIZATION] == utilization


@pytest.mark.parametrize(
    ("reasons", "known", "throttled"),
    [
        (0x0, 0x1FF, 0.0),
        (0x3, 0x1FF, 0.0),  # idle, and clocks that a user has set
        (0x4, 0x1FF, 100.0),  # the power limit
        (0x40, 0x1FF, 100.0),  # the temperature
        (0x8, 0x1FF, 100.0),  # the hardware, which does not say why
        (0x40, 0x1 | 0x4, 0.0),  # a reason that the device does not report
        (0x4, 0x1, None),
    ],
)
def test_whether_the_clocks_are_lowered(nvml, reasons, known, throttled):
    nvml.reasons, nvml.reasons_known = reasons, known
    assert nvidia().read().get(THROTTLED) == throttled


def test_what_a_device_does_not_offer_is_left_out_in_silence(nvml):
    nvml.refused.add("nvmlDeviceGetSupportedClocksEventReasons")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reading = nvidia().read()

    assert set(reading) == {UTILIZATION, POWER, ENERGY, SM_CLOCK}


def test_a_refused_query_is_dropped_and_warned_of_once_and_never_raises(nvml, monkeypatch):
    probe, other = nvidia(), nvidia()
    assert POWER in probe.read()
    nvml.refused.add("nvmlDeviceGetPowerUsage")
    with pytest.warns(RuntimeWarning, match="device/power_w is left out: refused") as caught:
        readings = [each.read() for each in (probe, probe, other)]
    assert len(caught) == 1
    monkeypatch.setattr(probes, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        readings.append(nvidia().read())
    nvml.refused.clear()
    assert all(POWER not in reading and UTILIZATION in reading for reading in [*readings, probe.read()])


@pytest.mark.parametrize("missing", ["library", "driver", "device"])
def test_without_nvml_the_process_is_read_and_there_is_one_warning(nvml, monkeypatch, missing):
    if missing == "library":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    elif missing == "driver":
        nvml.refused.add("nvmlInit")
    else:
        see(monkeypatch, "of no device")

    with pytest.warns(RuntimeWarning, match="no readings of cuda:0, NVML is not available") as caught:
        read = [set(probe_for(CUDA).read()) for _ in range(2)]

    assert len(caught) == 1
    assert read == [{RSS}] * 2


def test_the_real_library_has_what_is_used():
    pynvml = pytest.importorskip("pynvml")
    assert [name for name in [*FakeNvml.NAMES, *FakeNvml().functions] if not hasattr(pynvml, name)] == []


# --- AMD, CPU and process --------------------------------------------------------------------------------------------


def test_amd_readings_are_torchs_and_what_is_not_available_is_left_out(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 55)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 0)  # not known
    reading = probe_for(CUDA).read()
    assert reading[UTILIZATION] == 55.0
    assert SM_CLOCK not in reading
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


@pytest.mark.parametrize("cores, seconds, expected", [(4, 0.5, 50.0), (2, 0.51, 100.0), (4, -0.1, 0.0)])
def test_processor_time_is_that_of_the_usable_cores(monkeypatch, cores, seconds, expected):
    clock, used = Clock(), iter([1.0, 1.0 + seconds])
    monkeypatch.setattr(probes, "usable_cores", lambda: cores)
    monkeypatch.setattr(probes, "own_seconds", lambda: next(used))
    probe = probe_for(torch.device("cpu"), clock)

    assert set(probe.read()) == {RSS, ALLOCATED, PEAK}
    clock.now += 0.25
    assert probe.read()[PROCESSOR_TIME] == pytest.approx(expected)
