"""AtomicCSVLogger: Lightning's CSV logger with a file that is complete at every moment."""

from pathlib import Path

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import rank_zero_experiment
from typing_extensions import override

from .._lightning import AppendingCSVWriter, has_begun, set_csv_writer
from ..records.step_file import read_rows, write_rows


class AtomicCSVLogger(CSVLogger):
    """Lightning's CSVLogger, with the same arguments, which appends to an existing file and adds columns atomically.

    Lightning adds a column by truncating the file and writing it again. A run that is killed at that moment loses rows
    that its checkpoint counts on.
    """

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        if not has_begun(self):
            append_to_file(self)
        return super().experiment


class _AtomicCSVWriter(AppendingCSVWriter):
    @override
    def existing_columns(self) -> list[str]:
        return read_rows(Path(self.metrics_file_path))[0]

    @override
    def add_columns(self, columns: list[str]) -> None:
        path = Path(self.metrics_file_path)
        write_rows(path, columns, read_rows(path)[1])


def append_to_file(logger: CSVLogger) -> None:
    """Have a CSVLogger that is not yet used append to its file, which Lightning would delete."""
    set_csv_writer(logger, _AtomicCSVWriter(log_dir=logger.log_dir))
