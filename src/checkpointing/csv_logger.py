"""Lightning's CSV logger with a file that is complete at every moment."""

from pathlib import Path

from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

from .._lightning import AppendingCSVWriter, set_csv_writer
from ..records.step_file import read_rows, write_rows


def append_to_file(logger: CSVLogger) -> None:
    """Have a CSVLogger that is not yet used append to its file, and add columns atomically.

    Lightning deletes a file that is there. It adds a column by truncating the file and writing it again: a run that is
    killed at that moment loses rows that its checkpoint counts on.
    """
    set_csv_writer(logger, _AtomicCSVWriter(log_dir=logger.log_dir))


class _AtomicCSVWriter(AppendingCSVWriter):
    @override
    def existing_columns(self) -> list[str]:
        return read_rows(Path(self.metrics_file_path))[0]

    @override
    def add_columns(self, columns: list[str]) -> None:
        path = Path(self.metrics_file_path)
        write_rows(path, columns, read_rows(path)[1])
