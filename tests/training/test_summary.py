"""What a run says of itself: in the terminal, in TensorBoard, and what of Lightning's messages it leaves."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningDataModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from batchscope.analysis import write_report
from batchscope.analysis.report import Report
from batchscope.callbacks.nonfinite import StopOnNonFinite
from batchscope.data.adding import Adding
from batchscope.data.plain import PlainData
from batchscope.training.quiet import is_shown
from batchscope.training.run import limit_batch_size
from batchscope.training.summary import (
    callback_facts,
    evaluated_samples,
    log_hyperparameters,
    print_summary,
    whole_epochs,
)
from tests.support.runs import SMALL, last, record, run, table
from tests.support.third_party_modules import Stranger, loader, train


@pytest.fixture(scope="module")
def oversize(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose batches shall hold more samples than there are."""
    folder = tmp_path_factory.mktemp("oversize")
    line = ["data.batch_size=200", "optimizer.lr_scaling=linear", "optimizer.reference_batch_size=76"]
    line += ["callbacks.throughput.warmup_steps=1", "callbacks.throughput.record_operations=false"]  # two steps in all
    done = run(folder, *SMALL, *line, "hydra.run.dir=out")
    assert done.end() == 0, done.complained
    return folder


def test_a_batch_larger_than_the_training_set_is_said(oversize: Path) -> None:
    (line,) = [line for line in (oversize / "stderr").read_text().splitlines() if "data.batch_size" in line]
    said = "data.batch_size: got 200, and copy-memory has 76 training samples: every step takes all of them"
    assert line == f"warning: {said}"


def test_several_ranks_share_the_training_set(capsys: pytest.CaptureFixture[str]) -> None:
    data = Adding(batch_size=64)
    assert limit_batch_size(data, 101, world_size=2) == {"batch_size": 51, "global_batch_size": 101}
    assert data.batch_size == 51
    assert "got 64 for each of 2 processes, and adding has 101 training samples" in capsys.readouterr().err


