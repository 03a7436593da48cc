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

from batchscope.callbacks import _analysis, throughput
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
from tests.support.third_party_modules import Memory, Stranger, loader, train


def monitoring(**options: Any) -> ThroughputMonitor:
    """A monitor that says nothing, measures no peak, and records no operations unless it is asked to."""
    return ThroughputMonitor(**{"calibrate": False, "verbose": False, "record_operations": False, **options})


def fit(monitor: ThroughputMonitor, module: Any = None, *callbacks: Callback, **options: Any) -> Memory:
    """Train for two epochs of five steps of four samples, by default; returns what was logged."""
    memory = Memory()
    train(module or Stranger(), monitor, *callbacks, **{"logger": memory, **options})
    return memory


def summary_of(module: Any = None, *callbacks: Callback, **options: Any) -> dict[str, Any]:
    monitor = monitoring()
    fit(monitor, module, *callbacks, **options)
    return monitor.summary


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Calibration | None]:
    """The device's calibration; None before a test sets it."""
    found: list[Calibration | None] = [None]
    monkeypatch.setattr(_analysis, "find_calibration", lambda device, measure: found[0])
    return found


def test_a_name_in_place_of_a_function_is_refused() -> None:
    with pytest.raises(
        TypeError, match="^timesteps_fn: got 'mine.tokens', takes {_target_: …, _partial_: true} of a func"
    ):
        ThroughputMonitor(timesteps_fn="mine.tokens")  # pyrefly: ignore[bad-argument-type]


# --- the curves -------------------------------------------------------------------------------------------------------


def test_every_step_after_the_recorded_ones_has_all_that_can_be_known() -> None:
    memory = fit(monitoring(record_operations=True))
    assert memory.steps("time/step_ms") == list(range(5, 11))
    declared = {key for key in METRICS if key.startswith(("time/", "throughput/"))}
    unknown = {"throughput/timesteps_per_sec", "throughput/mfu"}  # no sequences; no peak was measured
    for step in range(5, 11):
        row = memory.at(step)
        assert set(row) == declared - unknown
        assert sum(row[f"time/{part}_ms"] for part in PARTS) == pytest.approx(row["time/step_ms"])


