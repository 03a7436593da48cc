"""Telemetry: the readings of a GPU, a CPU and the process, the thread that samples, and the summary of the training."""

import itertools
import threading
import time
import warnings
from unittest.mock import Mock

import psutil
import pynvml
import pytest
import torch

from batchscope.hardware import telemetry
from batchscope.hardware.nvml_readings import ENERGY, POWER, SM_CLOCK, THROTTLED, UTILIZATION
from batchscope.hardware.telemetry import (
    ALLOCATED,
    CPU,
    PEAK,
    PROCESSOR_TIME,
    RSS,
    Telemetry,
    queries_for,
    read,
    with_statistic,
)
from tests.hardware.conftest import REFUSED, UUIDS
from tests.support.devices import Clock
from tests.support.waiting import wait_until

CUDA = torch.device("cuda", 0)
OFFERED = {UTILIZATION: 40.0, POWER: 250.0, ENERGY: 1000.0, SM_CLOCK: 1980.0, THROTTLED: 0.0}


def settled(device: torch.device):
    """The queries for a device that has computed for a while."""
    clock = Clock()
    queries = queries_for(device, clock)
    clock.now += 10
    return queries


def device_readings(device: torch.device) -> dict[str, float]:
    """The readings of a device without those of the process; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {key: value for key, value in read(settled(device)).items() if key != RSS}


@pytest.mark.parametrize(
    ("uuid", "visible"),  # of NVML's second device
    [
        (UUIDS[1], "1"),
        (f"GPU-{UUIDS[1]}", f"GPU-{UUIDS[1]}"),
        ("4" * 8, "0"),  # a MIG instance, as torch spells it
        (UUIDS[0], "MIG-33"),
    ],
)
def test_a_gpu_is_found_by_its_uuid_and_read_in_the_units_of_the_keys(nvml, monkeypatch, uuid, visible):
    nvml.uuid = uuid
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_readings(torch.device("cuda")) == OFFERED | {UTILIZATION: 41.0}


@pytest.mark.parametrize(
    ("reasons", "supported", "throttled"),
    [
        pytest.param(0x3, 0x1FF, {THROTTLED: 0.0}, id="idle, and clocks that a user has set"),
        *(pytest.param(bit, 0x1FF, {THROTTLED: 100.0}, id=f"{bit:#x}") for bit in (0x4, 0x8, 0x20, 0x40, 0x80)),
        pytest.param(0x40, 0x1 | 0x4, {THROTTLED: 0.0}, id="a reason that the device does not report"),
        pytest.param(0x4, 0x1, {}, id="no reason that counts"),
        pytest.param(0x4, None, {}, id="it does not tell"),
    ],
)
def test_whether_the_clocks_are_lowered(nvml, monkeypatch, reasons, supported, throttled):
    nvml.reasons, nvml.supported = reasons, supported
    if supported is None:
        monkeypatch.setattr(pynvml, "nvmlDeviceGetSupportedClocksEventReasons", REFUSED)
    assert device_readings(CUDA) == {key: value for key, value in OFFERED.items() if key != THROTTLED} | throttled


@pytest.mark.usefixtures("nvml")
def test_a_refused_query_is_dropped_with_a_warning_and_never_raises(monkeypatch):
    queries = settled(CUDA)
    with monkeypatch.context() as patch:
        patch.setattr(pynvml, "nvmlDeviceGetPowerUsage", REFUSED)
        with pytest.warns(RuntimeWarning, match="device/power_w is left out: Not Supported") as caught:
            readings = [read(queries) for _ in range(3)]
        assert len(caught) == 1
        readings.append(device_readings(CUDA))  # also where warnings are errors
    assert all(POWER not in reading and UTILIZATION in reading for reading in [*readings, read(queries)])


@pytest.mark.usefixtures("nvml")
def test_a_utilisation_of_the_time_before_is_not_read():
    clock = Clock()
    queries = queries_for(CUDA, clock)
    readings = {}
    for seconds in (0.0, 1.9, 2.2):
        clock.now = 100.0 + seconds
        readings[seconds] = UTILIZATION in read(queries)
    assert readings == {0.0: False, 1.9: False, 2.2: True}


@pytest.mark.parametrize("missing", ["driver", "device"])
def test_without_nvml_the_process_is_read_and_there_is_one_warning(nvml, monkeypatch, missing):
    if missing == "driver":
        monkeypatch.setattr(pynvml, "nvmlInit", REFUSED)
    nvml.uuid = "of no device" if missing == "device" else UUIDS[0]
    with pytest.warns(RuntimeWarning, match="no readings of cuda:0, NVML is not available") as caught:
        assert set(read(settled(CUDA))) == {RSS}
    assert len(caught) == 1


@pytest.mark.usefixtures("nvml")
def test_amd_readings_are_torchs_and_what_is_not_available_is_left_out(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 55)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 0)  # an unknown clock rate
    assert device_readings(CUDA) == {UTILIZATION: 55.0}
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: "N/A")
    with pytest.warns(RuntimeWarning, match="device/utilization_pct"):
        assert UTILIZATION not in read(settled(CUDA))


@pytest.mark.usefixtures("nvml")
def test_where_an_allocator_tells_nothing_the_gpu_is_read_all_the_same(monkeypatch):
    for name in ("reset_peak_memory_stats", "memory_stats_as_nested_dict"):
        monkeypatch.setattr(torch.cuda, name, Mock(side_effect=RuntimeError("it keeps no statistics")))
    assert device_readings(CUDA) == OFFERED


def test_a_process_has_its_time_of_one_core_and_a_processor_of_all_usable_ones(monkeypatch):
    clock, process_times, own_times = Clock(), iter([2.0, 2.5, 2.5, 2.6, 2.0, 0.0]), iter([1.0, 1.5, 1.5, 2.6, 2.5])
    monkeypatch.setattr(time, "process_time", lambda: next(process_times))
    monkeypatch.setattr(telemetry, "usable_cores", lambda: 4)
    monkeypatch.setattr(telemetry, "own_seconds", lambda: next(own_times))
    queries = queries_for(torch.device("cpu"), clock)
    rows = []
    for pause in (0, 0.25, 0.01, 0.25, 0.25):
        clock.now += pause
        rows.append(read(queries))
    # Half a second of CPU time in a quarter of a second is two cores; the third reading comes too soon after the second.
    assert [reading.get(CPU) for reading in rows] == pytest.approx([None, 200, None, 40, 0])
    assert [reading.get(PROCESSOR_TIME) for reading in rows] == pytest.approx([None, 50, None, 100, 0])
    assert rows[-1][RSS] == pytest.approx(psutil.Process().memory_info().rss / 2**30, rel=0.1)
    assert set(read(queries_for(torch.device("meta")))) == {RSS}
    assert set(rows[0]) == {RSS, ALLOCATED, PEAK} and set(rows[-1]) == {CPU, RSS, PROCESSOR_TIME, ALLOCATED, PEAK}


def sampler_of(*samples, is_training=True) -> Telemetry:
    """Telemetry of samples (time, readings); the first sample is from before the training."""
    clock, pending = Clock(), list(samples)

    def next_readings():
        clock.now, readings = pending.pop(0)
        return readings

    sampler = Telemetry(next_readings, 60, clock)
    for _ in samples[2:]:
        sampler.sample(is_training)
    sampler.is_training = is_training
    sampler.stop()
    return sampler


def energy_samples(*joules):
    """A sample a second, with a power of 100 W and the energy counter; a negative value stands for a refused counter."""
    return [(at, {POWER: 100.0} | ({} if counter < 0 else {ENERGY: counter})) for at, counter in enumerate(joules)]


POWERS = [(0, {POWER: 999.0}), (0, {}), (1, {POWER: 100.0, CPU: 50.0}), (4, {POWER: 200.0})]
MEMORY = [(0, {RSS: 9.0}), (0, {}), (2, {CPU: 10.0, RSS: 1.0}), (4, {CPU: 20.0, RSS: 8.0}), (6, {CPU: 40.0, RSS: 3.0})]
BEFORE = (0, {POWER: 999.0, ENERGY: 0.0})
MEAN = {"seconds": 2.0, "device/power_mean_w": 100.0}
SUMS = {  # samples, and a time → the summary of the samples after it
    "a sample stands for the time since the one before": (
        POWERS, 0, {"seconds": 4.0, "device/power_mean_w": 175.0, "host/cpu_mean_pct": 50.0},
    ),
    "memory has its maximum": (MEMORY, 0, {"seconds": 6.0, "host/cpu_mean_pct": 70 / 3, "host/rss_max_gib": 8.0}),
    "samples after a time": (MEMORY, 4, {"seconds": 2.0, "host/cpu_mean_pct": 40.0, "host/rss_max_gib": 3.0}),
    "none is after it": (POWERS, 5, {}),
    "energy is the counter's": ([BEFORE, *energy_samples(500, 700, 1000)], 0, MEAN | {"energy_j": 500}),
    "a counter that is refused": ([BEFORE, *energy_samples(10, -1, -1)], 0, MEAN),
    "a counter that is reset": ([BEFORE, *energy_samples(10, 20, 5)], 0, MEAN),
    "power alone": ([BEFORE, *energy_samples(-1, -1, -1)], 0, MEAN),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_readings_of_the_training_are_summed_up(name):
    samples, since, expected = SUMS[name]
    assert sampler_of(*samples).summary(since) == pytest.approx(expected)
    assert sampler_of(*samples, is_training=False).summary(since) == {}


def test_the_peak_of_memory_is_that_of_validations_too():
    samples = [(0, {PEAK: 1.0, RSS: 1.0}), (0, {PEAK: 1.0}), (2, {PEAK: 2.0, RSS: 2.0}), (4, {PEAK: 9.0, RSS: 9.0})]
    clock, pending = Clock(), list(samples)

    def next_readings():
        clock.now, readings = pending.pop(0)
        return readings

    sampler = Telemetry(next_readings, 60, clock)
    sampler.sample(True)
    sampler.sample(False)  # the validation begins
    sampler.stop()
    assert sampler.summary() == pytest.approx({"seconds": 2.0, PEAK: 9.0, "host/rss_max_gib": 2.0})


def test_the_readings_from_a_sample_on_and_a_word_before_a_unit():
    sampler = sampler_of((1, {CPU: 1.0}), (2, {CPU: 2.0}), (3, {RSS: 1.0}), (4, {CPU: 4.0}))
    assert [list(values) for values in sampler.readings(CPU, 1)] == [[2, 4], [2.0, 4.0]]
    assert [list(values) for values in sampler.readings(RSS)] == [[3], [1.0]]
    assert [len(values) for values in sampler.readings(POWER)] == [0, 0]
    assert (sampler.samples, with_statistic(POWER, "max")) == (4, "device/power_max_w")


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "telemetry"]


def test_the_thread_samples_and_stops(monkeypatch):
    monkeypatch.setattr(telemetry, "MIN_INTERVAL_S", 0.01)
    reads = itertools.count(1.0)
    sampler = Telemetry(lambda: {CPU: next(reads)}, interval_s=0.001)
    wait_until(lambda: sampler.samples >= 3, "no samples")
    assert len(threads()) == 1 and threads()[0].daemon
    sampler.stop()
    sampler.stop()
    assert threads() == []
    assert list(sampler.readings(CPU)[1]) == list(range(1, sampler.samples + 1))


def test_in_a_long_run_samples_become_rarer(monkeypatch):
    monkeypatch.setattr(telemetry, "MIN_INTERVAL_S", 0.001)
    clock = itertools.count(0.0, 1e6)
    sampler = Telemetry(lambda: {CPU: 1.0}, 0.001, lambda: next(clock))
    wait_until(lambda: sampler.samples == 2, "no samples")
    time.sleep(0.1)
    assert sampler.samples == 2  # the third one comes after two minutes
    sampler.stop()
    assert sampler.samples == 3


def test_a_short_run_has_a_sample_at_its_beginning_at_its_end_and_where_one_is_asked_for():
    clock, rss_gib = Clock(), iter([9.0, 5.0, 1.0])
    sampler = Telemetry(lambda: {RSS: next(rss_gib)}, interval_s=60, clock=clock)
    for call in (sampler.sample, sampler.stop):
        clock.now += 1
        call()
    assert [list(values) for values in sampler.readings(RSS)] == [[100, 101, 102], [9.0, 5.0, 1.0]]
    sampler.sample()  # has no effect after the end


def test_a_driver_that_hangs_does_not_hang_the_run(monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(telemetry, "PATIENCE_S", 0.02)
    started = time.monotonic()
    sampler = Telemetry(lambda: {CPU: float(answers.wait(10))}, 60)
    for call in (sampler.sample, sampler.stop):
        call()
    answers.set()
    assert time.monotonic() - started < 5