def test_an_update_of_several_batches_is_said_where_it_takes_the_whole_training_set(
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = Adding(batch_size=25)
    assert limit_batch_size(data, 101, world_size=2, batches=2) == {"global_batch_size": 100}
    assert not capsys.readouterr().err
    assert limit_batch_size(data, 101, world_size=2, batches=4) == {"global_batch_size": 101}
    assert "an update of 200 samples takes all 101 training samples of adding" in capsys.readouterr().err


def test_a_batch_that_the_training_set_can_fill_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    data = Adding(batch_size=50)
    assert limit_batch_size(data, 101, world_size=2) == {"global_batch_size": 100}
    assert (data.batch_size, capsys.readouterr().err) == (50, "")


@pytest.fixture(scope="module")
def report(oversize: Path) -> Report:
    return write_report([oversize / "out"], oversize / "report")


def hparams_in(folder: Path) -> Any:
    metadata = EventAccumulator(str(folder)).Reload().SummaryMetadata("_hparams_/session_start_info")
    return plugin_data_pb2.HParamsPluginData.FromString(metadata.plugin_data.content).session_start_info.hparams


def test_it_is_labelled_as_what_it_held_wherever_it_is_named(oversize: Path, report: Report) -> None:
    found = record(oversize / "out")
    assert (found["batch_size"], found["global_batch_size"], found["throughput"]["batch_size"]) == (76, 76, 76)
    assert found["name"] == "stacked-lstm-copy-memory-bs76"
    assert found["config"]["data"]["batch_size"] == 200  # what was asked for
    assert found["learning_rate"] == found["config"]["optimizer"]["lr"]  # scaled to what the batch held
    said = (oversize / "stdout").read_text()
    assert "· batch 76 ·" in said
    (folder,) = {path.parent for path in (oversize / "out").glob("*/events.*")}
    assert folder.name == "stacked-lstm-copy-memory-bs76"
    assert hparams_in(folder)["data.batch_size"].number_value == 76
    assert report.headlines[0].split("samples/s at ")[1].startswith("batch size 76.")


def test_the_validation_in_the_record_is_the_last_one_though_the_best_checkpoint_was_tested(oversize: Path) -> None:
    """That checkpoint was written before its own validation."""
    key = "val/loss"
    last = [float(row[key]) for row in table(oversize / "out") if row.get(key)][-1]
    assert record(oversize / "out")["metrics"][key] == pytest.approx(last, rel=1e-6)


def test_the_rate_of_a_run_is_one_number_in_the_record_the_report_and_hparams(oversize: Path, report: Report) -> None:
    throughput = record(oversize / "out")["throughput"]
    assert throughput["samples_per_sec"] == pytest.approx(76e3 / throughput["step_ms_median"])
    assert report.sweep.runs[0].values["samples_per_sec"] == throughput["samples_per_sec"]
    (folder,) = {path.parent for path in (oversize / "out").glob("*/events.*")}
    events = EventAccumulator(str(folder)).Reload()
    for key in ("samples_per_sec", "step_ms_median"):
        assert events.Scalars(f"summary/{key}")[-1].value == pytest.approx(throughput[key])


# --- callbacks ------------------------------------------------------------------------------------------------------


class CountsSteps(Callback):
    def record_facts(self) -> dict[str, Any]:
        return {"counted": 3, "learning_rate": None}

    def summary_lines(self) -> list[str]:
        return ["counted 3 steps"]

    def detail_lines(self) -> list[str]:
        return ["one by one"]


def test_a_callback_of_ones_own_reaches_the_record_the_last_lines_and_the_details(oversize, capsys, monkeypatch):
    trainer = Trainer(callbacks=[CountsSteps()], logger=False, accelerator="cpu", enable_checkpointing=False)
    trainer.optimizers = [torch.optim.SGD([torch.zeros(1)], lr=0.5)]
    unmeasured = {"missing": {"bottleneck": "callbacks.throughput is left out"}}
    assert callback_facts(trainer) == {"counted": 3, "learning_rate": None, "throughput": unmeasured}
    print_summary(trainer, record(oversize / "out"))
    said = capsys.readouterr().out
    assert "\ncounted 3 steps\n" in said and "one by one" not in said
    monkeypatch.setenv("BATCHSCOPE_VERBOSE", "1")
    print_summary(trainer, record(oversize / "out"))
    assert "\ncounted 3 steps\n" in (said := capsys.readouterr().out) and "\n\none by one\n" in said


RESULTS = {
    "test acc 98.9 % in 47 s": {},
    "val acc 98.8 % in 47 s": {"metrics": {"val/acc": 0.9881, "val/loss": 0.1}, "resumed": [{"step": 430}]},
    "test loss 0.6188 in 47 s": {"metrics": {"test/loss": 0.61881, "val/loss": 0.1}},
    "test loss nan in 47 s": {"metrics": {"test/loss": float("nan")}},
    "1 epoch, 430 steps in 47 s": {"metrics": {"train/loss": 0.1}},
    "430 steps in 47 s": {"metrics": {"train/loss": 0.1}, "epochs": 0},
    "test acc 98.9 % in 47 s, the last 130 of 430 steps": {"resumed": [{"step": 100}, {"step": 300}]},
}


@pytest.mark.parametrize(("steps", "epochs"), [(0, 0), (3, 0), (4, 1), (5, 1), (8, 2)])
def test_an_epoch_that_has_not_ended_does_not_count(steps: int, epochs: int) -> None:
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(max_steps=steps, limit_train_batches=4, enable_model_summary=False, **silent)
    trainer.fit(Stranger(), loader())
    assert (trainer.global_step, whole_epochs(trainer)) == (steps, epochs)


class Ten(LightningDataModule):
    def num_samples(self, split: str) -> int:
        return 10


@pytest.mark.parametrize(("limit", "samples"), [(2, 8), (3, 10), (1.0, 10)])
def test_a_limited_validation_counts_the_samples_of_its_batches(limit: float, samples: int) -> None:
    trainer = train(Stranger(), data=(loader(), loader(10, batch_size=4)), limit_val_batches=limit, max_epochs=1)
    assert evaluated_samples(trainer, PlainData(Ten())) == {"val": samples}


@pytest.mark.parametrize("row", RESULTS)
def test_the_result_is_one_row(row: str, oversize: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"metrics": {"test/acc": 0.98871, "test/loss": 0.03}, "fit_seconds": 47.0, "epochs": 1, "steps": 430}
    trainer = Trainer(logger=False, accelerator="cpu", enable_checkpointing=False)
    print_summary(trainer, record(oversize / "out") | facts | RESULTS[row])
    assert capsys.readouterr().out.splitlines()[-2:] == [f"result  {row}", "files   out"]


@pytest.mark.parametrize(
    ("checkpoints", "kept"),
    [
        ({"best": "checkpoints/best.ckpt", "last": "checkpoints/last.ckpt"}, "best"),
        ({"last": "checkpoints/last.ckpt"}, "last"),  # a run that has ended before its first validation
    ],
)
def test_the_details_name_the_checkpoint_that_was_kept(oversize, checkpoints, kept, capsys, monkeypatch):
    monkeypatch.setenv("BATCHSCOPE_VERBOSE", "1")
    trainer = Trainer(logger=False, accelerator="cpu", enable_checkpointing=False)
    print_summary(trainer, record(oversize / "out") | {"checkpoints": checkpoints})
    said = capsys.readouterr().out
    assert f"\nkept    out/checkpoints/{kept}.ckpt\n" in said
    assert f" ckpt=out/checkpoints/{kept}.ckpt" in said


def test_the_details_of_a_run_in_the_working_directory(oversize: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("BATCHSCOPE_VERBOSE", "1")
    monkeypatch.chdir(oversize / "out")
    facts = record(Path())
    trainer = Trainer(logger=False, accelerator="cpu", enable_checkpointing=False)
    print_summary(trainer, facts | {"config": facts["config"] | {"run_dir": "."}})
    assert "\nlook    tensorboard --logdir .\n" in capsys.readouterr().out


@pytest.mark.parametrize("of_task", [True, False])
def test_hparams_shows_only_options_that_have_an_effect(of_task: bool, oversize: Path, tmp_path: Path) -> None:
    facts = record(oversize / "out")
    facts["model"]["lightning_module"] = not of_task
    logger = TensorBoardLogger(str(tmp_path), name=None, version="")
    log_hyperparameters(Trainer(logger=logger, accelerator="cpu", enable_checkpointing=False), facts)
    shown = hparams_in(tmp_path)
    assert "data.batch_size" in shown
    assert ("optimizer.lr" in shown) == of_task


# --- what Lightning has to say --------------------------------------------------------------------------------------

FINDER = [
    "+callbacks.finder._target_=lightning.pytorch.callbacks.LearningRateFinder",
    "+callbacks.finder.num_training_steps=20",
]


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which Lightning has much to say."""
    folder = tmp_path_factory.mktemp("talkative")
    stopping = "+callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping"
    verbose = ["+callbacks.stop.monitor=val/loss", "+callbacks.stop.verbose=true"]
    done = run(folder, *SMALL, *FINDER, stopping, *verbose, "+trainer.profiler=simple", "hydra.run.dir=out")
    assert done.end() == 0, done.complained
    return folder


@pytest.mark.slow
def test_what_was_asked_for_is_shown_once_and_greetings_are_not(talkative: Path) -> None:
    both = "".join((talkative / name).read_text() for name in ("stdout", "stderr"))
    assert both.count("Learning rate set to") == 1
    assert both.count("FIT Profiler Report") == 1
    assert "Metric val/loss improved" in both
    assert not any(words in both for words in ("GPU available", "`Trainer.fit` stopped", "Restoring states", "Tip"))


@pytest.mark.parametrize(
    ("file", "level", "shown"),
    [
        ("tuner/batch_size_scaling.py", logging.INFO, True),
        ("callbacks/model_checkpoint.py", logging.INFO, True),
        ("callbacks/timer.py", logging.INFO, False),
        ("trainer/setup.py", logging.INFO, False),
        ("trainer/setup.py", logging.WARNING, True),
    ],
)
def test_a_message_of_the_logger_that_all_share_is_judged_by_its_speaker(file: str, level: int, shown: bool) -> None:
    message = logging.LogRecord("lightning", level, f"/lib/lightning/pytorch/{file}", 1, "…", None, None)
    assert is_shown(message) == shown


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["constant", "one_cycle", "cosine"])
def test_a_learning_rate_that_a_callback_found_is_that_of_the_schedule_and_in_the_record(
    tmp_path: Path, schedule: str
) -> None:
    done = run(tmp_path, *SMALL, *FINDER, f"optimizer.schedule={schedule}", "hydra.run.dir=out")
    assert done.end() == 0, done.complained
    found = record(tmp_path / "out")
    assert found["learning_rate"] != found["config"]["optimizer"]["lr"]
    (group,) = last(tmp_path / "out")["optimizer_states"][0]["param_groups"]
    peak = {"constant": "lr", "one_cycle": "max_lr", "cosine": "initial_lr"}[schedule]
    assert group[peak] == pytest.approx(found["learning_rate"])


def test_updates_that_were_skipped_are_a_count_of_the_whole_run() -> None:
    callback = StopOnNonFinite("skip")
    assert callback.record_facts() == {"skipped_steps": None}  # takes back what an earlier fit has counted in vain
    callback.load_state_dict({"skipped": 2})
    assert callback.record_facts() == {"skipped_steps": 2}
