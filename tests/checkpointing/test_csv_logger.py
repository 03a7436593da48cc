"""The CSV file of all metrics is complete at every moment, also while a column is added."""

import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from batchscope.checkpointing.csv_logger import AtomicCSVLogger


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "csv" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def log(logger: CSVLogger) -> None:
    """Rows of two columns, and then one with a third."""
    for step in range(5):
        logger.log_metrics({"train/loss": 1.0 / (step + 1)}, step)
    logger.save()
    logger.log_metrics({"val/loss": 0.5}, 5)
    logger.save()


def test_it_holds_what_lightnings_own_holds(tmp_path: Path) -> None:
    for folder, kind in ((tmp_path / "ours", AtomicCSVLogger), (tmp_path / "theirs", CSVLogger)):
        log(kind(folder, name="csv", version=""))
    assert rows(tmp_path / "ours") == rows(tmp_path / "theirs")
    assert len(rows(tmp_path / "ours")) == 6


def test_a_kill_while_a_column_is_added_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for step in ("batchscope.checkpointing.csv_logger.write_rows", "os.replace"):
        folder = tmp_path / step
        with monkeypatch.context() as patch:
            patch.setattr(step, killed)
            with pytest.raises(KeyboardInterrupt):
                log(AtomicCSVLogger(folder, name="csv", version=""))
        assert len(rows(folder)) == 5
