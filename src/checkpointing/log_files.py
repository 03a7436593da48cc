"""The log files of a run: how far they were written at a checkpoint, and truncating them to there on resume.

A killed run may have logged steps after its last checkpoint. The resumed run trains these steps again, and they must
not be in the files twice.
"""

import os
from pathlib import Path

from lightning import Trainer
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from ..errors import UserError, warn
from ..files import WriteError, set_aside, why
from ..records.step_file import read_rows, write_rows
from .csv_logger import append_to_file


def loggers_of_rank(trainer: Trainer) -> list[Logger]:
    """The loggers that write in this process: all of them on rank 0, none on the others."""
    return trainer.loggers if trainer.is_global_zero else []


def log_positions(loggers: list[Logger], earlier: dict[str, int]) -> dict[str, int]:
    """The length of each TensorBoard file (bytes) and CSV file (rows), after flushing.

    File names are relative to the loggers' `save_dir`, so that a run's folder can be moved.

    Args:
        loggers: of the run.
        earlier: the positions that the run was resumed from. A file that the present loggers do not write keeps its
            position: a logger that is off for a while continues from there.
    """
    found = dict(earlier)
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.flush()
            found |= {_name(logger, path): path.stat().st_size for path in _event_files(logger)}
        elif isinstance(logger, CSVLogger):
            logger.save()
            found[_name(logger, _csv_file(logger))] = len(read_rows(_csv_file(logger))[1])
    return found


def check_log_files(loggers: list[Logger], option: str) -> None:
    """Check that the log files can be written; nothing is changed. `option` names the run's folder.

    Raises:
        UserError: if something else has the name of a folder or file, or the permission is missing.
    """
    for logger in loggers:
        if not isinstance(logger, TensorBoardLogger | CSVLogger):
            continue
        try:
            folder = Path(str(logger.log_dir))
            for path in (folder, *folder.parents):
                if os.path.lexists(path) and not path.is_dir():
                    raise UserError(
                        f"{option}: {path} is not a folder, and logs are written there; rename or remove it"
                    )
            files = _event_files(logger) if isinstance(logger, TensorBoardLogger) else [_csv_file(logger)]
            for path in (path for path in (*files, folder) if os.path.lexists(path)):
                if path != folder and not path.is_file():
                    raise UserError(f"{option}: {path} is not a file, and logs are written there; rename or remove it")
                if not os.access(path, os.R_OK | os.W_OK):
                    raise WriteError(f"{option}: {path} cannot be read and written, and logs are written there")
        except OSError as error:
            raise WriteError(f"{option}: {error.filename} cannot be read: {why(error)}") from error


def append_to_logs(loggers: list[Logger]) -> list[Path]:
    """Have unused loggers append to the files that are there; returns TensorBoard's, for `truncate_logs`."""
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            append_to_file(logger)
    return [path for logger in loggers if isinstance(logger, TensorBoardLogger) for path in _event_files(logger)]


def truncate_logs(loggers: list[Logger], earlier: list[Path], to: dict[str, int], step: int) -> None:
    """Truncate the log files to their positions at a checkpoint; set aside a file that the checkpoint does not know.

    Such a file was begun after the checkpoint, or there is no checkpoint.

    Args:
        loggers: have logged no metric yet.
        earlier: what `append_to_logs` returned.
        to: what `log_positions` returned; empty to start again.
        step: the number of trained steps; an open TensorBoard purges later ones.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            for path in sorted(set(_event_files(logger)).intersection(earlier)):
                length = to.get(_name(logger, path))
                if length is None:  # TensorBoard reads every file with "tfevents" in its name
                    _set_aside(path, path.name.replace("tfevents", "curves"))
                else:
                    os.truncate(path, min(length, path.stat().st_size))
            start = Event(session_log=SessionLog(status=SessionLog.START))
            logger.experiment.file_writer.add_event(start, step + 1)
        elif isinstance(logger, CSVLogger):
            _truncate_csv(logger, to.get(_name(logger, _csv_file(logger))))


def _truncate_csv(logger: CSVLogger, length: int | None) -> None:
    """Keep the first `length` rows; None for a file that the checkpoint does not know."""
    path = _csv_file(logger)
    columns, rows = read_rows(path)
    if rows[:length] and length is not None:
        write_rows(path, columns, rows[:length])
        return
    if length is None and path.exists():
        _set_aside(path, path.name)
    else:
        path.unlink(missing_ok=True)
    logger.experiment.metrics_keys = []


def _set_aside(path: Path, name: str) -> None:
    warn(f"the checkpoint does not know {path}; it is now {set_aside(path, name)}")


def _event_files(logger: TensorBoardLogger) -> list[Path]:
    return sorted(Path(logger.log_dir).glob("events.out.tfevents.*"))


def _csv_file(logger: CSVLogger) -> Path:
    return Path(logger.log_dir) / "metrics.csv"


def _name(logger: Logger, path: Path) -> str:
    return os.path.relpath(path, logger.save_dir)
