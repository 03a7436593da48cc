"""Every moment of a step belongs to one part: exact times, on a clock that the test moves."""

import time
from types import SimpleNamespace

import lightning
import pytest
import torch

from batchscope.callbacks import _timer
from batchscope.callbacks._timer import (
    PAUSE,
    TIMED,
    CudaClock,
    HostClock,
    StepTimer,
    add_timer,
    clock_for,
    parts_ms,
    pause,
    remove_timer,
)
from batchscope.hardware.sampler import Spans
from batchscope.records.step_parts import PARTS


class FakeClock(HostClock):
    """Moves when a test moves it; in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def timer(clock: FakeClock) -> StepTimer:
    return StepTimer(clock)


def parts_of(timer: StepTimer) -> list[dict[str, float]]:
    """Milliseconds by part of the finished steps; those of the step alone."""
    rows = [dict(zip(TIMED, row, strict=True)) for row in parts_ms(timer.finished, timer.clock).tolist()]
    return [{part: ms for part, ms in row.items() if part in PARTS} for row in rows]


def test_preparing_a_batch_is_waiting_for_data(timer: StepTimer, clock: FakeClock) -> None:
    timer.begin_batch()
    timer.enter("transfer")
    clock.now += 1e-3
    timer.enter("on_after_batch_transfer")
    clock.now += 2e-3
    timer.leave("on_after_batch_transfer")
    timer.leave("transfer")
    timer.end_step()
    parts = parts_of(timer)[0]
    assert (parts["transfer"], parts["data_wait"]) == pytest.approx((1, 2))
    (row,) = parts_ms(timer.finished, clock)
    assert row[TIMED.index("on_after_batch_transfer")] == pytest.approx(2)


def test_the_parts_of_a_step_and_what_is_left_over(timer: StepTimer, clock: FakeClock) -> None:
    timer.begin_batch()
    for part, ms in (("data_wait", 1), ("transfer", 2), ("forward", 3), ("backward", 4), ("optimizer", 5)):
        timer.enter(part)
        clock.now += ms / 1e3
        timer.leave(part)
        clock.now += 0.1 / 1e3
    timer.end_step()
    parts = parts_of(timer)[0]
    expected = {"data_wait": 1, "transfer": 2, "forward": 3, "backward": 4, "optimizer": 5, "other": 0.5}
    assert parts == pytest.approx(expected)


def test_time_belongs_to_the_innermost_part(timer: StepTimer, clock: FakeClock) -> None:
    timer.begin_batch()
    timer.enter("optimizer")  # Lightning's optimizer_step calls the closure that trains
    clock.now += 0.001
    timer.enter("forward")
    clock.now += 0.010
    timer.leave("forward")
    timer.enter("backward")
    clock.now += 0.020
    timer.leave("backward")
    clock.now += 0.002
    timer.leave("optimizer")
    timer.end_step()
    parts = parts_of(timer)[0]
    assert (parts["forward"], parts["backward"], parts["optimizer"]) == pytest.approx((10, 20, 3))


def test_steps_adjoin_so_that_no_time_is_lost(timer: StepTimer, clock: FakeClock) -> None:
    for _ in range(3):
        timer.begin_batch()
        clock.now += 0.007
    timer.end_step()
    assert [sum(step.values()) for step in parts_of(timer)] == pytest.approx([7, 7, 7])
    assert timer.finished[0].end is timer.finished[1].moments[0]


def test_a_pause_is_excluded_whatever_happens_in_it(timer: StepTimer, clock: FakeClock) -> None:
    timer.begin_batch()
    clock.now += 0.001
    timer.enter(PAUSE)
    clock.now += 5
    timer.enter("transfer")  # validation moves batches, too
    clock.now += 5
    timer.leave("transfer")
    timer.leave(PAUSE)
    clock.now += 0.002
    timer.end_step()
    assert parts_of(timer)[0] == pytest.approx(
        {"data_wait": 0, "transfer": 0, "forward": 0, "backward": 0, "optimizer": 0, "other": 3}
    )


def test_a_pause_may_be_nested_and_is_in_no_part_and_not_in_the_time_of_the_fit(
    timer: StepTimer, clock: FakeClock
) -> None:
    timer.begin_batch()
    clock.now += 0.001
    with timer.pause():
        clock.now += 0.004
        with timer.pause():
            clock.now += 0.004
            time.sleep(0.01)
    clock.now += 0.002
    timer.end_step()
    (row,) = parts_ms(timer.finished, clock)
    assert (row[TIMED.index(PAUSE)], row[: len(PARTS)].sum()) == pytest.approx((8, 3))
    assert 0.01 <= timer.paused_s < 1


def test_steps_adjoin_after_a_pause(timer: StepTimer, clock: FakeClock) -> None:
    timer.begin_batch()
    with timer.pause():
        clock.now += 0.004
    timer.begin_batch()
    assert timer.finished[0].end is timer.current.moments[0]


def test_whoever_times_the_trainer_leaves_a_pause_out(timer: StepTimer, clock: FakeClock) -> None:
    trainer = lightning.Trainer(logger=False, enable_checkpointing=False)
    other = StepTimer(clock)
    for each in (timer, other):
        add_timer(trainer, each)
        each.begin_batch()
    remove_timer(trainer, other)
    with pause(trainer):
        clock.now += 0.003
    for each in (timer, other):
        each.end_step()
    assert [sum(parts_of(each)[0].values()) for each in (timer, other)] == pytest.approx([0, 3])


def test_what_lies_between_two_epochs_is_no_steps(timer: StepTimer, clock: FakeClock) -> None:
    timer.begin_batch()
    clock.now += 0.001
    timer.end_step()
    clock.now += 100
    timer.begin_batch()
    clock.now += 0.001
    timer.end_step()
    assert [sum(step.values()) for step in parts_of(timer)] == pytest.approx([1, 1])


def test_a_part_that_began_before_the_step_does_not_end_another(timer: StepTimer, clock: FakeClock) -> None:
    timer.begin_batch()
    timer.enter("forward")
    timer.leave("backward")
    clock.now += 0.004
    timer.end_step()
    assert parts_of(timer)[0]["forward"] == pytest.approx(4)


def test_updates_are_counted_by_lightnings_step(timer: StepTimer) -> None:
    for global_step in (0, 1, 1, 2):  # two batches an update
        timer.begin_batch()
        timer.end_batch(global_step)
    assert (timer.batches, timer.updates, timer.is_between_updates) == (4, 2, True)


def test_the_spans_of_training_have_no_pause_and_no_time_between_epochs(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_timer, "Spans", lambda: Spans(clock.mark))
    timer = StepTimer(clock)
    timer.begin_batch()
    clock.now += 10
    with timer.pause():
        clock.now += 5
    clock.now += 10
    timer.end_step()
    clock.now += 30
    timer.begin_batch()
    clock.now += 1
    assert timer.spans.all() == [(0, 10), (15, 25), (55, 56)]
    timer.spans.clear()
    clock.now += 2
    assert timer.spans.all() == [(56, 58)]


class FakeEvent:
    """The part of a CUDA event that is used: it takes the device's time when the device comes by."""

    device_ms = 0.0
    created = 0
    done = True

    def __init__(self, enable_timing: bool = False):
        assert enable_timing
        FakeEvent.created += 1

    def record(self) -> None:
        self.at = FakeEvent.device_ms

    def query(self) -> bool:
        return FakeEvent.done

    def synchronize(self) -> None:
        FakeEvent.done = True

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert FakeEvent.done, "reading an event that has not passed would wait"
        return end.at - self.at


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> type[FakeEvent]:
    FakeEvent.device_ms, FakeEvent.created, FakeEvent.done = 0.0, 0, True

    def forbidden() -> None:
        raise AssertionError("synchronised")

    fake = SimpleNamespace(cuda=SimpleNamespace(Event=FakeEvent, synchronize=forbidden), device=torch.device)
    monkeypatch.setattr(_timer, "torch", fake)
    return FakeEvent


