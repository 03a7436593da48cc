"""The bottleneck of a run: the resource that limits its step time.

The step's wall time is divided into shares, and the largest one names the bottleneck.

Waits are measured: `input` (for the loader), `transfer` (of batches to the device), and `communication` (the exchange of
gradients that is not hidden behind the backward pass). The first two count up to the device's idle time: overlapped
work is free. The exchange runs in kernels, so a device that waits for other ranks is busy.

The rest is the work of the step. The operations of the step divide it:

- On a CPU the operations are timed. The fixed cost of a call, and the time between calls (Python, autograd, the framework),
  is `host`. The rest of an operation's time has one kind. An operation with FLOPs is `memory` if, at the device's peaks, its
  traffic takes longer than its FLOPs; else `compute`. An operation without FLOPs is `memory` if most of its bytes come from main
  memory, else `elementwise`. A low bandwidth does not decide: look-ups and strides reach 1.4 to 2 % of the peak here, and so do
  random numbers. So special functions and sorting are `memory`, too, on values that no cache holds.
- An accelerator computes asynchronously, so its operations are not timed. The time in which no kernel runs is `host`. The
  busy time is divided between `memory` and `compute` in proportion to the operations' times at the peaks. If the busy time is
  unknown, these times decide whether the device limits the step, or the host that launches the operations.

The verdict is `clear`, or `probable` with the reasons for doubt. It is `unclear` if no share reaches `LEAST`, or if the
unknown share of the step is larger than every other one. If other programs use much of the processor, there is no verdict.

Runs and explanations are judged by `find_bottleneck` alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..records.formatting import count, duration, percent
from ..records.operations import OperationRow
from ..records.step_parts import PARTS
from .calibration import Calibration, compute_seconds, launch_seconds, memory_seconds, undisturbed
from .evidence import NAMES, Timed, describe_shares, describe_work

Certainty = Literal["clear", "probable", "unclear"]
UNCLEAR = "unclear"  # in place of a kind

LEAST = 0.35  # of the step: below about a third, two other shares may be as large
MARGIN = 0.1  # of the step, between the largest share and the next one: shares vary by a few percent between runs
FEW_STEPS = 10  # with fewer, a median says little
BUSY = 0.25  # share of the processor, taken by other programs, above which no step is undisturbed
SHARED = 0.1  # the same, above which a verdict is doubtful; an idle virtual machine loses 2 to 3 %
CHANGED = 2.0  # ratio of the work of recorded and median step, above which the recorded steps do not represent it

WELL_FED = 0.25  # share of a peak: networks that a peak limits reach 25 to 70 % of it
CALL_S = 30e-6  # the largest fixed cost of a call: arguments, dispatch, a new tensor; most take 3 to 20 µs
PRODUCT_CALL_S = 100e-6  # the same for a product, which also picks a kernel and wakes its threads

# For a CPU without a calibration: only the ratio of the peaks matters.
_TYPICAL = Calibration("cpu", "", None, "", None, {"fp32": 1e11}, memory_bytes_per_sec=2e10, launch_us=2.0)


@dataclass(frozen=True)
class Step:
    """The measurements of a run's steps. Times are those of the mean step, without warm-up, validation and checkpoints."""

    parts_ms: Mapping[str, float]  # of `records.step_parts.PARTS`; a missing part is 0
    work_ms: float | None = None  # of the median step, without `data_wait` and `transfer`; None if unknown
    device: str = "cpu"  # torch's type: `cpu`, `cuda`, `mps`
    steps: int = 1000  # that were measured
    operations: Sequence[OperationRow] = ()  # of one step; empty if unknown
    not_recorded: str | None = None  # why there are no operations
    calibration: Calibration | None = None
    communication_ms: float | None = 0.0  # wait for other ranks in `forward` and `backward`; None if not measured
    busy: float | None = None  # share of the step in which a kernel runs; None if unknown
    mfu: float | None = None  # of the median step; read only if the operations are unknown
    changed: float = 1.0  # work of a batch in the median step ÷ in a step right after the recorded ones
    others_share: float = 0.0  # of the processor, that other programs took


@dataclass(frozen=True)
class Bottleneck:
    """The bottleneck of a run."""

    kind: str  # `input`, `transfer`, `communication`, `host`, `memory`, `compute`, `elementwise` or `unclear`
    share: float  # of the step's wall time, 0 to 1
    certainty: Certainty
    evidence: str  # one line with the numbers behind the verdict
    shares: Mapping[str, float] = field(default_factory=dict)  # of every kind; the rest to 1 is unknown
    busy: bool = False  # whether other programs used too much of the processor for a verdict


