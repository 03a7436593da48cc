"""The log files are complete at every moment, and a resumed run has every step in them once."""

import contextlib
import csv
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from batchscope.checkpointing.callback import Checkpoints
from batchscope.checkpointing.log_files import append_to_file, log_positions
from tests.checkpointing.support import OUT, STEP, refused, terminate
from tests.support.runs import SMALL, curves, run, table
from tests.support.third_party_modules import Stranger, train


def logged(folder: Path, ours: bool = True) -> list[dict[str, str]]:
    """The rows of two columns, and then one with a third, as a run's logger writes them; a kill ends the process."""
    logger = CSVLogger(folder, name="csv", version="")
    if ours:
        append_to_file(logger)
    with contextlib.suppress(KeyboardInterrupt):
        for step in range(5):
            logger.log_metrics({"train/loss": 1.0 / (step + 1)}, step)
        logger.save()
        logger.log_metrics({"val/loss": 0.5}, 5)
        logger.save()
    return list(csv.DictReader((folder / "csv" / "metrics.csv").read_text().splitlines()))


def test_the_csv_file_holds_what_lightnings_own_holds_and_loses_no_row_in_a_kill(tmp_path: Path, monkeypatch) -> None:
    rows = logged(tmp_path / "theirs", ours=False)
    assert len(rows) == 6
    assert logged(tmp_path / "ours") == rows
    for step in ("batchscope.checkpointing.log_files.write_rows", "os.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(step, Mock(side_effect=KeyboardInterrupt))  # while a column is added
            assert len(logged(tmp_path / step)) == 5


def test_a_checkpoint_reads_only_the_lines_since_the_one_before_or_those_with_a_new_column(tmp_path: Path) -> None:
    logger, counted, earlier = CSVLogger(tmp_path, name="csv", version=""), {}, {"events": 3}
    append_to_file(logger)
    path = tmp_path / "csv" / "metrics.csv"
    for names, lines in (("a", 2), ("a", 3), ("ab", 4), ("b", 5)):
        logger.log_metrics(dict.fromkeys(names, 0.5))
        assert log_positions([logger], earlier, counted) == earlier | {"csv/metrics.csv": lines}
        assert counted[path][1:] == (path.stat().st_size, lines)
    path.write_bytes(path.read_bytes().replace(b"5\r\n", b"5  "))  # of lines that are counted
    assert log_positions([logger], earlier, counted)["csv/metrics.csv"] == 5


class Logs(Stranger):
    """Logs every step itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("train/own", float(batch_idx))
        return super().training_step(batch, batch_idx)


def test_what_a_module_logs_of_a_step_belongs_to_the_checkpoint_of_the_step(tmp_path: Path) -> None:
    how = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1, "max_epochs": 1, "enable_checkpointing": True}
    train(Logs(), Checkpoints(str(tmp_path)), **how)
    (lines,) = torch.load(tmp_path / "last.ckpt", weights_only=True)["loop_state"]["log_positions"].values()
    assert lines == 1 + 5  # the names, and every step


def test_curves_are_kept_while_their_logger_is_off(unstopped: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(tmp_path, *SMALL, OUT, faults=[(STEP, 7, terminate)], code=143)
    run(tmp_path, "resume=out", "logger=null", faults=[(STEP, 6, terminate)], code=143)
    assert run(tmp_path, "resume=out", "logger=default", code=0).complained == ""
    steps = [*range(1, 8), *range(14, 21)]
    assert curves(out)["train/loss"] == [point for point in curves(unstopped)["train/loss"] if point[0] in steps]
    assert [int(row["step"]) for row in table(out) if row["train/loss"]] == steps


@pytest.mark.parametrize("place", ["csv", "csv/metrics.csv", pytest.param("*/events.*", marks=pytest.mark.slow)])
def test_something_else_in_the_place_of_a_log_is_one_line(place: str, killed: Path) -> None:
    (path,) = (killed / "out").glob(place)
    was_folder = path.is_dir()
    path.rename(killed / "before")
    path.write_text("") if was_folder else path.mkdir()
    line = refused(run(killed, "resume=out"))
    assert line.startswith("error: ") and f"{path.relative_to(killed)} cannot be written: " in line
