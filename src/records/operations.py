"""The operations of a training step (`operations.json`), as a run has recorded them: what each computes and moves, and its time.

A row stands for the calls that have the same name, module, part, dtype and dimensions. Its numbers are those of all of
them in one step, which is one update of the weights.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import WriteError, why, write_bytes

FILE = "operations.json"
SCHEMA = 1
_MAX_BYTES = 2**26  # of a file that is read
_MAX_ROWS = 200_000
_DIGITS = 5  # of a number


@dataclass(frozen=True)
class OperationRow:
    """The calls of one operation with the same dimensions, in one module and one part of the step."""

    name: str  # `aten.addmm`
    module: str  # the path in the LightningModule; empty for its own code
    part: str  # `forward`, `backward`, `optimizer`, `other`
    dtype: str  # `fp32`, `bf16`, `fp16`, `fp64`, `other`
    dims: tuple[int, ...]  # of a call; hardware/dims.py says which
    calls: float = 1.0
    flops: float = 0.0
    bytes: float = 0.0  # read and written
    cold_bytes: float = 0.0  # of these, through main memory
    seconds: float = 0.0  # measured; on an asynchronous device the host's time only


_TEXTS = ("name", "module", "part", "dtype")
_COLUMNS = tuple(each.name for each in fields(OperationRow))


@dataclass(frozen=True)
class StepOperations:
    """A step's operations, and where and how they were recorded."""

    batch_size: int  # samples of a batch on one device
    batches: float  # of a step; more than 1 with accumulated gradients
    device: str  # `cpu`, `cuda`, `mps`
    device_name: str
    precision: str  # as Lightning takes it
    rows: Sequence[OperationRow]
    threads: int | None = None  # of a CPU
    calibration: Mapping[str, Any] = field(default_factory=dict)  # what the device was measured to do; may be empty


def write_operations(folder: Path, step: StepOperations) -> None:
    """Write the file into a run's folder atomically. Raises WriteError."""
    try:
        write_bytes(folder / FILE, to_json(step).encode("utf-8", "replace"))
    except OSError as error:
        raise WriteError(f"{folder / FILE} cannot be written: {why(error)}") from error


def to_json(step: StepOperations) -> str:
    """The file's text: one line for what holds for all rows, then a line for each row."""
    modules = list(dict.fromkeys(row.module for row in step.rows))
    names = list(dict.fromkeys(row.name for row in step.rows))
    places = {"name": {name: at for at, name in enumerate(names)}, "module": {m: at for at, m in enumerate(modules)}}
    head = {each.name: getattr(step, each.name) for each in fields(step) if each.name != "rows"}
    head = {"schema": SCHEMA, **head, "columns": _COLUMNS, "names": names, "modules": modules}
    lines = [_line(row, places) for row in step.rows]
    return _json(head)[:-1] + ',"rows":[\n' + ",\n".join(lines) + "\n]}\n"


def _line(row: OperationRow, places: Mapping[str, Mapping[str, int]]) -> str:
    values = {column: getattr(row, column) for column in _COLUMNS}
    values |= {column: place[values[column]] for column, place in places.items()}
    return _json([_short(value) if isinstance(value, float) else value for value in values.values()])


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _short(number: float) -> float | int:
    """A number in few characters: a whole one as such, any other with 5 digits."""
    if not math.isfinite(number):
        return 0
    short = number if number == int(number) else float(f"{number:.{_DIGITS}g}")
    return int(short) if short == int(short) else short


def read_operations(folder: Path) -> StepOperations | None:
    """The operations of a run's step; None where the run left none.

    Raises:
        UserError: if the file cannot be read, is damaged, or has another schema.
    """
    path = folder / FILE
    try:
        if not path.exists():
            return None
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            raise ValueError("it is not a file" if not path.is_file() else "it is too large")
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and isinstance(found.get("schema"), int) and found["schema"] != SCHEMA:
            raise ValueError(f"its schema is {found['schema']}, and this version reads {SCHEMA}")
        return _checked(found)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {why(error)}") from error
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
        raise UserError(f"{path}: cannot be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"it has no {error.args[0]}"
    return " ".join(str(error).split())[:200] or type(error).__name__


def _checked(found: Any) -> StepOperations:
    if not isinstance(found, dict) or found["schema"] != SCHEMA:
        raise ValueError("it is not the record of a step's operations")
    columns, rows = found["columns"], found["rows"]
    if not isinstance(columns, list) or not {*_COLUMNS} <= {*columns} or not isinstance(rows, list):
        raise ValueError("its columns are others")
    if len(rows) > _MAX_ROWS:
        raise ValueError("it has too many rows")
    texts = {"name": found["names"], "module": found["modules"]}
    calibration, threads = found["calibration"], found["threads"]
    if not isinstance(calibration, dict) or not (threads is None or _count(threads)):
        raise ValueError("its device is damaged")
    return StepOperations(
        batch_size=_whole(found["batch_size"]),
        batches=_number(found["batches"], least=1e-9),
        device=_text(found["device"]),
        device_name=_text(found["device_name"]),
        precision=_text(found["precision"]),
        rows=[_row(row, columns, texts) for row in rows],
        threads=threads,
        calibration=calibration,
    )


def _row(row: Any, columns: list[str], texts: Mapping[str, Any]) -> OperationRow:
    if not isinstance(row, list) or len(row) != len(columns):
        raise ValueError("a row has another length than its columns")
    values = {column: value for column, value in zip(columns, row, strict=True) if column in _COLUMNS}
    for column, words in texts.items():
        if not isinstance(values[column], int) or values[column] < 0 or not isinstance(words, list):
            raise ValueError(f"a row has no {column}")
        values[column] = words[values[column]]
    dims = _dims(values.pop("dims"))
    made: dict[str, Any] = {key: _text(each) if key in _TEXTS else _number(each) for key, each in values.items()}
    return OperationRow(**made, dims=dims)


def _dims(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > 16 or not all(_count(size) or size == 0 for size in value):
        raise ValueError("a row has no dimensions")
    return tuple(value)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**60


def _whole(value: Any) -> int:
    if not _count(value):
        raise ValueError(f"{str(value)[:40]} is no count")
    return value


def _number(value: Any, least: float = 0.0) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < 1e30:
        raise ValueError(f"{str(value)[:40]} is no number of a step")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]} is no text")
    return value
