"""The best rate of a work: timed from idle to idle, in short blocks of which the best counts."""

from collections.abc import Callable

import pytest
import torch

from batchscope.hardware import timing
from batchscope.hardware.timing import Effort, Work, best_rates, time_runs

EFFORT = Effort(seconds=10.0, turn_s=1.0, slowest_run_s=2.0)


class FakeDevice:
    """A device on which work takes exactly what the test says; its clock stands still otherwise."""

    now = 0.0

    def clock(self) -> float:
        return self.now

    def run(self, *seconds: float) -> Callable[[], None]:
        """Takes these seconds, one after another; the last of them from then on."""
        left = list(seconds)

        def run() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run

    def work(self, amount: float, *seconds: float) -> Work:
        return Work(amount, lambda: self.run(*seconds))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Times are read off the clock of a fake device, in blocks of half a second."""
    fake = FakeDevice()
    monkeypatch.setattr(timing, "clock", fake.clock)
    monkeypatch.setattr(timing, "_BLOCK_S", 0.5)
    monkeypatch.setattr(timing, "_ALWAYS_TRIED", 1)
    return fake


def test_runs_are_timed_from_an_idle_accelerator_to_an_idle_one(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: calls.append("read") or len(calls))
    assert time_runs(lambda: calls.append("run"), 2) == 6 - 2
    assert calls == ["wait", "read", "run", "run", "wait", "read"]


def test_the_best_block_counts(device):
    assert best_rates({"a": [device.work(100, 1.5, 4.0, 1.25, 8.0, 3.0)]}, EFFORT) == {"a": 100 / 1.25}


def test_the_fastest_of_several_ways_is_the_rate(device):
    ways = [device.work(1, 1.0), device.work(2, 0.5), device.work(2, 2.0)]
    assert best_rates({"a": ways}, EFFORT) == {"a": 4.0}


def test_a_slow_start_costs_no_way_its_chance(device):
    late = device.work(5, 2.0, 2.0, 1.0)
    assert best_rates({"a": [device.work(4, 1.0), late]}, EFFORT) == {"a": 5.0}


def test_short_work_is_timed_in_blocks_that_the_clock_can_resolve(device, monkeypatch):
    blocks = []
    monkeypatch.setattr(timing, "time_runs", lambda run, times: blocks.append(times) or time_runs(run, times))
    device.work(1, 0.125).take_turn(1.0)
    assert blocks == [1, 4, 4]  # 1/8 s to learn how fast it is, then blocks of half a second until the turn is over


def test_the_start_of_a_library_in_the_first_run_hides_no_larger_work(device):
    first = device.work(0.1, 5.0, 0.125)  # 40 times slower than it is: what follows would seem to take 50 s
    assert best_rates({"a": [first, device.work(1, 0.5)]}, EFFORT) == {"a": 2.0}


def test_a_disturbed_start_hides_no_larger_work(device):
    first = device.work(1, 100.0, 100.0, 100.0, 0.125)  # the second work would seem to take 1600 s
    assert best_rates({"a": [first, device.work(16, 1.0)]}, EFFORT) == {"a": 16.0}


def test_some_works_are_tried_however_slow_the_first_ones_are(device, monkeypatch):
    monkeypatch.setattr(timing, "_ALWAYS_TRIED", 2)
    assert best_rates({"a": [device.work(1, 100.0), device.work(16, 1.0)]}, EFFORT) == {"a": 16.0}


def test_work_that_would_take_too_long_is_not_begun(device):
    assert best_rates({"a": [device.work(10, 1.0), device.work(21, 0.001)]}, EFFORT) == {"a": 10.0}


def test_what_a_device_does_not_support_is_left_out(device):
    def unsupported() -> Work:
        def run() -> None:
            raise RuntimeError('"addmm" not implemented for this format')

        return Work(1, lambda: run)

    choices = {"a": [unsupported()], "b": [unsupported(), device.work(2, 1.0)]}
    assert best_rates(choices, EFFORT) == {"b": 2.0}


def test_what_does_not_fit_into_memory_is_left_out(device):
    def no_memory() -> Callable[[], None]:
        raise torch.OutOfMemoryError("out of memory")

    assert best_rates({"a": [device.work(1, 1.0), Work(2, no_memory)]}, EFFORT) == {"a": 1.0}


def test_measuring_ends_when_its_time_is_up(device):
    best_rates({"a": [device.work(1, 1.0)], "b": [device.work(1, 1.0)]}, EFFORT)
    assert device.now == 2 * (1 + 1) + 10  # a first run and a turn of each, then the time for the finals
