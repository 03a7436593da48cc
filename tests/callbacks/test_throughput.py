"""ThroughputMonitor in strangers' projects: what it measures of each step, what it leaves out, and the summary."""

import json
from pathlib import Path
from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset

from batchscope.callbacks import _measurement
from batchscope.callbacks._batches import SampleCounter, count_samples
from batchscope.callbacks.curves import TrainCurves
from batchscope.callbacks.device import LOGGED, DeviceMonitor
from batchscope.callbacks.throughput import ThroughputMonitor
from batchscope.errors import UserError
from batchscope.hardware import calibration
from batchscope.hardware.calibration import Calibration
from batchscope.hardware.processor import Noise
from batchscope.records.metrics import METRICS
from batchscope.records.step_parts import PARTS
from tests.callbacks.support import monitoring, stranger
from tests.support.third_party_modules import Asking, Memory, Stranger, loader, train


def fit(monitor: ThroughputMonitor, module=None, *callbacks, **options) -> Memory:
    """Train, by default for two epochs of five steps of four samples; returns what was logged."""
    memory = Memory()
    train(module or Stranger(), monitor, *callbacks, **{"logger": memory, **options})
    return memory


def test_a_name_in_place_of_a_function_is_refused() -> None:
    message = "^timesteps_fn: got 'mine.tokens', takes {_target_: …, _partial_: true} of a func"
    with pytest.raises(TypeError, match=message):
        ThroughputMonitor(timesteps_fn="mine.tokens")


@pytest.mark.parametrize(("module", "steps"), [(Stranger, 0), (Asking, 1)])
@pytest.mark.parametrize("name", ["batch_size_fn", "timesteps_fn"])
def test_a_function_that_returns_a_tensor_ends_the_run_when_the_first_batch_is_counted(name, module, steps) -> None:
    module = module()
    with pytest.raises(UserError, match=f"^{name}: returned a Tensor, takes a function that returns a number "):
        fit(monitor := monitoring(**{name: lambda batch: batch[0].sum()}), module)
    assert module.trainer.global_step == steps
    assert monitor.summary["missing"]["bottleneck"] == "the fit ended with ArgumentError"


@pytest.mark.parametrize("number", [None, -1, float("nan"), "8"])
def test_a_function_that_returns_no_count_is_named_with_what_it_returned(number: object) -> None:
    with pytest.raises(
        UserError, match=f"^batch_size_fn: returned {number!r}, takes a function that returns a number "
    ):
        fit(monitoring(batch_size_fn=lambda batch: number))


def test_how_long_the_peak_was_measured_is_known_where_a_signal_has_ended_it(monkeypatch) -> None:
    def interrupted(device, measure):
        raise KeyboardInterrupt

    monkeypatch.setattr("batchscope.hardware.measure.find_calibration", interrupted)
    monitor, strategy = monitoring(), SimpleNamespace(root_device=torch.device("cpu"))
    with pytest.raises(KeyboardInterrupt):
        monitor.setup(SimpleNamespace(strategy=strategy, is_global_zero=True), Stranger(), "fit")
    assert monitor.calibration_s > 0


def test_the_epoch_that_only_updates_batch_norms_is_not_training() -> None:
    averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    monitor = monitoring()
    memory = fit(monitor, stranger(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), averaging, max_epochs=3)
    assert len(monitor.table) == 16  # three epochs of five updates, and what Lightning counts as one more
    assert memory.steps("time/step_ms") == list(range(2, 16))
    assert monitor.summary["samples"] == 4 * monitor.summary["updates"]


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
    docs = Path(__file__).parents[2] / "docs" / "measuring.md"
    table = docs.read_text(encoding="utf-8").partition("## Metrics")[2].partition("##")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in table.splitlines() if line.startswith("| `")]
    assert [(key.strip("`"), unit) for key, unit, _ in rows] == [(m.key, m.unit) for m in METRICS.values()]
    assert all(meaning for *_, meaning in rows)
    assert set(LOGGED) <= set(METRICS)


def test_the_samples_of_a_batch_are_the_length_of_its_first_tensor() -> None:
    assert count_samples([torch.zeros(4, 4), torch.zeros(3)]) == 4
    assert count_samples({"id": 3, "a": (torch.zeros(5),)}) == 5
    assert count_samples(["a text"]) == 0


