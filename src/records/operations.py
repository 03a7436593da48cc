"""The recorded operations of a training step (`operations.json`): the FLOPs, bytes and seconds of each.

A row stands for the calls that have the same name, module, part, dtype and dimensions. Its numbers are sums over these
calls in one step, which is one update of the weights.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from ..options.types import NonNegativeInt, PositiveInt, Range
from ..options.values import check_value
from .read import reading, replacing

FILE = "operations.json"
SCHEMA = 3
_SUM = Annotated[float, Range(0, 1e30)]  # the range of a row's floats


@dataclass(frozen=True)
class OperationRow:
    """The calls of one operation in a training step; numbers are sums over all calls in one step."""

    name: str  # `aten.addmm`
    module: str  # the path of the innermost module in the LightningModule; empty for its own code
    part: str  # of the step: `forward`, `backward`, `optimizer`, `other`
    dtype: str  # of its arithmetic: `fp32`, `bf16`, `fp16`, `fp64`, `other`; on CUDA `tf32`
    dims: tuple[NonNegativeInt, ...] = ()  # of each call; hardware/dims.py defines them
    calls: float = 1.0
    flops: float = 0.0  # of products, convolutions, attention and recurrent kernels; a multiply-add is two
    bytes: float = 0.0  # read and written
    cold_bytes: float = 0.0  # of `bytes`, through main memory
    seconds: float = 0.0  # in the calls; on an asynchronous device only the host's time

    def plus(self, other: Self) -> Self:
        """Return the sum of two rows, with the name, module, part, dtype and dims of this row."""
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in _addends(type(self))})

    def times(self, share: float) -> Self:
        """Return the row with its work, but not its number of calls, scaled by a share."""
        work = ("flops", "bytes", "cold_bytes", "seconds")
        return replace(self, **{name: share * getattr(self, name) for name in work})


@cache
def _addends(kind: type[OperationRow]) -> list[str]:
    """Return the names of the columns that are added up."""
    return [column.name for column in fields(kind) if column.type is float]


_Row = TypeVar("_Row", bound=OperationRow)


def merge(rows: Iterable[_Row], key: Callable[[_Row], Any]) -> dict[Any, _Row]:
    """Add up rows by a key. A sum has the name, module, part and dtype of its group's first row."""
    sums: dict[Any, _Row] = {}
    for row in rows:
        group = key(row)
        sums[group] = sums[group].plus(row) if group in sums else row
    return sums


@dataclass(frozen=True)
class StepOperations:
    """The operations of a step, and where and how they were recorded."""

    batch_size: PositiveInt  # samples of a batch on one device
    batches: Annotated[float, Range(1e-3, 1e30)]  # in a step; more than 1 with accumulated gradients
    device: str  # `cpu`, `cuda`, `mps`
    device_name: str
    precision: str  # Lightning's name for it
    rows: Sequence[OperationRow]
    threads: PositiveInt | None = None  # on a CPU
    calibration: Mapping[str, Any] = field(default_factory=dict)  # the measured peaks of the device; may be empty
    batch_bytes: PositiveInt | None = None  # of a batch's tensors; None where the step itself requests the batch


def write_operations(folder: Path, step: StepOperations) -> None:
    """Write the file into a run's folder atomically, with 0 for numbers that are not finite. Raises WriteError."""
    rows = [_replace_nonfinite(row) for row in step.rows]
    with replacing(folder / FILE) as file:
        file.write(json.dumps({"schema": SCHEMA, **asdict(replace(step, rows=rows))}).encode("utf-8", "replace"))


def _replace_nonfinite(row: OperationRow) -> OperationRow:
    zeros: dict[str, Any] = {name: 0.0 for name in _addends(type(row)) if not isfinite(getattr(row, name))}
    return replace(row, **zeros)


def read_operations(folder: Path) -> StepOperations | None:
    """Return the operations of a run's step; None if the run left no file.

    Raises:
        UserError: if the file cannot be read, is damaged, or has another schema.
    """
    path = folder / FILE
    with reading(path):
        if not path.exists():
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {str(content['schema'])[:20]!r}, and this version reads {SCHEMA}")
        step = _build_checked(StepOperations, content)
        rows = [_build_checked(OperationRow, row) for row in step.rows]
        return replace(step, rows=[replace(row, dims=tuple(row.dims)) for row in rows])


def _build_checked(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """Build a dataclass. Raises UserError for a value that is missing, or that its field does not take."""
    arguments = {column.name: values.get(column.name) for column in fields(kind)}
    for column in fields(kind):
        check_value(column.name, arguments[column.name], _SUM if column.type is float else column.type)
    return kind(**arguments)
