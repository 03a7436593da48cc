"""What a run reports in the terminal and in TensorBoard, and which of Lightning's messages it shows."""

import contextlib
import io
import logging
import os
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.loggers import WandbLogger
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SubsetRandomSampler

from batchscope._system import command_line
from batchscope.analysis import write_report
from batchscope.callbacks import _recording
from batchscope.callbacks._setting import count_epoch_samples
from batchscope.data.adding import Adding
from batchscope.data.plain import described
from batchscope.training.quiet import is_shown, quiet_libraries
from batchscope.training.run import limit_batch_size
from batchscope.training.summary import (
    _learning_rate,
    _shown_columns,
    callback_facts,
    evaluated_samples,
    full_epochs,
    log_hyperparameters,
    parameters,
    print_summary,
)
from tests.checkpointing.support import OUT
from tests.support.runs import SMALL, record, table
from tests.support.third_party_modules import Stranger, loader, train
from tests.training.support import completed, hparams, tensorboard


@pytest.fixture(scope="module")
def oversize(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose batch size is larger than its training set."""
    folder = tmp_path_factory.mktemp("oversize")
    line = ["data.batch_size=200", "optimizer.lr_scaling=linear", "optimizer.reference_batch_size=76"]
    line += ["callbacks.throughput.warmup_steps=1", "callbacks.throughput.record_operations=false"]  # two steps in all
    completed(folder, *SMALL, *line, OUT)
    return folder


ALL = "and adding has 101 training samples: every step takes all of them"


@pytest.mark.parametrize(
    ("size", "ranks", "batches", "recorded_sizes", "warning"),
    [
        (64, 2, 1, {"batch_size": 51, "global_batch_size": 101}, f"data.batch_size: got 64 for each of 2 processes, {ALL}"),
        (50, 2, 1, {"global_batch_size": 100}, None),
        (25, 2, 2, {"global_batch_size": 100}, None),
        (1, 1, 101, {"global_batch_size": 101}, None),
        (25, 2, 4, {"global_batch_size": 101}, "an update of 200 samples takes all 101 training samples of adding"),
    ],
    ids=["several ranks share the training set", "it can be filled", "by several batches", "exactly", "an update takes all"],
)  # fmt: skip
def test_a_batch_is_what_the_training_set_can_fill(size, ranks, batches, recorded_sizes, warning, capsys) -> None:
    data = Adding(batch_size=size)
    assert limit_batch_size(data, 101, world_size=ranks, batches=batches) == recorded_sizes
    assert data.batch_size == recorded_sizes.get("batch_size", size)
    assert capsys.readouterr().err == (f"warning: {warning}\n" if warning else "")


def test_a_batch_larger_than_the_training_set_is_labelled_as_what_it_held(oversize: Path) -> None:
    (line,) = [line for line in (oversize / "stderr").read_text().splitlines() if "data.batch_size" in line]
    message = "data.batch_size: got 200, and copy-memory has 76 training samples: every step takes all of them"
    assert line == f"warning: {message}"
    result = record(oversize / "out")
    assert (result["batch_size"], result["global_batch_size"], result["throughput"]["batch_size"]) == (76, 76, 76)
    assert result["config"]["data"]["batch_size"] == 200  # what was asked for
    assert result["learning_rate"] == result["config"]["optimizer"]["lr"]  # scaled to what the batch held
    assert "\nrate " not in (oversize / "stdout").read_text()
    assert "· batch 76 ·" in (oversize / "stdout").read_text()
    events = tensorboard(oversize / "out")
    assert Path(events.path).name == result["name"] == "stacked-lstm-copy-memory-bs76"
    assert hparams(events).hparams["data.batch_size"].number_value == 76


def test_the_first_rank_alone_tells_the_loggers_what_a_run_was_trained_with(oversize: Path) -> None:
    logger = Mock(spec=WandbLogger)
    log_hyperparameters(SimpleNamespace(is_global_zero=False, loggers=[logger]), record(oversize / "out"))
    assert not logger.mock_calls


def test_a_number_is_the_same_in_the_record_the_report_and_the_curves(oversize: Path) -> None:
    run_record, report = record(oversize / "out"), write_report([oversize / "out"], oversize / "report")
    throughput = run_record["throughput"]
    assert throughput["samples_per_sec"] == pytest.approx(76e3 / throughput["step_ms_median"])
    assert report.sweep.runs[0].values["samples_per_sec"] == throughput["samples_per_sec"]
    assert report.headlines[0].split("samples/s at ")[1].startswith("batch size 76.")
    for key in ("samples_per_sec", "step_ms_median"):
        assert tensorboard(oversize / "out").Scalars(f"· summary/{key}")[-1].value == pytest.approx(throughput[key])
    # Of the last validation, though the best checkpoint, which was written before its own one, was tested.
    curve = [float(row["val/loss"]) for row in table(oversize / "out") if row.get("val/loss")]
    assert run_record["metrics"]["val/loss"] == pytest.approx(curve[-1], rel=1e-6)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("batchscope train -m seed=1 optimizer.lr=0.1 data.batch_size=8,16", {"model", "data.batch_size"}),
        (
            "batchscope train -m seed=1 optimizer.lr=0.1,0.2 data.batch_size=8",
            {"model", "data.batch_size", "optimizer.lr"},
        ),
        (
            "batchscope train seed=1 optimizer.lr=0.1 data.batch_size=8",
            {"model", "data.batch_size", "optimizer.lr", "seed"},
        ),
        ("batchscope train seed=1 data.batch_size=8", {"model", "data.batch_size", "optimizer.lr", "seed"}),  # resumed
    ],
)
def test_hparams_has_the_options_that_vary_in_a_sweep_and_those_that_were_typed_of_a_run_alone(command, shown) -> None:
    row = {
        "model": "cnn",
        "dataset": "mnist",
        "data.batch_size": 8,
        "optimizer.lr": 0.1,
        "optimizer.weight_decay": 0.01,
        "seed": 1,
    }
    record = {"command": command, "overrides": ["seed=1", "optimizer.lr=0.1", "data.batch_size=8"]}
    record["choices"] = {"model": "cnn", "data": "mnist"}
    record["resumed"] = [{"step": 3}] if "-m" in command or "lr" not in command else []
    assert _shown_columns(row, record).keys() == shown
    assert _shown_columns(row | {"dataset": "rendered-digits"}, record).keys() == shown | {"dataset"}


def test_hparams_has_the_same_options_however_a_record_spells_what_was_typed() -> None:
    row = {"model": "cnn", "dataset": "mnist", "data.batch_size": 8, "optimizer.lr": 0.1, "seed": 1}
    typed = ["seed=1", "optimizer.lr=0.1", "data.root=/home/jörg/my data", 'tags=["it\'s"]']
    recorded = ["++seed=1", "optimizer.lr=0.1", 'data.root="/home/jörg/my data"', 'tags=["it\'s"]']
    record = {"command": command_line(["batchscope", "train", *typed]), "overrides": recorded}
    record["choices"] = {"model": "cnn", "data": "mnist"}
    assert _shown_columns(row, record).keys() == {"model", "data.batch_size", "optimizer.lr", "seed"}


# --- callbacks ------------------------------------------------------------------------------------------------------


COUNTER = SimpleNamespace(
    record_facts=lambda: {"counted": 3, "learning_rate": None},
    summary_lines=lambda: ["counted 3 steps"],
    detail_lines=lambda: ["one by one"],
)


def test_a_batch_of_data_that_cannot_be_changed_is_lowered_in_words_alone() -> None:
    class Few(LightningDataModule):
        batch_size = property(lambda self: 512)

    data = described(Few())
    assert limit_batch_size(data, 100, 1)["batch_size"] == data.batch_size == 100
    assert data.module.batch_size == 512


class HasTest(LightningModule):
    def test_step(self, batch, batch_idx) -> None: ...


def summary_of(run_record: dict[str, Any], *callbacks: Any, run_dir: str = "out", module: Any = None) -> str:
    """The last lines that a run with these callbacks prints."""
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        trainer = SimpleNamespace(callbacks=callbacks, lightning_module=module or HasTest())
        print_summary(trainer, run_record, Path(run_dir))
    return stdout.getvalue()


def optimizers(lr: float | None, peak: float | None) -> SimpleNamespace:
    """A trainer with SGD: its groups have no rate if `lr` is None; OneCycleLR drives them if there is a `peak`."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr or 1.0)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, 10)] if peak else []
    if lr is None:
        del optimizer.defaults["lr"], optimizer.param_groups[0]["lr"]
    return SimpleNamespace(callbacks=[], optimizers=[optimizer], lr_scheduler_configs=schedules)


@pytest.mark.parametrize(("lr", "peak", "recorded"), [(0.5, None, 0.5), (0.5, 3.0, 3.0), (None, None, None)])
def test_the_recorded_rate_is_that_of_the_optimizer_or_the_peak_of_its_schedule(lr, peak, recorded) -> None:
    assert callback_facts(optimizers(lr, peak))["learning_rate"] == recorded


def test_a_callback_of_ones_own_reaches_the_record_the_last_lines_and_the_details(oversize: Path, monkeypatch) -> None:
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.5}])
    trainer = SimpleNamespace(callbacks=[COUNTER], optimizers=[optimizer], lr_scheduler_configs=[])
    unmeasured = {"missing": {"bottleneck": "callbacks.throughput is left out"}}
    assert callback_facts(trainer) == {"counted": 3, "learning_rate": None, "throughput": unmeasured}
    stdout = summary_of(record(oversize / "out"), COUNTER)
    assert "\ncounted 3 steps\n" in stdout and "one by one" not in stdout
    monkeypatch.setenv("BATCHSCOPE_VERBOSE", "1")
    assert "\n\none by one\n" in summary_of(record(oversize / "out"), COUNTER)


