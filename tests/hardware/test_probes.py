"""Probes: what they read and what they leave out; a fake plays NVML."""

import ctypes
import subprocess
import sys
import time
import types
import warnings

import psutil
import pytest
import torch

from batchscope.hardware import probes
from batchscope.hardware.nvml_readings import DRAM_ACTIVITY, SM_ACTIVITY, TENSOR_ACTIVITY, THROTTLED, THROTTLED_BY
from batchscope.hardware.probes import (
    CPU,
    ENERGY,
    POWER,
    PROCESSOR_TIME,
    RSS,
    SM_CLOCK,
    UTILIZATION,
    AmdProbe,
    CpuProbe,
    NvidiaProbe,
    ProcessProbe,
    QueryProbe,
    probes_for,
)
from tests.support.devices import Clock

CUDA = torch.device("cuda", 0)
UUIDS = ["11111111-aaaa-0000-0000-000000000000", "22222222-bbbb-0000-0000-000000000000"]


class FakeNvml(types.ModuleType):
    """The part of pynvml that is in use, for two GPUs and a MIG instance; `refuse` maps a function to an error code."""

    NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRICS_GET_VERSION = 2, 1
    NVML_GPM_METRIC_ANY_TENSOR_UTIL, NVML_GPM_METRIC_DRAM_BW_UTIL = 5, 10
    NVML_CLOCK_SM = 1
    nvmlClocksEventReasonSwPowerCap, nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x4, 0x80
    nvmlClocksEventReasonSwThermalSlowdown, nvmlClocksEventReasonHwThermalSlowdown = 0x20, 0x40
    nvmlClocksEventReasonHwSlowdown = 0x8

    class NVMLError(Exception):
        def __init__(self, value):
            super().__init__(f"code {value}")
            self.value = value

    class c_nvmlGpmMetricsGet_t(ctypes.Structure):
        class Metric(ctypes.Structure):
            _fields_ = [("metricId", ctypes.c_uint), ("nvmlReturn", ctypes.c_uint), ("value", ctypes.c_double)]

        _fields_ = [("version", ctypes.c_uint), ("numMetrics", ctypes.c_uint), ("metrics", Metric * 3)]
        sample1 = sample2 = None

    def __init__(self, gpm=True):
        super().__init__("pynvml")
        self.gpm = gpm
        self.refuse = {}
        self.calls = []
        self.energy_mj = {0: 1_000_000, 1: 5_000_000}
        self.busy = 0.0  # what the counters of SM activity have added up to
        self.freed = []
        self.reasons = 0  # why the clocks are lowered
        self.reasons_known = 0x1FF

    def _asked(self, name):
        self.calls.append(name)
        if name in self.refuse:
            raise self.NVMLError(self.refuse[name])

    def nvmlInit(self):
        self._asked("init")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        names = {f"GPU-{uuid}": index for index, uuid in enumerate(UUIDS)} | {"MIG-33": 1, f"MIG-{'4' * 8}": 1}
        if uuid not in names:
            raise self.NVMLError(6)
        return names[uuid]

    def nvmlDeviceGetUtilizationRates(self, handle):
        self._asked("utilization")
        return types.SimpleNamespace(gpu=40 + handle)

    def nvmlDeviceGetPowerUsage(self, handle):
        self._asked("power")
        return 250_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        self._asked("energy")
        return self.energy_mj[handle]

    def nvmlDeviceGetClockInfo(self, handle, kind):
        self._asked("clock")
        assert kind == self.NVML_CLOCK_SM
        return 1_980

    def nvmlDeviceGetSupportedClocksEventReasons(self, handle):
        self._asked("throttling")
        return self.reasons_known

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        self._asked("throttling")
        return self.reasons

    def nvmlGpmQueryDeviceSupport(self, handle):
        self._asked("gpm support")
        return types.SimpleNamespace(isSupportedDevice=int(self.gpm))

    def nvmlGpmSampleAlloc(self):
        return types.SimpleNamespace(busy=None)

    def nvmlGpmSampleGet(self, handle, sample):
        self._asked("gpm")
        sample.busy = self.busy

    def nvmlGpmMetricsGet(self, request):
        assert [metric.metricId for metric in request.metrics] == [2, 5, 10]
        for metric in request.metrics[: request.numMetrics]:
            share = {2: 1.0, 5: 0.5, 10: 0.25}[metric.metricId]
            metric.value = share * (request.sample2.busy - request.sample1.busy)

    def nvmlGpmSampleFree(self, sample):
        self.freed.append(sample)


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


