"""ThroughputMonitor in strangers' projects: what it measures, what it leaves out, and that it never ends a training."""

import functools
import pickle
import time
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor, nn
from torch.utils.data import DataLoader

from batchscope.callbacks import _analysis, _step_monitor
from batchscope.callbacks._timer import HostClock
from batchscope.callbacks.curves import TrainCurves
from batchscope.callbacks.device import DeviceMonitor
from batchscope.callbacks.memory import MemoryMonitor
from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.hardware import calibration
from batchscope.hardware.calibration import Calibration
from batchscope.models.recurrent import LSTMCell, unroll
from batchscope.records.metrics import METRICS
from batchscope.records.step_parts import PARTS
from tests.support.runs import SMALL, ranks, record
from tests.support.third_party_modules import Memory, Stranger, loader

PART_KEYS = [f"time/{part}_ms" for part in PARTS]


def fit(
    monitor: ThroughputMonitor,
    tmp_path: Path,
    module: lightning.LightningModule | None = None,
    train: Any = None,
    val: Any = None,
    callbacks: tuple[Callback, ...] = (),
    **options: Any,
) -> Memory:
    """Train for two epochs of five steps of four samples, by default."""
    memory = Memory()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    options = {"max_epochs": 2, "accelerator": "cpu", **quiet, **options}
    trainer = lightning.Trainer(default_root_dir=tmp_path, logger=memory, callbacks=[monitor, *callbacks], **options)
    trainer.fit(module or Stranger(), loader() if train is None else train, val)
    return memory


@pytest.fixture(autouse=True)
def nothing_measured_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_analysis, "find_calibration", lambda device, measure: None)


@pytest.fixture
def monitor() -> ThroughputMonitor:
    return ThroughputMonitor(calibrate=False, verbose=False, record_operations=False)


@pytest.fixture
def recording() -> ThroughputMonitor:
    """A monitor that records the updates 2 to 4."""
    return ThroughputMonitor(calibrate=False, verbose=False)


def test_every_step_after_the_recorded_ones_has_all_that_can_be_known(
    recording: ThroughputMonitor, tmp_path: Path
) -> None:
    memory = fit(recording, tmp_path)
    assert memory.steps("time/step_ms") == list(range(5, 11))
    declared = {key for key in METRICS if key.startswith(("time/", "throughput/"))}
    unknown = {"throughput/timesteps_per_sec", "throughput/mfu"}  # no sequences; no peak was measured
    for step in range(5, 11):
        assert set(memory.at(step)) == declared - unknown


def test_the_parts_add_up_to_the_step(monitor: ThroughputMonitor, tmp_path: Path) -> None:
    memory = fit(monitor, tmp_path)
    for step in range(2, 11):
        row = memory.at(step)
        assert sum(row[key] for key in PART_KEYS) == pytest.approx(row["time/step_ms"])
        assert row["throughput/samples_per_sec"] == pytest.approx(4e3 / row["time/step_ms"])
    summary = monitor.summary
    assert sum(summary["parts_ms"].values()) == pytest.approx(summary["step_ms"])


class Sleeper(Stranger):
    """Sleeps in one place."""

    def __init__(self, where: str):
        super().__init__()
        self.where = where

    def nap(self, where: str) -> None:
        if where == self.where:
            time.sleep(0.02)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.nap("forward")
        return super().training_step(batch, batch_idx)

    def backward(self, loss: Tensor) -> None:
        self.nap("backward")
        loss.backward()

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.nap("transfer")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        self.nap("optimizer")
        optimizer.zero_grad()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.nap("other")


@pytest.mark.parametrize("part", ["transfer", "forward", "backward", "optimizer", "other"])
def test_time_is_found_in_the_part_that_takes_it(part: str, monitor: ThroughputMonitor, tmp_path: Path) -> None:
    fit(monitor, tmp_path, Sleeper(part))
    parts = monitor.summary["parts_ms"]
    assert max(parts, key=parts.__getitem__) == part
    assert parts[part] >= 20


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "on_after_batch_transfer"])
@pytest.mark.parametrize("in_datamodule", [False, True], ids=["module", "datamodule"])
def test_a_hook_that_prepares_the_batch_is_input_and_is_named(
    hook: str, in_datamodule: bool, monitor: ThroughputMonitor, tmp_path: Path
) -> None:
    def slow(self: Any, batch: Any, dataloader_idx: int) -> Any:
        time.sleep(0.02)
        return batch

    if in_datamodule:
        methods = {hook: slow, "train_dataloader": lambda self: loader()}
        fit(monitor, tmp_path, train=type("Data", (lightning.LightningDataModule,), methods)())
    else:
        fit(monitor, tmp_path, type("Module", (Stranger,), {hook: slow})())
    parts, found = monitor.summary["parts_ms"], monitor.summary["bottleneck"]
    assert parts["data_wait"] >= 20 > parts["transfer"]
    assert sum(parts.values()) == pytest.approx(monitor.summary["step_ms"])
    assert found["kind"] == "input"
    assert f"preparing the batch in {hook}: " in found["evidence"]
    assert hook in found["advice"]


