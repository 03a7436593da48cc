"""The operations of a training step as a run has recorded them (`operations.json`): what each computes, moves, takes.

A row stands for the calls that have the same name, module, part, dtype and dimensions. Its numbers are those of all of
them in one step, which is one update of the weights.
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
_AMOUNT = Annotated[float, Range(0, 1e30)]  # what a float of a row may be


@dataclass(frozen=True)
class OperationRow:
    """Calls of one operation in a training step, added up. Numbers are those of all calls in one step."""

    name: str  # `aten.addmm`
    module: str  # the path of the innermost module in the LightningModule; empty for its own code
    part: str  # of the step: `forward`, `backward`, `optimizer`, `other`
    dtype: str  # of the numbers that it computes with: `fp32`, `bf16`, `fp16`, `fp64`, `other`; on CUDA `tf32`
    dims: tuple[NonNegativeInt, ...] = ()  # of each call; hardware/dims.py says which
    calls: float = 1.0
    flops: float = 0.0  # of products, convolutions, attention and recurrent kernels; a multiply-add is two
    bytes: float = 0.0  # read and written
    cold_bytes: float = 0.0  # of these, through main memory
    seconds: float = 0.0  # in the calls; on an asynchronous device the host's time only

    def plus(self, other: Self) -> Self:
        """Both together, under this one's name, module, part, dtype and dims."""
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in _amounts(type(self))})

    def times(self, share: float) -> Self:
        """The same calls with so much of the work."""
        work = ("flops", "bytes", "cold_bytes", "seconds")
        return replace(self, **{name: share * getattr(self, name) for name in work})


@cache
def _amounts(kind: type[OperationRow]) -> list[str]:
    """The columns that are added up."""
    return [column.name for column in fields(kind) if column.type is float]


_Row = TypeVar("_Row", bound=OperationRow)


def merge(rows: Iterable[_Row], key: Callable[[_Row], Any]) -> dict[Any, _Row]:
    """Rows added up by a key. The sum has the name, module, part and dtype of the group's first row."""
    sums: dict[Any, _Row] = {}
    for row in rows:
        group = key(row)
        sums[group] = sums[group].plus(row) if group in sums else row
    return sums


@dataclass(frozen=True)
class StepOperations:
    """A step's operations, and where and how they were recorded."""

    batch_size: PositiveInt  # samples of a batch on one device
    batches: Annotated[float, Range(1e-3, 1e30)]  # of a step; more than 1 with accumulated gradients
    device: str  # `cpu`, `cuda`, `mps`
    device_name: str
    precision: str  # as Lightning takes it
    rows: Sequence[OperationRow]
    threads: PositiveInt | None = None  # of a CPU
    calibration: Mapping[str, Any] = field(default_factory=dict)  # what the device was measured to do; may be empty
    batch_bytes: PositiveInt | None = None  # of the tensors of a batch; None where its step asks for it


def write_operations(folder: Path, step: StepOperations) -> None:
    """Write the file into a run's folder atomically; a row's number that is not finite is 0. Raises WriteError."""
    rows = [_finite(row) for row in step.rows]
    with replacing(folder / FILE) as file:
        file.write(json.dumps({"schema": SCHEMA, **asdict(replace(step, rows=rows))}).encode("utf-8", "replace"))


def _finite(row: OperationRow) -> OperationRow:
    zeros: dict[str, Any] = {name: 0.0 for name in _amounts(type(row)) if not isfinite(getattr(row, name))}
    return replace(row, **zeros)


def read_operations(folder: Path) -> StepOperations | None:
    """The operations of a run's step; None where the run left none.

    Raises:
        UserError: if the file cannot be read, is damaged, or has another schema.
    """
    path = folder / FILE
    with reading(path):
        if not path.exists():
            return None
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["schema"] != SCHEMA:
            raise ValueError(f"its schema is {str(known['schema'])[:20]!r}, and this version reads {SCHEMA}")
        step = _checked(StepOperations, known)
        rows = [_checked(OperationRow, row) for row in step.rows]
        return replace(step, rows=[replace(row, dims=tuple(row.dims)) for row in rows])


def _checked(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """The dataclass with these values. Raises UserError for one that is missing, or is not what its field takes."""
    known = {of.name: values.get(of.name) for of in fields(kind)}
    for of in fields(kind):
        check_value(of.name, known[of.name], _AMOUNT if of.type is float else of.type)
    return kind(**known)