def find_bottleneck(step: Step) -> Bottleneck | None:
    """Return the bottleneck of a run by the rule above; None for a step without a time."""
    parts = {part: step.parts_ms.get(part, 0.0) for part in PARTS}
    total = sum(parts.values())
    if not math.isfinite(total) or total <= 0 or min(parts.values()) < 0:
        return None
    if step.others_share > BUSY:
        evidence = f"{_load_text(step.others_share)}: close them and run again"
        return Bottleneck(UNCLEAR, 0.0, "unclear", evidence, busy=True)
    # Waits for data and copies count up to the device's idle time; waits for other ranks count in full.
    ms_by_kind, idle = {}, total * (1 - min(step.busy or 0.0, 1.0))
    for kind, part in (("input", "data_wait"), ("transfer", "transfer")):
        ms_by_kind[kind] = min(parts[part], idle)
        idle -= ms_by_kind[kind]
    ms_by_kind["communication"] = min(step.communication_ms or 0.0, parts["forward"] + parts["backward"])
    # A few long steps do not explain the time of the others: the mean step's time beyond the median step's is unknown.
    work = total - sum(ms_by_kind.values())
    if step.work_ms is not None:
        work = min(work, max(step.work_ms - ms_by_kind["communication"], 0.0))
    operations_by_kind = _times_by_kind(step)
    if reason_unknown := _reason_unknown(step, operations_by_kind, work):
        step, operations_by_kind = replace(step, operations=()), {}
        ms_by_kind |= _divide_by_parts(step, parts, work)
    elif step.device == "cpu":
        ms_by_kind |= _divide_cpu_work(operations_by_kind, work)
    else:
        ms_by_kind |= _divide_accelerator_work(step, operations_by_kind, work, total)
    shares = {kind: max(ms, 0.0) / total for kind, ms in ms_by_kind.items()}
    largest, runner_up = sorted(shares, key=shares.__getitem__, reverse=True)[:2]
    share, unknown = min(shares[largest], 1.0), 1 - sum(shares.values())
    if share < LEAST or unknown > share:
        return Bottleneck(UNCLEAR, share, "unclear", describe_shares(shares, unknown, reason_unknown), shares)
    two_largest = {largest: shares[largest], runner_up: shares[runner_up]}
    doubts = _doubts(step, two_largest, unknown)
    evidence = _evidence_line(step, largest, share, total / 1e3, operations_by_kind.get(largest, ()))
    return Bottleneck(largest, share, "probable" if doubts else "clear", "; ".join([evidence, *doubts]), shares)


def _load_text(share: float) -> str:
    return f"other programs took {percent(share)} of the processor"


def _device_ms(step: Step, total: float, work: float) -> float | None:
    """Return the ms of the work in which the device computes, without the kernels of the exchange; None if unknown."""
    if step.busy is None:
        return None
    busy, exchange = min(step.busy, 1.0) * total, step.communication_ms or 0.0
    return min(busy - exchange if busy > exchange else busy, work)


def _times_by_kind(step: Step) -> dict[str, list[Timed]]:
    """Group the operations by what limits them, each with its seconds: measured ones on a CPU, needed ones on an accelerator."""
    times_by_kind: dict[str, list[Timed]] = {"memory": [], "compute": [], "elementwise": []}
    device = step.calibration or _TYPICAL
    for row in step.operations:
        compute, memory = compute_seconds(row, device), memory_seconds(row, device)
        seconds, is_memory = max(compute, memory), memory > compute
        if step.device == "cpu":
            call_s = PRODUCT_CALL_S if row.flops else CALL_S
            seconds = row.seconds - min(call_s * row.calls, max(row.seconds - seconds / WELL_FED, 0.0))
            is_memory = is_memory if row.flops else 2 * row.cold_bytes > row.bytes
        if seconds > 0:
            times_by_kind["memory" if is_memory else "compute" if row.flops else "elementwise"].append((row, seconds))
    return times_by_kind


def _milliseconds(operations_by_kind: Mapping[str, Sequence[Timed]]) -> dict[str, float]:
    return {kind: 1e3 * sum(seconds for _, seconds in times) for kind, times in operations_by_kind.items()}


def _reason_unknown(step: Step, operations_by_kind: Mapping[str, Sequence[Timed]], work: float) -> str | None:
    """Return why the operations of a step are unknown; None if they are known."""
    if not step.operations:
        return "no step's operations were recorded" + (f" ({step.not_recorded})" if step.not_recorded else "")
    if not 1 / CHANGED <= step.changed <= CHANGED:
        change = f"without waits a batch takes {step.changed:.2g} times as long as those whose operations were recorded"
        return f"the steps changed: {change}"
    recorded = sum(_milliseconds(operations_by_kind).values())
    if step.device == "cpu" and 0 < CHANGED * work < recorded:
        return f"the recorded operations took {recorded / work:.2g} times as long as a step without its waits"
    return None


