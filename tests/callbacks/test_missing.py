"""A summary without a bottleneck, FLOP/s or MFU says why; and what the advice knows of another project."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from batchscope.callbacks import _analysis, throughput
from batchscope.callbacks._run_words import details
from batchscope.callbacks._setting import setting_of
from batchscope.callbacks._timer import HostClock
from batchscope.callbacks.memory import MemoryMonitor
from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.hardware.calibration import Calibration
from batchscope.hardware.operations import OperationRecorder
from tests.support.third_party_modules import Stranger, loader, train

MEASURED = Calibration("cpu", "a processor", None, torch.__version__, 2, {"fp32": 1e9})


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Calibration | None]:
    """The device's calibration; None before a test sets it."""
    found: list[Calibration | None] = [None]
    monkeypatch.setattr(_analysis, "find_calibration", lambda device, measure: found[0])
    return found


@pytest.fixture
def monitor() -> ThroughputMonitor:
    return ThroughputMonitor(calibrate=False)


def why(monitor: ThroughputMonitor, key: str = "bottleneck") -> str:
    assert key not in monitor.summary
    return monitor.summary["missing"][key]


class Manual(Stranger):
    """Optimizes by itself, with an optimizer that Lightning does not see."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


UNSEEN = (
    "of 10 batches none ended with an optimizer step that Lightning counts; with manual optimization, step the "
    "optimizers that self.optimizers() returns"
)
NO_RATE: list[tuple[Any, dict[str, Any], str]] = [
    (Manual, {}, UNSEEN),
    (Stranger, {"limit_train_batches": 0}, "no batch was trained"),
    (Stranger, {"fast_dev_run": True}, "of 1 updates none came after the warm-up of 5"),
    (Stranger, {"limit_train_batches": 2}, "of 4 updates none came after the warm-up of 5"),
]


@pytest.mark.parametrize(("module", "options", "reason"), NO_RATE)
def test_a_fit_without_a_rate_says_why(
    module: Any, options: dict[str, Any], reason: str, monitor: ThroughputMonitor, capsys: pytest.CaptureFixture[str]
) -> None:
    train(module(), monitor, **options)
    assert why(monitor) == reason
    said = " ".join(capsys.readouterr().out.split())
    assert f"speed unknown: {reason}" in said or options == {"limit_train_batches": 0}  # which Lightning never starts
    assert "samples_per_sec" not in monitor.summary and monitor.step_times() is None


@pytest.mark.parametrize("seconds", [0.0, -1.0], ids=["stands still", "runs backwards"])
def test_a_clock_that_jumps_is_named(
    monitor: ThroughputMonitor, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    class Odd(HostClock):
        now = 1e6

        def mark(self) -> float:
            self.now += seconds
            return self.now

    monkeypatch.setattr(throughput, "clock_for", lambda device: Odd())
    train(Stranger(), monitor)
    assert why(monitor) == "no step has a time: the clock has jumped"


def test_steps_that_the_user_profiles_have_no_rate_and_say_so(monitor: ThroughputMonitor) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        train(Stranger(), monitor)
    assert why(monitor) == "every step was profiled or recorded, which makes it slower"


class Broken(Stranger):
    def __init__(self, at: int | None) -> None:
        super().__init__()
        self.at = at  # the step that fails; None: before the first one

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == self.at:
            raise NameError("the user's own")
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers() if self.at is not None else 1 / 0


@pytest.mark.filterwarnings("error:ThroughputMonitor:UserWarning")
@pytest.mark.parametrize(("at", "error"), [(8, NameError), (None, ZeroDivisionError)])
def test_a_fit_that_fails_is_the_users_own_error_and_says_so(
    at: int | None, error: type[Exception], monitor: ThroughputMonitor
) -> None:
    with pytest.raises(error):
        train(Broken(at), monitor)
    assert why(monitor) == f"the fit ended with {error.__name__}"
    assert ("updates" in monitor.summary) == (at is not None)


FAILURES = {  # what fails → whether the times are known
    "batchscope.callbacks._analysis.find_calibration": False,
    "batchscope.callbacks._table.UpdateTable.add": False,
    "batchscope.callbacks._analysis.bottleneck_facts": True,
}


@pytest.mark.parametrize("place", FAILURES)
def test_a_measurement_that_fails_is_one_warning_and_says_with_what(
    place: str, monitor: ThroughputMonitor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("the driver\nwent away")

    with monkeypatch.context() as patch:
        patch.setattr(place, broken)
        with pytest.warns(UserWarning, match="ThroughputMonitor stopped measuring: OSError") as caught:
            train(Stranger(), monitor)
    assert len([one for one in caught if "stopped measuring" in str(one.message)]) == 1
    assert why(monitor) == "the measurement ended with OSError: the driver went away"
    assert ("samples_per_sec" in monitor.summary) == FAILURES[place]
    assert ": the measurement ended with OSError" in " ".join(capsys.readouterr().out.split())
    train(Stranger(), monitor)
    assert "bottleneck" in monitor.summary  # the next fit knows nothing of it


class Double(Stranger):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([part.double() for part in batch], batch_idx)


NO_MFU: list[tuple[Calibration | None, type[Stranger], str, str]] = [
    (None, Stranger, "32-true", "this device's peak was not measured before, and calibrate=False"),
    (MEASURED, Double, "64-true", "the peak at precision 64-true was not measured here"),
    (
        Calibration("cpu", "a processor", None, "2", 2, {"fp32": 1e9}, disturbed="others were busy"),
        Stranger,
        "32-true",
        "the device's peak is not known: others were busy",
    ),
]


@pytest.mark.parametrize(("calibration", "module", "precision", "reason"), NO_MFU)
def test_a_peak_that_is_not_known_is_the_reason_for_no_mfu(
    calibration: Any, module: Any, precision: Any, reason: str, monitor: ThroughputMonitor, measured: list[Any]
) -> None:
    measured[0] = calibration
    train(module(), monitor, precision=precision)
    assert monitor.summary["missing"] == {"mfu": reason}
    assert f"no MFU: {reason}" in details(monitor.summary)


def test_a_step_that_cannot_be_counted_has_one_reason_for_both(monitor: ThroughputMonitor) -> None:
    class Uncountable(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return torch.fft.rfft(self.layer(batch[0])).abs().mean()

    with pytest.warns(UserWarning, match="cannot be counted, so there is no FLOP/s and no MFU: "):
        train(Uncountable(), monitor)
    assert why(monitor, "flops_per_sec") == why(monitor, "mfu") == "the FLOPs of aten._fft_r2c.default are not known"
    assert f"no FLOP/s and no MFU: {why(monitor, 'mfu')}" in details(monitor.summary)
    assert monitor.summary["step"]["operations"] > 0


def test_a_batch_without_tensors_has_step_times_and_a_reason_for_the_rest(monitor: ThroughputMonitor) -> None:
    class Texts(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layer(torch.ones(len(batch), 4)).mean()

    memory = MemoryMonitor()
    texts = DataLoader([f"text {n}" for n in range(8)], batch_size=2, collate_fn=list)
    train(Texts(), monitor, memory, data=texts)
    assert monitor.summary["step_ms_median"] > 0 and "bottleneck" in monitor.summary
    unknown = "the batch has no tensors; batch_size_fn says how many samples it has"
    assert why(monitor, "samples_per_sec") == why(monitor, "mfu") == unknown
    assert "batch_size" not in memory.facts


def test_a_verdict_says_how_little_it_rests_on() -> None:
    unwanted = ThroughputMonitor(calibrate=False, record_operations=False)
    train(Stranger(), unwanted, max_steps=6)
    assert unwanted.summary["step"] == {"not_recorded": "record_operations=False"}
    assert why(unwanted, "flops_per_sec") == "record_operations=False"
    found = unwanted.summary["bottleneck"]
    assert found["kind"] != "unclear" or "were recorded (record_operations=False)" in found["evidence"]
    assert found["certainty"] == "unclear" or "only 1 step measured" in found["evidence"]


def test_a_complete_summary_misses_nothing(monitor: ThroughputMonitor, measured: list[Any]) -> None:
    measured[0] = MEASURED
    train(Stranger(), monitor)
    assert "missing" not in monitor.summary
    assert not any(line.startswith("no ") for line in details(monitor.summary))


def test_updates_that_another_callback_records_count_for_no_rate(monitor: ThroughputMonitor) -> None:
    class Recording(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            self.recorder = OperationRecorder() if trainer.global_step in (6, 7) else None
            if self.recorder is not None:
                self.recorder.__enter__()

        def on_train_batch_end(self, *_: Any) -> None:
            if self.recorder is not None:
                self.recorder.__exit__(None, None, None)

    train(Stranger(), monitor, Recording())
    assert monitor.summary["updates"] == 10 - 5 - 2


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(loader().dataset)


class Iterable:
    def __iter__(self) -> Any:
        return iter(list(loader()))


@pytest.mark.parametrize(
    ("data", "known"),
    [
        (loader(), {"batch_size": 4, "num_workers": 0, "train_samples": 20, "is_stream": False}),
        (DataLoader(Stream(), batch_size=4), {"batch_size": 4, "train_samples": None, "is_stream": True}),
        (DataLoader(list(loader()), batch_size=None), {"batch_size": None, "num_workers": 0}),
        (Iterable(), {"batch_size": None, "num_workers": None, "train_samples": None}),
        ({"a": loader(), "b": loader()}, {"batch_size": None, "num_workers": None}),
    ],
    ids=["loader", "stream", "batches of its own", "any iterable", "several loaders"],
)
def test_the_advice_knows_a_dataloader_and_guesses_no_other(data: Any, known: dict[str, Any]) -> None:
    class AnyBatch(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch["a"] if isinstance(batch, dict) else batch, batch_idx)

    found: list[Any] = []

    class Asks(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            found.append(setting_of(trainer, {"batch_size": 100}, None))

    train(AnyBatch(), Asks(), data=data)
    assert not found[0].own
    assert {key: getattr(found[0], key) for key in known} == known