def test_on_cuda_the_device_tells_the_time(cuda: type[FakeEvent]) -> None:
    clock = clock_for(torch.device("cuda"))
    assert isinstance(clock, CudaClock)
    timer = StepTimer(clock)
    timer.begin_batch()
    timer.enter("forward")
    cuda.device_ms += 1.5
    timer.leave("forward")
    cuda.device_ms += 0.25
    timer.end_step()
    assert parts_of(timer)[0] == {
        "data_wait": 0, "transfer": 0, "forward": 1.5, "backward": 0, "optimizer": 0, "other": 0.25
    }  # fmt: skip


def test_events_are_recorded_again_instead_of_created(cuda: type[FakeEvent]) -> None:
    clock = CudaClock()
    for _ in range(10):
        marks = [clock.mark(), clock.mark()]
        clock.reuse(marks)
    assert cuda.created == 2


def test_the_cpu_has_the_hosts_clock() -> None:
    assert isinstance(clock_for(torch.device("cpu")), HostClock)


def test_a_pause_within_a_validation_counts_as_paused(timer: StepTimer) -> None:
    timer.begin_batch()
    timer.enter(PAUSE)
    with timer.pause():
        time.sleep(0.01)
    assert timer.paused_s >= 0.01


def test_a_pause_that_is_a_part_of_the_fit_is_in_no_step_and_in_the_fits_time(
    timer: StepTimer, clock: FakeClock
) -> None:
    timer.begin_batch()
    with timer.pause(part_of_fit=True):
        clock.now += 1
    timer.end_step()
    assert sum(parts_of(timer)[0].values()) == 0
    assert timer.paused_s == 0
