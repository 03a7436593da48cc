"""The step file is replaced as a whole, and a torn row of it is left out."""

import os
from pathlib import Path

from batchscope.records.step_file import read_rows, write_rows


def test_what_was_written_is_read(tmp_path: Path) -> None:
    rows = [{"step": "1", "train/loss": "0.5"}, {"step": "2", "train/loss": ""}]
    write_rows(tmp_path / "metrics.csv", ["step", "train/loss"], rows)
    assert read_rows(tmp_path / "metrics.csv") == (["step", "train/loss"], rows)


def test_a_torn_row_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,train/loss\n1,0.5\n2")
    assert read_rows(tmp_path / "metrics.csv") == (["step", "train/loss"], [{"step": "1", "train/loss": "0.5"}])


def test_a_missing_file_and_a_pipe_have_no_rows(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_rows(tmp_path / "metrics.csv") == read_rows(tmp_path / "pipe") == ([], [])
