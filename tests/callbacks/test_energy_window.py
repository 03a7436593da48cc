"""Power and energy of the summary are those of the very steps that it counts: exact, in a world that the test moves."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from batchscope.callbacks import _analysis, _timer, device, throughput
from batchscope.callbacks._timer import HostClock
from batchscope.callbacks.device import DeviceMonitor
from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.hardware.nvml_readings import ENERGY
from batchscope.hardware.sampler import Sampler, Spans
from tests.support.third_party_modules import Stranger, loader, train

BATCH = 4


class World(HostClock):
    """The clock of the steps and of the samples, and the device's energy counter."""

    def __init__(self) -> None:
        self.now = self.joules = 0.0
        self.sampler: Sampler | None = None

    def mark(self) -> float:
        return self.now

    def move(self, seconds: float, watts: float) -> None:
        self.now += seconds
        self.joules += seconds * watts
        if self.sampler is not None:
            self.sampler.sample()  # while the power is constant, energy is interpolated exactly

    def sample(self, read: Any, interval_s: float) -> Sampler:
        self.sampler = Sampler(lambda: {ENERGY: self.joules}, interval_s, lambda: self.now)
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


def step_joules(steps: range) -> float:
    return sum((2 + k) * k for k in steps)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()

    monkeypatch.setattr(_analysis, "find_calibration", lambda device, measure: None)
    monkeypatch.setattr(throughput, "clock_for", lambda device: world)
    monkeypatch.setattr(device, "Sampler", world.sample)
    for module in (device, _timer):
        monkeypatch.setattr(module, "Spans", lambda: Spans(lambda: world.now))
    return world


def fit(world: World, tmp_path: Path, callbacks: list[Callback], **options: Any) -> None:
    """Two epochs of five steps, with a validation and a checkpoint in the middle and at the end of each."""
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    known = {"val_check_interval": 3, "num_sanity_val_steps": 0, "enable_checkpointing": True}
    train(Module(world), *callbacks, checkpoint, data=(loader(), loader(8)), **known | options)


@pytest.mark.filterwarnings("ignore")
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
    monitors = [
        DeviceMonitor(interval_s=60),
        ThroughputMonitor(warmup_steps=warmup, verbose=False, calibrate=False, record_operations=False),
    ]
    fit(world, tmp_path, monitors if device_first else monitors[::-1], **options)
    summary = monitors[1].summary
    assert summary["updates"] == len(counted)
    assert summary["seconds"] == step_seconds(counted)
    assert summary["joules_per_sample"] == pytest.approx(step_joules(counted) / (BATCH * len(counted)))