@pytest.mark.usefixtures("alone")
def test_waiting_for_the_loader_is_data_wait_and_the_bottleneck_is_input(
    monitor: ThroughputMonitor, tmp_path: Path
) -> None:
    class Slow(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            time.sleep(0.005)
            return torch.zeros(4), torch.zeros(1)

    fit(monitor, tmp_path, train=DataLoader(Slow(), batch_size=4))
    assert monitor.summary["parts_ms"]["data_wait"] >= 20
    assert monitor.summary["bottleneck"]["kind"] == "input"


def test_validation_and_checkpoints_are_not_training_time(
    monitor: ThroughputMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hours(HostClock):
        now = 0.0

        def mark(self) -> float:
            return self.now

    hours = Hours()
    monkeypatch.setattr(_step_monitor, "clock_for", lambda device: hours)

    class Slow(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            hours.now += 2
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            hours.now += 50

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            hours.now += 30

    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    options = {"val_check_interval": 2, "enable_checkpointing": True, "callbacks": (checkpoint,)}
    memory = fit(monitor, tmp_path, Slow(), val=loader(8), **options)
    assert len(list(tmp_path.glob("*.ckpt"))) == 10
    assert set(memory.values("time/step_ms")) == {2000}


def test_accumulated_gradients_make_one_row_an_update_of_all_its_samples(
    monitor: ThroughputMonitor, tmp_path: Path
) -> None:
    memory = fit(monitor, tmp_path, train=loader(16), accumulate_grad_batches=2)
    assert memory.steps("time/step_ms") == [2, 3, 4]
    row = memory.at(3)
    assert row["throughput/samples_per_sec"] == pytest.approx(8e3 / row["time/step_ms"])
    assert row["throughput/batches_per_sec"] == pytest.approx(2e3 / row["time/step_ms"])


def test_the_short_last_batch_counts_as_what_it_is(monitor: ThroughputMonitor, tmp_path: Path) -> None:
    memory = fit(monitor, tmp_path, train=loader(samples=10, batch_size=4))
    row = memory.at(3)
    assert row["throughput/samples_per_sec"] == pytest.approx(2e3 / row["time/step_ms"])


def test_manual_optimisation_with_two_optimizers(monitor: ThroughputMonitor, tmp_path: Path) -> None:
    class Manual(Stranger):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.other = nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer, layer in zip(self.optimizers(), (self.layer, self.other), strict=True):
                optimizer.zero_grad()
                self.manual_backward(nn.functional.mse_loss(layer(batch[0]), batch[1]))
                optimizer.step()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in (self.layer, self.other)]

    memory = fit(monitor, tmp_path, Manual())
    assert memory.steps("time/step_ms") == list(range(4, 21, 2))  # an optimizer's step is a step of Lightning's count
    assert all(monitor.summary["parts_ms"][part] > 0 for part in ("forward", "backward", "optimizer"))


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_run_that_is_no_longer_than_the_warm_up_has_curves_and_no_rate(
    steps: int, monitor: ThroughputMonitor, tmp_path: Path
) -> None:
    memory = fit(monitor, tmp_path, max_steps=steps)
    assert memory.steps("time/step_ms") == list(range(2, steps + 1))
    assert list(monitor.summary) == ["missing"]
    assert f"of {steps} updates none came after the warm-up of 5" in monitor.summary["missing"]["bottleneck"]


def test_the_warm_up_is_left_out_of_the_summary(tmp_path: Path) -> None:
    monitor = ThroughputMonitor(warmup_steps=7, calibrate=False, verbose=False, record_operations=False)
    fit(monitor, tmp_path)
    assert monitor.summary["updates"] == 3
    assert monitor.summary["samples"] == 12


def test_a_second_fit_starts_a_new_summary(monitor: ThroughputMonitor, tmp_path: Path) -> None:
    first = fit(monitor, tmp_path)
    second = fit(monitor, tmp_path)
    assert first.steps("time/step_ms") == second.steps("time/step_ms")
    assert monitor.summary["updates"] == 5


def test_several_fits_of_one_trainer(monitor: ThroughputMonitor, tmp_path: Path) -> None:
    trainer = lightning.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", max_epochs=1, logger=False, callbacks=[monitor],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Stranger(), loader())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(Stranger(), loader())
    assert monitor.summary["updates"] > 0
    monitor.teardown(trainer, Stranger(), "fit")
    monitor.teardown(trainer, Stranger(), "fit")


def test_the_trainers_own_profiler_goes_on_and_comes_back(monitor: ThroughputMonitor, tmp_path: Path) -> None:
    profiler = SimpleProfiler(dirpath=tmp_path, filename="profile")
    fit(monitor, tmp_path, profiler=profiler)
    assert any("training_step" in action for action in profiler.recorded_durations)
    assert monitor.summary["updates"] > 0


def test_two_monitors_of_one_trainer_both_measure(monitor: ThroughputMonitor, tmp_path: Path) -> None:
    second = ThroughputMonitor(calibrate=False, verbose=False, record_operations=False, warmup_steps=2)
    fit(monitor, tmp_path, callbacks=(second,))
    assert (monitor.summary["updates"], second.summary["updates"]) == (5, 8)
    for summary in (monitor.summary, second.summary):
        assert summary["parts_ms"]["forward"] > 0


class Dicts(Stranger):
    """Takes batches of any shape."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["inner"][0] if isinstance(batch, dict) else batch
        return self.layer(x).mean()


@pytest.mark.parametrize(
    "sample", [torch.zeros(4), {"inner": (torch.zeros(4), torch.zeros(1)), "id": 3}], ids=["tensor", "nested"]
)
def test_any_batch_that_lightning_can_size(sample: Any, monitor: ThroughputMonitor, tmp_path: Path) -> None:
    memory = fit(monitor, tmp_path, Dicts(), train=DataLoader([sample] * 12, batch_size=3))
    row = memory.at(4)
    assert row["throughput/samples_per_sec"] == pytest.approx(3e3 / row["time/step_ms"])


def test_a_batch_size_of_ones_own(tmp_path: Path) -> None:
    monitor = ThroughputMonitor(
        batch_size_fn=lambda batch: 100, calibrate=False, verbose=False, record_operations=False
    )
    fit(monitor, tmp_path)
    assert monitor.summary["batch_size"] == 100


def test_flops_are_those_of_the_layer_and_mfu_is_of_the_measured_peak(
    recording: ThroughputMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Calibration("cpu", "a processor", None, torch.__version__, 2, {"fp32": 1e9})
    monkeypatch.setattr(_analysis, "find_calibration", lambda device, measure: measured)
    memory = fit(recording, tmp_path)
    # A linear layer of 4 → 1: 8 FLOPs forward, 8 for the weights' gradient, none for the input's.
    assert recording.summary["flops_per_sample"] == 16
    assert recording.summary["flops_per_sec"] == pytest.approx(16 * recording.summary["samples_per_sec"])
    assert recording.summary["samples_per_sec"] == pytest.approx(4e3 / recording.summary["step_ms_median"])
    row = memory.at(5)
    assert row["throughput/flops_per_sec"] == pytest.approx(16 * 4e3 / row["time/step_ms"])
    assert row["throughput/mfu"] == pytest.approx(row["throughput/flops_per_sec"] / 1e9)


def test_the_peak_is_that_of_what_the_model_really_runs(
    recording: ThroughputMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where cuDNN's recurrent kernels use TF32 and the products of the head do not."""

    class Recurrent(Stranger):
        def __init__(self) -> None:
            super().__init__()
            self.cell = LSTMCell(1, 2)
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.layer(unroll(self.cell, x[..., None])[0][:, -1]), y)

    formats = {"matmul": "none", "convolution": "tf32", "recurrent": "tf32"}
    monkeypatch.setattr(calibration, "float32_formats", lambda device: formats)
    measured = Calibration("cpu", "a device", None, torch.__version__, 2, {"fp32": 1e9, "tf32": 8e9})
    monkeypatch.setattr(_analysis, "find_calibration", lambda device, measure: measured)
    memory = fit(recording, tmp_path, Recurrent())
    weights, states = 4 * 2 * (1 + 2) * 8, 3 * 2 * 2 * 8  # four steps of (1 + 2) inputs into 2 units of 4 gates each
    cell, head = 2 * weights + states, 3 * 2 * 2  # backward: of each weight, of the states but the first one
    peak = (cell + head) / (cell / 8e9 + head / 1e9)
    assert recording.summary["peak_flops_per_sec"] == pytest.approx(peak)
    row = memory.at(5)
    assert row["throughput/mfu"] == pytest.approx(row["throughput/flops_per_sec"] / peak)


def test_a_step_that_depends_on_its_data_has_the_flops_that_it_ran(
    recording: ThroughputMonitor, tmp_path: Path
) -> None:
    class ByValue(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss if loss.item() >= 0 else -loss

    memory = fit(recording, tmp_path, ByValue())
    assert len(memory.values("throughput/flops_per_sec")) == 6
    assert recording.summary["flops_per_sample"] == 16


def test_without_recorded_operations_there_are_no_flops(monitor: ThroughputMonitor, tmp_path: Path) -> None:
    memory = fit(monitor, tmp_path)
    assert memory.values("throughput/flops_per_sec") == []
    assert monitor.summary["missing"]["flops_per_sec"] == "record_operations=False"


@functools.lru_cache
def cached_mask(size: int, device: torch.device) -> Tensor:
    return torch.ones(size, device=device)


TABLE: dict[int, Tensor] = {}


@pytest.mark.parametrize("callbacks", [(), (MemoryMonitor(verbose=False),)], ids=["alone", "with memory"])
def test_a_module_that_caches_tensors_outside_of_itself_trains(
    recording: ThroughputMonitor, tmp_path: Path, callbacks: tuple[Callback, ...]
) -> None:
    class Caching(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            x = x * cached_mask(4, x.device) * TABLE.setdefault(len(x), torch.ones(4, device=x.device))
            return super().training_step((x, y), batch_idx)

    cached_mask.cache_clear()
    TABLE.clear()
    fit(recording, tmp_path, Caching(), callbacks=callbacks)
    assert recording.summary["flops_per_sample"] == 16
    assert [each.device.type for each in (cached_mask(4, torch.device("cpu")), *TABLE.values())] == ["cpu", "cpu"]


def test_flops_may_be_given(tmp_path: Path) -> None:
    monitor = ThroughputMonitor(flops_per_sample=1000, calibrate=False, verbose=False, record_operations=False)
    fit(monitor, tmp_path)
    assert monitor.summary["flops_per_sample"] == 1000


def test_every_nth_step_is_written_and_all_are_measured(tmp_path: Path) -> None:
    monitor = ThroughputMonitor(
        every_n_steps=3, warmup_steps=0, calibrate=False, verbose=False, record_operations=False
    )
    memory = fit(monitor, tmp_path)
    assert memory.steps("time/step_ms") == [3, 6, 9]
    assert monitor.summary["updates"] == 9  # the first one pays for work that is done once


def test_every_0th_step_is_a_warning_and_the_run_goes_on(tmp_path: Path) -> None:
    monitor = ThroughputMonitor(every_n_steps=0, calibrate=False, verbose=False, record_operations=False)
    with pytest.warns(UserWarning, match="every_n_steps=0"):
        memory = fit(monitor, tmp_path)
    assert memory.steps("time/step_ms") == []
    assert monitor.summary["updates"] == 5


class LateClock(HostClock):
    """A device that is always behind: no moment has come until somebody waits for it."""

    waited = 0

    def ready(self, mark: float) -> bool:
        return self.waited > 0

    def wait(self, mark: float) -> None:
        self.waited += 1


def test_nobody_waits_for_the_device_before_the_training_is_over(
    monitor: ThroughputMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LateClock()
    monkeypatch.setattr(_step_monitor, "clock_for", lambda device: clock)
    waits = []

    class Watching(Stranger):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            waits.append(clock.waited)

    memory = fit(monitor, tmp_path, Watching(), train=loader(samples=250, batch_size=1))
    assert waits == [0] * 500
    assert clock.waited == 1
    assert memory.steps("time/step_ms") == list(range(2, 501))


class SteppedClock(HostClock):
    """Stands still until somebody moves it."""

    now = 0.0

    def mark(self) -> float:
        return self.now


@pytest.mark.slow
def test_a_curve_of_equal_steps_is_flat_though_a_hundred_of_them_are_written_at_once(
    monitor: ThroughputMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SteppedClock()
    monkeypatch.setattr(_step_monitor, "clock_for", lambda device: clock)

    class Equal(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            clock.now += 0.002
            return super().training_step(batch, batch_idx)

    class SlowMemory(Memory):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            clock.now += 0.5
            super().log_metrics(metrics, step)

    memory = SlowMemory()
    trainer = lightning.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", max_epochs=1, logger=memory, callbacks=[monitor, TrainCurves()],
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Equal(), loader(samples=350, batch_size=1))
    assert memory.steps("train/loss") == list(range(1, 351))
    assert [memory.at(step)["time/step_ms"] for step in range(2, 351)] == pytest.approx([2.0] * 349)
    assert monitor.summary["excluded_ms"] > 500


def test_a_device_that_is_lost_in_a_step_is_one_warning_and_the_training_goes_on(
    monitor: ThroughputMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lost(HostClock):
        marks = 0

        def mark(self) -> float:
            self.marks += 1
            if self.marks > 20:
                raise RuntimeError("CUDA error: the device is lost")
            return float(self.marks)

    monkeypatch.setattr(_step_monitor, "clock_for", lambda device: Lost())
    with pytest.warns(UserWarning, match="stopped measuring: RuntimeError: CUDA error") as caught:
        fit(monitor, tmp_path)
    assert len([w for w in caught if "stopped measuring" in str(w.message)]) == 1


def test_a_failure_in_measuring_is_one_warning_and_the_training_goes_on(
    monitor: ThroughputMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("the driver went away")

    monkeypatch.setattr(monitor, "_flush", broken)
    with pytest.warns(
        UserWarning, match="ThroughputMonitor stopped measuring: OSError: the driver went away"
    ) as caught:
        fit(monitor, tmp_path)
    assert len([w for w in caught if "stopped measuring" in str(w.message)]) == 1


def test_a_run_that_fails_has_the_cost_of_its_steps(monitor: ThroughputMonitor, tmp_path: Path) -> None:
    class Failing(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.global_step == 8:
                raise ValueError("broken")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="broken"):
        fit(monitor, tmp_path, Failing())
    assert monitor.summary["updates"] == 3


def test_a_run_that_fails_does_not_wait_for_a_device_that_may_wait_for_a_lost_rank(
    monitor: ThroughputMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Stranger):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                raise ConnectionError("a rank is gone")

    clock = LateClock()
    monkeypatch.setattr(_step_monitor, "clock_for", lambda device: clock)
    with pytest.raises(ConnectionError):
        fit(monitor, tmp_path, Failing())
    assert clock.waited == 0
    assert monitor.summary["missing"] == {"bottleneck": "the fit ended with ConnectionError"}


@pytest.mark.usefixtures("alone")
def test_the_rows_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(ThroughputMonitor(calibrate=False), tmp_path, callbacks=(DeviceMonitor(),))
    said = capsys.readouterr().out
    assert said.startswith("\nStranger · batch 4 · cpu\nspeed   ")
    assert [line.split()[0] for line in said.splitlines()[2:] if line[0] != " "] == ["speed", "step", "limit", "try"]
    assert "p99" not in said  # a detail


def test_the_details_are_printed_where_they_are_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHSCOPE_VERBOSE", "1")
    fit(ThroughputMonitor(calibrate=False), tmp_path)
    assert "p99 step" in capsys.readouterr().out


def test_energy_and_memory_come_from_the_device_monitor_in_either_order(tmp_path: Path) -> None:
    for order in (lambda m, d: (m, d), lambda m, d: (d, m)):
        monitor, device = ThroughputMonitor(calibrate=False, verbose=False, record_operations=False), DeviceMonitor()
        first, second = order(monitor, device)
        trainer = lightning.Trainer(
            default_root_dir=tmp_path, accelerator="cpu", max_epochs=1, logger=False, callbacks=[first, second],
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(Stranger(), loader(400))
        assert monitor.summary["memory_peak_gib"] > 0


def test_a_monitor_is_spawned_with_its_arguments_and_results(monitor: ThroughputMonitor, tmp_path: Path) -> None:
    assert pickle.loads(pickle.dumps(monitor)).summary == {}
    fit(monitor, tmp_path)
    again = pickle.loads(pickle.dumps(monitor))
    assert (again.summary, again.verbose, again.step_times()) == (monitor.summary, False, None)
    fit(again, tmp_path)
    assert again.summary["updates"] == monitor.summary["updates"]


def fail(*_: Any) -> None:
    raise RuntimeError("cannot be measured")


@pytest.mark.slow
def test_a_rank_that_gives_up_keeps_none_waiting(tmp_path: Path) -> None:
    """At the end the ranks gather their rates. A sum without one of them is no rate of all."""
    measured = "batchscope.callbacks._table.UpdateTable.add"
    both = ranks(tmp_path, *SMALL, faults={1: [(measured, 1, fail)]})
    assert [one.end() for one in both] == [0, 0], [one.complained for one in both]
    assert record(tmp_path / "out")["throughput"] == {"missing": {"bottleneck": "rank 1 has stopped measuring"}}
    assert "ThroughputMonitor has no summary: rank 1 has stopped measuring" in both[0].complained