def _divide_by_parts(step: Step, parts: Mapping[str, float], work: float) -> dict[str, float]:
    """Divide the work without operations: by the busy share, else by the parts; `compute` only if the MFU is high."""
    device_ms = _device_ms(step, sum(parts.values()), work)
    if device_ms is not None:
        host_ms, compute_ms = work - device_ms, device_ms
    elif step.device == "mps":  # there `other` has all but the wait for data
        host_ms, compute_ms = 0.0, work
    else:
        host_ms, compute_ms = parts["other"], parts["forward"] + parts["backward"] - (step.communication_ms or 0.0)
    return {"host": host_ms} | ({"compute": compute_ms} if (step.mfu or 0.0) >= WELL_FED else {})


def _divide_cpu_work(operations_by_kind: Mapping[str, Sequence[Timed]], work: float) -> dict[str, float]:
    """Return the milliseconds of each kind; work outside of operations is the host's."""
    ms_by_kind = _milliseconds(operations_by_kind)
    operations_ms = sum(ms_by_kind.values())
    if operations_ms > work:  # the recorded steps were slower than the mean step
        ms_by_kind = {kind: ms * work / operations_ms for kind, ms in ms_by_kind.items()}
    return ms_by_kind | {"host": max(work - operations_ms, 0.0)}


def _divide_accelerator_work(
    step: Step, operations_by_kind: Mapping[str, Sequence[Timed]], work: float, total: float
) -> dict[str, float]:
    """Return the known milliseconds of each kind."""
    device_ms = _device_ms(step, total, work)
    # A known busy time is divided by the ratio of the peaks. Without one, disturbed peaks cannot tell a time.
    machine = undisturbed(step.calibration) if device_ms is None else step.calibration
    if machine is None:
        return {} if device_ms is None else {"host": work - device_ms}
    needed_ms = _milliseconds(operations_by_kind)
    total_needed_ms = sum(needed_ms.values())
    launch_ms = sum(1e3 * launch_seconds(operation, machine) for operation in step.operations)
    if device_ms is None and total_needed_ms >= WELL_FED * work and total_needed_ms >= launch_ms:
        device_ms = work
    if device_ms is None and launch_ms >= WELL_FED * work:
        device_ms = min(total_needed_ms / WELL_FED, max(work - launch_ms, 0.0))
    if device_ms is None:
        return {"host": launch_ms} | needed_ms
    divided_ms = {kind: device_ms * ms / total_needed_ms for kind, ms in needed_ms.items()} if total_needed_ms else {}
    return {"host": work - device_ms} | divided_ms


def _evidence_line(step: Step, kind: str, share: float, step_s: float, timed: Sequence[Timed]) -> str:
    """Return the numbers behind a verdict, given the seconds of the step and the operations of this kind."""
    prefix = f"{percent(share)} of the step is"
    if timed:
        seconds = sum(operation.seconds for operation, _ in timed) if step.device == "cpu" else share * step_s
        return f"{prefix} {describe_work(kind, timed, seconds, undisturbed(step.calibration))}"
    if kind == "compute":  # the operations are unknown
        return f"{prefix} arithmetic, at {percent(step.mfu or 0.0)} of the peak measured here"
    calls = sum(operation.calls for operation in step.operations) if kind == "host" else 0
    number_of_calls = f" around {count(round(calls), 'operation')}" if calls else ""
    return f"{prefix} {NAMES[kind]}{number_of_calls}: {duration(share * step_s)} of {duration(step_s)}"


def _doubts(step: Step, two_largest: Mapping[str, float], unknown: float) -> list[str]:
    """Return the reasons for doubt, given the two largest shares and the unknown share."""
    (_, share), (runner_up, runner_up_share) = two_largest.items()
    is_work, others_share = {"memory", "compute", "elementwise"} & set(two_largest), step.others_share
    doubts = {
        f"{runner_up} is nearly as much ({percent(runner_up_share)})": share - runner_up_share < MARGIN,
        f"{percent(unknown)} is not known": share - runner_up_share < unknown,
        f"only {count(step.steps, 'step')} measured": step.steps < FEW_STEPS,
        "the device's peaks are not known": undisturbed(step.calibration) is None and bool(is_work),
        "the device may compute while the host waits": step.device == "mps" and "input" in two_largest,
        "waiting for other ranks is not measured here": step.communication_ms is None,
        _load_text(others_share): others_share > SHARED,
    }
    return [reason for reason, holds in doubts.items() if holds]
