"""The operations of a training step (`operations.json`), as a run has recorded them: what each computes and moves, and its time.

A row stands for the calls that have the same name, module, part, dtype and dimensions. Its numbers are those of all of
them in one step, which is one update of the weights.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import WriteError, why, write_bytes
from .read import load_json

FILE = "operations.json"
SCHEMA = 2
_MAX_BYTES = 2**26  # of a file that is read
_LARGEST = 1e30  # number of a step
_DIGITS = 5  # of a number
_SUMS = ("calls", "flops", "bytes", "cold_bytes", "seconds")


@dataclass(frozen=True)
class OperationRow:
    """Calls of one operation in a training step, added up. Numbers are those of all calls in one step."""

    name: str  # `aten.addmm`
    module: str  # the path of the innermost module in the LightningModule; empty for its own code
    part: str  # of the step: `forward`, `backward`, `optimizer`, `other`
    dtype: str  # of the numbers that it computes with: `fp32`, `bf16`, `fp16`, `fp64`, `other`
    dims: tuple[int, ...] = ()  # of each call; hardware/dims.py says which
    calls: float = 1.0
    flops: float = 0.0  # of products, convolutions, attention and recurrent kernels; a multiply-add is two
    bytes: float = 0.0  # read and written
    cold_bytes: float = 0.0  # of these, through main memory
    seconds: float = 0.0  # in the calls; on an asynchronous device the host's time only

    def plus(self, other: "OperationRow") -> "OperationRow":
        """Both together, under this one's name, module, part, dtype and dims."""
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in _SUMS})


_COLUMNS = [each.name for each in fields(OperationRow)]


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
    head = {each.name: getattr(step, each.name) for each in fields(step) if each.name != "rows"}
    lines = [
        _json([_short(value) if isinstance(value, float) else value for value in astuple(row)]) for row in step.rows
    ]
    return _json({"schema": SCHEMA, **head, "columns": _COLUMNS})[:-1] + ',"rows":[\n' + ",\n".join(lines) + "\n]}\n"


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
    if not path.exists():
        return None
    found = load_json(path, _MAX_BYTES)
    try:
        if found["schema"] != SCHEMA:
            raise ValueError(f"its schema is {str(found['schema'])[:20]!r}, and this version reads {SCHEMA}")
        if found["columns"] != _COLUMNS:
            raise ValueError("its columns are others")
        rows = [_checked(OperationRow, dict(zip(_COLUMNS, row, strict=True))) for row in found["rows"]]
        step = _checked(StepOperations, {**found, "rows": rows})
        if not step.batches:
            raise ValueError("it has no batches")
        return step
    except KeyError as error:
        raise UserError(f"{path}: cannot be read: it has no {error.args[0]}") from error
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def _is_count(value: Any, least: int = 1) -> bool:
    return type(value) is int and least <= value < 2**60


# For the type of each field: whether a value is of it.
_FITS: dict[Any, Callable[[Any], bool]] = {
    str: lambda value: isinstance(value, str),
    int: _is_count,
    int | None: lambda value: value is None or _is_count(value),
    float: lambda value: type(value) in (int, float) and 0 <= value < _LARGEST,
    tuple[int, ...]: lambda value: isinstance(value, list) and all(_is_count(size, 0) for size in value),
    Mapping[str, Any]: lambda value: isinstance(value, dict),
    Sequence[OperationRow]: lambda value: True,  # already checked
}


def _checked(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """The dataclass with these values; KeyError, or ValueError for a value that is not of its field's type."""
    for each in fields(kind):
        if not _FITS[each.type](values[each.name]):
            raise ValueError(f"{each.name} cannot be {str(values[each.name])[:40]!r}")
    found = {each.name: values[each.name] for each in fields(kind)}
    return kind(**found | ({"dims": tuple(found["dims"])} if "dims" in found else {}))
