"""From the operations that a fit has recorded to the record of a step that the run leaves (`operations.json`)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..hardware.calibration import Calibration
from ..hardware.operations import Operation, merge
from ..records.operations import OperationRow, StepOperations

# Of a calibration: what says which machine and not what it can do.
_IDENTITY = ("device", "device_name", "host", "uuid", "driver", "torch")
_SAME = ("name", "module", "part", "dtype", "dims", "calls", "flops", "bytes", "cold_bytes", "seconds")


def step_operations(
    operations: Sequence[Operation], summary: Mapping[str, Any], calibration: Calibration | None
) -> StepOperations | None:
    """The record of a step; None where no operation was recorded.

    Args:
        operations: of one step.
        summary: of the run.
        calibration: of the device, if it was measured.
    """
    if not operations:
        return None
    batches = summary["batches_per_sec"] * summary["step_ms_median"] / 1e3
    known = calibration.to_dict() if calibration is not None else {}
    return StepOperations(
        batch_size=summary["batch_size"],
        batches=max(1.0, round(batches, 6)),
        device=summary["device"],
        device_name=summary["device_name"] or "",
        precision=summary["precision"],
        rows=rows_of(operations),
        threads=torch.get_num_threads() if summary["device"] == "cpu" else None,
        calibration={key: value for key, value in known.items() if key not in _IDENTITY},
    )


def rows_of(operations: Sequence[Operation]) -> list[OperationRow]:
    """The operations as rows: those of the same name, module, part, dtype and dimensions as one."""
    merged = merge(operations, lambda each: (each.name, each.module, each.part, each.dtype, each.dims))
    return [OperationRow(**{key: getattr(each, key) for key in _SAME}) for each in merged.values()]
