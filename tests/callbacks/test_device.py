"""DeviceMonitor in a stranger's Lightning project: what it samples, and of which time its numbers are."""

from pathlib import Path
from typing import Any

import psutil
import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from batchscope.callbacks._timer import pause
from batchscope.callbacks.device import LOGGED, DeviceMonitor
from batchscope.hardware import probes, sampler
from batchscope.hardware.device_memory import ALLOCATED, PEAK
from batchscope.hardware.probes import CPU, PROCESSOR_TIME, RSS
from tests.callbacks.support import Slow, World
from tests.support.third_party_modules import Memory, Stranger, loader, train


def test_a_fit_is_logged_and_summed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "MIN_INTERVAL_S", 0.02)  # so that the run can be short
    monkeypatch.setattr(probes, "MIN_SPAN_S", 0.001)
    monitor, logger, steps = DeviceMonitor(interval_s=0.02, details=True), TensorBoardLogger(tmp_path), 40
    assert monitor.result() == {}
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


def test_validation_and_waiting_are_not_training_time(world: World) -> None:
    """Twelve steps of a second and 1 W, and two validations of twelve at 100 W."""

    class Timed(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            world.move(1)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            world.move(1, watts=100)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                before = len(world.sampler.timeline.after(0))
                for part_of_fit in (True, False):  # such as writing curves, and a wait
                    with pause(self.trainer, part_of_fit):
                        world.now += 0.25
                    world.now += 0.25
                assert len(world.sampler.timeline.after(0)) == before + 2  # at both ends, so that no sample has both

    monitor, logger, data = DeviceMonitor(), Memory(), loader(12, 1)
    options = {"val_check_interval": 6, "num_sanity_val_steps": 0, "max_epochs": 1}
    train(Timed(), monitor, data=(data, data), logger=logger, **options)
    assert (monitor.summary["seconds"], monitor.summary["energy_j"]) == (13, 12)
    assert monitor.result([(0.0, 3.5), (20.0, 21.0)])["seconds"] == 4.5
    assert logger.steps(RSS) == list(range(1, 13))
