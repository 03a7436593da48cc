"""ThroughputMonitor in strangers' projects: what it measures of each step, what it leaves out, and the summary."""

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.profilers import SimpleProfiler
from torch import Tensor, nn
from torch.utils.data import DataLoader

from batchscope.callbacks import throughput
from batchscope.callbacks.curves import TrainCurves
from batchscope.callbacks.device import LOGGED, DeviceMonitor
from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.hardware import calibration
from batchscope.hardware.calibration import Calibration
from batchscope.records.metrics import METRICS
from batchscope.records.step_parts import PARTS
from tests.callbacks.support import World, monitoring
from tests.support.third_party_modules import Memory, Stranger, loader, train

DOCS = Path(__file__).parents[2] / "docs" / "measuring.md"


def fit(monitor: ThroughputMonitor, module: Any = None, *callbacks: Callback, **options: Any) -> Memory:
    """Train for two epochs of five steps of four samples, by default; returns what was logged."""
    memory = Memory()
    train(module or Stranger(), monitor, *callbacks, **{"logger": memory, **options})
    return memory


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


def test_the_documented_metrics_are_the_declared_ones_with_their_units() -> None:
    table = DOCS.read_text(encoding="utf-8").partition("## Metrics")[2].partition("##")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in table.splitlines() if line.startswith("| `")]
    assert [(key.strip("`"), unit) for key, unit, _ in rows] == [(m.key, m.unit) for m in METRICS.values()]
    assert all(meaning for *_, meaning in rows)
    assert set(LOGGED) <= set(METRICS)


@pytest.mark.parametrize(
    ("data", "options", "steps", "samples", "batches"),
    [
        (loader(), {}, range(2, 11), 4, 1),
        (loader(16), {"accumulate_grad_batches": 2}, range(2, 5), 8, 2),
        (loader(10), {"max_epochs": 1}, [2, 3], 2, 1),
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


def test_the_arguments_decide_what_is_written_and_what_a_summary_is_of() -> None:
    monitor = monitoring(every_n_steps=3, warmup_steps=0)
    assert fit(monitor).steps("time/step_ms") == [3, 6, 9]
    assert monitor.summary["updates"] == 9  # the first one pays for work that is done once
    monitor = monitoring(every_n_steps=0, warmup_steps=7, batch_size_fn=lambda batch: 100, flops_per_sample=1000)
    assert fit(monitor).steps("time/step_ms") == []
    found = {key: monitor.summary[key] for key in ("updates", "samples", "batch_size", "flops_per_sample")}
    assert found == {"updates": 3, "samples": 300, "batch_size": 100, "flops_per_sample": 1000}


def test_manual_optimisation_with_two_optimizers() -> None:
    class Manual(Stranger):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD([each], lr=0.01) for each in self.parameters()]

    monitor = monitoring()
    memory = fit(monitor, Manual())
    assert memory.steps("time/step_ms") == list(range(4, 21, 2))  # an optimizer's step is a step of Lightning's count
    assert all(monitor.summary["parts_ms"][part] > 0 for part in ("forward", "backward", "optimizer"))


# --- the parts, on a clock that the test moves -----------------------------------------------------------------------


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


def test_a_hook_of_the_datamodule_prepares_the_batch_too(world: World) -> None:
    def slow(self: Any, batch: Any, dataloader_idx: int) -> Any:
        world.now += 7
        return batch

    methods = {"on_before_batch_transfer": slow, "train_dataloader": lambda self: loader()}
    fit(monitor := monitoring(), data=type("Data", (lightning.LightningDataModule,), methods)())
    assert (monitor.summary["parts_ms"]["data_wait"], monitor.summary["parts_ms"]["transfer"]) == (7e3, 0)


@pytest.mark.parametrize("is_behind", [False, True], ids=["a device in time", "a device that is always behind"])
def test_equal_steps_are_a_flat_curve_though_a_hundred_are_written_at_once_and_nobody_waits_before_the_end(
    is_behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(World):
        waited = 0

        def ready(self, mark: float) -> bool:
            return not is_behind or self.waited > 0

        def wait(self, mark: float) -> None:
            self.waited += 1

    class Equal(Stranger):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            world.now += 0.002
            assert world.waited == 0
            return super().training_step(batch, batch_idx)

    class SlowMemory(Memory):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            world.now += 0.5
            super().log_metrics(metrics, step)

    memory, monitor, world = SlowMemory(), monitoring(), Clock()
    monkeypatch.setattr(throughput, "clock_for", lambda device: world)
    fit(monitor, Equal(), TrainCurves(), data=loader(120, 1), max_epochs=1, logger=memory)
    assert world.waited == 1
    assert memory.steps("train/loss") == list(range(1, 121))
    assert memory.steps("time/step_ms") == list(range(2, 121))
    assert memory.values("time/step_ms") == pytest.approx([2.0] * 119)
    assert monitor.summary["excluded_ms"] > 100


# --- the summary ------------------------------------------------------------------------------------------------------


def test_several_monitors_and_the_trainers_own_profiler_all_measure(tmp_path: Path) -> None:
    profiler, monitor, second = SimpleProfiler(tmp_path, "profile"), monitoring(), monitoring(warmup_steps=2)
    fit(monitor, None, second, profiler=profiler)
    assert any("training_step" in action for action in profiler.recorded_durations)
    assert (monitor.summary["updates"], second.summary["updates"]) == (5, 8)
    assert all(each.summary["parts_ms"]["forward"] > 0 for each in (monitor, second))


class ByValue(Stranger):
    """A linear layer of 4 → 1: 8 FLOPs forward, 8 for the weights' gradient, none for the input's."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() >= 0 else -loss


class Mixed(Stranger):
    """A convolution of 16 FLOPs, forward and for its weights, and a head of 4, also for its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 4), nn.Flatten(), nn.Linear(2, 1))


@pytest.mark.parametrize(
    ("module", "flops", "peak"),
    [(ByValue, 16, 1e9), (Mixed, 44, 44 / (32 / 8e9 + 12 / 1e9))],  # convolutions in TF32, other products not
    ids=["one product", "products of two peaks"],
)
def test_flops_are_those_of_the_layers_and_mfu_is_of_the_peak_of_what_they_run(
    module: type[Stranger], flops: int, peak: float, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    formats = {"matmul": "none", "convolution": "tf32", "recurrent": "tf32"}
    monkeypatch.setattr(calibration, "float32_formats", lambda device: formats)  # as on a GPU
    measured[0] = Calibration("cpu", "a device", None, torch.__version__, 2, {"fp32": 1e9, "tf32": 8e9})
    memory = fit(monitor := monitoring(record_operations=True), module())
    summary = monitor.summary
    assert (summary["flops_per_sample"], summary["peak_flops_per_sec"]) == (flops, pytest.approx(peak))
    assert summary["flops_per_sec"] == pytest.approx(flops * summary["samples_per_sec"])
    assert summary["mfu"] == pytest.approx(summary["flops_per_sec"] / peak)
    assert summary["samples_per_sec"] == pytest.approx(4e3 / summary["step_ms_median"])
    row = memory.at(5)
    assert row["throughput/flops_per_sec"] == pytest.approx(flops * 4e3 / row["time/step_ms"])
    assert row["throughput/mfu"] == pytest.approx(row["throughput/flops_per_sec"] / peak)


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
