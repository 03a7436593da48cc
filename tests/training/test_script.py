"""A Trainer of anybody's script is measured and leaves a record; where nothing is asked for, nothing is added."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from batchscope import ThroughputMonitor, attached
from batchscope.analysis.read import find
from batchscope.errors import UserError
from batchscope.options.check import check_config
from batchscope.training.script import ScriptRecord, arguments


class Net(LightningModule):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.fails = fails

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.fails and batch_idx == 3:
            raise ValueError("their own mistake")
        x, y = batch
        return torch.nn.functional.cross_entropy(self.layer(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: LightningModule, *callbacks: Any, **options: Any) -> Trainer:
    loader = DataLoader(TensorDataset(torch.randn(80, 4), torch.zeros(80, dtype=torch.long)), batch_size=4)
    quiet = {name: False for name in ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")}
    if not options.get("barebones"):
        options |= quiet
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", **options)
    trainer.callbacks[:0] = callbacks  # as Lightning adds those of an entry point
    trainer.fit(module, loader)
    return trainer


def test_a_fit_leaves_a_record_that_reports_read_and_nothing_else_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["their.py", "--batch-size=4", "--lr", "0.1"])
    fit(Net(), ScriptRecord(tmp_path / "run"))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "finished"
    assert record["config"]["data"] == {"batch_size": 4, "arguments": {"lr": "0.1"}}
    assert record["steps"] == 20
    assert record["dataset"]["train_samples"] == 80
    (run,) = find([tmp_path]).runs
    assert run.batch_size == 4
    assert run.model == "Net"


def test_an_epoch_of_a_script_that_has_not_ended_does_not_count(tmp_path: Path) -> None:
    fit(Net(), ScriptRecord(tmp_path / "run"), max_steps=3)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["steps"], record["epochs"]) == (3, 0)


def test_a_run_of_a_script_is_resumed_by_nothing_but_the_script(tmp_path: Path) -> None:
    fit(Net(), ScriptRecord(tmp_path / "run"))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    with pytest.raises(
        UserError, match="script: the run is one of .*, with options of its own: batchscope run starts it again"
    ):
        check_config(record["config"])


def test_each_fit_is_recorded_and_a_trainer_without_one_takes_no_folder(tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as command:
        command.setenv(attached.FOLDER, str(tmp_path / "run"))
        _, callbacks = attached.callbacks(), attached.callbacks()  # of two Trainers
    trainer = fit(Net(), *callbacks)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Net(), trainer.train_dataloader)
    steps = {folder.name: json.loads((folder / "run.json").read_text())["steps"] for folder in tmp_path.iterdir()}
    assert steps == {"run": 20, "run-2": 40}


def test_a_fit_that_raises_is_recorded_as_failed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="their own mistake"):
        fit(Net(fails=True), ScriptRecord(tmp_path / "run"))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "failed"
    assert "their own mistake" in record["error"]


def test_a_monitor_of_their_own_is_not_added_twice(tmp_path: Path) -> None:
    own = ThroughputMonitor(calibrate=False)
    trainer = fit(Net(), ScriptRecord(tmp_path / "run"), own)
    assert [one for one in trainer.callbacks if isinstance(one, ThroughputMonitor)] == [own]


def test_a_barebones_trainer_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = fit(Net(), ScriptRecord(tmp_path / "run"), barebones=True)
    assert "Trainer(barebones=True): nothing is measured" in capsys.readouterr().err
    assert not any(isinstance(one, ThroughputMonitor) for one in trainer.callbacks)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_stops_no_training(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.warns(UserWarning, match="ScriptRecord stopped measuring"):
        trainer = fit(Net(), ScriptRecord(tmp_path / "run"))
    assert trainer.global_step == 20


def test_the_factory_adds_nothing_outside_of_the_command() -> None:
    assert attached.callbacks() == []
    assert attached.callbacks_of_old_package() == []


def test_the_factory_of_the_old_package_says_what_to_do(monkeypatch, capsys) -> None:
    monkeypatch.setenv(attached.FOLDER, "run")
    assert attached.callbacks_of_old_package() == []
    assert "import lightning.pytorch instead" in capsys.readouterr().err


def test_asking_for_the_factory_imports_nothing_heavy() -> None:
    program = "import sys, batchscope.attached as a; a.callbacks(); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "False"


def test_the_flags_of_a_script_are_its_settings() -> None:
    words = ["--batch-size=16", "--lr", "0.1", "--amp", "-n", "3", "data"]
    assert arguments(words) == {"batch_size": "16", "lr": "0.1", "amp": "true", "n": "3"}
