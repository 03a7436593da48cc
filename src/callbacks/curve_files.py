"""How far the curves of a run have been written, and cutting them back to there, so that a resumed run goes on.

A run that was killed may have written steps that its last checkpoint does not know. They will be trained again, and
must not be in the files twice.
"""

import csv
import os
from pathlib import Path

import lightning
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from tensorboard.compat.proto.event_pb2 import Event, SessionLog


class WholeCSVLogger(CSVLogger):
    """Lightning's CSV file of all metrics, which is there as a whole while a new column is added to it.

    Arguments as CSVLogger. Lightning adds a column by truncating the file and writing it anew; a run that is killed
    in that moment would lose the rows that its checkpoint counts on.
    """

    @property
    def experiment(self) -> ExperimentWriter:
        """What writes the file; Lightning's stand-in that writes nothing in every process but the first."""
        if self._experiment is None and rank_zero_only.rank == 0:
            self._experiment = _WholeWriter(log_dir=self.log_dir)
        return super().experiment


class _WholeWriter(ExperimentWriter):
    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        path = Path(self.metrics_file_path)
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        beside = _beside(path)
        _write_csv(beside, fieldnames, rows)
        os.replace(beside, path)


def positions(loggers: list[Logger]) -> dict[str, int]:
    """How far each file of TensorBoard (in bytes) and each CSV file (in rows) reaches, after what is buffered.

    The names are relative to the loggers' `save_dir`: a run's folder can be moved.
    """
    found = {}
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.flush()
            found |= {_name(logger, path): path.stat().st_size for path in _event_files(logger)}
        elif isinstance(logger, CSVLogger):
            logger.save()
            found[_name(logger, _csv_file(logger))] = len(_read_csv(_csv_file(logger))[1])
    return found


def cut_back(loggers: list[Logger], to: dict[str, int], step: int) -> None:
    """Cut the curves back to positions noted earlier; files that are not among them are deleted.

    Args:
        loggers: not yet used.
        to: what `positions` returned; empty to start anew.
        step: how many steps have been trained; a TensorBoard that is open forgets those after it.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            for path in _event_files(logger):
                length = to.get(_name(logger, path), 0)
                if length:
                    os.truncate(path, min(length, path.stat().st_size))
                else:
                    path.unlink()
            start = Event(session_log=SessionLog(status=SessionLog.START))
            logger.experiment._get_file_writer().add_event(start, step + 1)
        elif isinstance(logger, CSVLogger):
            _cut_back_csv(logger, to.get(_name(logger, _csv_file(logger)), 0))


def on_this_process(trainer: lightning.Trainer) -> list[Logger]:
    """The loggers that this process writes: those of the trainer in the first one, none in the others."""
    return trainer.loggers if trainer.is_global_zero else []


def _cut_back_csv(logger: CSVLogger, rows: int) -> None:
    """Lightning's writer deletes the file that it finds: the rows to keep wait beside it meanwhile."""
    path = _csv_file(logger)
    beside = _beside(path)
    if path.exists():
        names, kept = _read_csv(path)
        if kept[:rows]:
            _write_csv(beside, names, kept[:rows])
        else:
            beside.unlink(missing_ok=True)
    experiment = logger.experiment
    if beside.exists():
        experiment.metrics_keys = _read_csv(beside)[0]
        os.replace(beside, path)


def _read_csv(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The names of the columns, and the rows; a row that was torn is none."""
    if not path.exists():
        return [], []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.DictReader(file)
        names = list(reader.fieldnames or [])
        return names, [row for row in reader if None not in row and None not in row.values()]


def _write_csv(path: Path, names: list[str], rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _event_files(logger: TensorBoardLogger) -> list[Path]:
    return sorted(Path(logger.log_dir).glob("events.out.tfevents.*"))


def _csv_file(logger: CSVLogger) -> Path:
    return Path(logger.log_dir) / "metrics.csv"


def _name(logger: Logger, path: Path) -> str:
    return os.path.relpath(path, logger.save_dir)
