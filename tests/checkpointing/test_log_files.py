"""The log files are complete at every moment, and a resumed run has every step in them once."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from batchscope.callbacks.step_file import StepFile, read_rows
from batchscope.checkpointing.callback import Checkpoints
from batchscope.checkpointing.resume_point import ResumePoint
from tests.checkpointing.support import OUT, STEP, refused, terminate
from tests.support.runs import SMALL, curves, run, table
from tests.support.third_party_modules import Stranger, train


def rows_in(folder: Path) -> list[dict[str, str]]:
    return [{key: value for key, value in row.items() if value} for row in read_rows(folder / "csv" / "metrics.csv")[1]]


@pytest.mark.parametrize("step", ["batchscope.callbacks.step_file.write_rows", "os.replace"])
def test_the_file_loses_no_row_where_a_kill_ends_the_process_while_a_column_is_added(step, tmp_path, monkeypatch):
    logger = StepFile(str(tmp_path))
    for number in range(5):
        logger.log_metrics({"train/loss": 1.0 / (number + 1)}, number)
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(step, Mock(side_effect=KeyboardInterrupt))
        logger.log_metrics({"val/loss": 0.5}, 5)
    assert [row["step"] for row in rows_in(tmp_path)] == ["0", "1", "2", "3", "4"]


def test_a_file_is_cut_after_a_checkpoint_and_what_is_logged_again_is_there_once(tmp_path: Path) -> None:
    def log(logger: StepFile, *steps: int) -> None:
        """Log as Lightning (steps from 0) and as a callback (steps from 1), with a validation every second update."""
        for step in steps:
            logger.log_metrics({"epoch": 0, "own": step}, step - 1)
            logger.log_metrics({"loss": step}, step)
            if step % 2 == 0:
                validate(logger, step)

    def validate(logger: StepFile, step: int) -> None:
        logger.log_metrics({"epoch": 0, "val/loss": step}, step - 1)

    log(StepFile(str(tmp_path / "whole")), 1, 2, 3, 4, 5)
    killed = StepFile(str(tmp_path / "killed"))
    log(killed, 1, 2, 3)
    killed.log_metrics({"epoch": 1, "test/loss": 0.5}, 2)  # the run had ended by then
    with killed.path.open("a") as file:
        file.write("0,4")  # torn
    resumed = StepFile(str(tmp_path / "killed"))
    resumed.cut(2, 1)
    validate(resumed, 2)
    log(resumed, 3, 4, 5)
    assert rows_in(tmp_path / "killed") == rows_in(tmp_path / "whole")


def test_a_row_without_its_line_end_is_torn_and_is_logged_again(tmp_path: Path) -> None:
    validation = ({"epoch": 0, "val/loss": 0.25}, 1)
    killed = StepFile(str(tmp_path))
    killed.log_metrics(*validation)
    killed.path.write_bytes(killed.path.read_bytes().removesuffix(b"5\r\n"))
    resumed = StepFile(str(tmp_path))
    resumed.cut(2, 1)
    resumed.log_metrics(*validation)
    assert rows_in(tmp_path) == [{"epoch": "0", "step": "1", "val/loss": "0.25"}]


class Logs(Stranger):
    """Logs every step itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train/own", float(batch_idx))
        return super().training_step(batch, batch_idx)


def test_what_a_module_logs_of_a_step_is_in_the_file_at_the_checkpoint_of_the_step(tmp_path: Path, monkeypatch) -> None:
    row_counts: list[int] = []
    monkeypatch.setattr(Checkpoints, "save", lambda self, trainer: row_counts.append(len(rows_in(tmp_path))))
    options = {"logger": StepFile(str(tmp_path)), "log_every_n_steps": 1, "max_epochs": 1, "enable_checkpointing": True}
    train(Logs(), Checkpoints(), **options)
    assert row_counts == [5]


def test_tensorboard_keeps_what_a_module_logs_where_its_optimizer_steps_in_every_fourth_batch(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, name="board", version="")
    for batch in range(10):  # two of them after the checkpoint
        logger.log_metrics({"train/own": float(batch)}, batch)
    at_checkpoint: Any = SimpleNamespace(
        is_global_zero=True, loggers=[logger], checkpoint_callback=None, callback_metrics={}
    )
    at_checkpoint.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=7))
    ResumePoint(steps=2)._cut_logs(at_checkpoint, Mock())
    logger.save()
    assert curves(tmp_path)["train/own"] == [(batch, batch) for batch in range(8)]


def test_curves_are_kept_while_their_logger_is_off(unstopped: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(tmp_path, *SMALL, OUT, faults=[(STEP, 7, terminate)], code=143)
    run(tmp_path, "resume=out", "logger=null", faults=[(STEP, 6, terminate)], code=143)
    assert run(tmp_path, "resume=out", "logger=default", code=0).complained == ""
    steps = [*range(1, 8), *range(14, 21)]
    assert curves(out)["train/loss"] == [point for point in curves(unstopped)["train/loss"] if point[0] in steps]
    assert [int(row["step"]) for row in table(out) if row["train/loss"]] == steps


@pytest.mark.parametrize("name", ["csv", "csv/metrics.csv"])
def test_something_else_in_the_place_of_a_log_is_one_line(name: str, killed: Path) -> None:
    (path,) = (killed / "out").glob(name)
    was_folder = path.is_dir()
    path.rename(killed / "before")
    path.write_text("") if was_folder else path.mkdir()
    line = refused(run(killed, "resume=out"))
    assert line.startswith("error: ") and f"{path.relative_to(killed)} cannot be written: " in line
