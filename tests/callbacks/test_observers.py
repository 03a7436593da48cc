"""What holds for every callback that measures: it changes no bit, ends no training, and leaves nothing behind."""

import copy
import pickle
import threading
from typing import NamedTuple
from unittest.mock import Mock, patch

import lightning
import numpy as np
import pytest
import torch
from lightning import LightningDataModule, LightningModule
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.profilers import PassThroughProfiler
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from batchscope._lightning import profiler_of
from batchscope.callbacks.curves import TrainCurves
from batchscope.callbacks.device import DeviceMonitor
from batchscope.callbacks.nonfinite import StopOnNonFinite
from batchscope.callbacks.profile import OperationProfiler
from batchscope.callbacks.throughput import ThroughputMonitor
from tests.callbacks.support import monitoring, stranger
from tests.support.third_party_modules import Memory, Stranger, loader, train


class Observers(NamedTuple):
    """The callbacks that measure, in an order in which they work."""

    curves: TrainCurves
    monitor: ThroughputMonitor
    profiler: OperationProfiler
    device: DeviceMonitor
    finite: StopOnNonFinite


def observers() -> Observers:
    """Updates 2 to 4 are recorded, 6 and 7 are timed, and 8 to 11 are traced."""
    timed, profiler = monitoring(record_operations=True), OperationProfiler(steps=2, verbose=False)
    return Observers(TrainCurves(), timed, profiler, DeviceMonitor(), StopOnNonFinite())


def assert_nothing_is_left(trainer) -> None:
    assert _get_current_dispatch_mode() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not torch.autograd._profiler_enabled()
    assert isinstance(profiler_of(trainer), PassThroughProfiler)
    assert [thread for thread in threading.enumerate() if thread.name == "telemetry"] == []


