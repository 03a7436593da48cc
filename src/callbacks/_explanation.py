"""From what was measured of some updates to an Explanation: operations with times and lower bounds, gaps, and the verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import mean
from typing import Any

import numpy
import torch

from ..hardware.bottleneck import Step, find_bottleneck
from ..hardware.calibration import Calibration
from ..hardware.contention import Noise
from ..hardware.devices import device_name
from ..hardware.operations import Operation, OperationRecorder
from ..hardware.roofline import Peaks, peaks_of
from ..hardware.trace import Event, device_seconds, idle, step_starts
from ..records import explanation as records
from ..records.explanation import Cost, Explanation, Gap
from ..records.formatting import duration, percent

MOST_GAPS = 5
_TOO_LONG = 1.1  # the operations' time ÷ what a plain step has for them; less is the scatter between steps
_PARTS = ("data_wait", "transfer", "batch", "other")  # of an update
_NO_PEAKS = Peaks(asynchronous=False, flops_per_sec={})


@dataclass
class Measured:
    """What the updates of a training have shown."""

    title: str
    device: torch.device
    precision: str
    batch_size: int | None
    updates: Sequence[Mapping[str, float]]  # seconds of each plain one: `data_wait`, `transfer`, `batch`, `other`
    recorder: OperationRecorder | None
    events: Sequence[Event] = ()  # of the trace
    calibration: Calibration | None = None
    others: float = 0.0  # the share of the processor that other programs used meanwhile
    noise: Noise = field(default_factory=Noise)  # what disturbed the machine meanwhile
    is_judged: bool = True  # whether this says what limits the step: not beside ThroughputMonitor, nor of one rank
    notes: list[str] = field(default_factory=list)


def explain(measured: Measured) -> Explanation:
    """The explanation of a step."""
    device, calibration, notes = measured.device, measured.calibration, list(measured.notes)
    peaks = peaks_of(calibration) if calibration else _NO_PEAKS
    parts, spread = _typical(measured)
    step_s = sum(parts.values())
    busy, gaps = _busy(measured, step_s)
    operations, is_timed, remark = _timed(measured)
    notes += remark
    # What a plain step has for its operations: on a CPU the time of its batches, else that in which a kernel runs.
    room = parts["batch"] if device.type == "cpu" else step_s * (1.0 if busy is None else busy)
    shown, remark = _within_step(operations, room)
    notes += remark
    if calibration is None:
        notes.append("the device was not measured: no lower bounds (batchscope hardware measures it)")
    if measured.others:
        used = f"other programs used {percent(measured.others)} of the processor meanwhile"
        notes.append(f"{used}, which makes times longer")
    return Explanation(
        title=measured.title,
        device=device.type,
        device_name=device_name(device),
        precision=measured.precision,
        batch_size=measured.batch_size,
        step_seconds=step_s,
        between_seconds=step_s - parts["batch"],
        waiting_seconds=parts["data_wait"],
        steps=len(measured.updates),
        is_timed=is_timed,
        roofs=records.Roofs(
            dict(peaks.flops_per_sec), peaks.bytes_per_sec, calibration.cache_bytes if calibration else None
        ),
        operations=records.add_up((_cost(each, peaks) for each in shown), _group),
        threads=torch.get_num_threads() if device.type == "cpu" else None,
        bottleneck=_bottleneck(measured, parts, spread, busy, operations),
        idle_share=None if busy is None else 1 - busy,
        gaps=gaps,
        trace_steps=len(step_starts(measured.events)),
        notes=notes,
    )


def _typical(measured: Measured) -> tuple[dict[str, float], float]:
    """The seconds of a step by part, and the 90th percentile of the steps ÷ their median.

    On a CPU they are those of the update of median length. A device that is awaited only after the last update makes the
    sum of the updates true, and no single one: there they are means, and the spread is not known.
    """
    updates = sorted(measured.updates, key=lambda update: sum(update.values()))
    if measured.device.type != "cpu":
        return {part: mean(update.get(part, 0.0) for update in updates) for part in _PARTS}, 1.0
    typical = {part: updates[len(updates) // 2].get(part, 0.0) for part in _PARTS}
    slow = numpy.quantile([sum(update.values()) for update in updates], 0.9)
    return typical, float(slow) / sum(typical.values())


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
    if recorder and recorder.error is not None:
        return [], False, [f"the operations could not be counted: {recorder.error}"]
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
    measured: Measured, parts: Mapping[str, float], spread: float, busy: float | None, operations: Sequence[Operation]
) -> dict[str, Any] | None:
    """What limits the step, by the rule that every run is judged by."""
    if not measured.is_judged:
        return None
    device, error = measured.device.type, measured.recorder.error if measured.recorder else None
    named = {"forward" if part == "batch" else part: 1e3 * seconds for part, seconds in parts.items()}
    found = find_bottleneck(
        Step(
            named,
            device=device,
            steps=len(measured.updates),
            operations=operations,
            not_recorded=None if error is None else str(error),
            peaks=peaks_of(measured.calibration) if measured.calibration else None,
            busy=busy,
            spread=spread,
            taken=[measured.noise.others_share] if device == "cpu" else (),
        )
    )
    return asdict(found) if found else None


def _group(cost: Cost) -> Any:
    return cost.name, cost.module, cost.part, cost.dtype


def _cost(operation: Operation, peaks: Peaks) -> Cost:
    """An operation with its lower bound."""
    same = ("module", "part", "name", "dtype", "calls", "flops", "bytes", "cold_bytes", "seconds")
    return Cost(**{key: getattr(operation, key) for key in same}, floor_seconds=peaks.least_seconds(operation))
