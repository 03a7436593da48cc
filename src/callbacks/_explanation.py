"""The Explanation of a step, from a fit's results and a trace: operations with times and lower bounds, the verdict; its text."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..hardware.calibration import Calibration, least_seconds, undisturbed
from ..hardware.trace import Event, device_seconds, step_starts
from ..records import explanation as records
from ..records.explanation import Cost, Explanation
from ..records.formatting import count, duration, percent, with_prefix
from ..records.operations import OperationRow
from ..records.step_parts import PARTS, SHORT_NAMES, StepPart
from ..records.terminal import columns, wrapped
from ._measured import Measured

MOST_MODULES = 24  # rows; with more modules, a row is a module with its submodules
_PARTS_BETWEEN = (StepPart.DATA_WAIT, StepPart.TRANSFER, StepPart.OTHER)  # the parts between two batches
_MAX_NAME_LENGTH = 60  # characters of a name; a longer name is cut from the left
_HEADINGS = ("share", "time", "calls", "FLOPs", "bytes", "bound/time")
_SHORT_PART_NAMES = dict(zip(PARTS, SHORT_NAMES, strict=True))


def explain(
    measured: Measured,
    machine: Calibration | None,
    bottleneck: Mapping[str, Any] | None,
    recorded: Sequence[OperationRow] = (),
    events: Sequence[Event] = (),
    notes: Sequence[str] = (),
) -> Explanation:
    """Return the explanation of a step.

    Args:
        measured: the results of a fit.
        machine: the calibration of its device.
        bottleneck: of the fit's summary.
        recorded: the operations of one recorded step, in the order of their calls, which is that of the trace.
        events: of a trace of some steps.
        notes: what is missing, and why.
    """
    cost, device, notes = measured.cost, measured.device, list(notes)
    parts = {part: ms / 1e3 for part, ms in measured.median_parts_ms.items()}
    between = _PARTS_BETWEEN if StepPart.TRANSFER in parts else (StepPart.DATA_WAIT,)  # on MPS `other` has work, too
    step_s, between_s = sum(parts.values()), sum(parts[part] for part in between)
    busy_share = None if measured.kernel_s is None else min(1.0, measured.kernel_s / step_s)
    operations, timing_notes = _time_operations(measured, recorded, events)
    if device == "cpu":  # the operations include those of callbacks
        between_s -= min(sum(row.seconds for row in operations if row.part == StepPart.OTHER), parts[StepPart.OTHER])
    notes += timing_notes
    if machine is None:
        notes.append("the device was not measured: no lower bounds (batchscope hardware measures it)")
    elif machine.disturbed:
        notes.append(
            f"the device's peak is not known: {machine.disturbed}; no lower bounds (batchscope hardware --refresh)"
        )
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
            (_add_bound(row, undisturbed(machine)) for row in operations),
            lambda cost: (cost.name, cost.module, cost.part, cost.dtype),
        ),
        threads=torch.get_num_threads() if device == "cpu" else None,
        bottleneck=bottleneck,
        idle_share=None if busy_share is None else 1 - busy_share,
        trace_steps=len(step_starts(events)),
        notes=notes,
    )


def _time_operations(
    measured: Measured, recorded: Sequence[OperationRow], events: Sequence[Event]
) -> tuple[Sequence[OperationRow], list[str]]:
    """Return the operations with their times, and a note where operations or times are missing."""
    operations, device = measured.operations, measured.device
    if not operations:
        return [], [f"the operations could not be counted: {measured.not_recorded}"]
    if device == "cpu":
        return operations, []
    if device == "cuda":
        seconds, rest_s = device_seconds(events, [row.name for row in recorded])
        if any(seconds):
            timed = [replace(row, seconds=value) for row, value in zip(recorded, seconds, strict=True)]
            other_kernels = OperationRow("other kernels", "", "other", "other", calls=0, seconds=rest_s)
            return [*timed, other_kernels] if rest_s else timed, []
    reason = "the trace has no kernel, so" if device == "cuda" else f"on {device}"
    return [replace(row, seconds=0.0) for row in operations], [f"{reason} the operations are not timed"]


def _add_bound(operation: OperationRow, calibration: Calibration | None) -> Cost:
    """Return an operation with its lower bound, which is 0 for a device with unknown peaks."""
    fields = ("module", "part", "name", "dtype", "calls", "flops", "bytes", "cold_bytes", "seconds")
    bound = least_seconds(operation, calibration) if calibration else 0.0
    return Cost(**{key: getattr(operation, key) for key in fields}, floor_seconds=bound)


def explanation_text(step: Explanation) -> str:
    """Return the text of an explanation, with its tables as wide as the terminal."""
    width = columns()
    blocks = [wrapped(_heading(step), width)]
    if step.operations:
        blocks.append(_module_table(step, width))
    if step.is_timed and _shown_costs(step):
        blocks.append(_costliest_table(step, width))
    blocks.append(wrapped([f"note     {note}" for note in step.notes], width, indent=9))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _heading(step: Explanation) -> list[str]:
    batch = f", batches of {step.batch_size:,}" if step.batch_size else ""
    threads = f", {count(step.threads, 'thread')}" if step.threads else ""
    lines = [f"{step.title}{batch}, {step.precision}, on {step.device} ({step.device_name}{threads})"]
    floor = step.total.floor_seconds
    bound = f"; its lower bound here is {duration(floor)}, {percent(floor / step.step_seconds)} of it" if floor else ""
    lines.append(f"a step takes {duration(step.step_seconds)} (median of {step.steps}){bound}")
    if step.bottleneck:
        lines.append(f"limit: {step.bottleneck['evidence']}")
    if step.idle_share is not None:
        lines.append(f"no kernel runs in {percent(step.idle_share)} of a step")
    return lines


def _module_table(step: Explanation, width: int) -> list[str]:
    rows = [[cost.module, *_cells(cost, step)] for cost in step.modules(MOST_MODULES) if _is_shown(cost.seconds, step)]
    remaining_s: dict[str, float] = {}
    if step.is_timed and step.device == "cpu":
        remaining_s = {"waiting for data": step.waiting_seconds}
        remaining_s["between batches"] = step.between_seconds - step.waiting_seconds
        remaining_s["host: Python, autograd"] = step.outside_seconds
    elif step.is_timed and step.idle_share is not None:
        remaining_s = {"no kernel runs": step.idle_share * step.step_seconds}
    rows += [
        [name, percent(seconds / step.step_seconds), duration(round(seconds, 9)), *"––––"]
        for name, seconds in remaining_s.items()
        if _is_shown(seconds, step)
    ]
    rows.append(["the step", *_cells(replace(step.total, seconds=step.step_seconds), step)])
    return _table(["module", *_HEADINGS], rows, width)


def _shown_costs(step: Explanation) -> list[Cost]:
    return [cost for cost in step.costliest() if _is_shown(cost.seconds, step)]


def _is_shown(seconds: float, step: Explanation) -> bool:
    """Whether a row is more than 0 % of the step, or no times are known."""
    return not step.is_timed or seconds >= 0.005 * step.step_seconds


def _cells(cost: Cost, step: Explanation) -> list[str]:
    bound = cost.of_floor
    return [
        percent(cost.seconds / step.step_seconds) if step.is_timed else "–",
        duration(cost.seconds) if step.is_timed else "–",
        f"{cost.calls:,.0f}" if cost.calls else "–",
        with_prefix(cost.flops) if cost.flops else "–",
        with_prefix(cost.bytes, "B") if cost.bytes else "–",
        "–" if bound is None else percent(bound, 0 if bound >= 0.1 else 1),
    ]


def _costliest_table(step: Explanation, width: int) -> list[str]:
    rows = []
    for cost in _shown_costs(step):
        share, time, calls, _, _, bound = _cells(cost, step)
        name = f"{cost.place}: {cost.name.removeprefix('aten.')}"
        rows.append([name, _SHORT_PART_NAMES.get(cost.part, cost.part), share, time, calls, bound])
    return _table(["costliest operations", "part", "share", "time", "calls", "bound/time"], rows, width)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return the lines of a table. Columns are as wide as needed; the first one, a name, is cut to the remaining width."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    room = width - sum(widths[1:]) - 2 * (len(widths) - 1)
    widths[0] = min(widths[0], max(room, len(headings[0])), _MAX_NAME_LENGTH)
    lines = []
    for name, *numbers in (headings, *rows):
        name = name if len(name) <= widths[0] else f"…{name[1 - widths[0] :]}"
        cells = [cell.rjust(column_width) for cell, column_width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *cells]))
    return lines
