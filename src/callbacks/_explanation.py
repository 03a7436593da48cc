"""From what was measured of some updates to an Explanation: operations with times and lower bounds, gaps, and the verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy
import torch

from ..hardware.bottleneck import Step, find_bottleneck
from ..hardware.calibration import Calibration
from ..hardware.devices import device_name
from ..hardware.operations import Operation, OperationRecorder
from ..hardware.roofline import least_seconds
from ..hardware.trace import Event, device_seconds, idle, step_starts
from ..records import explanation as records
from ..records.explanation import Cost, Explanation, Gap
from ..records.formatting import duration, percent
from ..records.step_parts import PARTS, StepPart
from ._table import UpdateTable

MOST_GAPS = 5
_TOO_LONG = 1.1  # the operations' time ÷ what a plain step has for them; less is the scatter between steps
_BETWEEN = (StepPart.DATA_WAIT, StepPart.TRANSFER, StepPart.OTHER)  # the parts between two batches


@dataclass
class Measured:
    """What the updates of a training have shown."""

    title: str
    device: torch.device
    precision: str
    table: UpdateTable
    recorder: OperationRecorder | None  # of the recorded updates; None where none was recorded
    not_recorded: str | None = None  # why
    events: Sequence[Event] = ()  # of the trace
    calibration: Calibration | None = None
    is_judged: bool = True  # whether this says what limits the step: not beside ThroughputMonitor, nor of one rank
    notes: list[str] = field(default_factory=list)


def explain(measured: Measured) -> Explanation:
    """The explanation of a step."""
    device, calibration, notes = measured.device, measured.calibration, list(measured.notes)
    parts, spread, steps = _median_step(measured.table)
    step_s, between_s = sum(parts.values()), sum(parts[part] for part in _BETWEEN)
    busy, gaps = _busy(measured, step_s)
    operations, is_timed, remark = _timed(measured)
    notes += remark
    # What a plain step has for its operations: on a CPU the time of its batches, else that in which a kernel runs.
    room = step_s - between_s if device.type == "cpu" else step_s * (1.0 if busy is None else busy)
    shown, remark = _within_step(operations, room)
    notes += remark
    if calibration is None:
        notes.append("the device was not measured: no lower bounds (batchscope hardware measures it)")
    noise = measured.table.windows.facts()
    if 2 * noise.get("disturbed_windows", 0) > noise.get("windows", 0):
        used = f"other programs used {percent(noise['others_share'])} of the processor meanwhile"
        notes.append(f"{used}, which makes times longer")
    return Explanation(
        title=measured.title,
        device=device.type,
        device_name=device_name(device),
        precision=measured.precision,
        batch_size=measured.table.batch_size() or None,
        step_seconds=step_s,
        between_seconds=between_s,
        waiting_seconds=parts[StepPart.DATA_WAIT],
        steps=steps,
        is_timed=is_timed,
        roofs=_roofs(calibration),
        operations=records.add_up((_cost(each, calibration) for each in shown), _group),
        threads=torch.get_num_threads() if device.type == "cpu" else None,
        bottleneck=_bottleneck(measured, parts, spread, steps, busy, operations),
        idle_share=None if busy is None else 1 - busy,
        gaps=gaps,
        trace_steps=len(step_starts(measured.events)),
        notes=notes,
    )


def _median_step(table: UpdateTable) -> tuple[dict[str, float], float, int]:
    """The seconds of the step of median length by part; the 90th percentile of the steps ÷ it; how many steps there are."""
    rows = numpy.flatnonzero(table.in_median())
    rows = rows[numpy.argsort(table.step_ms()[rows])]
    median = rows[len(rows) // 2]
    parts = dict(zip(PARTS, (table.rows["parts_ms"][median] / 1e3).tolist(), strict=True))
    return parts, float(numpy.quantile(table.step_ms()[rows], 0.9) / table.step_ms()[median]), len(rows)


def _busy(measured: Measured, step_s: float) -> tuple[float | None, list[Gap]]:
    """The share of a plain step in which a kernel runs, None without a trace of kernels; and the longest gaps.

    The kernels' time is compared with a step that nothing traces: tracing makes the host slower.
    """
    found, steps = idle(measured.events), len(step_starts(measured.events))
    if found is None or not steps:
        return None, []
    gaps = [
        Gap(after, before, sum(each) / 1e6 / steps, len(each) / steps, max(each) / 1e6)
        for (after, before), each in found.gaps.items()
    ]
    gaps.sort(key=lambda gap: -gap.seconds)
    return min(1.0, found.busy_us / 1e6 / steps / step_s), gaps[:MOST_GAPS]


def _timed(measured: Measured) -> tuple[list[Operation], bool, list[str]]:
    """The operations, whether they have times, and what is to be noted of them."""
    device, recorder = measured.device.type, measured.recorder
    operations = recorder.operations() if recorder else []
    if device == "cpu":
        return operations, bool(operations), []
    if device == "cuda" and recorder and operations:
        step = recorder.steps[-1]
        seconds, rest = device_seconds(measured.events, [each.name for each in step])
        if any(seconds):
            timed = [replace(each, seconds=value) for each, value in zip(step, seconds, strict=True)]
            others = Operation("other kernels", "other", "", "other", 0, seconds=rest)
            return [*timed, others] if rest else timed, True, []
    note = "the trace has no kernel, so" if device == "cuda" else f"on {device}"
    return [replace(each, seconds=0.0) for each in operations], False, [f"{note} the operations are not timed"]


def _within_step(operations: Sequence[Operation], room: float) -> tuple[Sequence[Operation], list[str]]:
    """Operations that took longer than a plain step has for them, scaled to it, and a note where it is much longer."""
    recorded = sum(each.seconds for each in operations)
    if recorded <= room:
        return operations, []
    note = (
        f"the operations took {duration(recorded)} while they were recorded, and a step that is not recorded has "
        f"{duration(room)} for them: their times and shares are scaled to it"
    )
    scaled = [replace(each, seconds=each.seconds * room / recorded) for each in operations]
    return scaled, [note] if recorded > _TOO_LONG * room else []


def _bottleneck(
    measured: Measured,
    parts: Mapping[str, float],
    spread: float,
    steps: int,
    busy: float | None,
    operations: Sequence[Operation],
) -> dict[str, Any] | None:
    """What limits the step, by the rule that every run is judged by."""
    if not measured.is_judged:
        return None
    found = find_bottleneck(
        Step(
            {part: 1e3 * seconds for part, seconds in parts.items()},
            device=measured.device.type,
            steps=steps,
            operations=operations,
            not_recorded=measured.not_recorded,
            calibration=measured.calibration,
            busy=busy,
            spread=spread,
            others_shares=measured.table.windows.others_shares(slowed_only=measured.device.type != "cpu"),
        )
    )
    return asdict(found) if found else None


def _group(cost: Cost) -> Any:
    return cost.name, cost.module, cost.part, cost.dtype


def _roofs(known: Calibration | None) -> records.Roofs:
    if known is None:
        return records.Roofs()
    return records.Roofs(dict(known.matmul_flops_per_sec), known.memory_bytes_per_sec, known.cache_bytes)


def _cost(operation: Operation, calibration: Calibration | None) -> Cost:
    """An operation with its lower bound, 0 for a device that was not measured."""
    same = ("module", "part", "name", "dtype", "calls", "flops", "bytes", "cold_bytes", "seconds")
    bound = least_seconds(operation, calibration) if calibration else 0.0
    return Cost(**{key: getattr(operation, key) for key in same}, floor_seconds=bound)
