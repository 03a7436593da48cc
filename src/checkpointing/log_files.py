"""How far the curves of a run have been written, and cutting them back to there, so that a resumed run goes on.

A run that was killed may have written steps that its last checkpoint does not know. They will be trained again, and
must not be in the files twice.
"""

import csv
import io
import os
import sys
from pathlib import Path

import lightning
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from ..errors import UserError
from ..files import WriteError, atomic_write, set_aside, why


class AtomicCSVLogger(CSVLogger):
    """Lightning's CSV file of all metrics, which is there as a whole while a new column is added to it.

    Arguments as CSVLogger. Lightning adds a column by truncating the file and writing it anew; a run that is killed
    in that moment would lose the rows that its checkpoint counts on.
    """

    @property
    def experiment(self) -> ExperimentWriter:
        """What writes the file; Lightning's stand-in that writes nothing in every process but the first."""
        if self._experiment is None and rank_zero_only.rank == 0:
            self._experiment = _AtomicWriter(log_dir=self.log_dir)
        return super().experiment


class _AtomicWriter(ExperimentWriter):
    """Lightning's writer, which adds to the rows of a file that is there, where Lightning deletes it."""

    def _check_log_dir_exists(self) -> None:
        self.metrics_keys = _read_csv(Path(self.metrics_file_path))[0]

    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        path = Path(self.metrics_file_path)
        rows = _read_csv(path)[1]
        _write_csv(path, fieldnames, rows)


def positions(loggers: list[Logger], earlier: dict[str, int] | None = None) -> dict[str, int]:
    """How far each file of TensorBoard (in bytes) and each CSV file (in rows) reaches, after what is buffered.

    The names are relative to the loggers' `save_dir`: a run's folder can be moved.

    Args:
        loggers: of the run.
        earlier: the positions that the run was resumed from. Files that the present loggers do not write keep theirs: a
            logger that is off for a while goes on from there.
    """
    found = dict(earlier or {})
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.flush()
            found |= {_name(logger, path): path.stat().st_size for path in _event_files(logger)}
        elif isinstance(logger, CSVLogger):
            logger.save()
            found[_name(logger, _csv_file(logger))] = len(_read_csv(_csv_file(logger))[1])
    return found


def check_files(loggers: list[Logger], option: str) -> None:
    """See that the files of the curves can be written; nothing is changed.

    Args:
        loggers: of the run.
        option: the one that names the run's folder.

    Raises:
        UserError: for a folder that is none, a file that is none, or one without permission.
    """
    for logger in loggers:
        if not isinstance(logger, TensorBoardLogger | CSVLogger):
            continue
        try:
            folder = Path(logger.log_dir)
            for path in (folder, *folder.parents):
                if os.path.lexists(path) and not path.is_dir():
                    raise UserError(f"{option}: {path} is no folder, and curves are written there; rename or remove it")
            files = _event_files(logger) if isinstance(logger, TensorBoardLogger) else [_csv_file(logger)]
            for path in filter(os.path.lexists, [*files, folder]):
                if path != folder and not path.is_file():
                    raise UserError(f"{option}: {path} is no file, and curves are written there; rename or remove it")
                if not os.access(path, os.R_OK | os.W_OK):
                    raise WriteError(f"{option}: {path} cannot be read and written, and curves are written there")
        except OSError as error:
            raise WriteError(f"{option}: {error.filename} cannot be read: {why(error)}") from error


def keep_files(loggers: list[Logger]) -> list[Path]:
    """Have loggers that are not yet used add to what is there; Lightning's CSV writer deletes it.

    Returns:
        TensorBoard's files so far, for `cut_back`.
    """
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            logger._experiment = _AtomicWriter(log_dir=logger.log_dir)
    return [path for logger in loggers if isinstance(logger, TensorBoardLogger) for path in _event_files(logger)]


def cut_back(loggers: list[Logger], earlier: list[Path], to: dict[str, int], step: int) -> None:
    """Cut the curves back to positions noted earlier; earlier files that are not among them are set aside.

    The checkpoint does not know such a file: it was begun after the checkpoint, or there is no checkpoint.

    Args:
        loggers: that have logged no metric yet.
        earlier: what `keep_files` returned before they were used.
        to: what `positions` returned; empty to start anew.
        step: how many steps have been trained; a TensorBoard that is open forgets those after it.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            for path in sorted(set(_event_files(logger)).intersection(earlier)):
                length = to.get(_name(logger, path))
                if length is None:
                    # TensorBoard reads every file that has this word in its name.
                    _set_aside(path, path.name.replace("tfevents", "curves"))
                else:
                    os.truncate(path, min(length, path.stat().st_size))
            start = Event(session_log=SessionLog(status=SessionLog.START))
            logger.experiment._get_file_writer().add_event(start, step + 1)
        elif isinstance(logger, CSVLogger):
            _cut_back_csv(logger, to.get(_name(logger, _csv_file(logger))))


def on_this_process(trainer: lightning.Trainer) -> list[Logger]:
    """The loggers that this process writes: those of the trainer in the first one, none in the others."""
    return trainer.loggers if trainer.is_global_zero else []


def _cut_back_csv(logger: CSVLogger, rows: int | None) -> None:
    """Keep so many rows; None for a file that the checkpoint does not know."""
    path = _csv_file(logger)
    names, there = _read_csv(path)
    if there[:rows] and rows is not None:
        _write_csv(path, names, there[:rows])
        return
    if rows is None and path.exists():
        _set_aside(path, path.name)
    else:
        path.unlink(missing_ok=True)
    logger.experiment.metrics_keys = []


def _set_aside(path: Path, name: str) -> None:
    place = set_aside(path, name)
    print(f"warning: the checkpoint does not know {path}; it is now {place}", file=sys.stderr, flush=True)


def _read_csv(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The names of the columns, and the rows; a row that was torn is none."""
    if not path.exists():
        return [], []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.DictReader(file)
        names = list(reader.fieldnames or [])
        return names, [row for row in reader if None not in row and None not in row.values()]


def _write_csv(path: Path, names: list[str], rows: list[dict[str, str]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(rows)
    with atomic_write(path) as file:
        file.write(text.getvalue().encode())


def _event_files(logger: TensorBoardLogger) -> list[Path]:
    return sorted(Path(logger.log_dir).glob("events.out.tfevents.*"))


def _csv_file(logger: CSVLogger) -> Path:
    return Path(logger.log_dir) / "metrics.csv"


def _name(logger: Logger, path: Path) -> str:
    return os.path.relpath(path, logger.save_dir)