@pytest.mark.parametrize(("steps", "epochs"), [(0, 0), (4, 0), (5, 1), (6, 1), (10, 2)])
def test_an_epoch_that_has_not_ended_does_not_count(steps: int, epochs: int) -> None:
    trainer = train(Stranger(), max_steps=steps)
    assert (trainer.global_step, full_epochs(trainer)) == (steps, epochs)


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize(("limit", "samples"), [(2, 8), (3, 10), (1.0, 10)])
def test_a_limited_validation_counts_the_samples_of_its_batches(limit: float, samples: int, as_list: bool) -> None:
    validated = loader(10, batch_size=4)
    data = (loader(), [validated] if as_list else validated)
    trainer = train(Stranger(), data=data, limit_val_batches=limit, max_epochs=1)
    assert evaluated_samples(trainer, SimpleNamespace(num_samples=lambda split: 10)) == {"val": samples}


def test_the_parameters_of_a_network_are_none_until_each_layer_has_its_own() -> None:
    networks = [nn.Sequential(nn.Linear(4, 8), last) for last in (nn.LazyLinear(2), nn.Linear(8, 2))]
    assert [parameters(network) for network in networks] == [0, 58]


def test_the_samples_of_several_loaders_are_not_known() -> None:
    trainer = SimpleNamespace(val_dataloaders=[loader(), loader()], num_val_batches=[5, 5], world_size=1)
    trainer.test_dataloaders, trainer.num_test_batches = None, []
    assert evaluated_samples(trainer, SimpleNamespace(num_samples=lambda split: 20)) == {}


