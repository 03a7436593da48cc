"""StepFile: the logger of a run's step file, which appends each row as it comes."""

import contextlib
import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from typing_extensions import override

from ..files import write_bytes


class StepFile(Logger):
    """Writes `csv/metrics.csv`, which is valid at every moment: rows are appended, and a new column is added atomically.

    Args:
        save_dir: the run's folder.
    """

    name, version = "csv", ""  # pyrefly: ignore[bad-override]

    def __init__(self, save_dir: str):
        super().__init__()
        self.path = Path(save_dir, "csv", "metrics.csv")
        self._columns: list[str] = []  # of the file
        self._repeated: set[tuple[float, frozenset[str]]] = set()  # step and columns of rows that are logged again

    @property
    @override
    def save_dir(self) -> str:
        return str(self.path.parents[1])

    @override
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...  # they are in the record

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        numbers = {key: value.item() if isinstance(value, Tensor) else value for key, value in metrics.items()}
        if (step or 0, frozenset({*numbers, "step"})) not in self._repeated:
            self.append([(step or 0, numbers)])

    def append(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Append the numbers of steps. A number has 9 digits, which distinguish all float32 values."""
        columns = self._columns_with({"step", *(key for _, numbers in rows for key in numbers)})
        lines = []
        for step, numbers in rows:
            texts = {key: _text(number) for key, number in numbers.items()} | {"step": str(step)}
            lines.append(",".join(texts.get(column, "") for column in columns) + csv.excel.lineterminator)
        with self.path.open("a", newline="", encoding="utf-8") as file:
            file.writelines(lines)

    def cut(self, steps: int, batches: int) -> None:
        """Remove the rows after a checkpoint at the `global_step` `steps`; the resumed run logs them again.

        Rows that Lightning logs have an epoch, and their step counts updates from 0; at the checkpoint it is `batches`. A
        validation after the checkpoint has this step, too: its row stays, and is not appended when it is logged again.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.open("a").close()  # so that an error names this file and no temporary one
        names, rows = read_rows(self.path)
        rows = [row for row in rows if _step(row) <= (batches if row.get("epoch") else steps)]
        write_rows(self.path, names, rows)
        repeated = (row for row in rows if _step(row) >= batches)
        self._repeated = {(_step(row), frozenset(key for key, value in row.items() if value)) for row in repeated}

    def _columns_with(self, keys: set[str]) -> list[str]:
        """Add missing columns for `keys` to the file, and return all of its columns."""
        if not keys <= {*self._columns} or not self.path.is_file():
            names, rows = read_rows(self.path)
            self._columns = sorted({*names, *keys})
            if names != self._columns:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                write_rows(self.path, self._columns, rows)
        return self._columns


def _step(row: Mapping[str, str]) -> float:
    text = row.get("step", "")
    return int(text) if text.isdecimal() else float("inf")


def _text(value: Any) -> str:
    """Return the text of a cell: a float with nine digits, an integer with all of its digits, anything else quoted."""
    if isinstance(value, float):
        return f"{value:.9g}"
    return str(value) if isinstance(value, int) else f'"{str(value).replace(chr(34), 2 * chr(34))}"'


def read_rows(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the column names and the rows up to the first damaged one, without incomplete rows; none for a missing file."""
    if not path.is_file():  # reading a pipe or a device may never end
        return [], []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        complete_lines = (line for line in file if line.endswith(("\r", "\n")))
        reader, names, rows = csv.DictReader(complete_lines), list[str](), list[dict[str, str]]()
        with contextlib.suppress(csv.Error):
            names += reader.fieldnames or []
            for row in reader:
                rows += [row] if None not in row and None not in row.values() else []
        return names, rows


def write_rows(path: Path, names: list[str], rows: list[dict[str, str]]) -> None:
    """Replace the file atomically. Raises OSError if it cannot be written."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(rows)
    write_bytes(path, text.getvalue().encode())
