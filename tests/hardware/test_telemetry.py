"""Telemetry: what probes read, what they leave out, and what the sampler makes of it; NVML is played by a fake."""

import ctypes
import multiprocessing
import os
import sys
import threading
import time
import types
import warnings

import psutil
import pytest
import torch

from batchscope.hardware import telemetry
from batchscope.hardware.telemetry import (
    CPU,
    ENERGY,
    MEMORY_CLOCK,
    MEMORY_USED,
    POWER,
    RSS,
    SM_ACTIVITY,
    SM_CLOCK,
    THROTTLED,
    UTILIZATION,
    AmdProbe,
    CpuProbe,
    MpsProbe,
    NvidiaProbe,
    ProcessProbe,
    QueryProbe,
    Sampler,
    named,
    probes_for,
    usable_cores,
)

CUDA = torch.device("cuda", 0)
UUIDS = ["11111111-aaaa-0000-0000-000000000000", "22222222-bbbb-0000-0000-000000000000"]


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch):
    """Warnings are given once a process; here a test counts as one."""
    monkeypatch.setattr(telemetry, "_warned", set())


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class FakeNvml(types.ModuleType):
    """The part of pynvml that is in use, for two GPUs and a MIG instance; `refuse` maps a function to an error code."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRICS_GET_VERSION = 1, 2, 2, 1

    class NVMLError(Exception):
        def __init__(self, value):
            super().__init__(f"code {value}")
            self.value = value

    class NVMLError_FunctionNotFound(NVMLError):
        def __init__(self):
            super().__init__(13)

    class c_nvmlGpmMetricsGet_t(ctypes.Structure):
        class Metric(ctypes.Structure):
            _fields_ = [("metricId", ctypes.c_uint), ("nvmlReturn", ctypes.c_uint), ("value", ctypes.c_double)]

        _fields_ = [("version", ctypes.c_uint), ("numMetrics", ctypes.c_uint), ("metrics", Metric * 1)]
        sample1 = sample2 = None

    def __init__(self, gpm=True):
        super().__init__("pynvml")
        self.gpm = gpm
        self.refuse = {}
        self.calls = []
        self.energy_mj = {0: 1_000_000, 1: 5_000_000}
        self.reasons = 0x1  # idle
        self.busy = 0.0  # what the counters of SM activity have added up to
        self.freed = []

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

    def nvmlDeviceGetMemoryInfo(self, handle):
        self._asked("memory")
        return types.SimpleNamespace(used=(handle + 1) * 2**30)

    def nvmlDeviceGetPowerUsage(self, handle):
        self._asked("power")
        return 250_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        self._asked("energy")
        return self.energy_mj[handle]

    def nvmlDeviceGetClockInfo(self, handle, kind):
        self._asked("clock")
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        self._asked("reasons")
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
        assert (request.metrics[0].metricId, request.numMetrics) == (2, 1)
        request.metrics[0].value = request.sample2.busy - request.sample1.busy

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

    assert first == {
        UTILIZATION: 40.0,
        MEMORY_USED: 1.0,
        POWER: 250.0,
        ENERGY: 1000.0,
        SM_CLOCK: 1980.0,
        MEMORY_CLOCK: 3201.0,
        THROTTLED: 0.0,
    }
    assert probe.read() == first | {SM_ACTIVITY: 37.5}
    assert all(isinstance(value, float) for value in first.values())


@pytest.mark.parametrize(
    "uuid, visible, memory",
    [
        (UUIDS[0], None, 1.0),
        (UUIDS[1], "1", 2.0),  # torch's first device is NVML's second
        (f"GPU-{UUIDS[1]}", "1", 2.0),
        (UUIDS[1], f"GPU-{UUIDS[1]}", 2.0),
        ("4" * 8, "0", 2.0),  # of a MIG instance, as torch spells it
        (UUIDS[0], "MIG-33", 2.0),
    ],
)
@pytest.mark.parametrize("device", ["cuda:0", "cuda"])
def test_the_device_is_found_by_its_uuid(nvml, monkeypatch, uuid, visible, memory, device):
    see(monkeypatch, uuid, visible)

    assert NvidiaProbe(torch.device(device)).read()[MEMORY_USED] == memory


@pytest.mark.parametrize("reasons, throttled", [(0x0, 0.0), (0x1, 0.0), (0x2, 0.0), (0x5, 1.0), (0x48, 1.0)])
def test_throttling_is_power_heat_or_hardware(nvml, reasons, throttled):
    nvml.reasons = reasons

    assert NvidiaProbe(CUDA).read()[THROTTLED] == throttled


def test_an_older_driver_knows_throttling_by_its_older_name(nvml):
    def missing(handle):
        raise nvml.NVMLError_FunctionNotFound

    nvml.nvmlDeviceGetCurrentClocksEventReasons = missing
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x4

    assert NvidiaProbe(CUDA).read()[THROTTLED] == 1.0


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


@pytest.mark.parametrize("code", [15, 16])
def test_a_lost_gpu_ends_its_readings(nvml, code):
    probe = NvidiaProbe(CUDA)
    sampler = Sampler([probe, ProcessProbe()], clock=Clock())
    sampler.resume()
    sampler.sample()
    assert POWER in sampler.latest()

    nvml.refuse = dict.fromkeys(["utilization", "memory", "power", "energy", "clock", "reasons", "gpm"], code)
    with pytest.warns(RuntimeWarning, match="no longer answers") as caught:
        run(sampler, Clock(), 1.0, 1.0)

    assert len(caught) == 1
    assert [key for key in sampler.latest() if key.startswith("device/")] == []
    assert RSS in sampler.latest()


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

    with pytest.warns(RuntimeWarning, match="NVML is not to be had: code"):
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
    assert (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED) == telemetry._LOST
    harmless = ("GpuIdle", "ApplicationsClocksSetting", "DisplayClockSetting")
    assert sum(getattr(pynvml, f"nvmlClocksEventReason{name}") for name in harmless) == telemetry._NOT_THROTTLING


# --- AMD, MPS --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power, watts", [(717, 717.0), (717_000, 717.0), (29_000, 29.0), (0, None)])
def test_amd_readings(monkeypatch, power, watts):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 55)
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: power)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 0)

    host, probe = probes_for(CUDA)

    assert isinstance(host, ProcessProbe) and isinstance(probe, AmdProbe)
    expected = {UTILIZATION: 55.0, MEMORY_USED: 3.0, POWER: watts}
    assert probe.read() == {key: value for key, value in expected.items() if value is not None}


def test_amd_says_not_available(monkeypatch):
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: "N/A")
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda device: 2**30)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 2100)

    with pytest.warns(RuntimeWarning, match="device/utilization_pct"):
        assert AmdProbe(CUDA).read() == {MEMORY_USED: 1.0, POWER: 100.0, SM_CLOCK: 2100.0}


def test_mps_readings(monkeypatch):
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 2**29)

    host, probe = probes_for(torch.device("mps"))

    assert isinstance(host, ProcessProbe) and isinstance(probe, MpsProbe)
    assert probe.read() == {MEMORY_USED: 0.5}


def test_a_device_of_another_kind_has_the_process_only():
    assert [type(p) for p in probes_for(torch.device("meta"))] == [ProcessProbe]


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
def test_cpu_utilization_is_the_share_of_usable_cores(monkeypatch, cores, expected):
    clock, used = Clock(), iter([1.0, 1.5])
    monkeypatch.setattr(telemetry, "usable_cores", lambda: cores)
    monkeypatch.setattr(time, "process_time", lambda: next(used))
    probe = CpuProbe(clock)

    assert probe.read() == {}
    clock.now += 0.25
    assert probe.read() == {UTILIZATION: pytest.approx(expected)}


def test_cpu_utilization_counts_children(monkeypatch):
    clock, seconds = Clock(), {"a": 10.0, "b": 7.0}
    monkeypatch.setattr(telemetry, "usable_cores", lambda: 4)
    monkeypatch.setattr(time, "process_time", lambda: 1.0)
    probe = CpuProbe(clock)
    children = ["a"]
    looked = []
    probe._process = types.SimpleNamespace(children=lambda recursive: looked.append(clock.now) or children)

    def cpu_seconds(child):
        if seconds[child] is None:
            raise psutil.NoSuchProcess(1)
        return seconds[child]

    monkeypatch.setattr(telemetry, "_cpu_seconds", cpu_seconds)

    def read(pause, **times):
        clock.now += pause
        seconds.update(times)
        return probe.read().get(UTILIZATION)

    assert read(0) is None
    assert read(1, a=11.0) == pytest.approx(25)
    children.append("b")
    assert read(1, a=13.0, b=9.0) == pytest.approx(50)  # the newcomer's time before it was seen is not counted
    assert read(1, a=13.0, b=11.0) == pytest.approx(50)
    children.remove("a")
    assert read(1, a=None, b=11.5) == pytest.approx(12.5)
    assert len(looked) < 5  # not at every reading


def test_a_real_child_is_seen():
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_spin, args=(1.0,), daemon=True)
    child.start()
    try:
        process = psutil.Process(child.pid)
        deadline = time.monotonic() + 10
        probe = CpuProbe()
        probe.read()
        before = telemetry._cpu_seconds(process)
        while telemetry._cpu_seconds(process) < before + 0.1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert probe.read()[UTILIZATION] > 0
        assert process in probe._children
    finally:
        child.kill()
        child.join()


def _spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.parametrize("text, cores", [("150000 100000", 1.5), ("max 100000", 8), ("800000000 100000", 8), ("", 8)])
def test_usable_cores(monkeypatch, text, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(telemetry.Path, "read_text", lambda self: text)

    assert usable_cores() == cores


def test_cpu_probes_are_for_the_cpu():
    assert [type(p) for p in probes_for(torch.device("cpu"))] == [ProcessProbe, CpuProbe]


# --- sampler ---------------------------------------------------------------------------------------------------------


class Script:
    """A probe that reads what it is told to, one reading after another."""

    def __init__(self, *readings):
        self.readings = iter(readings)

    def read(self):
        return next(self.readings)


def run(sampler, clock, *pauses):
    """Open a window, then take a sample after each pause."""
    sampler.resume()
    for pause in pauses:
        clock.now += pause
        sampler.sample()


def test_summary_is_weighted_by_time():
    clock = Clock()
    sampler = Sampler([Script({POWER: 999.0}, {POWER: 100.0, CPU: 50.0}, {POWER: 200.0})], clock=clock)
    run(sampler, clock, 1.0, 3.0)

    assert sampler.summary() == {
        "seconds": 4.0,
        "device/power_mean_w": 175.0,
        "device/power_max_w": 200.0,
        "host/cpu_mean_pct": 50.0,
        "host/cpu_max_pct": 50.0,
        "energy_j": 700.0,
        "energy_source": "power_integral",
    }


def test_energy_is_the_difference_of_the_counter():
    clock = Clock()
    readings = [{POWER: 100.0, ENERGY: energy} for energy in (5000.0, 5090.0, 5300.0)]
    sampler = Sampler([Script(*readings)], clock=clock)
    run(sampler, clock, 1.0, 1.0)

    summary = sampler.summary()

    assert (summary["energy_j"], summary["energy_source"]) == (300.0, "counter")
    assert not any("energy_m" in key for key in summary)


@pytest.mark.parametrize("counter", [(10.0, None, None), (10.0, 20.0, 5.0)])
def test_a_counter_that_fails_in_mid_run_is_not_used(counter):
    clock = Clock()
    readings = [{POWER: 100.0} | ({} if energy is None else {ENERGY: energy}) for energy in counter]
    sampler = Sampler([Script(*readings)], clock=clock)
    run(sampler, clock, 1.0, 1.0)

    summary = sampler.summary()

    assert (summary["energy_j"], summary["energy_source"]) == (200.0, "power_integral")


def test_without_power_there_is_no_energy():
    clock = Clock()
    sampler = Sampler([Script({RSS: 1.0}, {RSS: 2.0})], clock=clock)
    run(sampler, clock, 1.0)

    assert sampler.summary() == {"seconds": 1.0, "host/rss_mean_gib": 2.0, "host/rss_max_gib": 2.0}


def test_paused_time_is_not_in_the_summary():
    clock = Clock()
    readings = [{POWER: power, ENERGY: energy} for power, energy in [(1, 0), (100, 100), (9, 900), (300, 1200)]]
    sampler = Sampler([Script(*readings)], clock=clock)
    sampler.resume()
    clock.now += 1
    sampler.pause()
    clock.now += 50
    sampler.sample()  # does nothing
    sampler.pause()  # nor does this
    sampler.resume()
    clock.now += 1
    sampler.pause()

    summary = sampler.summary()

    assert (summary["seconds"], summary["energy_j"], summary["device/power_mean_w"]) == (2.0, 400, 200.0)
    assert [timestamp for timestamp, _ in sampler.drain()] == [101.0, 152.0]


@pytest.mark.parametrize("paused", [True, False])
def test_a_restarted_summary_counts_what_comes_after(paused):
    clock = Clock()
    readings = [{POWER: power, ENERGY: energy} for power, energy in [(1, 0), (100, 100), (999, 500), (300, 800)]]
    sampler = Sampler([Script(*readings)], clock=clock)
    run(sampler, clock, 1)
    if paused:
        sampler.paused = True
    sampler.restart()
    sampler.resume()
    clock.now += 1
    sampler.pause()

    summary = sampler.summary()

    assert (summary["seconds"], summary["energy_j"], summary["device/power_max_w"]) == (1.0, 300, 300)
    assert [timestamp for timestamp, _ in sampler.drain()] == [101.0, 102.0]


def test_drain_empties_and_latest_stays():
    clock = Clock()
    sampler = Sampler([Script({CPU: 0.0}, {CPU: 1.0}, {CPU: 2.0})], clock=clock)
    assert (sampler.latest(), sampler.drain(), sampler.summary()) == ({}, [], {})
    run(sampler, clock, 1.0, 1.0)

    assert sampler.drain() == [(101.0, {CPU: 1.0}), (102.0, {CPU: 2.0})]
    assert sampler.drain() == []
    assert sampler.latest() == {CPU: 2.0}


def test_a_probe_that_raises_is_dropped_with_one_warning():
    class Broken:
        def read(self):
            raise ValueError("broken")

    clock = Clock()
    sampler = Sampler([Broken(), Script({CPU: 0.0}, {CPU: 1.0}, {CPU: 2.0})], clock=clock)
    with pytest.warns(RuntimeWarning, match="Broken is left out: broken") as caught:
        run(sampler, clock, 1.0, 1.0)

    assert len(caught) == 1
    assert sampler.latest() == {CPU: 2.0}


def test_a_query_may_have_nothing_to_say():
    assert QueryProbe({CPU: lambda: None, RSS: lambda: 0}).read() == {RSS: 0.0}


@pytest.mark.parametrize(
    "key, expected",
    [(POWER, "device/power_max_w"), (SM_ACTIVITY, "device/sm_activity_max_pct"), (THROTTLED, "device/throttled_max")],
)
def test_a_word_goes_before_the_unit(key, expected):
    assert named(key, "max") == expected


def test_every_key_is_in_the_table():
    keys = [value for name, value in vars(telemetry).items() if name.isupper() and "/" in str(value)]
    table = [line.split("`")[1] for line in telemetry.__doc__.splitlines() if line.startswith("| `")]

    assert table == keys


# --- the thread ------------------------------------------------------------------------------------------------------


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "telemetry"]


def test_the_thread_samples_stops_and_starts_again():
    taken = threading.Event()

    class Counting:
        reads = 0

        def read(self):
            self.reads += 1
            if self.reads >= 3:  # the opening, and two of the thread's
                taken.set()
            return {CPU: float(self.reads)}

    probe = Counting()
    sampler = Sampler([probe], interval_s=0.001)
    assert sampler.interval_s == telemetry.MIN_INTERVAL_S
    sampler.stop()  # before any start
    for _ in range(2):
        taken.clear()
        probe.reads = 0
        sampler.start()
        sampler.start()
        assert taken.wait(5)
        assert len(threads()) == 1 and threads()[0].daemon
        sampler.stop()
        sampler.stop()
        assert threads() == []
        assert sampler.latest() == {CPU: probe.reads}
        assert len(sampler.drain()) == probe.reads - 1  # all but the opening


def test_stopping_closes_a_short_run():
    clock = Clock()
    sampler = Sampler([Script({ENERGY: 5.0, RSS: 9.0}, {ENERGY: 7.0, RSS: 1.0})], interval_s=60, clock=clock)
    sampler.start()
    clock.now += 0.02
    sampler.stop()

    assert sampler.summary() == {
        "seconds": pytest.approx(0.02),
        "host/rss_mean_gib": 1.0,
        "host/rss_max_gib": 1.0,
        "energy_j": 2.0,
        "energy_source": "counter",
    }


def test_a_driver_that_hangs_does_not_hang_the_run(monkeypatch):
    hangs, hanging = threading.Event(), threading.Event()

    class Hanging:
        reads = 0

        def read(self):
            self.reads += 1
            if self.reads == 2:
                hanging.set()
                hangs.wait(10)
            return {}

    monkeypatch.setattr(telemetry, "PATIENCE_S", 0.05)
    sampler = Sampler([Hanging()], interval_s=0.1)
    sampler.start()
    assert hanging.wait(5)

    started = time.monotonic()
    sampler.pause()
    sampler.stop()

    assert time.monotonic() - started < 2
    hangs.set()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_can_stop_and_start():
    sampler = Sampler([ProcessProbe()], interval_s=60)
    sampler.start()
    sampler._lock.acquire()  # as a sample in another thread would
    pid = os.fork()
    if pid == 0:
        sampler.stop()
        sampler.start()
        sampler.stop()
        os._exit(0 if sampler.latest() else 3)
    sampler._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    sampler.stop()
