"""Every moment of a step belongs to one part: exact times, on a clock that the test moves."""

from types import SimpleNamespace

import pytest
import torch

from batchscope.callbacks import _timer
from batchscope.callbacks._communication import WARMUP, Exchanges
from batchscope.callbacks._timer import PAUSE, TIMED, CudaClock, HostClock, StepTimer, clock_for, parts_ms
from tests.support.mps import Mps


@pytest.fixture
def timer(world) -> StepTimer:
    return StepTimer(world)


def parts_of(timer: StepTimer) -> list[dict[str, float]]:
    """The milliseconds of each finished batch by part, without the parts of 0 ms."""
    rows = parts_ms(timer.finished, timer.clock).tolist()
    return [{part: pytest.approx(ms) for part, ms in zip(TIMED, row, strict=True) if ms} for row in rows]


# The events of a step: a number of ms that pass, `+part` enters a part, `-part` leaves a part → ms by part.
STEPS = {
    "each part, and what is left over": (
        "+data_wait 1 -data_wait 1 +transfer 2 -transfer +forward 3 -forward +backward 4 -backward 1 +optimizer 5 -optimizer",
        {"data_wait": 1, "transfer": 2, "forward": 3, "backward": 4, "optimizer": 5, "other": 2},
    ),
    "the innermost part counts": (  # Lightning's optimizer_step calls the closure that trains
        "+optimizer 1 +forward 10 -forward +backward 20 -backward 2 -optimizer",
        {"optimizer": 3, "forward": 10, "backward": 20},
    ),
    "within a pause nothing else counts": (
        f"1 +{PAUSE} 5 +transfer 5 -transfer +{PAUSE} 3 -{PAUSE} -{PAUSE} 2",
        {"other": 3, PAUSE: 13},
    ),
    "a part that was not entered is not left": ("+forward -backward 4", {"forward": 4}),
}


@pytest.mark.parametrize(("events", "expected"), STEPS.values(), ids=STEPS)
def test_time_belongs_to_the_part_that_runs(events, expected, timer, world) -> None:
    timer.begin_batch()
    for event in events.split():
        if event.isdecimal():
            world.now += int(event) / 1e3
        else:
            (timer.enter if event[0] == "+" else timer.leave)(event[1:])
    timer.end_step()
    assert parts_of(timer) == [expected]


def test_steps_adjoin_so_that_no_time_is_lost_but_between_two_epochs(timer: StepTimer, world) -> None:
    for _ in range(2):
        for _ in range(3):
            timer.begin_batch()
            world.now += 7
            with timer.pause():
                world.now += 4
        timer.end_step()
        world.now += 100
    assert parts_of(timer) == [{"other": 7e3, PAUSE: 4e3}] * 6
    assert timer.finished[0].moments[-1] is timer.finished[1].moments[0]


def test_updates_are_counted_by_lightnings_step(timer: StepTimer) -> None:
    for global_step in (0, 1, 1, 2):  # two batches an update
        timer.begin_batch()
        timer.end_batch(global_step)
    assert (timer.updates.count, timer.updates.is_between) == (2, True)


class FakeEvent:
    """The methods of a CUDA event that CudaClock calls; it records the time of a simulated device."""

    device_ms, created = 0.0, 0

    def __init__(self, enable_timing: bool = False):
        assert enable_timing
        FakeEvent.created += 1

    def record(self) -> None:
        self.at = FakeEvent.device_ms

    def elapsed_time(self, end: "FakeEvent") -> float:
        return end.at - self.at


def test_on_cuda_the_device_tells_the_time_without_a_synchronisation_and_events_are_used_again(monkeypatch) -> None:
    fake = SimpleNamespace(cuda=SimpleNamespace(Event=FakeEvent), device=torch.device)  # which has no `synchronize`
    monkeypatch.setattr(_timer, "torch", fake)
    assert type(clock_for(torch.device("cpu"))) is HostClock
    timer = StepTimer(clock_for(torch.device("cuda")))
    timer.begin_batch()
    timer.enter("forward")
    FakeEvent.device_ms += 1.5
    timer.leave("forward")
    FakeEvent.device_ms += 0.25
    timer.end_step()
    assert parts_of(timer) == [{"forward": 1.5, "other": 0.25}]
    clock, FakeEvent.created = CudaClock(), 0
    for _ in range(10):
        clock.reuse([clock.mark(), clock.mark()])
    assert FakeEvent.created == 2


