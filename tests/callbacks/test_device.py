"""DeviceMonitor in a stranger's Lightning project: what it samples, and of which time its numbers are."""

import types
from pathlib import Path
from typing import Any

import lightning
import psutil
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from batchscope.callbacks import _timer, device, throughput
from batchscope.callbacks._timer import pause
from batchscope.callbacks.device import LOGGED, DeviceMonitor
from batchscope.hardware import probes, sampler
from batchscope.hardware.device_memory import ALLOCATED, PEAK
from batchscope.hardware.nvml_readings import ENERGY
from batchscope.hardware.probes import CPU, PROCESSOR_TIME, RSS
from batchscope.hardware.sampler import Sampler, Spans
from tests.callbacks import support
from tests.callbacks.support import Slow, monitoring
from tests.support.third_party_modules import Memory, Stranger, loader, train


def test_a_fit_is_logged_and_summed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "MIN_INTERVAL_S", 0.02)  # so that the run can be short
    monkeypatch.setattr(probes, "MIN_SPAN_S", 0.001)
    monitor, logger, steps = DeviceMonitor(interval_s=0.02, details=True), TensorBoardLogger(tmp_path), 40
    train(Slow(), monitor, data=loader(80), logger=logger)
    events = EventAccumulator(logger.log_dir).Reload()
    tags = {PROCESSOR_TIME, PEAK, ALLOCATED, CPU, RSS}
    assert tags <= set(events.Tags()["scalars"]) <= tags | set(LOGGED) | {"epoch"}
    logged = [event.step for event in events.Scalars(RSS)]
    assert logged == sorted(set(logged))  # at most one value a step
    assert len(logged) >= 3 and logged[0] >= 0 and logged[-1] <= steps
    peaks = [event.value for event in events.Scalars(PEAK)]
    assert peaks == sorted(peaks)
    summary = monitor.summary
    assert summary["seconds"] >= steps * 0.005
    assert summary["device/memory_allocated_max_gib"] <= summary[PEAK]
    assert summary[PEAK] == pytest.approx(psutil.Process().memory_info().rss / 2**30, rel=0.5)
    assert 0 <= summary["device/processor_time_mean_pct"] <= 100
    assert "energy_j" not in summary and "device/power_mean_w" not in summary


def test_the_result_can_be_asked_for_before_the_end() -> None:
    class Curious(lightning.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.result = monitor.result()

    monitor, curious = DeviceMonitor(), Curious()
    assert monitor.result() == {}
    train(Slow(), curious, monitor)
    assert curious.result == monitor.summary == monitor.result()
    assert curious.result[PEAK] > 0


@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"max_epochs": 0}, {"max_steps": 1}])
def test_the_shortest_run_has_a_summary_where_it_has_a_step(options: dict[str, Any]) -> None:
    train(Slow(), monitor := DeviceMonitor(), **options)
    assert bool(monitor.summary) == ("max_epochs" not in options)


def test_a_wait_is_in_no_sample_of_training() -> None:
    class Waiting(lightning.Callback):
        def on_train_batch_end(self, trainer: lightning.Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                before = len(monitor._timeline.after(0))  # which nothing tells outside
                with pause(trainer, part_of_fit=True):  # such as writing curves
                    pass
                with pause(trainer):
                    taken.append(len(monitor._timeline.after(0)) - before)
                taken.append(len(monitor._timeline.after(0)) - before)

    monitor, taken = DeviceMonitor(interval_s=60), []
    train(Slow(), monitor, Waiting(), max_epochs=1)
    assert taken == [1, 2]


# --- exact times and energies, in a world that the test moves ---------------------------------------------------------


class World(support.World):
    """The clock of the steps and of the samples, and the device's energy counter."""

    joules, sampler = 0.0, None

    def move(self, seconds: float, watts: float) -> None:
        self.now += seconds
        self.joules += seconds * watts
        if self.sampler is not None:
            self.sampler.sample()  # while the power is constant, energy is interpolated exactly

    def sample(self, read: Any, interval_s: float) -> Sampler:
        self.sampler = Sampler(lambda: {ENERGY: self.joules, RSS: 1.0}, 60, lambda: self.now)
        return self.sampler


class Module(Stranger):
    """Its step k takes 2 + k seconds at k watts; validation, checkpoints and what is between epochs draw a lot more."""

    def __init__(self, world: World):
        super().__init__()
        self.world = world

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.world.move(2, watts=self.global_step + 1)
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self.world.move(self.global_step + 1, watts=self.global_step + 1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.world.move(50, 500)

    def on_train_epoch_start(self) -> None:
        self.world.move(7, 700)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.world.move(30, 300)


def step_seconds(steps: range) -> float:
    return sum(2 + k for k in steps)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(throughput, "clock_for", lambda device: world)
    monkeypatch.setattr(device, "Sampler", world.sample)
    monkeypatch.setattr(device, "time", types.SimpleNamespace(perf_counter=lambda: world.now))
    for module in (device, _timer):
        monkeypatch.setattr(module, "Spans", lambda: Spans(lambda: world.now))
    return world


def fit(world: World, *callbacks: lightning.Callback, **options: Any) -> None:
    """Two epochs of five steps, with a validation in the middle of each."""
    known = {"val_check_interval": 3, "num_sanity_val_steps": 0}
    train(Module(world), *callbacks, data=(loader(), loader(8)), **known | options)


def test_validation_is_not_training_time(world: World) -> None:
    monitor, logger = DeviceMonitor(), Memory()
    fit(world, monitor, logger=logger)
    assert monitor.summary["seconds"] == step_seconds(range(1, 11)) + 2 * 7  # an epoch begins with 7 s
    assert monitor.result([(0.0, 3.5), (20.0, 21.0)])["seconds"] == 4.5
    assert logger.steps(RSS) == list(range(1, 11))


@pytest.mark.parametrize(
    ("warmup", "options", "counted", "device_first"),
    [
        (0, {}, range(2, 11), True),
        (7, {}, range(8, 11), False),
        (5, {"max_steps": 6}, range(6, 7), False),
    ],
    ids=["no warm-up", "seven", "a single step"],
)
def test_energy_is_that_of_the_counted_steps(
    world: World, tmp_path: Path, warmup: int, options: dict[str, Any], counted: range, device_first: bool
) -> None:
    monitors = [DeviceMonitor(), monitor := monitoring(warmup_steps=warmup)]
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    fit(world, *(monitors if device_first else monitors[::-1]), checkpoint, enable_checkpointing=True, **options)
    summary = monitor.summary
    assert summary["updates"] == len(counted)
    assert summary["seconds"] == step_seconds(counted)
    joules = sum((2 + k) * k for k in counted)
    assert summary["joules_per_sample"] == pytest.approx(joules / (4 * len(counted)))