def image(height: int = 6) -> torch.Tensor:
    return torch.zeros(3, height, 7)


# The forms that a batch of n samples may take.
COLLATED = {
    "a list of images, and one of targets": lambda n: (tuple(image(4 + i) for i in range(n)), ({"boxes": 1},) * n),
    "a list of samples": lambda n: [(image(), {"boxes": torch.zeros(1, 4)}) for _ in range(n)],
    "lists by name": lambda n: {"names": ["a"] * n, "images": [image() for _ in range(n)]},
    "a number first": lambda n: {"scale": torch.tensor(2.0), "images": torch.zeros(n, 3, 6, 6)},
    "a list behind others": lambda n: {"anchors": torch.zeros(9, 4), "images": [image() for _ in range(n)]},
    "time first": lambda n: [torch.zeros(50, n, 3), torch.zeros(n)],
    "packed sequences": lambda n: [pack_sequence([torch.zeros(5)] * n), torch.zeros(n)],
    "a nested tensor": lambda n: torch.nested.nested_tensor([torch.zeros(3 + i) for i in range(n)]),
    "stacked images": lambda n: [torch.zeros(n, 3, 6, 6), torch.zeros(n)],
    "stacked images of several views": lambda n: ((torch.zeros(n, 3, 6, 6), torch.zeros(n, 3, 6, 6)), torch.zeros(n)),
}


@pytest.mark.parametrize("name", COLLATED)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_samples_of_a_batch_that_is_not_stacked_are_those_of_its_list(name: str, size: int) -> None:
    count, collated = SampleCounter(DataLoader([0] * 20, batch_size=size)), COLLATED[name]
    assert [count(collated(n)) for n in (size, size, 1)] == [size, size, 1]


def test_a_fit_counts_the_images_of_a_detection() -> None:
    class Detector(Stranger):
        def training_step(self, batch, batch_idx: int) -> torch.Tensor:
            return torch.stack([self.layer(image.mean((1, 2)).repeat(2)[:4]) for image in batch[0]]).mean()

    monitor = monitoring()
    samples = [(image(4 + n), {"boxes": n}) for n in range(39)]
    data = DataLoader(samples, batch_size=8, collate_fn=lambda batch: tuple(zip(*batch, strict=True)))
    train(Detector(), monitor, data=data, max_epochs=3)
    assert monitor.summary["batch_size"] == 8
    assert monitor.table.rows["samples"][:5].tolist() == [8, 8, 8, 8, 7]


def test_nothing_else_than_a_list_of_samples_takes_the_place_of_the_first_tensor() -> None:
    views = [torch.zeros(4, 3), torch.zeros(4)]  # of two samples
    for source in (DataLoader([0] * 20, batch_size=2), DataLoader([0] * 20, batch_size=None), [views]):
        assert SampleCounter(source)(views) == 4
    assert SampleCounter(DataLoader([0], batch_size=1))(["a text"]) == 0


def test_the_arguments_decide_what_is_written_and_what_a_summary_is_of() -> None:
    monitor = monitoring(every_n_steps=3, warmup_steps=0)
    assert fit(monitor).steps("time/step_ms") == [3, 6, 9]
    assert monitor.summary["updates"] == 9  # the first update is left out: it includes work that is done once
    monitor = monitoring(every_n_steps=0, warmup_steps=7, batch_size_fn=lambda batch: 100, flops_per_sample=1000)
    assert fit(monitor).steps("time/step_ms") == []
    summary = {key: monitor.summary[key] for key in ("updates", "samples", "batch_size", "flops_per_sample")}
    assert summary == {"updates": 3, "samples": 300, "batch_size": 100, "flops_per_sample": 1000}


def test_a_test_that_fails_changes_nothing_of_what_the_fit_has_measured() -> None:
    module, monitor = stranger(test_step=lambda module: 1 / 0), monitoring(warmup_steps=0)
    trainer = train(module, monitor)
    summary = {**monitor.summary}
    with pytest.raises(ZeroDivisionError):
        trainer.test(module, loader(), verbose=False)
    assert monitor.summary == summary


# --- the parts, on a clock that the test moves -----------------------------------------------------------------------