@pytest.fixture
def mps(monkeypatch) -> Mps:
    device = Mps()
    monkeypatch.setattr(_timer, "torch", device.torch())
    monkeypatch.setattr(_timer.MpsClock, "mark", staticmethod(device.perf_counter))
    return device


def mps_steps(mps: Mps, steps: int, device_s: float, host_s: float = 0.002, wait_s: float = 0.001) -> StepTimer:
    """Steps with a wait for data; the host submits a step in `host_s`, and the device computes a step in `device_s`."""
    timer = StepTimer(clock_for(torch.device("mps")))
    for _ in range(steps):
        timer.begin_batch()
        timer.enter("data_wait")
        mps.now += wait_s
        timer.leave("data_wait")
        timer.enter("forward")
        mps.submit(device_s, host_s)
        timer.leave("forward")
    timer.end_step()
    return timer


def test_on_mps_a_step_is_as_long_as_the_devices_although_the_host_is_ahead(mps: Mps) -> None:
    timer = mps_steps(mps, 20, device_s=0.030)
    steps_ms = parts_ms(timer.finished, timer.clock).sum(1)
    assert steps_ms[2:-1] == pytest.approx([30] * 17)
    assert steps_ms.sum() == pytest.approx(20 * 30 + 3)  # from an idle device to an idle device
    assert mps.waits == 0  # a wait for the whole queue happens at the end alone


def test_on_mps_a_host_that_is_slower_than_the_device_is_not_held_up(mps: Mps) -> None:
    timer = mps_steps(mps, 20, device_s=0.001, host_s=0.005)
    assert parts_ms(timer.finished, timer.clock).sum(1)[:-1] == pytest.approx([6] * 19)


def test_on_mps_the_wait_for_data_and_the_rest_are_the_only_parts(mps: Mps) -> None:
    timer = mps_steps(mps, 5, device_s=0.030)
    assert [sorted(parts) for parts in parts_of(timer)] == [["data_wait", "other"]] * 5


def test_on_mps_the_step_after_a_pause_begins_on_an_idle_device(mps: Mps) -> None:
    timer = mps_steps(mps, 3, device_s=0.030)
    assert mps.now >= mps.free_at
    assert timer.clock._last_event is None


def test_on_mps_what_the_device_still_computes_before_a_pause_is_in_the_step(mps: Mps) -> None:
    timer = StepTimer(clock_for(torch.device("mps")))
    timer.begin_batch()
    mps.submit(0.030, 0.002)
    timer.settle()
    timer.enter(PAUSE)
    mps.now += 1.0
    timer.settle()
    timer.end_step()
    assert parts_of(timer) == [{"other": 32, PAUSE: 1000}]


class Exchanging(torch.nn.parallel.DistributedDataParallel):
    """A DDP without ranks: the two attributes that Exchanges reads."""

    def __init__(self, *layers: torch.nn.Module) -> None:
        torch.nn.Module.__init__(self)
        self.module, self.require_backward_grad_sync = torch.nn.ModuleList(layers), True


def test_each_backward_pass_of_a_batch_has_its_wait_for_other_ranks(timer: StepTimer) -> None:
    layers = [torch.nn.Linear(1, 1) for _ in range(2)]  # as of a GAN
    exchanges = Exchanges(SimpleNamespace(world_size=2, strategy=SimpleNamespace(model=Exchanging(*layers))), timer)
    for _ in range(WARMUP):
        timer.begin_batch()
        for layer in layers:
            layer(torch.ones(1, 1)).sum().backward()
            timer.clock.move(0.003)
            exchanges.end_backward()
    assert timer.current.waits_ms(timer.clock) == pytest.approx(2 * 3)
