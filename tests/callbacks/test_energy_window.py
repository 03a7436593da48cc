"""Power and energy of the summary are those of the very steps that it counts: exact, in a world that the test moves."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from batchscope.callbacks import _flops_meter, device, throughput
from batchscope.callbacks._timer import Clock
from batchscope.callbacks.device import DeviceMonitor
from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.hardware.probes import ENERGY
from batchscope.hardware.sampler import Sampler
from tests.support.third_party_modules import Stranger, loader

BATCH = 4


class World(Clock):
    """The clock of the steps and of the samples, and the device's energy counter."""

    def __init__(self) -> None:
        self.now = self.joules = 0.0
        self.reading_takes = 0.0

    def mark(self) -> float:
        return self.now

    def move(self, seconds: float, watts: float) -> None:
        self.now += seconds
        self.joules += seconds * watts

    def read(self) -> dict[str, float]:
        self.now += self.reading_takes
        return {ENERGY: self.joules}


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

    monkeypatch.setattr(_flops_meter, "find_calibration", lambda device, measure: None)
    monkeypatch.setattr(throughput, "clock_for", lambda device: world)
    monkeypatch.setattr(device, "probes_for", lambda device: [world])
    monkeypatch.setattr(device, "AllocatorProbe", lambda device: type("Nothing", (), {"read": lambda self: {}})())
    monkeypatch.setattr(device, "Sampler", partial(Sampler, clock=lambda: world.now))
    return world


def fit(world: World, tmp_path: Path, callbacks: list[Callback], **options: Any) -> None:
    """Two epochs of five steps, with a validation and a checkpoint in the middle and at the end of each."""
    options = {"max_epochs": 2, "val_check_interval": 3, **options}
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    trainer = lightning.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", logger=False, callbacks=[*callbacks, checkpoint],
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, **options,
    )  # fmt: skip
    trainer.fit(Module(world), loader(), loader(8))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device_first", [True, False])
@pytest.mark.parametrize(
    ("warmup", "options", "counted"),
    [
        (0, {}, range(1, 11)),
        (1, {}, range(2, 11)),
        (5, {}, range(6, 11)),
        (7, {}, range(8, 11)),
        (20, {}, range(2, 11)),
        (5, {"max_steps": 5}, range(2, 6)),
        (5, {"max_steps": 1}, range(1, 2)),
    ],
    ids=["no warm-up", "one", "an epoch", "seven", "longer than the run", "as long as the run", "a single step"],
)
def test_energy_is_that_of_the_counted_steps(
    world: World, tmp_path: Path, warmup: int, options: dict[str, Any], counted: range, device_first: bool
) -> None:
    # A minute between samples: none but those at the borders of the measured time.
    monitors = [
        DeviceMonitor(interval_s=60),
        ThroughputMonitor(warmup_steps=warmup, verbose=False, calibrate=False, record_operations=False),
    ]
    fit(world, tmp_path, monitors if device_first else monitors[::-1], **options)
    sampled, summary = monitors[0].summary, monitors[1].summary
    assert summary["updates"] == len(counted)
    assert summary["seconds"] == sampled["seconds"] == step_seconds(counted)
    assert sampled["energy_j"] == step_joules(counted)
    assert summary["joules_per_sample"] == pytest.approx(step_joules(counted) / (BATCH * len(counted)))


@pytest.mark.filterwarnings("ignore")
def test_reading_the_device_is_no_steps_time(world: World, tmp_path: Path) -> None:
    world.reading_takes = 3.0
    monitor = ThroughputMonitor(verbose=False, calibrate=False, record_operations=False)
    fit(world, tmp_path, [DeviceMonitor(interval_s=60), monitor])
    assert monitor.summary["seconds"] == step_seconds(range(6, 11))


@pytest.mark.filterwarnings("ignore")
def test_a_device_monitor_goes_on_alone_where_the_steps_are_no_longer_timed(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor, timer = (
        DeviceMonitor(interval_s=60),
        ThroughputMonitor(verbose=False, calibrate=False, record_operations=False, warmup_steps=0),
    )
    monkeypatch.setattr(throughput, "timesteps_in", lambda *_: 1 / 0)  # disabled in the first step
    fit(world, tmp_path, [monitor, timer], val_check_interval=None)
    assert monitor.summary["energy_j"] >= step_joules(range(1, 11))


@pytest.mark.filterwarnings("ignore")
def test_a_device_monitor_follows_only_while_it_is_led(world: World, tmp_path: Path) -> None:
    monitor = DeviceMonitor(interval_s=60)
    fit(world, tmp_path, [monitor, ThroughputMonitor(verbose=False, calibrate=False, record_operations=False)])
    fit(world, tmp_path, [monitor])
    assert monitor.summary["energy_j"] >= step_joules(range(1, 11))