# Seconds that hooks of a module take, and the watts that the device draws meanwhile.
SPENT = {
    "on_before_batch_transfer": (1, 1),
    "transfer_batch_to_device": (2, 1),
    "on_after_batch_transfer": (40, 1),
    "training_step": (3, 1),
    "backward": (4, 1),
    "optimizer_zero_grad": (5, 1),
    "on_train_batch_end": (6, 1),
    "validation_step": (500, 50),
    "on_save_checkpoint": (300, 1),
    "on_train_epoch_start": (7, 1),
    "on_validation_end": (900, 90),
}


def spending(world) -> Stranger:
    """A module whose hooks take the times of SPENT; during the warm-up its device draws twenty watts more."""

    def hook(seconds: float, watts: float):
        return lambda module: world.move(seconds, watts + 20 * (module.global_step < 5))

    return stranger(**{name: hook(*spent) for name, spent in SPENT.items()})


class Reading(Dataset):
    """Samples that take half a second each."""

    def __init__(self, world) -> None:
        self.world = world

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int):
        self.world.move(0.5)
        return torch.zeros(4), torch.zeros(1)


@pytest.mark.usefixtures("alone")
def test_time_is_that_of_steps_and_power_that_of_training(world, tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    options = {"val_check_interval": 2, "enable_checkpointing": True, "max_epochs": 3, "num_sanity_val_steps": 0}
    monitor, data = monitoring(), (DataLoader(Reading(world), 4), loader(8))
    memory = fit(monitor, spending(world), DeviceMonitor(), checkpoint, data=data, **options)
    assert len(list(tmp_path.glob("*.ckpt"))) == 3
    expected = {"data_wait": 43, "transfer": 2, "forward": 3, "backward": 4, "optimizer": 5, "other": 6}
    row = {part: memory.at(11)[f"time/{part}_ms"] / 1e3 for part in PARTS}
    assert row == pytest.approx(expected)  # a batch of four samples takes 2 s, beside 41 s of preparation
    seconds = 10 * 63 - 2 * 6  # a step ends with its checkpoint, before the module's own hook
    assert (monitor.summary["updates"], monitor.summary["seconds"]) == (10, pytest.approx(seconds))
    assert monitor.summary["joules_per_sample"] == pytest.approx(seconds / (10 * 4))
    assert monitor.summary["bottleneck"]["kind"] == "input"


def test_a_validation_between_two_batches_of_an_update_is_in_no_step(world) -> None:
    options = {"accumulate_grad_batches": 2, "val_check_interval": 1, "data": (loader(16), loader(8))}
    steps = fit(monitoring(), spending(world), **options).values("time/step_ms")
    assert len(steps) == 3 and max(steps) < 500e3  # a validation takes 1,900 s


@pytest.mark.usefixtures("alone")
def test_a_step_that_asks_for_its_batch_has_its_parts_and_its_rate_of_samples(world) -> None:
    class Slowly(Asking):
        def training_step(self, dataloader_iter):
            world.move(3)
            return super().training_step(dataloader_iter)

        def on_train_batch_end(self, *args) -> None:
            world.move(6)

    memory = fit(monitor := monitoring(), Slowly(), data=DataLoader(Reading(world), 4))
    row = {part: memory.at(8)[f"time/{part}_ms"] / 1e3 for part in PARTS}
    assert row == pytest.approx(dict.fromkeys(PARTS, 0) | {"data_wait": 2, "forward": 3, "other": 6})
    assert (monitor.summary["updates"], monitor.summary["samples_per_sec"]) == (5, pytest.approx(4 / 11))


@pytest.mark.parametrize("world", [False, True], indirect=True, ids=["a device in time", "a device that lags behind"])
def test_equal_steps_are_a_flat_curve_and_nobody_waits_for_the_device_before_the_end(world) -> None:
    class SlowMemory(Memory):
        def log_metrics(self, metrics, step: int | None = None) -> None:
            world.move(0.5)
            super().log_metrics(metrics, step)

    def step(module) -> None:
        world.move(0.002)
        assert world.waited == 0

    memory, monitor, module = SlowMemory(), monitoring(), stranger(training_step=step)
    fit(monitor, module, TrainCurves(), data=loader(120, 1), max_epochs=1, logger=memory)
    assert world.waited == 1
    assert memory.steps("train/loss") == list(range(1, 121))
    assert memory.steps("time/step_ms") == list(range(2, 121))
    assert memory.values("time/step_ms") == pytest.approx([2.0] * 119)
    assert world.lags or monitor.summary["excluded_ms"] > 100  # a device that lags is read when the steps are over


# --- the summary ------------------------------------------------------------------------------------------------------


# Where a linear layer of 4 → 1 takes 8 FLOPs, forward and for its weights: a convolution of 16 FLOPs, forward and for
# its weights, and a head of 4, also for its input.
MIXED = stranger(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 4), nn.Flatten(), nn.Linear(2, 1))


