"""A summary without a bottleneck, FLOP/s or MFU, and memory that is not measured, say why."""

from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from batchscope.callbacks import _analysis, _step_monitor
from batchscope.callbacks._run_words import details
from batchscope.callbacks._setting import setting_of
from batchscope.callbacks._timer import HostClock
from batchscope.callbacks.memory import MemoryMonitor
from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.hardware.calibration import Calibration
from batchscope.hardware.operations import OperationRecorder
from tests.support.third_party_modules import Memory, Stranger, loader


def fit(module: lightning.LightningModule, *callbacks: Callback, train: Any = None, **options: Any) -> None:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    options = {"max_epochs": 2, "accelerator": "cpu", "logger": False, **quiet, **options}
    lightning.Trainer(callbacks=list(callbacks), **options).fit(module, loader() if train is None else train)


@pytest.fixture(autouse=True)
def nothing_measured_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_analysis, "find_calibration", lambda device, measure: None)


@pytest.fixture
def monitor() -> ThroughputMonitor:
    return ThroughputMonitor(calibrate=False)


class Manual(Stranger):
    """Optimizes by itself, with an optimizer that Lightning does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Failing(Stranger):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 8:
            raise ValueError("broken")
        return super().training_step(batch, batch_idx)


def why(monitor: ThroughputMonitor, key: str = "bottleneck") -> str:
    assert key not in monitor.summary
    return monitor.summary["missing"][key]


def test_steps_that_lightning_does_not_see_are_no_updates(
    monitor: ThroughputMonitor, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(Manual(), monitor)
    assert why(monitor) == (
        "of 10 batches none ended with an optimizer step that Lightning counts; with manual optimization, step the "
        "optimizers that self.optimizers() returns"
    )
    assert f"speed unknown: {why(monitor)}" in " ".join(capsys.readouterr().out.split())
    assert monitor.step_times() is None


def test_a_fit_without_a_batch_says_so(monitor: ThroughputMonitor) -> None:
    fit(Stranger(), monitor, limit_train_batches=0)
    assert why(monitor) == "no batch was trained"


def test_a_fit_that_fails_says_with_what(monitor: ThroughputMonitor) -> None:
    with pytest.raises(ValueError, match="broken"):
        fit(Failing(), monitor)
    assert why(monitor) == "the fit ended with ValueError"
    assert monitor.summary["updates"] > 0


def test_a_measurement_that_fails_says_with_what(
    monitor: ThroughputMonitor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("the driver\nwent away")

    monkeypatch.setattr(monitor, "_flush", broken)
    with pytest.warns(UserWarning, match="stopped measuring"):
        fit(Stranger(), monitor)
    assert why(monitor) == "the measurement ended with OSError: the driver went away"
    assert "speed   unknown: the measurement ended with OSError" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(_analysis, "find_calibration", lambda device, measure: None)
    fit(Stranger(), monitor)
    assert "bottleneck" in monitor.summary  # the next fit knows nothing of it


def test_a_logger_that_fails_ends_the_curves_and_not_the_measurement(monitor: ThroughputMonitor) -> None:
    class Broken(Memory):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            raise ConnectionError("no network")

    with pytest.warns(UserWarning, match="gets no more curves: ConnectionError: no network") as caught:
        fit(Stranger(), monitor, logger=Broken(), val_check_interval=1)
    assert len([one for one in caught if "no more curves" in str(one.message)]) == 1
    assert "bottleneck" in monitor.summary


@pytest.mark.parametrize("seconds", [0.0, -1.0], ids=["stands still", "runs backwards"])
def test_a_clock_that_jumps_is_named(
    monitor: ThroughputMonitor, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    class Odd(HostClock):
        now = 1e6

        def mark(self) -> float:
            self.now += seconds
            return self.now

    monkeypatch.setattr(_step_monitor, "clock_for", lambda device: Odd())
    fit(Stranger(), monitor)
    assert why(monitor) == "no step has a time: the clock has jumped"


@pytest.mark.parametrize("options", [{"fast_dev_run": True}, {"max_steps": 1}, {"limit_train_batches": 2}])
def test_a_fit_that_is_no_longer_than_the_warm_up_has_no_rate(
    monitor: ThroughputMonitor, options: dict[str, Any]
) -> None:
    fit(Stranger(), monitor, **options)
    assert "none came after the warm-up of 5" in why(monitor)
    assert "samples_per_sec" not in monitor.summary


def test_a_fit_of_a_few_steps_says_how_few_its_bottleneck_rests_on(monitor: ThroughputMonitor) -> None:
    fit(Stranger(), monitor, max_steps=6)
    found = monitor.summary["bottleneck"]
    assert found["certainty"] == "unclear" or "measured" in found["evidence"]


def test_a_verdict_without_recorded_operations_says_why_there_are_none() -> None:
    unwanted = ThroughputMonitor(calibrate=False, record_operations=False)
    fit(Stranger(), unwanted, max_steps=6)
    assert unwanted.summary["step"] == {"not_recorded": "record_operations=False"}
    found = unwanted.summary["bottleneck"]
    assert found["kind"] != "unclear" or "were recorded (record_operations=False)" in found["evidence"]


def test_a_peak_that_was_not_measured_is_the_reason_for_no_mfu(
    monitor: ThroughputMonitor, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(Stranger(), monitor)
    assert monitor.summary["missing"] == {"mfu": "this device's peak was not measured before, and calibrate=False"}
    assert f"no MFU: {monitor.summary['missing']['mfu']}" in details(monitor.summary)
    assert "MFU" not in capsys.readouterr().out


def test_a_precision_that_was_not_measured_is_the_reason_for_no_mfu(
    monitor: ThroughputMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Calibration("cpu", "a processor", None, torch.__version__, 2, {"fp32": 1e9})
    monkeypatch.setattr(_analysis, "find_calibration", lambda device, measure: measured)

    class Double(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step([part.double() for part in batch], batch_idx)

    fit(Double(), monitor, precision="64-true")
    assert why(monitor, "mfu") == "the peak at precision 64-true was not measured here"


def test_a_step_that_cannot_be_counted_has_one_reason_for_both(monitor: ThroughputMonitor) -> None:
    class Uncountable(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return torch.fft.rfft(self.layer(batch[0])).abs().mean()

    with pytest.warns(UserWarning, match="cannot be counted, so there is no FLOP/s and no MFU: "):
        fit(Uncountable(), monitor)
    assert why(monitor, "flops_per_sec") == why(monitor, "mfu") == "the FLOPs of aten._fft_r2c.default are not known"
    assert f"no FLOP/s and no MFU: {why(monitor, 'mfu')}" in details(monitor.summary)


def test_a_batch_without_tensors_has_step_times_and_a_reason_for_the_rest(monitor: ThroughputMonitor) -> None:
    class Texts(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layer(torch.ones(len(batch), 4)).mean()

    memory = MemoryMonitor()
    train = DataLoader([f"text {n}" for n in range(8)], batch_size=2, collate_fn=list)
    fit(Texts(), monitor, memory, train=train)
    assert monitor.summary["step_ms_median"] > 0
    assert "bottleneck" in monitor.summary
    assert (
        why(monitor, "samples_per_sec")
        == why(monitor, "mfu")
        == "the batch has no tensors; batch_size_fn says how many samples it has"
    )
    assert "batch_size" not in memory.facts


def test_a_complete_summary_misses_nothing(monitor: ThroughputMonitor, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Calibration("cpu", "a processor", None, torch.__version__, 2, {"fp32": 1e9})
    monkeypatch.setattr(_analysis, "find_calibration", lambda device, measure: measured)
    fit(Stranger(), monitor)
    assert "missing" not in monitor.summary
    assert not any(line.startswith("no ") for line in details(monitor.summary))


def test_memory_of_no_batch_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    monitor = MemoryMonitor()
    monitor.facts = {"uncounted": "no batch was trained"}
    assert monitor.line == "memory  not measured: no batch was trained"


# --- what the advice knows of another project's loader ----------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(loader().dataset)


class Iterable:
    def __iter__(self) -> Any:
        return iter(list(loader()))


@pytest.mark.parametrize(
    ("train", "known"),
    [
        (loader(), {"batch_size": 4, "num_workers": 0, "train_samples": 20, "is_stream": False}),
        (DataLoader(Stream(), batch_size=4), {"batch_size": 4, "train_samples": None, "is_stream": True}),
        (DataLoader(list(loader()), batch_size=None), {"batch_size": None, "num_workers": 0}),
        (Iterable(), {"batch_size": None, "num_workers": None, "train_samples": None}),
        ({"a": loader(), "b": loader()}, {"batch_size": None, "num_workers": None}),
    ],
    ids=["loader", "stream", "batches of its own", "any iterable", "several loaders"],
)
def test_the_advice_knows_a_dataloader_and_guesses_no_other(train: Any, known: dict[str, Any]) -> None:
    class Any_(Stranger):
        provenance = {"config": "of another program"}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch["a"] if isinstance(batch, dict) else batch, batch_idx)

    found: list[Any] = []

    class Asks(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            found.append(setting_of(trainer, {"batch_size": 100}, None))

    fit(Any_(), Asks(), train=train)
    assert not found[0].own
    assert {key: getattr(found[0], key) for key in known} == known


@pytest.mark.filterwarnings("error:ThroughputMonitor:UserWarning")
def test_a_fit_that_fails_before_its_first_batch_is_the_users_own_error_alone(monitor: ThroughputMonitor) -> None:
    class Broken(Stranger):
        def configure_optimizers(self) -> Any:
            raise NameError("the user's own")

    with pytest.raises(NameError, match="the user's own"):
        fit(Broken(), monitor)
    assert why(monitor) == "the fit ended with NameError"


def test_a_peak_that_was_measured_beside_other_programs_makes_no_mfu(
    monitor: ThroughputMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Calibration(
        "cpu", "a processor", None, torch.__version__, 2, {"fp32": 1e9}, disturbed="others were busy"
    )
    monkeypatch.setattr(_analysis, "find_calibration", lambda device, measure: measured)
    fit(Stranger(), monitor)
    assert why(monitor, "mfu") == "the device's peak is not known: others were busy"


def test_an_analysis_that_fails_leaves_the_times(
    monitor: ThroughputMonitor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("no such rule")

    monkeypatch.setattr("batchscope.callbacks._analysis.bottleneck_facts", broken)
    with pytest.warns(UserWarning, match="stopped measuring: ZeroDivisionError"):
        fit(Stranger(), monitor)
    assert monitor.summary["samples_per_sec"] > 0
    assert why(monitor) == "the measurement ended with ZeroDivisionError: no such rule"
    assert "samples/s" in capsys.readouterr().out


def test_updates_that_a_profiler_records_beside_it_count_for_no_rate(monitor: ThroughputMonitor) -> None:
    class Recording(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            self.recorder = OperationRecorder() if trainer.global_step in (6, 7) else None
            if self.recorder is not None:
                self.recorder.__enter__()

        def on_train_batch_end(self, *_: Any) -> None:
            if self.recorder is not None:
                self.recorder.__exit__(None, None, None)

    fit(Stranger(), monitor, Recording())
    assert monitor.summary["updates"] == 10 - 5 - 2


def test_a_setup_that_fails_is_one_warning_with_its_own_reason(
    monitor: ThroughputMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("no calibration here")

    fit(Stranger(), monitor)  # whose analysis is of no other fit
    monkeypatch.setattr(_analysis, "find_calibration", broken)
    with pytest.warns(UserWarning, match="stopped measuring: ValueError: no calibration here") as caught:
        fit(Stranger(), monitor)
    assert len([one for one in caught if "stopped measuring" in str(one.message)]) == 1
    assert why(monitor) == "the measurement ended with ValueError: no calibration here"
