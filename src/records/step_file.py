"""The step file of a run (`csv/metrics.csv`): a row for each logged step, a column for each metric."""

import csv
import io
from pathlib import Path

from ..files import write_bytes


def read_rows(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """The names of the columns, and the rows; a torn row is left out, and a missing file has neither."""
    if not path.is_file():  # reading a pipe or a device may never end
        return [], []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.DictReader(file)
        names = list(reader.fieldnames or [])
        return names, [row for row in reader if None not in row and None not in row.values()]


def write_rows(path: Path, names: list[str], rows: list[dict[str, str]]) -> None:
    """Replace the file atomically. Raises OSError if it cannot be written."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(rows)
    write_bytes(path, text.getvalue().encode())