@pytest.mark.parametrize(
    ("module", "flops", "peak"),
    [(Stranger(), 16, 1e9), (MIXED, 44, 44 / (32 / 8e9 + 12 / 1e9))],  # convolutions in TF32, other products not
    ids=["one product", "products of two peaks"],
)
def test_flops_are_those_of_the_layers_and_mfu_is_of_their_peak(module, flops, peak, calibrated, monkeypatch) -> None:
    formats = {"matmul": "none", "convolution": "tf32", "recurrent": "tf32"}
    monkeypatch.setattr(calibration, "float32_formats", lambda device: formats)  # as on a GPU
    calibrated[0] = Calibration("cpu", "a device", None, torch.__version__, 2, {"fp32": 1e9, "tf32": 8e9})
    memory = fit(monitor := monitoring(record_operations=True), module)
    summary = monitor.summary
    assert (summary["flops_per_sample"], summary["peak_flops_per_sec"]) == (flops, pytest.approx(peak))
    assert summary["flops_per_sec"] == pytest.approx(flops * summary["samples_per_sec"])
    assert summary["mfu"] == pytest.approx(summary["flops_per_sec"] / peak)
    assert summary["samples_per_sec"] == pytest.approx(4e3 / summary["step_ms_median"])
    row = memory.at(5)
    assert row["throughput/flops_per_sec"] == pytest.approx(flops * 4e3 / row["time/step_ms"])
    assert row["throughput/mfu"] == pytest.approx(row["throughput/flops_per_sec"] / peak)


def test_the_rate_is_of_the_batches_that_the_ranks_train_on_at_a_time(monkeypatch) -> None:
    """As under tensor parallelism, where ranks share a batch: the ranks train on three batches at a time."""
    monkeypatch.setattr(lightning.Trainer, "distributed_sampler_kwargs", {"num_replicas": 3, "rank": 0})
    memory = fit(monitor := monitoring())
    assert monitor.summary["samples_per_sec"] == pytest.approx(3 * 4e3 / monitor.summary["step_ms_median"])
    row = memory.at(5)
    assert row["throughput/samples_per_sec"] == pytest.approx(3 * 4e3 / row["time/step_ms"])


@pytest.mark.usefixtures("alone")
def test_the_rows_are_printed_and_the_details_where_they_are_wanted(capsys, monkeypatch) -> None:
    fit(ThroughputMonitor(calibrate=False), None, DeviceMonitor())
    output = capsys.readouterr().out
    assert output.startswith("\nStranger · batch 4 · cpu\nspeed   ")
    assert [line.split()[0] for line in output.splitlines()[2:] if line[0] != " "] == ["speed", "step", "limit", "try"]
    assert "p99" not in output
    monkeypatch.setenv("BATCHSCOPE_VERBOSE", "1")
    fit(ThroughputMonitor(calibrate=False))
    assert "step_ms_p99" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("others_share", "is_in_sweep", "is_named"), [(0.4, False, True), (0.4, True, False), (0.05, False, False)]
)
@pytest.mark.usefixtures("alone")
def test_a_run_alone_names_the_programs_that_took_most_and_keeps_them_to_the_terminal(
    others_share, is_in_sweep, is_named, noises, capsys, monkeypatch
) -> None:
    watch = SimpleNamespace(sample=lambda: None, most_of=lambda share: "chrome" * (share > 0.3))
    monkeypatch.setattr(_measurement, "ProgramWatch", lambda roots: watch)
    if is_in_sweep:
        monkeypatch.setenv("BATCHSCOPE_IN_SWEEP", "1")
    noises += [Noise(others_share, 0.5)] * 10
    monitor = monitoring(verbose=True)
    fit(monitor)
    assert ("mostly chrome" in " ".join(capsys.readouterr().out.split())) == is_named
    assert "chrome" not in json.dumps(monitor.record_facts())
