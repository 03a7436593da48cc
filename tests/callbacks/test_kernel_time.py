"""The time of kernels in a step: the device is held until the host has submitted the step, in one update of a fit."""

from types import SimpleNamespace

import pytest

from batchscope.callbacks import _kernel_time, _measurement
from batchscope.callbacks._kernel_time import KernelTime
from batchscope.callbacks._table import RECORDED
from batchscope.callbacks._timer import HostClock
from tests.callbacks.support import monitoring
from tests.support.third_party_modules import Stranger, loader, train


class Stream(HostClock):
    """A device with a queue: a kernel begins when it is submitted and the previous one is over; the test moves both clocks."""

    can_hold = True

    def __init__(self) -> None:
        self.host = self.device = 0.0  # the time of the host, and when the queue is empty, in seconds
        self.held: list[float] = []

    def mark(self) -> float:
        self.device = max(self.device, self.host)
        return self.device

    def ready(self, mark: float) -> bool:
        return mark <= self.host

    def hold(self, seconds: float) -> None:
        self.held.append(seconds)
        self.run(seconds)

    def run(self, seconds: float) -> None:
        """Submit a kernel of so many seconds."""
        self.device = max(self.device, self.host) + seconds


@pytest.fixture
def stream(monkeypatch):
    stream = Stream()
    monkeypatch.setattr(_kernel_time.time, "perf_counter", lambda: stream.host)
    return stream


def step(stream, kernels, waits=False):
    """The host submits kernels, each in 1 ms; a kernel takes so many seconds on the device."""
    for seconds in kernels:
        stream.host += 0.001
        stream.run(seconds)
        if waits:
            stream.host = max(stream.host, stream.device)


def kernel_seconds(stream, kernels, batches=1, update=2, **options):
    kernel_time = KernelTime(stream, update)
    for number in (1, 2, 3):
        for _ in range(batches):
            kernel_time.start(number)
            step(stream, kernels, **options)
            kernel_time.stop(8.0)
    stream.host += 10  # the device has finished
    return kernel_time.seconds


def test_kernels_that_wait_for_their_host_are_timed_without_the_gaps(stream):
    assert kernel_seconds(stream, [1e-4] * 20) == pytest.approx(20e-4)
    assert stream.held == [pytest.approx(1.5 * 0.020 + 0.001)]  # from the host's time for the batch before


def test_kernels_that_follow_each_other_are_timed_as_well(stream):
    assert kernel_seconds(stream, [0.01] * 20) == pytest.approx(0.2)


def test_an_update_of_several_batches_has_the_kernels_of_all(stream):
    assert kernel_seconds(stream, [1e-4] * 20, batches=3) == pytest.approx(60e-4)


def test_a_batch_that_takes_the_host_longer_than_the_others_of_its_update_is_held_for_as_long(stream):
    """The last batch of an update also submits the optimizer's step."""
    kernel_time = KernelTime(stream, 2)
    for update, kernels in ((1, 5), (1, 40), (2, 5), (2, 40)):
        kernel_time.start(update)
        step(stream, [1e-4] * kernels)
        kernel_time.stop(8.0)
    stream.host += 10
    assert kernel_time.seconds == pytest.approx(45e-4) and kernel_time.samples == 16


def test_of_a_step_that_waits_for_the_device_nothing_is_known(stream):
    assert kernel_seconds(stream, [1e-4] * 20, waits=True) is None


def test_nothing_is_known_before_the_device_is_done_or_where_no_update_is_asked_for(stream):
    kernel_time = KernelTime(stream, 1)
    kernel_time.start(1)
    step(stream, [0.01] * 20)
    kernel_time.stop(8.0)
    assert kernel_time.seconds is None
    assert kernel_seconds(stream, [0.01], update=0) is None


def test_the_device_is_held_for_half_a_second_at_most(stream):
    kernel_seconds(stream, [1e-4] * 2000)
    assert stream.held == [0.5]


class Held(HostClock):
    """Notes the updates in which it is asked to hold the device, and holds nothing."""

    can_hold = True

    def __init__(self, monitor) -> None:
        self.monitor, self.updates = monitor, []

    def hold(self, seconds: float) -> None:
        self.updates.append(self.monitor.table.last_step)


def test_a_fit_holds_the_device_in_the_update_after_the_recorded_ones_which_counts_in_no_rate(monkeypatch):
    monitor = monitoring(record_operations=True, warmup_steps=0)
    clock = Held(monitor)
    monkeypatch.setattr(_measurement, "clock_for", lambda device: clock)
    train(Stranger(), monitor, max_epochs=3)
    assert len(clock.updates) == 1
    recorded = monitor.table.rows["flags"] & RECORDED > 0
    assert monitor.table.rows["step"][recorded].tolist() == [2, 3, 4, 5]
    assert monitor.summary["updates"] == 15 - 5


@pytest.mark.parametrize(("samples", "is_known"), [(40, True), (17, False)], ids=["a whole batch", "a short batch"])
def test_the_kernels_of_a_short_batch_are_not_those_of_a_step(samples, is_known, monkeypatch):
    """The held update is the fifth, and with 17 samples its batch has one."""
    clock = Held(monitor := monitoring(record_operations=True))
    monkeypatch.setattr(clock, "ready", lambda mark: not monitor._measurement._kernel_time.is_active)
    monkeypatch.setattr(_measurement, "clock_for", lambda device: clock)
    train(Stranger(), monitor, data=loader(samples), max_epochs=4)
    assert (monitor.measured.kernel_s is not None) is is_known


@pytest.mark.parametrize(("ranks", "compiled", "update"), [(1, False, 5), (1, True, 8), (2, False, 0)])
def test_the_held_update_comes_after_what_is_recorded_and_captured_and_of_ranks_there_is_none(
    ranks, compiled, update, monkeypatch
):
    monkeypatch.setattr(_measurement, "is_compiled_module", lambda module: compiled)
    recorded = SimpleNamespace(last_update=4)
    trainer = SimpleNamespace(world_size=ranks)
    assert _measurement._choose_held_update(trainer, Stranger(), recorded, can_hold=True) == update


def test_a_cpu_is_not_held(monkeypatch):
    holds = []
    monkeypatch.setattr(HostClock, "hold", lambda clock, seconds: holds.append(seconds))
    train(Stranger(), monitoring(record_operations=True), max_epochs=5)
    assert holds == []