RESULTS = {
    "test acc 98.9 % in 47 s": {},
    "val acc 98.8 % in 47 s": {"metrics": {"val/acc": 0.9881, "val/loss": 0.1}, "resumed": [{"step": 430}]},
    "test loss 0.619 in 47 s": {"metrics": {"test/loss": 0.61881, "val/loss": 0.1}},
    "test acc 98.7 % in 47 s": {"metrics": {"test_acc": 98.7}},  # in percent
    "test loss nan in 47 s": {"metrics": {"test/loss": float("nan")}},
    "1 epoch, 430 steps in 47 s": {"metrics": {"train/loss": 0.1}},
    "430 steps in 47 s": {"metrics": {"train/loss": 0.1}, "epochs": 0},
}


@pytest.mark.parametrize("row", RESULTS)
def test_the_result_is_one_row(row: str, oversize: Path) -> None:
    results = {"metrics": {"test/acc": 0.98871, "test/loss": 0.03}, "fit_seconds": 47.0, "epochs": 1, "steps": 430}
    stdout = summary_of(record(oversize / "out") | results | RESULTS[row])
    assert stdout.splitlines()[-2:] == [f"result  {row}", "files   out"]


@pytest.mark.parametrize(("name", "run_dir"), [("best", "out"), ("last", ".")])  # no best one before a validation
def test_the_details_name_the_checkpoint_that_was_kept(name: str, run_dir: str, oversize: Path, monkeypatch) -> None:
    monkeypatch.setenv("BATCHSCOPE_VERBOSE", "1")
    monkeypatch.chdir(oversize if run_dir == "out" else oversize / "out")
    run_record = record(oversize / "out")
    run_record["checkpoints"] = {kind: f"checkpoints/{kind}.ckpt" for kind in dict.fromkeys((name, "last"))}
    stdout, path = summary_of(run_record, run_dir=run_dir), os.path.join(run_dir, "checkpoints", f"{name}.ckpt")
    assert f"\nkept    {path}\n" in stdout
    assert f" ckpt={path}" in stdout
    assert "ckpt=" not in summary_of(run_record, run_dir=run_dir, module=LightningModule())  # it has no test


