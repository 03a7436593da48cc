"""Measured: what a fit has measured, all that its verdict needs; `measured.json` in the folder of a run."""

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
_NESTED = {"setting": Setting, "flops": Flops, "spans": Spans}
# Of a calibration: what says which machine and not what it can do.
_IDENTITY = ("device", "device_name", "driver", "torch")


@dataclass(frozen=True)
class Measured:
    """What one rank has measured of a fit. `_report.report` makes the run's summary of it."""

    title: str
    device: str  # torch's type: `cpu`, `cuda`, `mps`
    device_name: str
    precision: str  # as Lightning takes it
    cost: Mapping[str, Any]  # `_cost.cost_of`, the windows, the exchanges, and why a timed run has ended
    setting: Setting  # what the run has set, without what the report finds out
    ranks: Sequence[RankTimes] = ()  # of all ranks, where there are several
    sampled: Mapping[str, float] = field(default_factory=dict)  # of the device, in the counted steps
    operations: Sequence[OperationRow] = ()  # of one step
    not_recorded: str | None = None  # why there are none
    batch_bytes: int = 0  # of a recorded one
    flops: Flops = field(default_factory=Flops)
    changed: float = 1.0  # the work of a batch of the median step ÷ one right after the recorded ones
    median_parts_ms: Mapping[str, float] = field(default_factory=dict)  # of the update of median length
    median_steps: int = 0  # of which that is the median
    kernel_s: float | None = None  # seconds of a step in which a kernel ran, with the device held or by a trace
    fit_time: dict[str, Any] = field(default_factory=dict)  # `FitTimer.result`; of a run that a sweep visits empty
    spans: Spans | None = None  # of equal time; None of a short fit

    def step_operations(self, machine: Calibration | None) -> StepOperations | None:
        """The record of a step that a run leaves (`operations.json`); None where no operation was recorded.

        Operations of the same name, module, part, dtype and dimensions are one row.
        """
        if not self.operations:
            return None
        known = asdict(machine) if machine is not None else {}
        rows = merge(
            map(_in_tf32, self.operations) if self.device == "cuda" else self.operations,
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
            calibration={key: value for key, value in known.items() if value is not None and key not in _IDENTITY},
            batch_bytes=self.batch_bytes or None,
        )


def write_measured(folder: Path, measured: Measured, machine: Calibration | None) -> None:
    """Write the file into a run's folder atomically. Raises WriteError."""
    rows = [astuple(row) for row in measured.operations]
    known = asdict(replace(measured, operations=())) | {"operations": rows}
    content = {"schema": SCHEMA, "measured": known, "machine": asdict(machine) if machine else None}
    with replacing(folder / FILE) as file:
        file.write(json.dumps(content, default=str).encode("utf-8", "replace"))


def read_measured(folder: Path) -> tuple[Measured, Calibration | None]:
    """What a run has measured, and its device's calibration: the arguments of `report`.

    Raises:
        UserError: if the file is missing, cannot be read, or is of another schema.
    """
    path = folder / FILE
    with reading(path):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {str(content['schema'])[:20]!r}, and this version reads {SCHEMA}")
        known, machine = content["measured"], content["machine"]
        rows = [OperationRow(*row) for row in known["operations"]]
        known["operations"] = [replace(row, dims=tuple(row.dims)) for row in rows]
        known |= {key: kind(**known[key]) for key, kind in _NESTED.items() if known.get(key) is not None}
        return Measured(**known), Calibration(**machine) if machine else None


def _in_tf32(row: OperationRow) -> OperationRow:
    """The row with the dtype in which a CUDA device computes its product of float32, by torch's switches as they are."""
    if row.dtype == "fp32" and row.flops and float32_formats("cuda").get(kind_of_product(row.name)) == "tf32":
        return replace(row, dtype="tf32")
    return row