# --- NVIDIA ----------------------------------------------------------------------------------------------------------


def test_nvidia_readings_and_units(nvml):
    clock = Clock()
    probe = NvidiaProbe(CUDA, clock)

    first = probe.read()
    clock.now += 0.25
    nvml.busy = 37.5

    not_throttled = dict.fromkeys([THROTTLED, *THROTTLED_BY.values()], 0.0)
    assert first == {UTILIZATION: 40.0, POWER: 250.0, ENERGY: 1000.0, SM_CLOCK: 1980.0} | not_throttled
    assert probe.read() == first | {SM_ACTIVITY: 37.5, TENSOR_ACTIVITY: 18.75, DRAM_ACTIVITY: 9.375}
    assert all(isinstance(value, float) for value in first.values())


@pytest.mark.parametrize(
    "uuid, visible, utilization",
    [
        (UUIDS[0], None, 40.0),
        (UUIDS[1], "1", 41.0),  # torch's first device is NVML's second
        (f"GPU-{UUIDS[1]}", "1", 41.0),
        (UUIDS[1], f"GPU-{UUIDS[1]}", 41.0),
        ("4" * 8, "0", 41.0),  # of a MIG instance, as torch spells it
        (UUIDS[0], "MIG-33", 41.0),
    ],
)
@pytest.mark.parametrize("device", ["cuda:0", "cuda"])
def test_the_device_is_found_by_its_uuid(nvml, monkeypatch, uuid, visible, utilization, device):
    see(monkeypatch, uuid, visible)

    assert NvidiaProbe(torch.device(device)).read()[UTILIZATION] == utilization


def test_sm_activity_only_where_it_is_offered(nvml, monkeypatch):
    nvml.gpm = False
    without = NvidiaProbe(CUDA)
    nvml.refuse["gpm support"] = 13
    refused = NvidiaProbe(CUDA)
    monkeypatch.delattr(FakeNvml, "nvmlGpmQueryDeviceSupport")
    unknown = NvidiaProbe(CUDA)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(SM_ACTIVITY not in probe.read() for probe in (without, refused, unknown) for _ in range(2))
    assert "gpm" not in nvml.calls


def test_sm_activity_needs_samples_far_enough_apart(nvml):
    clock = Clock()
    probe = NvidiaProbe(CUDA, clock)
    seen = []
    for pause, busy in [(0, 0.0), (0.25, 10.0), (0.05, 90.0), (0.25, 95.0)]:
        clock.now += pause
        nvml.busy = busy
        seen.append(probe.read().get(SM_ACTIVITY))

    assert seen == [None, 10.0, None, 5.0]


def test_sm_activity_frees_its_samples(nvml):
    NvidiaProbe(CUDA)

    assert len(nvml.freed) == 2


def test_a_refused_query_is_left_out_and_warned_of_once(nvml):
    nvml.refuse["power"] = 3
    probe, other = NvidiaProbe(CUDA), NvidiaProbe(CUDA)
    with pytest.warns(RuntimeWarning, match="device/power_w is left out: code 3") as caught:
        readings = [p.read() for p in (probe, probe, other)]

    assert len(caught) == 1
    assert all(POWER not in reading and UTILIZATION in reading for reading in readings)
    assert nvml.calls.count("power") == 2  # once a probe


def test_a_query_refused_in_mid_run_leaves_the_others(nvml):
    probe = NvidiaProbe(CUDA)
    assert POWER in probe.read()
    nvml.refuse["power"] = 999

    with pytest.warns(RuntimeWarning, match="device/power_w"):
        assert POWER not in probe.read()
    del nvml.refuse["power"]
    assert POWER not in probe.read()


