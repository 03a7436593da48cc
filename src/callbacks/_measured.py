"""Measured: the results of a fit, which are all that its verdict needs; `measured.json` in the folder of a run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .._torch import float32_formats
from ..hardware.advice import Setting
from ..hardware.calibration import Calibration
from ..hardware.flops import kind_of_product
from ..hardware.slow_rank import RankTimes
from ..records.operations import OperationRow, StepOperations, merge
from ..records.read import reading, replacing
from ._level import Spans
from ._recording import Flops

FILE = "measured.json"
SCHEMA = 3
_NESTED_TYPES = {"setting": Setting, "flops": Flops, "spans": Spans}
# The fields of a calibration that identify the machine.
_IDENTITY = ("device", "device_name", "driver", "torch")


@dataclass(frozen=True)
class Measured:
    """The results of a fit on one rank. `_report.report` makes the run's summary from them."""

    title: str
    device: str  # the device type: `cpu`, `cuda`, `mps`
    device_name: str
    precision: str  # as an argument of the Trainer
    cost: Mapping[str, Any]  # `_cost.compute_cost`, `Windows.summarize`, and why a timed run has `ended`
    setting: Setting  # the options of the run, without what the report adds
    ranks: Sequence[RankTimes] = ()  # the times of all ranks, where there are several
    sampled: Mapping[str, float] = field(default_factory=dict)  # the readings of the device in the counted steps
    operations: Sequence[OperationRow] = ()  # of one step
    not_recorded: str | None = None  # why there are no operations
    batch_bytes: int = 0  # of a recorded batch
    flops: Flops = field(default_factory=Flops)
    changed: float = 1.0  # the work of a batch in the median step ÷ that right after the recorded ones
    median_parts_ms: Mapping[str, float] = field(default_factory=dict)  # of the update of median length, by part
    median_steps: int = 0  # the number of steps in the median
    kernel_s: float | None = None  # seconds of a step in which a kernel ran, by KernelTime or a trace
    fit_time: dict[str, Any] = field(default_factory=dict)  # `FitTimer.result`; empty for a run that a sweep visits
    spans: Spans | None = None  # spans of equal time; None for a short fit

    def step_operations(self, machine: Calibration | None) -> StepOperations | None:
        """Return the operations of a step for `operations.json`; None where no operation was recorded.

        Operations with the same name, module, part, dtype and dimensions become one row.
        """
        if not self.operations:
            return None
        fields = asdict(machine) if machine is not None else {}
        rows = merge(
            map(_with_tf32, self.operations) if self.device == "cuda" else self.operations,
            lambda row: (row.name, row.module, row.part, row.dtype, row.dims),
        ).values()
        return StepOperations(
            batch_size=self.cost["batch_size"],
            batches=self.cost.get("batches", 1.0),
            device=self.device,
            device_name=self.device_name,
            precision=self.precision,
            rows=list(rows),
            threads=torch.get_num_threads() if self.device == "cpu" else None,
            calibration={key: value for key, value in fields.items() if value is not None and key not in _IDENTITY},
            batch_bytes=self.batch_bytes or None,
        )


def write_measured(folder: Path, measured: Measured, machine: Calibration | None) -> None:
    """Write the file into a run's folder atomically. Raises WriteError."""
    rows = [astuple(row) for row in measured.operations]
    fields = asdict(replace(measured, operations=())) | {"operations": rows}
    content = {"schema": SCHEMA, "measured": fields, "machine": asdict(machine) if machine else None}
    with replacing(folder / FILE) as file:
        file.write(json.dumps(content, default=str).encode("utf-8", "replace"))


def read_measured(folder: Path) -> tuple[Measured, Calibration | None]:
    """Return the results of a run and its device's calibration: the arguments of `report`.

    Raises:
        UserError: if the file is missing, cannot be read, or is of another schema.
    """
    path = folder / FILE
    with reading(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {str(content['schema'])[:20]!r}, and this version reads {SCHEMA}")
        fields, machine = content["measured"], content["machine"]
        rows = [OperationRow(*row) for row in fields["operations"]]
        fields["operations"] = [replace(row, dims=tuple(row.dims)) for row in rows]
        fields |= {key: cls(**fields[key]) for key, cls in _NESTED_TYPES.items() if fields.get(key) is not None}
        return Measured(**fields), Calibration(**machine) if machine else None


def _with_tf32(row: OperationRow) -> OperationRow:
    """Return the row with the dtype `tf32` if torch's current switches let a CUDA device compute its float32 product in TF32."""
    if row.dtype == "fp32" and row.flops and float32_formats("cuda").get(kind_of_product(row.name)) == "tf32":
        return replace(row, dtype="tf32")
    return row
