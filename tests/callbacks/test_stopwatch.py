"""Every moment of a step belongs to one part: exact times, on a clock that the test moves."""

from types import SimpleNamespace

import pytest
import torch

from batchscope.callbacks import _stopwatch as stopwatch
from batchscope.callbacks._stopwatch import MEASURED, PAUSE, WRITING, Clock, CudaClock, Stopwatch, clock_for, parts_ms
from batchscope.records.step_parts import PARTS


class FakeClock(Clock):
    """Moves when a test moves it; in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def watch(clock: FakeClock) -> Stopwatch:
    return Stopwatch(clock)


def parts_of(watch: Stopwatch) -> list[dict[str, float]]:
    """Milliseconds by part of the finished steps; what is no part of the step only where there was any."""
    rows = [dict(zip(MEASURED, row, strict=True)) for row in parts_ms(watch.finished, watch.clock).tolist()]
    return [{part: ms for part, ms in row.items() if ms or part in PARTS} for row in rows]


def test_preparing_a_batch_is_waiting_for_data(watch: Stopwatch, clock: FakeClock) -> None:
    watch.begin_step()
    watch.enter("transfer")
    clock.now += 1e-3
    watch.enter("on_after_batch_transfer")
    clock.now += 2e-3
    watch.leave("on_after_batch_transfer")
    watch.leave("transfer")
    watch.end_step()
    parts = parts_of(watch)[0]
    assert (parts["transfer"], parts["data_wait"]) == pytest.approx((1, 2))
    assert parts["on_after_batch_transfer"] == pytest.approx(2)


def test_the_parts_of_a_step_and_what_is_left_over(watch: Stopwatch, clock: FakeClock) -> None:
    watch.begin_step()
    for part, ms in (("data_wait", 1), ("transfer", 2), ("forward", 3), ("backward", 4), ("optimizer", 5)):
        watch.enter(part)
        clock.now += ms / 1e3
        watch.leave(part)
        clock.now += 0.1 / 1e3
    watch.end_step()
    parts = parts_of(watch)[0]
    expected = {"data_wait": 1, "transfer": 2, "forward": 3, "backward": 4, "optimizer": 5, "other": 0.5}
    assert parts == pytest.approx(expected)


def test_time_belongs_to_the_innermost_part(watch: Stopwatch, clock: FakeClock) -> None:
    watch.begin_step()
    watch.enter("optimizer")  # Lightning's optimizer_step calls the closure that trains
    clock.now += 0.001
    watch.enter("forward")
    clock.now += 0.010
    watch.leave("forward")
    watch.enter("backward")
    clock.now += 0.020
    watch.leave("backward")
    clock.now += 0.002
    watch.leave("optimizer")
    watch.end_step()
    parts = parts_of(watch)[0]
    assert (parts["forward"], parts["backward"], parts["optimizer"]) == pytest.approx((10, 20, 3))


def test_steps_adjoin_so_that_no_time_is_lost(watch: Stopwatch, clock: FakeClock) -> None:
    for _ in range(3):
        watch.begin_step()
        clock.now += 0.007
    watch.end_step()
    assert [sum(step.values()) for step in parts_of(watch)] == pytest.approx([7, 7, 7])
    assert watch.finished[0].end is watch.finished[1].moments[0]


def test_a_pause_is_excluded_whatever_happens_in_it(watch: Stopwatch, clock: FakeClock) -> None:
    watch.begin_step()
    clock.now += 0.001
    watch.enter(PAUSE)
    clock.now += 5
    watch.enter("transfer")  # validation moves batches, too
    clock.now += 5
    watch.leave("transfer")
    watch.leave(PAUSE)
    clock.now += 0.002
    watch.end_step()
    assert parts_of(watch)[0] == pytest.approx(
        {"data_wait": 0, "transfer": 0, "forward": 0, "backward": 0, "optimizer": 0, "other": 3}
    )


def test_writing_is_excluded_and_the_device_is_sampled_on(clock: FakeClock) -> None:
    heard: list[bool] = []
    watch = Stopwatch(clock, heard.append)
    watch.begin_step()
    clock.now += 0.001
    with watch.excluding(WRITING):
        clock.now += 0.004
        with watch.excluding(WRITING):
            clock.now += 0.004
        watch.enter(PAUSE)
        clock.now += 1
        watch.leave(PAUSE)
    clock.now += 0.002
    watch.end_step()
    parts = parts_of(watch)[0]
    assert (parts.pop("writing"), sum(parts.values())) == pytest.approx((8, 3))
    assert heard == [True, False, True, False]  # only the pause is heard


def test_steps_adjoin_after_writing(watch: Stopwatch, clock: FakeClock) -> None:
    watch.begin_step()
    with watch.excluding(WRITING):
        clock.now += 0.004
    watch.begin_step()
    assert watch.finished[0].end is watch.current.moments[0]


def test_what_lies_between_two_epochs_is_no_steps(watch: Stopwatch, clock: FakeClock) -> None:
    watch.begin_step()
    clock.now += 0.001
    watch.end_step()
    clock.now += 100
    watch.begin_step()
    clock.now += 0.001
    watch.end_step()
    assert [sum(step.values()) for step in parts_of(watch)] == pytest.approx([1, 1])


def test_a_part_that_began_before_the_step_does_not_end_another(watch: Stopwatch, clock: FakeClock) -> None:
    watch.begin_step()
    watch.enter("forward")
    watch.leave("backward")
    clock.now += 0.004
    watch.end_step()
    assert parts_of(watch)[0]["forward"] == pytest.approx(4)


def test_the_listener_hears_when_training_time_begins_and_ends_and_acts_outside_of_it(clock: FakeClock) -> None:
    heard = []

    def listener(running: bool) -> None:
        heard.append(running)
        clock.now += 100

    watch = Stopwatch(clock, listener)
    watch.begin_step()
    clock.now += 0.001
    watch.begin_step()  # adjoins: no call
    clock.now += 0.002
    watch.enter(PAUSE)
    clock.now += 5
    watch.enter("transfer")
    watch.leave("transfer")
    watch.leave(PAUSE)
    clock.now += 0.003
    watch.end_step()
    watch.end_step()
    assert heard == [True, False, True, False]
    assert [sum(step.values()) for step in parts_of(watch)] == pytest.approx([1, 5])


def test_a_step_that_begins_in_a_pause_begins_after_the_listener(clock: FakeClock) -> None:
    def listener(running: bool) -> None:
        clock.now += 100

    watch = Stopwatch(clock, listener)
    watch.begin_step()
    watch.enter(PAUSE)
    watch.begin_step()
    clock.now += 0.004
    watch.end_step()
    assert [sum(step.values()) for step in parts_of(watch)] == pytest.approx([0, 4])


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
    monkeypatch.setattr(stopwatch, "torch", fake)
    return FakeEvent


def test_on_cuda_the_device_tells_the_time(cuda: type[FakeEvent]) -> None:
    clock = clock_for(torch.device("cuda"))
    assert isinstance(clock, CudaClock)
    watch = Stopwatch(clock)
    watch.begin_step()
    watch.enter("forward")
    cuda.device_ms += 1.5
    watch.leave("forward")
    cuda.device_ms += 0.25
    watch.end_step()
    assert parts_of(watch)[0] == {
        "data_wait": 0, "transfer": 0, "forward": 1.5, "backward": 0, "optimizer": 0, "other": 0.25
    }  # fmt: skip


def test_events_are_recorded_again_instead_of_created(cuda: type[FakeEvent]) -> None:
    clock = CudaClock()
    for _ in range(10):
        marks = [clock.mark(), clock.mark()]
        clock.reuse(marks)
    assert cuda.created == 2


def test_the_cpu_has_the_hosts_clock() -> None:
    assert isinstance(clock_for(torch.device("cpu")), Clock)