@pytest.mark.parametrize(
    ("reasons", "causes"),
    {
        0x0: "",
        0x1: "",  # idle
        0x2: "",  # clocks that a user has set
        0x4: "power",
        0x88: "power",  # the power supply's brake, which is a slowdown by the hardware
        0x20: "thermal",
        0x48: "thermal",
        0x8: "hardware",  # which does not say why
        0x24: "power thermal",
    }.items(),
)
def test_why_the_clocks_are_lowered(nvml, reasons, causes):
    probe = NvidiaProbe(CUDA)
    nvml.reasons = reasons

    reading = probe.read()

    assert {cause for cause, key in THROTTLED_BY.items() if reading[key] == 100.0} == set(causes.split())
    assert reading[THROTTLED] == (100.0 if causes else 0.0)


def test_causes_that_the_device_does_not_report_are_left_out(nvml):
    nvml.reasons_known = 0x1 | 0x4
    assert {key for key in NvidiaProbe(CUDA).read() if "throttled" in key} == {THROTTLED, THROTTLED_BY["power"]}
    nvml.reasons_known = 0x1
    assert not [key for key in NvidiaProbe(CUDA).read() if "throttled" in key]


def test_a_driver_from_before_535_calls_them_throttle_reasons(nvml, monkeypatch):
    for name in [name for name in vars(FakeNvml) if "ClocksEvent" in name]:
        monkeypatch.setattr(
            FakeNvml, name.replace("ClocksEvent", "ClocksThrottle"), getattr(FakeNvml, name), raising=False
        )
        monkeypatch.delattr(FakeNvml, name)
    nvml.reasons = 0x4

    assert NvidiaProbe(CUDA).read()[THROTTLED_BY["power"]] == 100.0


@pytest.mark.parametrize("refused", ["throttling", "clock"])
def test_what_a_device_refuses_from_the_start_is_left_out_in_silence(nvml, refused):
    nvml.refuse[refused] = 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reading = NvidiaProbe(CUDA).read()

    assert (THROTTLED in reading, SM_CLOCK in reading) == (refused == "clock", refused == "throttling")
    assert UTILIZATION in reading


@pytest.mark.parametrize("code", [15, 16])
def test_a_lost_gpu_ends_its_readings(nvml, code):
    probe = NvidiaProbe(CUDA)
    assert POWER in probe.read()

    nvml.refuse = dict.fromkeys(["utilization", "power", "energy", "clock", "throttling", "gpm"], code)
    with pytest.warns(RuntimeWarning, match="no longer answers") as caught:
        assert [probe.read(), probe.read()] == [{}, {}]
    assert len(caught) == 1


def test_without_the_library_there_is_one_warning(monkeypatch):
    see(monkeypatch, UUIDS[0])
    monkeypatch.setitem(sys.modules, "pynvml", None)

    with pytest.warns(RuntimeWarning, match="no readings of cuda:0") as caught:
        probes = [probes_for(CUDA), probes_for(CUDA)]

    assert len(caught) == 1
    assert [[type(p) for p in found] for found in probes] == [[ProcessProbe], [ProcessProbe]]


@pytest.mark.parametrize("broken", ["init", "handle"])
def test_without_a_driver_there_are_no_device_readings(nvml, monkeypatch, broken):
    if broken == "init":
        nvml.refuse["init"] = 12
    else:
        see(monkeypatch, "of no device")

    with pytest.warns(RuntimeWarning, match="NVML is not available: code"):
        assert [type(p) for p in probes_for(CUDA)] == [ProcessProbe]


def test_warnings_as_errors_do_not_end_a_run(nvml):
    nvml.refuse["power"] = 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert POWER not in NvidiaProbe(CUDA).read()


def test_the_real_library_has_what_is_used():
    pynvml = pytest.importorskip("pynvml")
    used = [name for name in vars(FakeNvml) if name.lower().startswith(("nvml", "c_nvml"))]

    assert [name for name in used if not hasattr(pynvml, name)] == []
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.metrics[0].metricId = pynvml.NVML_GPM_METRIC_SM_UTIL
    request.sample1 = request.sample2 = pynvml.c_nvmlGpmSample_t()
    assert (request.metrics[0].value, request.metrics[0].nvmlReturn) == (0.0, 0)
    assert (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED) == probes._LOST