class Net(LightningModule):
    """Has all that a callback could change: random numbers, buffers, a metric, logs, attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
        self.accuracy = MulticlassAccuracy(3)
        self.batch_sizes: list[int] = []

    def training_step(self, batch, batch_idx: int):
        x, y = batch
        output = self.net(x + torch.randn_like(x) + np.random.rand())
        self.accuracy(output, y)
        self.batch_sizes.append(len(x))
        self.log("loss", loss := F.cross_entropy(output, y), on_step=False, on_epoch=True)
        return {"loss": loss}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def trained(*callbacks):
    """All that a training changes: weights, random draws, batch sizes, the metric and the loss."""
    lightning.seed_everything(0, verbose=False)
    module, data = Net(), TensorDataset(torch.randn(300, 20), torch.randint(3, (300,)))
    trainer = train(module, *callbacks, data=DataLoader(data, batch_size=8), max_epochs=1)
    state = [tensor.tolist() for tensor in module.state_dict().values()]
    draws = [torch.rand(3).tolist(), np.random.rand()]
    return [state, draws, module.batch_sizes, float(module.accuracy.compute()), float(trainer.callback_metrics["loss"])]


def test_a_training_is_bit_for_bit_as_without_them() -> None:
    assert trained(*observers()) == trained()


def failing(after: int | None) -> Stranger:
    """A module that fails after `after` updates; None: before the first step."""

    def fail(module) -> None:
        if after in (None, module.global_step):
            raise ConnectionError("the user's own")

    return stranger(**{"configure_optimizers" if after is None else "training_step": fail})


@pytest.mark.parametrize("after", [2, 8, None], ids=["in a recorded step", "in a traced step", "before the first step"])
@pytest.mark.filterwarnings("error:.*stopped measuring:UserWarning")
def test_an_error_of_the_user_passes_and_what_was_measured_stays(after: int | None) -> None:
    module, logger, callbacks = failing(after), Memory(), observers()
    with pytest.raises(ConnectionError, match="the user's own"):
        train(module, *callbacks, logger=logger, max_epochs=3)
    assert_nothing_is_left(module.trainer)
    assert callbacks.monitor.summary["missing"] == {"bottleneck": "the fit ended with ConnectionError"}
    assert callbacks.monitor.summary.get("updates") == {2: None, 8: 2, None: None}[after]
    assert logger.steps("train/loss") == list(range(1, 1 + (after or 0)))
    assert bool(callbacks.device.summary) == (after is not None)
    assert ("saved" in callbacks.monitor.memory().get("parts_bytes", {})) == (after is not None)


@pytest.mark.parametrize("world", [True], indirect=True)
def test_a_fit_that_fails_waits_for_no_device(world) -> None:
    with pytest.raises(ConnectionError):
        train(failing(8), monitor := monitoring(), data=loader(40), max_epochs=1)  # no wait within an epoch
    assert world.waited == 0
    assert monitor.summary == {"missing": {"bottleneck": "the fit ended with ConnectionError"}}


UNKNOWN = "the measurement ended with OSError: the driver went away"
# What fails → the callback whose measurement ends, and whether the steps are timed.
BREAKS = {
    "hardware.measure.find_calibration": ("monitor", False),
    "callbacks._table.UpdateTable.add": ("monitor", False),
    "callbacks._report.report": ("monitor", True),
    "callbacks.device.Telemetry": ("device", True),
    "callbacks.profile.explain": ("profiler", True),
}


@pytest.mark.parametrize("place", BREAKS)
def test_a_measurement_that_fails_is_one_warning_and_the_training_goes_on(place: str) -> None:
    broken, is_timed = BREAKS[place]
    callbacks, fail = observers(), Mock(side_effect=OSError("the driver\nwent away"))
    with patch(f"batchscope.{place}", fail), pytest.warns(UserWarning) as caught:
        trainer = train(Stranger(), *callbacks, max_epochs=3)
    messages = [str(warning.message) for warning in caught if "stopped measuring" in str(warning.message)]
    assert messages == [f"{type(getattr(callbacks, broken)).__name__} stopped measuring: OSError: the driver went away"]
    assert_nothing_is_left(trainer)
    assert trainer.global_step == 15
    summary = callbacks.monitor.summary
    assert ("samples_per_sec" in summary) == is_timed
    assert summary.get("missing", {}).get("bottleneck") == (UNKNOWN if broken == "monitor" else None)
    assert bool(callbacks.device.summary) == (broken != "device")
    assert (callbacks.profiler.explanation is not None) == (broken not in ("monitor", "profiler"))
    if place in ("hardware.measure.find_calibration", "callbacks.device.Telemetry"):  # one failure a callback
        train(Stranger(), *callbacks, max_epochs=3)  # the next fit is not affected
        assert_all_known(callbacks)


def assert_all_known(callbacks: Observers) -> None:
    assert callbacks.monitor.summary["missing"] == {"mfu": "the device's peak at precision 32-true was not measured"}
    assert callbacks.monitor.summary["updates"] == 15 - 5 - 4 and callbacks.monitor.failure is None
    assert "uncounted" not in callbacks.monitor.memory() and callbacks.monitor.memory()["parts_bytes"]["saved"] > 0
    assert "communication_ms" not in callbacks.monitor.summary  # there is no other rank
    assert callbacks.device.summary["seconds"] > 0
    assert callbacks.profiler.explanation is not None and callbacks.profiler.explanation.trace_steps == 3


def test_a_monitor_is_copied_and_pickled_with_what_it_has_found_also_during_a_fit() -> None:
    monitors, pickles = (monitoring(record_operations=True), DeviceMonitor()), []
    keep = LambdaCallback(on_train_batch_end=lambda *_: pickles.append(pickle.dumps(monitors)))
    train(Stranger(), *monitors, keep, max_epochs=3)
    for copies in (copy.deepcopy(monitors), pickle.loads(pickle.dumps(monitors))):
        assert [monitor.summary for monitor in copies] == [monitor.summary for monitor in monitors]
        assert copies[0].step_times().step_s.tolist() == monitors[0].step_times().step_s.tolist()
        assert copies[0].operations == monitors[0].operations and copies[0].began is None
    monitor, device = pickle.loads(pickles[-1])
    train(Stranger(), monitor, device, max_epochs=3)
    assert monitor.summary["updates"] == 15 - 5 and device.summary["seconds"] > 0


def test_a_monitor_that_is_added_when_the_training_has_begun_says_so_and_warns_of_nothing(recwarn) -> None:
    module, monitor = Stranger(), monitoring()
    module.on_train_start = lambda: module.trainer.callbacks.append(monitor)
    train(module, max_epochs=1)
    assert monitor.summary == {"missing": {"bottleneck": "the callback was added too late"}}
    assert [warning for warning in recwarn if "stopped measuring" in str(warning.message)] == []
    train(Stranger(), monitor, max_epochs=3)
    assert monitor.summary["updates"] == 10
    train(module, max_epochs=1)
    assert monitor.summary == {"missing": {"bottleneck": "the callback was added too late"}} and not monitor.measured


def test_a_fit_that_fails_before_its_setup_leaves_the_results_of_the_last_fit_which_failed() -> None:
    monitor = monitoring()
    with pytest.raises(ConnectionError):
        train(module := failing(8), monitor, max_epochs=3)
    with pytest.raises(MisconfigurationException):
        module.trainer.fit(module, loader(), datamodule=LightningDataModule())
    assert monitor.summary["missing"] == {"bottleneck": "the fit ended with ConnectionError"}


def test_each_fit_starts_anew_and_each_callback_can_be_sent_to_a_process_and_torn_down_twice() -> None:
    callbacks = Observers(*pickle.loads(pickle.dumps(observers())))
    assert not callbacks.monitor.verbose
    for _ in range(2):
        trainer = train(Stranger(), *callbacks, logger=(logger := Memory()), max_epochs=3)
        assert logger.steps("train/loss") == list(range(1, 16))
        assert_all_known(callbacks)
    first = callbacks.device.summary
    trainer.fit_loop.max_epochs = 6
    trainer.fit(Stranger(), trainer.train_dataloader)  # goes on
    assert logger.steps("train/loss") == list(range(1, 31))
    for callback in (*callbacks, *callbacks):
        callback.teardown(trainer, Stranger(), "fit")
    assert_all_known(callbacks)
    assert callbacks.device.summary is not first
    assert_nothing_is_left(trainer)
