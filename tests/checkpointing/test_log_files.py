"""The log files are complete at every moment, and a resumed run has every step in them once."""

import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from batchscope.checkpointing.csv_logger import append_to_file
from batchscope.checkpointing.log_files import LogPositions
from tests.checkpointing.support import OUT, STEP, terminate
from tests.support.runs import SMALL, curves, run, table


def appending(folder: Path) -> CSVLogger:
    """A logger as a run has it."""
    logger = CSVLogger(folder, name="csv", version="")
    append_to_file(logger)
    return logger


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


def test_the_csv_file_holds_what_lightnings_own_holds(tmp_path: Path) -> None:
    log(appending(tmp_path / "ours"))
    log(CSVLogger(tmp_path / "theirs", name="csv", version=""))
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
                log(appending(folder))
        assert len(rows(folder)) == 5


def test_a_checkpoint_counts_only_the_lines_that_are_new_and_all_of_a_file_with_a_new_column(tmp_path: Path) -> None:
    logger = appending(tmp_path)
    positions, path = LogPositions({"other/metrics.csv": 7}), tmp_path / "csv" / "metrics.csv"

    def logged(step: int, **values: float) -> int:
        logger.log_metrics(values, step)
        found = positions.now([logger])
        assert found.pop("other/metrics.csv") == 7  # of a logger that is off
        return found["csv/metrics.csv"]

    assert [logged(step, a=0.5) for step in range(3)] == [2, 3, 4]
    header, counted = path.read_bytes().splitlines(keepends=True)[0], path.stat().st_size
    path.write_bytes(header.ljust(counted, b"x"))  # a part that is read again would have no line
    assert logged(3, a=0.5) == 5
    assert logged(4, b=0.5) == len(path.read_text().splitlines())


def test_curves_are_kept_while_their_logger_is_off(unstopped: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(tmp_path, *SMALL, OUT, faults=[(STEP, 7, terminate)]).end() == 143
    assert run(tmp_path, "resume=out", "logger=null", faults=[(STEP, 6, terminate)]).end() == 143
    done = run(tmp_path, "resume=out", "logger=default")
    assert (done.end(), done.complained) == (0, "")
    logged = [*range(1, 8), *range(14, 21)]
    assert curves(out)["train/loss"] == [point for point in curves(unstopped)["train/loss"] if point[0] in logged]
    assert [int(row["step"]) for row in table(out) if row["train/loss"]] == logged


@pytest.mark.parametrize("place", ["csv", "csv/metrics.csv", "*", pytest.param("*/events.*", marks=pytest.mark.slow)])
def test_something_else_in_the_place_of_a_log_is_one_line(place: str, killed: Path) -> None:
    (path,) = [p for p in (killed / "out").glob(place) if place != "*" or list(p.glob("events.*"))]
    was_folder = path.is_dir()
    path.rename(killed / "before")
    path.write_text("") if was_folder else path.mkdir()
    done = run(killed, "resume=out")
    assert done.end() == 1
    (line,) = done.complained.splitlines()
    assert line.startswith("error: ") and f"{path.relative_to(killed)} cannot be written: " in line
