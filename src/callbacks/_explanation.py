"""From what a fit has measured and a trace to an Explanation: operations with times and bounds, the verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..hardware.calibration import Calibration, least_seconds
from ..hardware.trace import Event, device_seconds, step_starts
from ..records import explanation as records
from ..records.explanation import Cost, Explanation
from ..records.operations import OperationRow
from ..records.step_parts import StepPart
from ._measured import Measured

_BETWEEN = (StepPart.DATA_WAIT, StepPart.TRANSFER, StepPart.OTHER)  # the parts between two batches


def explain(
    measured: Measured,
    machine: Calibration | None,
    bottleneck: Mapping[str, Any] | None,
    recorded: Sequence[OperationRow] = (),
    events: Sequence[Event] = (),
    notes: Sequence[str] = (),
) -> Explanation:
    """The explanation of a step.

    Args:
        measured: by a fit.
        machine: the calibration of its device.
        bottleneck: of the fit's summary.
        recorded: the operations of one recorded step, in their order, which those of a trace have.
        events: of a trace of some steps.
        notes: what is missing, and why.
    """
    cost, device, notes = measured.cost, measured.device, list(notes)
    parts = {part: ms / 1e3 for part, ms in measured.median_parts_ms.items()}
    between = _BETWEEN if StepPart.TRANSFER in parts else (StepPart.DATA_WAIT,)  # on MPS `other` has the work, too
    step_s, between_s = sum(parts.values()), sum(parts[part] for part in between)
    busy = measured.kernel_share
    operations, remark = _timed(measured, recorded, events)
    notes += [remark] if remark else []
    if machine is None:
        notes.append("the device was not measured: no lower bounds (batchscope hardware measures it)")
    return Explanation(
        title=measured.title,
        device=device,
        device_name=measured.device_name,
        precision=measured.precision,
        batch_size=cost["batch_size"] or None,
        step_seconds=step_s,
        between_seconds=between_s,
        waiting_seconds=parts[StepPart.DATA_WAIT],
        steps=measured.median_steps,
        is_timed=any(row.seconds for row in operations),
        operations=records.add_up(
            (_cost(row, machine) for row in operations),
            lambda cost: (cost.name, cost.module, cost.part, cost.dtype),
        ),
        threads=torch.get_num_threads() if device == "cpu" else None,
        bottleneck=bottleneck,
        idle_share=None if busy is None else 1 - busy,
        trace_steps=len(step_starts(events)),
        notes=notes,
    )


def _timed(
    measured: Measured, recorded: Sequence[OperationRow], events: Sequence[Event]
) -> tuple[Sequence[OperationRow], str | None]:
    """The operations with their times, and a note where they are not known or have none."""
    operations, device = measured.operations, measured.device
    if not operations:
        return [], f"the operations could not be counted: {measured.not_recorded}"
    if device == "cpu":
        return operations, None
    if device == "cuda":
        seconds, rest = device_seconds(events, [row.name for row in recorded])
        if any(seconds):
            timed = [replace(row, seconds=value) for row, value in zip(recorded, seconds, strict=True)]
            others = OperationRow("other kernels", "", "other", "other", calls=0, seconds=rest)
            return [*timed, others] if rest else timed, None
    why = "the trace has no kernel, so" if device == "cuda" else f"on {device}"
    return [replace(row, seconds=0.0) for row in operations], f"{why} the operations are not timed"


def _cost(operation: OperationRow, calibration: Calibration | None) -> Cost:
    """An operation with its lower bound, 0 for a device that was not measured."""
    same = ("module", "part", "name", "dtype", "calls", "flops", "bytes", "cold_bytes", "seconds")
    bound = least_seconds(operation, calibration) if calibration else 0.0
    return Cost(**{key: getattr(operation, key) for key in same}, floor_seconds=bound)
