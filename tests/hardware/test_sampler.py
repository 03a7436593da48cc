"""The sampler: what it makes of the readings of its probes, and its thread."""

import os
import threading
import time

import pytest

from batchscope.hardware import sampler as sampling
from batchscope.hardware.nvml_readings import SM_ACTIVITY
from batchscope.hardware.probes import CPU, ENERGY, POWER, RSS, ProcessProbe
from batchscope.hardware.sampler import Sampler, named
from tests.support.devices import Clock


class Script:
    """A probe with given readings, one after another."""

    def __init__(self, *readings):
        self.readings = iter(readings)

    def read(self):
        return next(self.readings)


def run(sampler, clock, *pauses):
    """Open a window, then take a sample after each pause."""
    sampler.resume()
    for pause in pauses:
        clock.now += pause
        sampler._sample()


def test_summary_is_weighted_by_time():
    clock = Clock()
    sampler = Sampler([Script({POWER: 999.0}, {POWER: 100.0, CPU: 50.0}, {POWER: 200.0})], clock=clock)
    run(sampler, clock, 1.0, 3.0)

    assert sampler.summary() == {
        "seconds": 4.0,
        "device/power_mean_w": 175.0,
        "host/cpu_mean_pct": 50.0,
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

    assert sampler.summary() == {"seconds": 1.0, "host/rss_max_gib": 2.0}


def test_paused_time_is_not_in_the_summary():
    clock = Clock()
    readings = [{POWER: power, ENERGY: energy} for power, energy in [(1, 0), (100, 100), (9, 900), (300, 1200)]]
    sampler = Sampler([Script(*readings)], clock=clock)
    sampler.resume()
    clock.now += 1
    sampler.pause()
    clock.now += 50
    sampler._sample()  # does nothing
    sampler.pause()  # this has no effect either
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

    assert (summary["seconds"], summary["energy_j"], summary["device/power_mean_w"]) == (1.0, 300, 300)
    assert [timestamp for timestamp, _ in sampler.drain()] == [101.0, 102.0]


def test_drain_empties():
    clock = Clock()
    sampler = Sampler([Script({CPU: 0.0}, {CPU: 1.0}, {CPU: 2.0})], clock=clock)
    assert (sampler.drain(), sampler.summary()) == ([], {})
    run(sampler, clock, 1.0, 1.0)

    assert sampler.drain() == [(101.0, {CPU: 1.0}), (102.0, {CPU: 2.0})]
    assert sampler.drain() == []


def test_a_probe_that_raises_is_dropped_with_one_warning():
    class Broken:
        def read(self):
            raise ValueError("broken")

    clock = Clock()
    sampler = Sampler([Broken(), Script({CPU: 0.0}, {CPU: 1.0}, {CPU: 2.0})], clock=clock)
    with pytest.warns(RuntimeWarning, match="Broken is left out: broken") as caught:
        run(sampler, clock, 1.0, 1.0)

    assert len(caught) == 1
    assert [readings for _, readings in sampler.drain()] == [{CPU: 1.0}, {CPU: 2.0}]


@pytest.mark.parametrize(
    "key, expected",
    [(POWER, "device/power_max_w"), (SM_ACTIVITY, "device/sm_activity_max_pct")],
)
def test_a_word_goes_before_the_unit(key, expected):
    assert named(key, "max") == expected


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
    assert sampler.interval_s == sampling.MIN_INTERVAL_S
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
        drained = sampler.drain()
        assert len(drained) == probe.reads - 1  # all but the opening
        assert drained[-1].readings == {CPU: probe.reads}


def test_stopping_closes_a_short_run():
    clock = Clock()
    sampler = Sampler([Script({ENERGY: 5.0, RSS: 9.0}, {ENERGY: 7.0, RSS: 1.0})], interval_s=60, clock=clock)
    sampler.start()
    clock.now += 0.02
    sampler.stop()

    assert sampler.summary() == {
        "seconds": pytest.approx(0.02),
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

    monkeypatch.setattr(sampling, "PATIENCE_S", 0.05)
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
        os._exit(0 if sampler.drain() else 3)
    sampler._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    sampler.stop()