# --- AMD --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power, watts", [(717, 717.0), (717_000, 717.0), (29_000, 29.0), (0, None)])
def test_amd_readings(monkeypatch, power, watts):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 55)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: power)

    host, probe = probes_for(CUDA)

    assert isinstance(host, ProcessProbe) and isinstance(probe, AmdProbe)
    expected = {UTILIZATION: 55.0, POWER: watts}
    assert probe.read() == {key: value for key, value in expected.items() if value is not None}


def test_amd_says_not_available(monkeypatch):
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: "N/A")
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 100)

    with pytest.warns(RuntimeWarning, match="device/utilization_pct"):
        assert AmdProbe(CUDA).read() == {POWER: 100.0}


@pytest.mark.parametrize("kind", ["mps", "meta"])
def test_a_device_of_another_kind_has_the_process_only(kind):
    assert [type(p) for p in probes_for(torch.device(kind))] == [ProcessProbe]


# --- CPU and process -------------------------------------------------------------------------------------------------


def test_process_cpu_and_memory(monkeypatch):
    clock, used = Clock(), iter([2.0, 2.5, 2.5, 2.6])
    monkeypatch.setattr(time, "process_time", lambda: next(used))
    probe = ProcessProbe(clock)
    seen = []
    for pause in (0, 0.25, 0.01, 0.25):
        clock.now += pause
        seen.append(probe.read())

    # Half a second in a quarter of one is two cores; the third reading comes too soon after the second.
    assert [reading.get(CPU) for reading in seen] == [None, pytest.approx(200), None, pytest.approx(40)]
    assert seen[-1][RSS] == pytest.approx(psutil.Process().memory_info().rss / 2**30, rel=0.1)


@pytest.mark.parametrize("cores, expected", [(4, 50.0), (2, 100.0), (1, 100.0)])
def test_processor_time_is_that_of_the_usable_cores(monkeypatch, cores, expected):
    clock, used = Clock(), iter([1.0, 1.5])
    monkeypatch.setattr(probes, "usable_cores", lambda: cores)
    monkeypatch.setattr(time, "process_time", lambda: next(used))
    probe = CpuProbe(clock)

    assert probe.read() == {}
    clock.now += 0.25
    assert probe.read() == {PROCESSOR_TIME: pytest.approx(expected)}


def test_processor_time_has_that_of_children(monkeypatch):
    clock, seconds = Clock(), {"a": 10.0, "b": 7.0}
    monkeypatch.setattr(probes, "usable_cores", lambda: 4)
    monkeypatch.setattr(time, "process_time", lambda: 1.0)
    probe = CpuProbe(clock)
    children = ["a"]
    looked = []
    probe._process = types.SimpleNamespace(children=lambda recursive: looked.append(clock.now) or children)

    def cpu_seconds(child):
        if seconds[child] is None:
            raise psutil.NoSuchProcess(1)
        return seconds[child]

    monkeypatch.setattr(probes, "cpu_seconds_of", cpu_seconds)

    def read(pause, **times):
        clock.now += pause
        seconds.update(times)
        return probe.read().get(PROCESSOR_TIME)

    assert read(0) is None
    assert read(1, a=11.0) == pytest.approx(25)
    children.append("b")
    assert read(1, a=13.0, b=9.0) == pytest.approx(50)  # the newcomer's time before it was seen is not counted
    assert read(1, a=13.0, b=11.0) == pytest.approx(50)
    children.remove("a")
    assert read(1, a=None, b=11.5) == pytest.approx(12.5)
    assert len(looked) < 5  # not at every reading


BUSY = "import time\nend = time.monotonic() + 20\nwhile time.monotonic() < end: pass"


def test_a_real_child_is_seen():
    with subprocess.Popen([sys.executable, "-c", BUSY]) as child:
        process = psutil.Process(child.pid)
        deadline = time.monotonic() + 10
        probe = CpuProbe()
        probe.read()
        before = probes.cpu_seconds_of(process)
        while probes.cpu_seconds_of(process) < before + 0.1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert probe.read()[PROCESSOR_TIME] > 0
        assert process in probe._children
        child.kill()


def test_cpu_probes_are_for_the_cpu():
    assert [type(p) for p in probes_for(torch.device("cpu"))] == [ProcessProbe, CpuProbe]


def test_a_query_may_have_nothing_to_say():
    assert QueryProbe({CPU: lambda: None, RSS: lambda: 0}).read() == {RSS: 0.0}
