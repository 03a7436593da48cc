"""The log files of a run: how far they were written at a checkpoint, and cutting them there on resume.

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


def loggers_of_rank(trainer: Trainer) -> list[Logger]:
    """The loggers that write in this process: all of them on rank 0, none on the others."""
    return trainer.loggers if trainer.is_global_zero else []


class LogPositions:
    """Finds the length of each TensorBoard file (bytes) and CSV file (lines); each line is counted once.

    A CSV file is rewritten when it gets a new column. That changes its bytes, and not its number of lines.

    Args:
        earlier: the positions that the run was resumed from. A file that the present loggers do not write keeps its
            position: a logger that is off for a while continues from there.
    """

    def __init__(self, earlier: dict[str, int]):
        self._earlier = earlier
        self._counted: dict[Path, tuple[bytes, int, int]] = {}  # the header, and how many bytes and lines are counted

    def now(self, loggers: list[Logger]) -> dict[str, int]:
        """The positions after flushing, by file names relative to the loggers' `save_dir`: a run's folder may be moved."""
        found = dict(self._earlier)
        for logger in loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.flush()
                found |= {_name(logger, path): path.stat().st_size for path in _event_files(logger)}
            elif isinstance(logger, CSVLogger):
                logger.save()
                found[_name(logger, _csv_file(logger))] = self._lines(_csv_file(logger))
        return found

    def _lines(self, path: Path) -> int:
        if not path.is_file():
            return 0
        with path.open("rb") as file:
            header = file.readline()
            before, size, lines = self._counted.get(path, (b"", 0, 0))
            if header != before:
                size, lines = len(header), 1
            file.seek(size)
            while block := file.read(2**20):
                size, lines = size + len(block), lines + block.count(b"\n")
        self._counted[path] = header, size, lines
        return lines


def earlier_events(loggers: list[Logger]) -> list[Path]:
    """The event files of TensorBoard loggers that are not yet used, for `cut_logs`."""
    return [path for logger in loggers if isinstance(logger, TensorBoardLogger) for path in _event_files(logger)]


def cut_logs(loggers: list[Logger], earlier: list[Path], to: dict[str, int], step: int) -> None:
    """Cut the log files to their positions at a checkpoint.

    A file that the checkpoint does not know was begun after it, and all of its steps are trained again.

    Args:
        loggers: have logged no metric yet.
        earlier: what `earlier_events` returned.
        to: what `LogPositions.now` returned; empty to start again.
        step: the number of trained steps; an open TensorBoard purges later ones.
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