def test_a_peak_is_that_of_the_groups_and_not_a_default_that_none_has() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    assert _learning_rate(optimizer, is_scheduled=True) == 0.5


@pytest.mark.parametrize("is_scheduled", [False, True])
@pytest.mark.parametrize(("rates", "rate"), [((0.1, 0.1), 0.1), ((0.1, 0.2), None)])
def test_an_optimizer_has_the_rate_that_all_its_groups_share(rates: Any, rate: Any, is_scheduled: bool) -> None:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": group_rate} for group_rate in rates])
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    assert _learning_rate(optimizer, is_scheduled) == rate


def trainer_with(train_loader: Any) -> Any:
    return SimpleNamespace(train_dataloader=train_loader, world_size=1)


@pytest.mark.parametrize(
    ("sampler", "samples"),
    [(SubsetRandomSampler(range(8)), 8), (DistributedSampler(range(20), 3, 0), 20), (None, 20)],
    ids=["a part of the set", "a rank's part of it", "all"],
)
def test_the_samples_of_an_epoch_are_those_that_the_sampler_takes(sampler: Any, samples: int) -> None:
    assert count_epoch_samples(trainer_with(DataLoader(range(20), sampler=sampler))) == samples


BATCHES = BatchSampler(range(8), 4, False)


@pytest.mark.parametrize(
    "how",
    [{"batch_size": None}, {"batch_size": None, "sampler": BATCHES}, {"batch_sampler": BATCHES}],
    ids=["the set", "its sampler", "its batch sampler"],
)
def test_batches_that_the_set_or_its_sampler_makes_are_no_samples(how: Any) -> None:
    assert count_epoch_samples(trainer_with(DataLoader(range(20), **how))) is None


# --- what Lightning has to say --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_was_asked_for_is_said_and_nothing_else(tmp_path: Path) -> None:
    line = ["+trainer.profiler=simple", "optimizer.lr_scaling=sqrt"]
    line += ["+callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping", "+callbacks.stop.monitor=val/loss"]
    process = completed(tmp_path, *SMALL, *line, "+callbacks.stop.verbose=true", OUT)
    output = process.said + process.complained
    assert output.count("FIT Profiler Report") == 1
    assert "Metric val/loss improved" in output
    assert not any(words in output for words in ("GPU available", "`Trainer.fit` stopped", "Restoring states", "Tip"))
    assert re.search(r"^rate    \S+ \(0.25 × optimizer.lr\)", process.said, re.MULTILINE)


@pytest.mark.parametrize(
    ("file", "level", "shown"),
    [
        ("tuner/batch_size_scaling.py", logging.INFO, True),
        ("callbacks/timer.py", logging.INFO, False),
        ("trainer/setup.py", logging.INFO, False),
        ("trainer/setup.py", logging.WARNING, True),
    ],
)
def test_a_message_of_the_logger_that_all_share_is_judged_by_its_speaker(file: str, level: int, shown: bool) -> None:
    message = logging.LogRecord("lightning", level, f"/lib/lightning/pytorch/{file}", 1, "…", None, None)
    assert is_shown(message) == shown


def test_a_warning_of_ours_is_one_line_without_a_file_and_another_one_has_its_own(monkeypatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", lambda message, category, file, line, text=None: f"{file}:{line}")
    for _ in range(2):
        quiet_libraries()
    assert warnings.formatwarning("no FLOPs", UserWarning, _recording.__file__, 92) == "warning: no FLOPs\n"
    assert warnings.formatwarning("other", UserWarning, "/lib/other.py", 1, "code") == "/lib/other.py:1"
