"""Telemetry: what probes read of a GPU, a CPU and the process, the thread that reads, and the sums over spans of time."""

import itertools
import sys
import threading
import time
import warnings

import psutil
import pynvml
import pytest
import torch

from batchscope.hardware import probes
from batchscope.hardware import sampler as sampling
from batchscope.hardware.nvml_readings import ENERGY, POWER, SM_CLOCK, THROTTLED, UTILIZATION
from batchscope.hardware.probes import ALLOCATED, CPU, PEAK, PROCESSOR_TIME, RSS, probe_for
from batchscope.hardware.sampler import Sample, Sampler, Spans, Timeline, named
from tests.hardware.conftest import REFUSED, UUIDS
from tests.support.devices import Clock
from tests.support.waiting import wait_until

CUDA = torch.device("cuda", 0)
OFFERED = {UTILIZATION: 40.0, POWER: 250.0, ENERGY: 1000.0, SM_CLOCK: 1980.0, THROTTLED: 0.0}


def read(probe: probes.Probe) -> dict[str, float]:
    """Without the process's memory, in silence."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return {key: value for key, value in probe.read().items() if key != RSS}


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
    assert read(probe_for(torch.device("cuda"))) == OFFERED | {UTILIZATION: 41.0}


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
def test_whether_the_clocks_are_lowered(nvml, monkeypatch, reasons, known, throttled):
    nvml.reasons, nvml.known = reasons, known
    if known is None:
        monkeypatch.setattr(pynvml, "nvmlDeviceGetSupportedClocksEventReasons", REFUSED)
    assert read(probe_for(CUDA)) == {key: value for key, value in OFFERED.items() if key != THROTTLED} | throttled


@pytest.mark.usefixtures("nvml")
def test_a_refused_query_is_dropped_with_a_warning_and_never_raises(monkeypatch):
    probe = probe_for(CUDA)
    with monkeypatch.context() as patch:
        patch.setattr(pynvml, "nvmlDeviceGetPowerUsage", REFUSED)
        with pytest.warns(RuntimeWarning, match="device/power_w is left out: Not Supported") as caught:
            readings = [probe.read() for _ in range(3)]
        assert len(caught) == 1
        readings.append(read(probe_for(CUDA)))  # also where warnings are errors
    assert all(POWER not in reading and UTILIZATION in reading for reading in [*readings, probe.read()])


@pytest.mark.usefixtures("nvml")
def test_a_utilisation_of_the_time_before_is_not_read():
    clock = Clock()
    probe = probe_for(CUDA, clock, settle_s=2.0)
    readings = {}
    for seconds in (0.0, 1.9, 2.1):
        clock.now = 100.0 + seconds
        readings[seconds] = UTILIZATION in probe.read()
    assert readings == {0.0: False, 1.9: False, 2.1: True}


@pytest.mark.parametrize("missing", ["library", "driver", "device"])
def test_without_nvml_the_process_is_read_and_there_is_one_warning(nvml, monkeypatch, missing):
    if missing == "library":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    if missing == "driver":
        monkeypatch.setattr(pynvml, "nvmlInit", REFUSED)
    nvml.uuid = "of no device" if missing == "device" else UUIDS[0]
    with pytest.warns(RuntimeWarning, match="no readings of cuda:0, NVML is not available") as caught:
        assert set(probe_for(CUDA).read()) == {RSS}
    assert len(caught) == 1


@pytest.mark.usefixtures("nvml")
def test_amd_readings_are_torchs_and_what_is_not_available_is_left_out(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 55)
    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 0)  # not known
    assert read(probe_for(CUDA)) == {UTILIZATION: 55.0}
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: "N/A")
    with pytest.warns(RuntimeWarning, match="device/utilization_pct"):
        assert UTILIZATION not in probe_for(CUDA).read()


def test_a_process_has_its_time_of_one_core_and_a_processor_of_all_usable_ones(monkeypatch):
    clock, used, own = Clock(), iter([2.0, 2.5, 2.5, 2.6, 2.0, 0.0]), iter([1.0, 1.5, 1.5, 2.6, 2.5])
    monkeypatch.setattr(time, "process_time", lambda: next(used))
    monkeypatch.setattr(probes, "usable_cores", lambda: 4)
    monkeypatch.setattr(probes, "own_seconds", lambda: next(own))
    probe = probe_for(torch.device("cpu"), clock)
    seen = []
    for pause in (0, 0.25, 0.01, 0.25, 0.25):
        clock.now += pause
        seen.append(probe.read())
    # Half a second in a quarter of one is two cores; the third reading comes too soon after the second.
    assert [reading.get(CPU) for reading in seen] == pytest.approx([None, 200, None, 40, 0])
    assert [reading.get(PROCESSOR_TIME) for reading in seen] == pytest.approx([None, 50, None, 100, 0])
    assert seen[-1][RSS] == pytest.approx(psutil.Process().memory_info().rss / 2**30, rel=0.1)
    assert set(probe_for(torch.device("meta")).read()) == {RSS}
    assert set(seen[0]) == {RSS, ALLOCATED, PEAK} and set(seen[-1]) == {CPU, RSS, PROCESSOR_TIME, ALLOCATED, PEAK}


def timeline(*samples):
    found = Timeline()
    for each in samples:
        found.add(Sample(*each))
    return found


def counted(*joules):
    """A mean power of 100 W, and a counter of energy, each second; it is refused where it is negative."""
    return [(at, {POWER: 100.0} | ({} if counter < 0 else {ENERGY: counter})) for at, counter in enumerate(joules)]


POWERS = [(0, {POWER: 999.0}), (1, {POWER: 100.0, CPU: 50.0}), (4, {POWER: 200.0})]
MEMORY = [(0, {RSS: 9.0}), (2, {CPU: 10.0, RSS: 1.0}), (4, {CPU: 20.0, RSS: 8.0}), (6, {CPU: 40.0, RSS: 3.0})]
HALVES = [(0, 1), (1.5, 2)]
MEAN = {"seconds": 1.5, "device/power_mean_w": 100.0}
SUMS = {  # samples, spans → their sum
    "a sample stands for the time since the one before": (
        POWERS, [(0, 4)], {"seconds": 4.0, "device/power_mean_w": 175.0, "host/cpu_mean_pct": 50.0},
    ),
    "only time within the spans counts": (
        MEMORY, [(-1, 1), (4, 5.5), (5.5, 9)], {"seconds": 3.0, "host/cpu_mean_pct": 30.0, "host/rss_max_gib": 3.0},
    ),
    "no spans": (POWERS, [], {}),
    "spans after the last sample": (POWERS, [(5, 6)], {}),
    "no samples": ([], [(0, 9)], {}),
    "energy is the counter's": (counted(500, 700, 1000), HALVES, MEAN | {"energy_j": 200 + 150}),
    "a counter that is refused": (counted(10, -1, -1), HALVES, MEAN),
    "a counter that is reset": (counted(10, 20, 5), HALVES, MEAN),
    "power alone": (counted(-1, -1, -1), HALVES, MEAN),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_readings_are_summed_up_over_spans(name):
    samples, spans, expected = SUMS[name]
    assert timeline(*samples).over(spans) == expected


def test_a_long_timeline_thins_itself_and_its_energy_stays_right(monkeypatch):
    monkeypatch.setattr(sampling, "MAX_SAMPLES", 100)
    samples, count = Timeline(), 500
    for second in range(count + 1):
        samples.add(Sample(second, {ENERGY: 7.0 * second, CPU: 30.0}))
        assert len(samples.after(-1)) <= 100
    expected = {"seconds": count, "host/cpu_mean_pct": 30, "energy_j": 7 * count}
    assert samples.over([(0, count)]) == pytest.approx(expected)


def test_the_samples_after_a_time_and_a_word_before_a_unit():
    samples = timeline((1, {CPU: 1.0}), (2, {CPU: 2.0}), (3, {CPU: 3.0}))
    assert [sample.timestamp for sample in samples.after(1)] == [2, 3]
    assert samples.after(3) == Timeline().after(0) == []
    assert named(POWER, "max") == "device/power_max_w"


def test_spans_begin_and_end_and_can_be_forgotten():
    clock = Clock()
    spans = Spans(clock)
    for seconds, running in ((1, True), (2, True), (4, False), (5, False), (6, True), (7, True)):
        clock.now = seconds
        spans.run(running)
    assert spans.all() == [(1, 4), (6, 7)]  # the one that runs ends now
    spans.clear()
    clock.now = 9
    assert (spans.running, spans.all()) == (True, [(7, 9)])


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "telemetry"]


def test_the_thread_samples_stops_and_starts_again(monkeypatch):
    monkeypatch.setattr(sampling, "MIN_INTERVAL_S", 0.01)
    reads = itertools.count(1.0)
    sampler = Sampler(lambda: {CPU: next(reads)}, interval_s=0.001)
    assert sampler.interval_s == 0.01
    sampler.stop()  # before any start
    for _ in range(2):
        first = next(reads) + 1
        sampler.start()
        sampler.start()
        wait_until(lambda: len(sampler.timeline.after(0)) >= 3, "no samples")
        assert len(threads()) == 1 and threads()[0].daemon
        sampler.stop()
        sampler.stop()
        assert threads() == []
        found = [sample.readings[CPU] for sample in sampler.timeline.after(0)]
        assert found == [first + number for number in range(len(found))]


def test_a_short_run_has_a_sample_at_its_beginning_at_its_end_and_where_one_is_asked_for():
    clock, held = Clock(), iter([9.0, 5.0, 1.0])
    sampler = Sampler(lambda: {RSS: next(held)}, interval_s=60, clock=clock)
    for call in (sampler.start, sampler.sample, sampler.stop):
        call()
        clock.now += 1
    assert sampler.timeline.after(0) == [(100.0, {RSS: 9.0}), (101.0, {RSS: 5.0}), (102.0, {RSS: 1.0})]
    sampler.sample()  # without effect


def test_a_driver_that_hangs_does_not_hang_the_run(monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(sampling, "PATIENCE_S", 0.02)
    sampler, started = Sampler(lambda: {CPU: float(answers.wait(10))}), time.monotonic()
    for call in (sampler.start, sampler.sample, sampler.stop):
        call()
    answers.set()
    assert time.monotonic() - started < 5


def test_after_an_error_nobody_waits_for_samples_any_more(monkeypatch):
    monkeypatch.setattr(sampling, "PATIENCE_S", 3600.0)
    sampler = Sampler(lambda: {}[CPU])
    with pytest.warns(UserWarning, match="not sampled any more: KeyError"):
        sampler.start()
    while threads():
        time.sleep(0.001)
    sampler.sample()
    sampler.stop()
    assert sampler.timeline.after(0) == []
