"""The Trainer of any script is measured and leaves a record; without the command, nothing is added."""

import itertools
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning import LightningDataModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from batchscope import ThroughputMonitor, attached
from batchscope.analysis.read import read_sweep
from batchscope.files import new_folder
from batchscope.options.check import check_config
from batchscope.records.run_record import RunRecord
from batchscope.training import summary
from batchscope.training.script import ScriptRecord, arguments
from tests.support.command_lines import refusal
from tests.support.runs import record
from tests.support.third_party_modules import Stranger, loader, train


@pytest.fixture(autouse=True)
def nothing_is_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration takes ten seconds where an earlier test has changed the number of threads."""
    monkeypatch.setattr("batchscope.hardware.measure.find_calibration", lambda device, measure: None)


def test_a_fit_leaves_a_record_that_reports_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["their.py", "--batch-size=4", "--lr", "0.1"])
    monitor = ThroughputMonitor(calibrate=False)
    trainer = train(Stranger(), ScriptRecord(tmp_path / "run"), monitor, data=loader(80), max_epochs=1)
    assert [callback for callback in trainer.callbacks if isinstance(callback, ThroughputMonitor)] == [monitor]  # once
    run_record = record(tmp_path / "run")
    assert (run_record["status"], run_record["steps"], run_record["epochs"]) == ("finished", 20, 1)
    assert run_record["config"]["data"] == {"batch_size": 4, "arguments": {"lr": "0.1"}}
    assert run_record["dataset"]["train_samples"] == 80
    (run,) = read_sweep([tmp_path]).runs
    assert (run.batch_size, run.model) == (4, "Stranger")
    assert re.match(
        "script: the run is one of .*, with options of its own: batchscope run starts it again",
        refusal(check_config, run_record["config"]),
    )


def test_the_flag_of_the_batch_size_is_told_by_its_name_and_its_value(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["their.py", "--bs=4", "--workers", "4", "--log-batches", "4"])
    monitor = ThroughputMonitor(calibrate=False)
    train(Stranger(), ScriptRecord(tmp_path / "run"), monitor, data=loader(80), max_epochs=1)
    settings = {"workers": "4", "log_batches": "4"}
    assert record(tmp_path / "run")["config"]["data"] == {"batch_size": 4, "arguments": settings}


def test_a_mean_of_sizes_that_vary_is_no_option(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["their.py", "--batch-size=4"])
    sizes = itertools.cycle((2, 3, 4, 5, 6))
    monitor = ThroughputMonitor(calibrate=False, batch_size_fn=lambda batch: next(sizes))
    train(Stranger(), ScriptRecord(tmp_path / "run"), monitor, data=loader(80), max_epochs=1)
    run_record = record(tmp_path / "run")
    assert run_record["throughput"]["batch_size_varies"]
    assert run_record["config"]["data"] == {"arguments": {"batch_size": "4"}}


def test_each_fit_is_recorded_and_a_trainer_without_one_takes_no_folder(tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as command:
        command.setenv(attached.FOLDER, str(tmp_path / "run"))
        _, callbacks = attached.callbacks(), attached.callbacks()  # of two Trainers
    trainer = train(Stranger(), *callbacks, max_epochs=1)
    trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = 2, 8
    trainer.fit(Stranger(), trainer.train_dataloader)
    records = {folder.name: record(folder) for folder in tmp_path.iterdir()}
    ends = {name: (run_record["steps"], run_record["epochs"]) for name, run_record in records.items()}
    assert ends == {"run": (5, 1), "run-2": (8, 1)}  # an epoch that has not ended does not count


def test_a_fit_takes_a_folder_that_no_other_process_of_the_script_has_taken(tmp_path: Path) -> None:
    new_folder(tmp_path / "run")
    train(Stranger(), ScriptRecord(tmp_path / "run"), max_epochs=1)
    assert record(tmp_path / "run-2")["status"] == "finished"


def test_the_batches_of_an_update_are_those_that_a_schedule_has_set(tmp_path: Path) -> None:
    train(Stranger(), ScriptRecord(tmp_path / "run"), GradientAccumulationScheduler({0: 2}))
    assert record(tmp_path / "run")["config"]["trainer"]["accumulate_grad_batches"] == 2


class Counting(LightningDataModule):
    """Its loader has no length."""

    def train_dataloader(self):
        return iter(list(loader(80)))

    def num_samples(self, split: str) -> int:
        return {"train": 80}[split]


class Failing(Counting):
    def num_samples(self, split: str) -> int:
        return {}[split]


@pytest.mark.parametrize(("data", "expected"), [(Counting(), 80), (Failing(), None)])
def test_the_samples_of_a_loader_without_a_length_are_those_that_the_data_say(data, expected, tmp_path) -> None:
    train(Stranger(), ScriptRecord(tmp_path / "run"), ThroughputMonitor(calibrate=False), data=data, max_epochs=1)
    run_record = record(tmp_path / "run")
    assert run_record["status"] == "finished"
    assert run_record["dataset"].get("train_samples") == expected


def test_the_batch_size_under_a_schedule_is_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["their.py", "--batch-size=4"])
    monitor, schedule = ThroughputMonitor(calibrate=False), GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})
    train(Stranger(), ScriptRecord(tmp_path / "run"), monitor, schedule, data=loader(80), max_epochs=3)
    assert record(tmp_path / "run")["config"]["data"] == {"batch_size": 4, "arguments": {}}


def test_the_recorded_cores_are_those_that_a_fit_has_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usable = "batchscope.hardware.devices.usable_cores"
    monkeypatch.setattr(usable, lambda: 1.0)
    binds = LambdaCallback(on_train_start=lambda *_: monkeypatch.setattr(usable, lambda: 8.0))  # as OMP_PROC_BIND does
    train(Stranger(), ScriptRecord(tmp_path / "run"), binds)
    assert record(tmp_path / "run")["hardware"]["cpu_cores"] == 8


def test_a_fit_that_raises_is_recorded_as_failed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        train(Stranger(), ScriptRecord(tmp_path / "run"), LambdaCallback(on_train_batch_end=lambda *_: 1 / 0))
    assert record(tmp_path / "run")["status"] == "failed"
    assert "division by zero" in record(tmp_path / "run")["error"]


ENDS = {
    "failed": ProcessRaisedException("Process 0 …\nTraceback …\nZeroDivisionError: division by zero\n", 0, 1),
    "out_of_memory": ProcessRaisedException("Process 0 …\nTraceback …\ntorch.OutOfMemoryError: CUDA …\n", 0, 1),
    "killed": ProcessExitedException("process 0 terminated with signal SIGKILL", 0, 1, -9, "SIGKILL"),
    "failed by itself": ProcessExitedException("process 0 terminated with exit code 2", 0, 1, 2),
}


def fail_in_children(folder: Path, error: Exception) -> None:
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp_spawn", logger=False, enable_checkpointing=False)
    ScriptRecord(folder).on_exception(trainer, Stranger(), error)


@pytest.mark.parametrize("end", ENDS)
def test_a_fit_that_fails_in_processes_that_lightning_started_has_its_end(end: str, tmp_path: Path) -> None:
    with RunRecord(tmp_path / "run", started_by=os.getpid()) as begun:  # as the first of them has
        begun.begin()
        fail_in_children(tmp_path / "run", ENDS[end])
        run_record = record(tmp_path / "run")
        assert (run_record["status"], run_record["error"]) == (end.split()[0], str(ENDS[end]).strip().splitlines()[-1])


def test_such_a_fit_leaves_a_run_open_that_another_process_has_started(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("batchscope.training.script.parent_process", lambda: SimpleNamespace(pid=os.getpid() + 1))
    records = []

    def fail(*_: object) -> None:
        fail_in_children(tmp_path / "run", ENDS["failed"])
        records.append(record(tmp_path / "run"))

    train(Stranger(), ScriptRecord(tmp_path / "run"), LambdaCallback(on_train_end=fail), max_epochs=1)
    assert [(run["status"], run["started_by"]) for run in records] == [("running", os.getpid() + 1)]


def test_a_record_that_cannot_be_completed_ends_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "callback_facts", lambda trainer: 1 / 0)
    with pytest.warns(UserWarning, match="ScriptRecord stopped measuring"):
        train(Stranger(), ScriptRecord(tmp_path / "run"))
    assert record(tmp_path / "run")["status"] == "failed"
    assert "division by zero" in record(tmp_path / "run")["error"]


def test_a_barebones_trainer_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(barebones=True, max_epochs=1, accelerator="cpu")
    trainer.callbacks.insert(0, ScriptRecord(tmp_path / "run"))  # as Lightning adds that of an entry point
    trainer.fit(Stranger(), loader())
    assert "Trainer(barebones=True): nothing is measured" in capsys.readouterr().err
    assert not any(isinstance(callback, ThroughputMonitor) for callback in trainer.callbacks)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_stops_no_training(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.warns(UserWarning, match="ScriptRecord stopped measuring"):
        assert train(Stranger(), ScriptRecord(tmp_path / "run")).global_step == 10


def test_the_factory_adds_nothing_outside_of_the_command_and_explains_the_old_package(monkeypatch, capsys) -> None:
    assert attached.callbacks() == attached.callbacks_of_old_package() == []
    monkeypatch.setenv(attached.FOLDER, "run")
    assert attached.callbacks_of_old_package() == []
    assert "import lightning.pytorch instead" in capsys.readouterr().err


def test_the_flags_of_a_script_are_its_settings() -> None:
    words = [
        "resnet18",
        "--batch-size=16",
        "--lr",
        "-0.1",
        "--amp",
        "-n",
        "3",
        "data",
        "+model.width=64",
        "--fast",
        "a/b=c d",
    ]
    flags = {"batch_size": "16", "lr": "-0.1", "amp": "true", "n": "3", "fast": "true"}
    assert arguments(words) == {"word_1": "resnet18", **flags, "word_2": "data", "model.width": "64", "a/b": "c d"}
