"""From what was recorded of some steps to an Explanation: operations with times and lower bounds, gaps, and notes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from ..hardware.bottleneck import Step, find_bottleneck
from ..hardware.calibration import Calibration
from ..hardware.contention import Noise
from ..hardware.devices import device_name
from ..hardware.floor import Roofs, roofs_of
from ..hardware.operations import Operation, OperationRecorder
from ..hardware.trace import Event, calls, device_seconds, idle, step_spans
from ..records import explanation as records
from ..records.explanation import Cost, Explanation, Gap
from ..records.formatting import duration, percent

MOST_GAPS = 5
_TOO_LONG = 1.1  # the operations' time ÷ what a plain step has for them; less is the scatter between steps
_NO_ROOFS = Roofs(asynchronous=False, flops_per_sec={})


@dataclass
class Measured:
    """What the steps of a training have shown."""

    title: str
    device: torch.device
    precision: str
    batch_size: int | None
    step_seconds: float
    between_seconds: float  # of it
    waiting_seconds: float  # of `between_seconds`, waiting for the loader
    steps: int
    recorder: OperationRecorder | None
    events: Sequence[Event] = ()
    trace_steps: int = 0
    calibration: Calibration | None = None
    others: float = 0.0  # the share of the processor that other programs used meanwhile
    noise: Noise = field(default_factory=Noise)  # what disturbed the machine meanwhile
    spread: float = 1.0  # the 90th percentile of the steps ÷ their median
    is_judged: bool = True  # whether this says what limits the step: not beside ThroughputMonitor, nor of one rank
    notes: list[str] = field(default_factory=list)


def explain(measured: Measured) -> Explanation:
    """The explanation of a step."""
    device, calibration, notes = measured.device, measured.calibration, list(measured.notes)
    roofs = roofs_of(calibration) if calibration else _NO_ROOFS
    if calibration is None:
        notes.append("the device was not measured: no lower bounds (batchscope hardware measures it)")
    operations, is_timed, remarks = _timed(measured)
    notes += remarks
    of_trace = _of_trace(measured, operations)
    shown, remarks = _within_step(operations, _room(measured, of_trace.get("idle_share", 0.0)))
    notes += remarks
    if measured.others:
        used = f"other programs used {percent(measured.others)} of the processor meanwhile"
        notes.append(f"{used}, which makes times longer")
    return Explanation(
        title=measured.title,
        device=device.type,
        device_name=device_name(device),
        precision=measured.precision,
        batch_size=measured.batch_size,
        step_seconds=measured.step_seconds,
        between_seconds=measured.between_seconds,
        waiting_seconds=measured.waiting_seconds,
        steps=measured.steps,
        is_timed=is_timed,
        roofs=records.Roofs(
            dict(roofs.flops_per_sec), roofs.bytes_per_sec, calibration.cache_bytes if calibration else None
        ),
        operations=records.add_up((_cost(each, roofs) for each in shown), _group),
        threads=torch.get_num_threads() if device.type == "cpu" else None,
        bottleneck=_bottleneck(measured, operations, roofs if calibration else None),
        trace_steps=measured.trace_steps,
        notes=notes,
        **of_trace,
    )


def _timed(measured: Measured) -> tuple[list[Operation], bool, list[str]]:
    """The operations, whether they have times, and what is to be noted of them."""
    device, recorder = measured.device.type, measured.recorder
    operations, notes = recorder.operations() if recorder else [], []
    if recorder and recorder.error is not None:
        notes.append(f"the operations could not be counted: {recorder.error}")
    if device == "cpu":
        return operations, bool(operations), notes
    if device == "cuda" and operations:
        operations, is_timed = _timed_by_device(measured)
        if not is_timed:
            notes.append("the trace has no kernel, so the operations are counted and not timed")
        return operations, is_timed, notes
    notes.append(f"on {device} the operations are counted and not timed")
    return [replace(each, seconds=0.0) for each in operations], False, notes


def _of_trace(measured: Measured, operations: Sequence[Operation]) -> dict[str, Any]:
    """What the trace alone tells."""
    if not operations or not measured.events:
        return {}
    if measured.device.type == "cuda":
        return _idle(measured)
    return {"profiled_seconds": _profiled(measured.events, operations)} if measured.device.type == "cpu" else {}


def _room(measured: Measured, idle: float) -> float:
    """What a plain step has for its operations: on a CPU the time of its batches, on a GPU that in which a kernel runs."""
    if measured.device.type == "cpu":
        return measured.step_seconds - measured.between_seconds
    return measured.step_seconds * (1 - idle)


def _within_step(operations: Sequence[Operation], room: float) -> tuple[Sequence[Operation], list[str]]:
    """Operations that took longer than a plain step has for them, scaled to it, and a note where it is much longer."""
    recorded = sum(each.seconds for each in operations)
    if recorded <= room:
        return operations, []
    scaled = [replace(each, seconds=each.seconds * room / recorded) for each in operations]
    note = (
        f"the operations took {duration(recorded)} while they were recorded, and a step that is not recorded has "
        f"{duration(room)} for them: their times and shares are scaled to it"
    )
    return scaled, [note] if recorded > _TOO_LONG * room else []


def _bottleneck(measured: Measured, operations: Sequence[Operation], roofs: Roofs | None) -> dict[str, Any] | None:
    """What limits the step, by the rule that every run is judged by; None on a device whose parts of a step are not timed."""
    if measured.device.type != "cpu" or not measured.is_judged:
        return None
    waiting, between = 1e3 * measured.waiting_seconds, 1e3 * measured.between_seconds
    found = find_bottleneck(
        Step(
            {"data_wait": waiting, "other": between - waiting, "forward": 1e3 * measured.step_seconds - between},
            steps=measured.steps,
            operations=operations,
            not_recorded=str(measured.recorder.error) if measured.recorder and measured.recorder.error else None,
            roofs=roofs,
            others=measured.others,
            spread=measured.spread,
            windows=[measured.noise],
        )
    )
    return asdict(found) if found else None


def _group(cost: Cost) -> Any:
    return cost.name, cost.module, cost.part, cost.dtype


def _cost(operation: Operation, roofs: Roofs) -> Cost:
    """An operation with its lower bound."""
    return Cost(
        operation.module,
        operation.part,
        operation.name,
        operation.dtype,
        operation.calls,
        operation.flops,
        operation.bytes,
        operation.cold_bytes,
        operation.seconds,
        roofs.floor_seconds(operation),
    )


def _timed_by_device(measured: Measured) -> tuple[list[Operation], bool]:
    """The operations of the last recorded step with the device's time instead of the host's."""
    step = measured.recorder.steps[-1] if measured.recorder else []
    seconds, others = device_seconds(measured.events, [each.name for each in step])
    timed = [replace(each, seconds=value) for each, value in zip(step, seconds, strict=True)]
    if others > 0:
        timed.append(Operation("other kernels", "other", "", "other", 0, seconds=others))
    return timed, any(seconds)


def _idle(measured: Measured) -> dict[str, Any]:
    """The share of a step in which no kernel ran, and the gaps that were longest in the traced steps.

    The share compares the busy time with a step that nothing traces: tracing makes the host slower.
    """
    found, steps = idle(measured.events), len(step_spans(measured.events))
    if found is None or not steps:
        return {}
    busy = found.busy_us / 1e6 / steps
    gaps = [
        Gap(after, before, sum(each) / 1e6 / steps, len(each) / steps, max(each) / 1e6)
        for (after, before), each in found.gaps.items()
    ]
    gaps.sort(key=lambda gap: -gap.seconds)
    return {"idle_share": max(0.0, 1 - busy / measured.step_seconds), "gaps": gaps[:MOST_GAPS]}


def _profiled(events: Sequence[Event], operations: Sequence[Operation]) -> float:
    """The time of a step in these operations, by torch's profiler."""
    found = calls(events, sorted({each.name for each in operations}))
    return sum(call.end - call.start for call in found) / 1e6 / max(1, len(step_spans(events)))
