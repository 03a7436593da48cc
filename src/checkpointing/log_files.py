"""The log files of a run: complete at every moment, and cut on resume to what they were at the checkpoint.

A killed run may have logged steps after its last checkpoint, and the validation that followed it. The resumed run logs
them again, and they must not be in the files twice. A validation has the step of the checkpoint before it, so that a
step alone does not say where to cut.
"""

import itertools
import os
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from .._lightning import append_to_csv
from ..records.step_file import read_rows, write_rows

Counted = dict[Path, tuple[bytes, int, int]]  # of a CSV file: its header, and how many bytes and lines are counted


def loggers_of_rank(trainer: Trainer) -> list[Logger]:
    """The loggers that write in this process: all of them on rank 0, none on the others."""
    return trainer.loggers if trainer.is_global_zero else []


def log_positions(loggers: list[Logger], earlier: dict[str, int], counted: Counted) -> dict[str, int]:
    """How far the log files are written: TensorBoard files in bytes, CSV files in lines, which new columns do not change.

    Names of files are relative to the loggers' `save_dir`, because a run's folder may be moved. A file that no logger
    writes now keeps its `earlier` position: a logger that is off for a while continues from there. `counted` is kept
    from one call to the next, so that only lines that are new, or have a new column, are read.
    """
    positions = dict(earlier)
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.flush()
            positions |= {_name(logger, path): path.stat().st_size for path in _event_files(logger)}
        elif isinstance(logger, CSVLogger):
            logger.save()
            positions[_name(logger, _csv_file(logger))] = _lines(_csv_file(logger), counted)
    return positions


def _lines(path: Path, counted: Counted) -> int:
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        header = file.readline()
        before, size, lines = counted.get(path, (b"", 0, 0))
        if header != before:
            size, lines = len(header), 1
        file.seek(size)
        while block := file.read(2**20):
            size, lines = size + len(block), lines + block.count(b"\n")
    counted[path] = header, size, lines
    return lines


def earlier_events(loggers: list[Logger]) -> list[Path]:
    """The event files of TensorBoard loggers that are not yet used, for `cut_logs`."""
    return [path for logger in loggers if isinstance(logger, TensorBoardLogger) for path in _event_files(logger)]


def cut_logs(loggers: list[Logger], earlier: list[Path], to: dict[str, int], step: int) -> None:
    """Cut the log files to their positions at a checkpoint.

    A file that the checkpoint does not know was begun after it, and all of its steps are trained again. `earlier` is of
    `earlier_events`, `to` of `log_positions`; the loggers have logged nothing yet. TensorBoard purges steps after `step`.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            for path in set(_event_files(logger)).intersection(earlier):
                _cut(path, to.get(_name(logger, path), 0))
            start: Any = Event(session_log=SessionLog(status=SessionLog.START))
            logger.experiment.file_writer.add_event(start, step + 1)
        elif isinstance(logger, CSVLogger) and (path := _csv_file(logger)).exists():
            with path.open("rb") as file:
                _cut(path, sum(map(len, itertools.islice(file, to.get(_name(logger, path), 0)))))
            if not path.exists():
                logger.experiment.metrics_keys = []


def _cut(path: Path, length: int) -> None:
    if length:
        os.truncate(path, min(length, path.stat().st_size))
    else:
        path.unlink()


def _event_files(logger: TensorBoardLogger) -> list[Path]:
    return sorted(Path(logger.log_dir).glob("events.out.tfevents.*"))


def _csv_file(logger: CSVLogger) -> Path:
    return Path(logger.log_dir) / "metrics.csv"


def _name(logger: Logger, path: Path) -> str:
    return os.path.relpath(path, logger.save_dir)


def append_to_file(logger: CSVLogger) -> None:
    """Have a CSVLogger that is not yet used append to its file, and add columns atomically.

    By Lightning's own way of adding a column a run that is killed loses rows that its checkpoint counts on.
    """
    path = _csv_file(logger)
    append_to_csv(logger, read_rows(path)[0], lambda columns: write_rows(path, columns, read_rows(path)[1]))
