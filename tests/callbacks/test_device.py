"""DeviceMonitor in a stranger's Lightning project, on a CPU."""

import copy
import pickle
import threading
import time
import types

import lightning
import psutil
import pytest
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, TensorDataset

from batchscope.callbacks import device
from batchscope.callbacks._timer import pause
from batchscope.callbacks.device import LOGGED, DeviceMonitor
from batchscope.hardware import probes, sampler
from batchscope.hardware.device_memory import ALLOCATED, PEAK
from batchscope.hardware.probes import CPU, PROCESSOR_TIME, RSS

STEP_S = 0.01


class Stranger(lightning.LightningModule):
    """A plain module that knows nothing of this project; its steps take 10 ms."""

    def __init__(self, fail_at=None):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.fail_at = fail_at

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == self.fail_at:
            raise RuntimeError("the stranger's own mistake")
        time.sleep(STEP_S)
        return self.layer(batch[0]).mean()

    def validation_step(self, batch, batch_idx):
        time.sleep(STEP_S)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=1)

    val_dataloader = train_dataloader


class Kept(Logger):
    """Keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.rows = []

    name = version = "kept"

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """Samples every 20 ms, so that runs can be short."""
    monkeypatch.setattr(sampler, "MIN_INTERVAL_S", 0.02)
    monkeypatch.setattr(probes, "MIN_SPAN_S", 0.001)
    monkeypatch.setattr(probes, "_warned", set())


def trainer_with(monitor, tmp_path, **options):
    options = {"max_epochs": 1, "limit_val_batches": 0, "logger": False, **options}
    return lightning.Trainer(
        accelerator="cpu",
        callbacks=[monitor],
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
        **options,
    )


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "telemetry"]


def test_a_fit_is_logged_and_summed_up(tmp_path):
    monitor, logger = DeviceMonitor(interval_s=0.02, details=True), TensorBoardLogger(tmp_path)
    trainer = trainer_with(monitor, tmp_path, logger=logger, max_epochs=2)

    trainer.fit(Stranger())

    events = EventAccumulator(logger.log_dir).Reload()
    tags = {PROCESSOR_TIME, PEAK, ALLOCATED, CPU, RSS}
    assert tags <= set(events.Tags()["scalars"]) <= tags | set(LOGGED) | {"epoch"}
    steps = [event.step for event in events.Scalars(RSS)]
    assert steps == sorted(set(steps))  # at most one value a step
    assert len(steps) >= 3 and steps[0] >= 0 and steps[-1] <= 24
    peaks = [event.value for event in events.Scalars(PEAK)]
    assert peaks == sorted(peaks)
    assert all(0 <= event.value <= 100 for event in events.Scalars(PROCESSOR_TIME))

    summary = monitor.summary
    assert summary["seconds"] >= 24 * STEP_S
    assert summary["device/memory_allocated_max_gib"] <= summary[PEAK]
    assert summary[PEAK] == pytest.approx(psutil.Process().memory_info().rss / 2**30, rel=0.5)
    assert summary["device/processor_time_mean_pct"] <= 100
    assert "energy_j" not in summary and "device/power_mean_w" not in summary
    assert threads() == []


def test_fit_twice_and_tear_down_twice(tmp_path):
    monitor, logger = DeviceMonitor(interval_s=0.02), Kept()
    trainer, module = trainer_with(monitor, tmp_path, logger=logger), Stranger()

    summaries = []
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module)
        summaries.append(monitor.summary)
        assert threads() == []
    monitor.teardown(trainer, module, "fit")
    monitor.teardown(trainer, module, "fit")

    assert monitor.summary is summaries[1]
    assert all(summary["seconds"] > 0 for summary in summaries)
    assert [step for step, row in logger.rows if RSS in row][-1] > 12
    assert pickle.loads(pickle.dumps(monitor)).summary == copy.deepcopy(monitor).summary == monitor.summary


def test_validation_is_not_training_time(tmp_path, monkeypatch):
    """Twelve steps, and two validations of twelve, in a world in which a step takes a second and a sample ends it."""
    now = 0.0

    class Timed(Stranger):
        def training_step(self, batch, batch_idx):
            pass_a_second()
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            pass_a_second()

    def pass_a_second():
        nonlocal now
        now += 1.0
        monitor.result()  # takes a sample

    monkeypatch.setattr(device, "Spans", lambda: sampler.Spans(lambda: now))
    monkeypatch.setattr(device, "Sampler", lambda read, interval_s: sampler.Sampler(read, 60, lambda: now))
    monkeypatch.setattr(device, "time", types.SimpleNamespace(perf_counter=lambda: now))
    monitor, logger = DeviceMonitor(), Kept()
    options = {"limit_val_batches": 12, "val_check_interval": 6, "num_sanity_val_steps": 0}
    trainer_with(monitor, tmp_path, logger=logger, **options).fit(Timed())

    assert monitor.summary["seconds"] == 12
    assert monitor.result([(0.0, 3.5), (20.0, 21.0)])["seconds"] == 4.5
    assert [step for step, row in logger.rows if RSS in row] == list(range(1, 13))


def test_the_result_can_be_asked_for_before_the_end(tmp_path):
    class Curious(lightning.Callback):
        def on_train_end(self, trainer, pl_module):
            self.result = trainer.callbacks[-1].result()

    monitor, curious = DeviceMonitor(), Curious()
    trainer = trainer_with(monitor, tmp_path)
    trainer.callbacks.insert(0, curious)
    assert monitor.result() == {}

    trainer.fit(Stranger())

    assert curious.result == monitor.summary == monitor.result()
    assert curious.result[PEAK] > 0


@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"logger": False}, {"max_epochs": 0}, {"max_steps": 1}])
def test_short_runs(tmp_path, options):
    monitor = DeviceMonitor()

    trainer_with(monitor, tmp_path, **options).fit(Stranger())

    assert threads() == []
    assert bool(monitor.summary) == ("max_epochs" not in options)


def test_a_run_that_fails_keeps_what_was_sampled(tmp_path):
    monitor, logger = DeviceMonitor(interval_s=0.02), Kept()

    with pytest.raises(RuntimeError, match="own mistake"):
        trainer_with(monitor, tmp_path, logger=logger).fit(Stranger(fail_at=8))

    assert threads() == []
    assert monitor.summary["seconds"] >= 8 * STEP_S
    assert max(step for step, row in logger.rows if RSS in row) <= 8


@pytest.mark.parametrize("broken", ["probe_for", "StepWriter", "Sampler"])
def test_a_measurement_that_fails_does_not_end_the_training(tmp_path, monkeypatch, broken):
    def fail(*args, **kwargs):
        raise OSError("no measuring here")

    monkeypatch.setattr(device, broken, fail)
    trainer = trainer_with(DeviceMonitor(), tmp_path, logger=Kept(), max_epochs=2)
    with pytest.warns(UserWarning, match="DeviceMonitor .*OSError: no measuring here") as caught:
        trainer.fit(Stranger())

    assert trainer.global_step == 24
    assert len([warning for warning in caught if "DeviceMonitor" in str(warning.message)]) == 1
    assert threads() == []


def test_a_wait_is_in_no_sample_of_training(tmp_path):
    class Waiting(lightning.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 3:
                before = len(monitor._timeline.after(0))
                with pause(trainer, part_of_fit=True):  # such as writing curves
                    pass
                with pause(trainer):
                    taken.append(len(monitor._timeline.after(0)) - before)
                taken.append(len(monitor._timeline.after(0)) - before)

    monitor, taken = DeviceMonitor(interval_s=60), []
    waiting = trainer_with(monitor, tmp_path)
    waiting.callbacks.append(Waiting())
    waiting.fit(Stranger())
    assert taken == [1, 2]
