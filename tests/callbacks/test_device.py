"""DeviceMonitor in a stranger's Lightning project, on a CPU."""

import copy
import pickle
import threading
import time
import types
from pathlib import Path
from typing import Any

import lightning
import psutil
import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from batchscope.callbacks import device
from batchscope.callbacks._timer import pause
from batchscope.callbacks.device import LOGGED, DeviceMonitor
from batchscope.hardware import probes, sampler
from batchscope.hardware.device_memory import ALLOCATED, PEAK
from batchscope.hardware.probes import CPU, PROCESSOR_TIME, RSS
from tests.support.third_party_modules import Memory, Stranger, loader, train

STEP_S, STEPS = 0.01, 12
DATA = loader(STEPS, 1)


class Slow(Stranger):
    """Its steps take 10 ms, or fail."""

    def __init__(self, fail_at: int | None = None):
        super().__init__()
        self.fail_at = fail_at

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == self.fail_at:
            raise RuntimeError("the stranger's own mistake")
        time.sleep(STEP_S)
        return super().training_step(batch, batch_idx)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples every 20 ms, so that runs can be short."""
    monkeypatch.setattr(sampler, "MIN_INTERVAL_S", 0.02)
    monkeypatch.setattr(probes, "MIN_SPAN_S", 0.001)
    monkeypatch.setattr(probes, "_warned", set())


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "telemetry"]


def test_a_fit_is_logged_and_summed_up(tmp_path: Path) -> None:
    monitor, logger = DeviceMonitor(interval_s=0.02, details=True), TensorBoardLogger(tmp_path)
    train(Slow(), monitor, data=DATA, logger=logger, max_epochs=2)
    events = EventAccumulator(logger.log_dir).Reload()
    tags = {PROCESSOR_TIME, PEAK, ALLOCATED, CPU, RSS}
    assert tags <= set(events.Tags()["scalars"]) <= tags | set(LOGGED) | {"epoch"}
    steps = [event.step for event in events.Scalars(RSS)]
    assert steps == sorted(set(steps))  # at most one value a step
    assert len(steps) >= 3 and steps[0] >= 0 and steps[-1] <= 2 * STEPS
    peaks = [event.value for event in events.Scalars(PEAK)]
    assert peaks == sorted(peaks)
    summary = monitor.summary
    assert summary["seconds"] >= 2 * STEPS * STEP_S
    assert summary["device/memory_allocated_max_gib"] <= summary[PEAK]
    assert summary[PEAK] == pytest.approx(psutil.Process().memory_info().rss / 2**30, rel=0.5)
    assert 0 <= summary["device/processor_time_mean_pct"] <= 100
    assert "energy_j" not in summary and "device/power_mean_w" not in summary
    assert threads() == []


def test_fit_twice_and_tear_down_twice() -> None:
    monitor, logger = DeviceMonitor(interval_s=0.02), Memory()
    trainer = train(Slow(), monitor, data=DATA, logger=logger, max_epochs=1)
    first = monitor.summary
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Slow(), DATA)
    for _ in range(2):
        monitor.teardown(trainer, Slow(), "fit")
    assert threads() == []
    assert monitor.summary is not first and monitor.summary["seconds"] > 0 < first["seconds"]
    assert logger.steps(RSS)[-1] > STEPS
    assert pickle.loads(pickle.dumps(monitor)).summary == copy.deepcopy(monitor).summary == monitor.summary


def test_validation_is_not_training_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve steps, and two validations of twelve, in a world in which a step takes a second and a sample ends it."""
    now = 0.0

    class Timed(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            pass_a_second()
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass_a_second()

    def pass_a_second() -> None:
        nonlocal now
        now += 1.0
        monitor.result()  # takes a sample

    monkeypatch.setattr(device, "Spans", lambda: sampler.Spans(lambda: now))
    monkeypatch.setattr(device, "Sampler", lambda read, interval_s: sampler.Sampler(read, 60, lambda: now))
    monkeypatch.setattr(device, "time", types.SimpleNamespace(perf_counter=lambda: now))
    monitor, logger = DeviceMonitor(), Memory()
    options = {"val_check_interval": 6, "num_sanity_val_steps": 0, "max_epochs": 1}
    train(Timed(), monitor, data=(DATA, DATA), logger=logger, **options)
    assert monitor.summary["seconds"] == STEPS
    assert monitor.result([(0.0, 3.5), (20.0, 21.0)])["seconds"] == 4.5
    assert logger.steps(RSS) == list(range(1, STEPS + 1))


def test_the_result_can_be_asked_for_before_the_end() -> None:
    class Curious(lightning.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.result = monitor.result()

    monitor, curious = DeviceMonitor(), Curious()
    assert monitor.result() == {}
    train(Slow(), curious, monitor, data=DATA, max_epochs=1)
    assert curious.result == monitor.summary == monitor.result()
    assert curious.result[PEAK] > 0


@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"max_epochs": 0}, {"max_steps": 1}])
def test_short_runs(options: dict[str, Any]) -> None:
    monitor = DeviceMonitor()
    train(Slow(), monitor, data=DATA, **options)
    assert threads() == []
    assert bool(monitor.summary) == ("max_epochs" not in options)


def test_a_run_that_fails_keeps_what_was_sampled() -> None:
    monitor, logger = DeviceMonitor(interval_s=0.02), Memory()
    with pytest.raises(RuntimeError, match="own mistake"):
        train(Slow(fail_at=8), monitor, data=DATA, logger=logger)
    assert threads() == []
    assert monitor.summary["seconds"] >= 8 * STEP_S
    assert max(logger.steps(RSS)) <= 8


@pytest.mark.parametrize("broken", ["probe_for", "StepWriter", "Sampler"])
def test_a_measurement_that_fails_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("no measuring here")

    monkeypatch.setattr(device, broken, fail)
    with pytest.warns(UserWarning, match="DeviceMonitor .*OSError: no measuring here") as caught:
        trainer = train(Slow(), DeviceMonitor(), data=DATA, logger=Memory())
    assert trainer.global_step == 2 * STEPS
    assert len([warning for warning in caught if "DeviceMonitor" in str(warning.message)]) == 1
    assert threads() == []


def test_a_wait_is_in_no_sample_of_training() -> None:
    class Waiting(lightning.Callback):
        def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                before = len(monitor._timeline.after(0))
                with pause(trainer, part_of_fit=True):  # such as writing curves
                    pass
                with pause(trainer):
                    taken.append(len(monitor._timeline.after(0)) - before)
                taken.append(len(monitor._timeline.after(0)) - before)

    monitor, taken = DeviceMonitor(interval_s=60), []
    train(Slow(), monitor, Waiting(), data=DATA, max_epochs=1)
    assert taken == [1, 2]