@pytest.mark.parametrize(
    ("data", "options", "steps", "samples", "batches"),
    [
        (loader(), {}, range(2, 11), 4, 1),
        (loader(16), {"accumulate_grad_batches": 2}, range(2, 5), 8, 2),
        (loader(10), {"max_epochs": 1}, [2, 3], 2, 1),  # the short last batch
        (DataLoader([torch.zeros(4)] * 12, batch_size=3), {"max_epochs": 1}, range(2, 5), 3, 1),
        (DataLoader([{"a": (torch.zeros(4),), "id": 3}] * 12, batch_size=3), {"max_epochs": 1}, range(2, 5), 3, 1),
    ],
    ids=["plain", "accumulated", "a short last batch", "a tensor", "nested"],
)
def test_a_row_is_an_update_with_all_its_samples(
    data: Any, options: dict[str, Any], steps: Any, samples: int, batches: int
) -> None:
    class AnyBatch(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            batch = batch["a"] if isinstance(batch, dict) else batch
            return self.layer(batch[0] if isinstance(batch, list | tuple) else batch).mean()

    memory = fit(monitoring(), AnyBatch(), data=data, **options)
    assert memory.steps("time/step_ms") == list(steps)
    row = memory.at(steps[-1])
    assert row["throughput/samples_per_sec"] == pytest.approx(1e3 * samples / row["time/step_ms"])
    assert row["throughput/batches_per_sec"] == pytest.approx(1e3 * batches / row["time/step_ms"])


def test_every_nth_step_is_written_and_all_are_measured() -> None:
    monitor = monitoring(every_n_steps=3, warmup_steps=0)
    assert fit(monitor).steps("time/step_ms") == [3, 6, 9]
    assert monitor.summary["updates"] == 9  # the first one pays for work that is done once
    assert fit(monitoring(every_n_steps=0)).steps("time/step_ms") == []


def test_manual_optimisation_with_two_optimizers() -> None:
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

    monitor = monitoring()
    memory = fit(monitor, Manual())
    assert memory.steps("time/step_ms") == list(range(4, 21, 2))  # an optimizer's step is a step of Lightning's count
    assert all(monitor.summary["parts_ms"][part] > 0 for part in ("forward", "backward", "optimizer"))


# --- the parts, on a clock that the test moves -----------------------------------------------------------------------


class World(HostClock):
    """A clock that stands still until somebody moves it."""

    now = 0.0

    def mark(self) -> float:
        return self.now


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(throughput, "clock_for", lambda device: made)
    return made


class Sleeper(Stranger):
    """Takes a time of its own in each part."""

    def __init__(self, world: World):
        super().__init__()
        self.world = world

    def spend(self, seconds: float) -> None:
        self.world.now += seconds

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.spend(1)
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.spend(2)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.spend(40)
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.spend(3)
        return super().training_step(batch, batch_idx)

    def backward(self, loss: Tensor) -> None:
        self.spend(4)
        loss.backward()

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        self.spend(5)
        optimizer.zero_grad()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.spend(6)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.spend(500)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.spend(300)


def test_time_is_in_the_part_that_takes_it_and_validation_and_checkpoints_are_in_none(
    world: World, tmp_path: Path
) -> None:
    class Reading(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            world.now += 0.5
            return torch.zeros(4), torch.zeros(1)

    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    options = {"val_check_interval": 2, "enable_checkpointing": True, "max_epochs": 3}
    monitor = monitoring()
    memory = fit(monitor, Sleeper(world), checkpoint, data=(DataLoader(Reading(), 4), loader(8)), **options)
    assert len(list(tmp_path.glob("*.ckpt"))) == 3
    expected = {"data_wait": 43, "transfer": 2, "forward": 3, "backward": 4, "optimizer": 5, "other": 6}
    row = {part: memory.at(11)[f"time/{part}_ms"] / 1e3 for part in PARTS}
    assert row == pytest.approx(expected)  # a batch of four samples takes 2 s, beside 41 s of preparation
    found = monitor.summary["bottleneck"]
    assert found["kind"] == "input"
    assert "preparing the batch in on_after_batch_transfer: " in found["evidence"]
    assert "on_after_batch_transfer" in found["advice"]


def test_a_validation_between_two_batches_of_an_update_is_in_no_step(world: World) -> None:
    options = {"accumulate_grad_batches": 2, "val_check_interval": 1, "data": (loader(16), loader(8))}
    steps = fit(monitoring(), Sleeper(world), **options).values("time/step_ms")
    assert len(steps) == 3 and max(steps) < 500e3  # a validation takes 1,000 s


@pytest.mark.usefixtures("alone")
def test_a_hook_of_the_datamodule_prepares_the_batch_too() -> None:
    def slow(self: Any, batch: Any, dataloader_idx: int) -> Any:
        time.sleep(0.02)
        return batch

    methods = {"on_before_batch_transfer": slow, "train_dataloader": lambda self: loader()}
    summary = summary_of(data=type("Data", (lightning.LightningDataModule,), methods)())
    assert summary["parts_ms"]["data_wait"] >= 20 > summary["parts_ms"]["transfer"]


@pytest.mark.slow
def test_a_curve_of_equal_steps_is_flat_though_a_hundred_of_them_are_written_at_once(world: World) -> None:
    class Equal(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            world.now += 0.002
            return super().training_step(batch, batch_idx)

    class SlowMemory(Memory):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            world.now += 0.5
            super().log_metrics(metrics, step)

    memory, monitor = SlowMemory(), monitoring()
    fit(monitor, Equal(), TrainCurves(), data=loader(350, 1), max_epochs=1, logger=memory)
    assert memory.steps("train/loss") == list(range(1, 351))
    assert [memory.at(step)["time/step_ms"] for step in range(2, 351)] == pytest.approx([2.0] * 349)
    assert monitor.summary["excluded_ms"] > 500


class Late(HostClock):
    """A device that is always behind: no moment has come until somebody waits for it."""

    waited = 0

    def ready(self, mark: float) -> bool:
        return self.waited > 0

    def wait(self, mark: float) -> None:
        self.waited += 1


def test_nobody_waits_for_the_device_before_the_training_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waits = Late(), []
    monkeypatch.setattr(throughput, "clock_for", lambda device: clock)

    class Watching(Stranger):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            waits.append(clock.waited)

    memory = fit(monitoring(), Watching(), data=loader(120, 1), max_epochs=1)
    assert (waits, clock.waited) == ([0] * 120, 1)
    assert memory.steps("time/step_ms") == list(range(2, 121))


# --- the summary ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_run_that_is_no_longer_than_the_warm_up_has_curves_and_no_rate(steps: int) -> None:
    monitor = monitoring()
    assert fit(monitor, max_steps=steps).steps("time/step_ms") == list(range(2, steps + 1))
    assert list(monitor.summary) == ["missing"]
    assert f"of {steps} updates none came after the warm-up of 5" in monitor.summary["missing"]["bottleneck"]


def test_the_arguments_decide_what_a_summary_is_of() -> None:
    monitor = monitoring(warmup_steps=7, batch_size_fn=lambda batch: 100, flops_per_sample=1000)
    fit(monitor)
    found = {key: monitor.summary[key] for key in ("updates", "samples", "batch_size", "flops_per_sample")}
    assert found == {"updates": 3, "samples": 300, "batch_size": 100, "flops_per_sample": 1000}


def test_each_fit_starts_a_new_summary_and_a_torn_down_one_stays() -> None:
    monitor = monitoring()
    assert fit(monitor).steps("time/step_ms") == fit(monitor).steps("time/step_ms")
    assert monitor.summary["updates"] == 5
    trainer = train(Stranger(), monitor, max_epochs=1)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(Stranger(), loader())
    assert monitor.summary["updates"] > 0
    for _ in range(2):
        monitor.teardown(trainer, Stranger(), "fit")


def test_several_monitors_and_the_trainers_own_profiler_all_measure(tmp_path: Path) -> None:
    profiler, monitor, second = SimpleProfiler(tmp_path, "profile"), monitoring(), monitoring(warmup_steps=2)
    fit(monitor, None, second, profiler=profiler)
    assert any("training_step" in action for action in profiler.recorded_durations)
    assert (monitor.summary["updates"], second.summary["updates"]) == (5, 8)
    assert all(each.summary["parts_ms"]["forward"] > 0 for each in (monitor, second))


def test_flops_are_those_of_the_layer_and_mfu_is_of_the_measured_peak(measured: list[Any]) -> None:
    class ByValue(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss if loss.item() >= 0 else -loss

    measured[0] = Calibration("cpu", "a processor", None, torch.__version__, 2, {"fp32": 1e9})
    monitor = monitoring(record_operations=True)
    memory = fit(monitor, ByValue())
    # A linear layer of 4 → 1: 8 FLOPs forward, 8 for the weights' gradient, none for the input's.
    assert monitor.summary["flops_per_sample"] == 16
    assert monitor.summary["flops_per_sec"] == pytest.approx(16 * monitor.summary["samples_per_sec"])
    assert monitor.summary["samples_per_sec"] == pytest.approx(4e3 / monitor.summary["step_ms_median"])
    row = memory.at(5)
    assert row["throughput/flops_per_sec"] == pytest.approx(16 * 4e3 / row["time/step_ms"])
    assert row["throughput/mfu"] == pytest.approx(row["throughput/flops_per_sec"] / 1e9)


def test_the_peak_is_that_of_what_the_model_really_runs(measured: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
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
    measured[0] = Calibration("cpu", "a device", None, torch.__version__, 2, {"fp32": 1e9, "tf32": 8e9})
    monitor = monitoring(record_operations=True)
    fit(monitor, Recurrent())
    weights, states = 4 * 2 * (1 + 2) * 8, 3 * 2 * 2 * 8  # four steps of (1 + 2) inputs into 2 units of 4 gates each
    cell, head = 2 * weights + states, 3 * 2 * 2  # backward: of each weight, of the states but the first one
    peak = (cell + head) / (cell / 8e9 + head / 1e9)
    assert monitor.summary["peak_flops_per_sec"] == pytest.approx(peak)


@functools.lru_cache
def cached_mask(size: int, device: torch.device) -> Tensor:
    return torch.ones(size, device=device)


TABLE: dict[int, Tensor] = {}


@pytest.mark.parametrize("callbacks", [(), (MemoryMonitor(verbose=False),)], ids=["alone", "with memory"])
def test_a_module_that_caches_tensors_outside_of_itself_trains(callbacks: tuple[Callback, ...]) -> None:
    class Caching(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            x = x * cached_mask(4, x.device) * TABLE.setdefault(len(x), torch.ones(4, device=x.device))
            return super().training_step((x, y), batch_idx)

    cached_mask.cache_clear()
    TABLE.clear()
    monitor = monitoring(record_operations=True)
    fit(monitor, Caching(), *callbacks)
    assert monitor.summary["flops_per_sample"] == 16
    assert [each.device.type for each in (cached_mask(4, torch.device("cpu")), *TABLE.values())] == ["cpu", "cpu"]


@pytest.mark.usefixtures("alone")
def test_the_rows_are_printed_and_the_details_where_they_are_wanted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(ThroughputMonitor(calibrate=False), None, DeviceMonitor())
    said = capsys.readouterr().out
    assert said.startswith("\nStranger · batch 4 · cpu\nspeed   ")
    assert [line.split()[0] for line in said.splitlines()[2:] if line[0] != " "] == ["speed", "step", "limit", "try"]
    assert "p99" not in said
    monkeypatch.setenv("BATCHSCOPE_VERBOSE", "1")
    fit(ThroughputMonitor(calibrate=False))
    assert "p99 step" in capsys.readouterr().out


def test_a_monitor_can_be_sent_to_a_process_that_is_spawned() -> None:
    fit(again := pickle.loads(pickle.dumps(monitoring())))
    assert again.summary["updates"] == 5 and not again.verbose


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_run_that_fails_has_the_cost_of_its_steps_and_waits_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.global_step == 8:
                raise ConnectionError("a rank is gone")
            return super().training_step(batch, batch_idx)

    monitor, clock = monitoring(), Late()
    with pytest.raises(ConnectionError):
        fit(monitor, Failing())
    assert monitor.summary["updates"] == 3
    monkeypatch.setattr(throughput, "clock_for", lambda device: clock)
    with pytest.raises(ConnectionError):
        fit(monitor, Failing())
    assert clock.waited == 0
    assert monitor.summary["missing"] == {"bottleneck": "the fit ended with ConnectionError"}


def fail(*_: Any) -> None:
    raise RuntimeError("cannot be measured")


@pytest.mark.slow
def test_a_rank_that_gives_up_keeps_none_waiting(tmp_path: Path) -> None:
    """At the end the ranks gather their rates. A sum without one of them is no rate of all."""
    both = ranks(tmp_path, *SMALL, faults={1: [("batchscope.callbacks._table.UpdateTable.add", 1, fail)]})
    assert [one.end() for one in both] == [0, 0], [one.complained for one in both]
    assert record(tmp_path / "out")["throughput"] == {"missing": {"bottleneck": "rank 1 has stopped measuring"}}
