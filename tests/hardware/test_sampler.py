"""Telemetry: what is summed up of a timeline over spans of time, and the thread that fills it."""

import os
import threading
import time

import pytest

from batchscope.hardware import sampler as sampling
from batchscope.hardware.nvml_readings import ENERGY, POWER
from batchscope.hardware.probes import CPU, RSS
from batchscope.hardware.sampler import Sample, Sampler, Spans, Timeline, named
from tests.support.devices import Clock


def timeline(*samples: tuple[float, dict[str, float]]) -> Timeline:
    found = Timeline()
    for timestamp, readings in samples:
        found.add(Sample(timestamp, readings))
    return found


def every_second(*joules: float | None) -> list[tuple[float, dict[str, float]]]:
    """A mean power of 100 W, and a counter of energy that may be refused."""
    return [
        (second, {POWER: 100.0} | ({} if counter is None else {ENERGY: counter}))
        for second, counter in enumerate(joules)
    ]


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
    "one sample": (POWERS[:1], [(0, 9)], {}),
    "no samples": ([], [(0, 9)], {}),
    "energy is the counter's": (every_second(500, 700, 1000), HALVES, MEAN | {"energy_j": 200 + 150}),
    "a counter that is refused": (every_second(10, None, None), HALVES, MEAN),
    "a counter that is reset": (every_second(10, 20, 5), HALVES, MEAN),
    "power alone": (every_second(None, None, None), HALVES, MEAN),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_readings_are_summed_up_over_spans(name: str) -> None:
    samples, spans, expected = SUMS[name]
    assert timeline(*samples).over(spans) == expected


def test_a_long_timeline_thins_itself_and_its_energy_stays_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_SAMPLES", 100)
    samples, count = Timeline(), 500
    for second in range(count + 1):
        samples.add(Sample(second, {ENERGY: 7.0 * second, CPU: 30.0}))
        assert len(samples.after(-1)) <= 100
    assert samples.over([(0, count)]) == pytest.approx(
        {"seconds": count, "host/cpu_mean_pct": 30, "energy_j": 7 * count}
    )


def test_the_samples_after_a_time_and_a_word_before_a_unit() -> None:
    samples = timeline((1, {CPU: 1.0}), (2, {CPU: 2.0}), (3, {CPU: 3.0}))
    assert [sample.timestamp for sample in samples.after(1)] == [2, 3]
    assert samples.after(3) == Timeline().after(0) == []
    assert named(POWER, "max") == "device/power_max_w"


def test_spans_begin_and_end_and_can_be_forgotten() -> None:
    clock = Clock()
    spans = Spans(clock)
    for seconds, running in ((1, True), (2, True), (4, False), (5, False), (6, True), (7, True)):
        clock.now = seconds
        spans.run(running)
    assert spans.all() == [(1, 4), (6, 7)]  # the one that runs ends now
    spans.clear()
    clock.now = 9
    assert (spans.running, spans.all()) == (True, [(7, 9)])


# --- the thread ------------------------------------------------------------------------------------------------------


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "telemetry"]


def test_the_thread_samples_stops_and_starts_again() -> None:
    third, reads = threading.Event(), []

    def read() -> dict[str, float]:
        reads.append(float(len(reads)))
        if len(reads) >= 3:
            third.set()
        return {CPU: reads[-1]}

    sampler = Sampler(read, interval_s=0.001)
    assert sampler.interval_s == sampling.MIN_INTERVAL_S
    sampler.stop()  # before any start
    for _ in range(2):
        third.clear()
        reads.clear()
        sampler.start()
        sampler.start()
        assert third.wait(5)
        assert len(threads()) == 1 and threads()[0].daemon
        sampler.stop()
        sampler.stop()
        assert threads() == []
        assert [sample.readings[CPU] for sample in sampler.timeline.after(0)] == reads


def test_a_short_run_has_a_sample_at_its_beginning_at_its_end_and_where_one_is_asked_for() -> None:
    clock, held = Clock(), iter([9.0, 5.0, 1.0])
    sampler = Sampler(lambda: {RSS: next(held)}, interval_s=60, clock=clock)
    sampler.start()
    clock.now += 1
    sampler.sample()
    clock.now += 1
    sampler.stop()
    assert sampler.timeline.after(0) == [(100.0, {RSS: 9.0}), (101.0, {RSS: 5.0}), (102.0, {RSS: 1.0})]
    sampler.sample()  # without effect


def test_a_driver_that_hangs_does_not_hang_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(sampling, "PATIENCE_S", 0.05)
    sampler = Sampler(lambda: {CPU: float(answers.wait(10))})
    started = time.monotonic()
    sampler.start()
    sampler.sample()
    sampler.stop()
    assert time.monotonic() - started < 5
    answers.set()


def test_after_an_error_nobody_waits_for_samples_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "PATIENCE_S", 3600.0)
    sampler = Sampler(lambda: {}[CPU])
    with pytest.warns(UserWarning, match="not sampled any more: KeyError"):
        sampler.start()
    while threads():
        time.sleep(0.001)
    sampler.sample()
    sampler.stop()
    assert sampler.timeline.after(0) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_can_stop_and_start() -> None:
    sampler = Sampler(lambda: {CPU: 1.0}, interval_s=60)
    sampler.start()
    pid = os.fork()
    if pid == 0:
        sampler.sample()
        sampler.stop()
        sampler.start()
        sampler.stop()
        os._exit(0 if sampler.timeline.after(0) else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    sampler.stop()
