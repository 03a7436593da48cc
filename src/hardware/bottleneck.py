"""The bottleneck of a run: the resource that limits its step time, with the evidence for it.

The step's wall time is divided into shares. `input`, `transfer` and `communication` are measured: waiting for data, copying
to the device, and the exchange of gradients that is not hidden behind the backward pass. `step_shares.py` divides the rest
into `host`, `memory` and `compute`.

The largest share names the bottleneck. The verdict is `clear`, or `probable` where the evidence is thin: few steps, a
disturbed machine, a device that is not calibrated, or another share that is nearly as large. It is `unclear` where no share
reaches `LEAST`, or where more of the step is unknown than the largest share: also where the steps whose operations are
known do not stand for the others, because the run has changed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ..records.formatting import count, percent
from ..records.step_parts import PARTS
from .contention import MAX_OTHERS
from .evidence import evidence_of, seen
from .floor import Roofs, step_floor
from .operations import Operation
from .step_shares import TYPICAL, divide

Certainty = Literal["clear", "probable", "unclear"]
UNCLEAR = "unclear"  # in place of a kind
LEAST = 0.35
MARGIN = 0.1  # of the step, between the largest share and the next one
FEW_STEPS = 10
WELL_USED = 0.25  # of the peak: at least so much of it is reached by networks that arithmetic limits
CHANGED = 2.0  # between the recorded steps and the median one: then they do not stand for it
LEAST_USED = 0.05  # of a roof, for its verdict on a machine that others use for most of the time
UNSTEADY = 1.5  # the 90th percentile of the steps ÷ their median


@dataclass(frozen=True)
class Step:
    """What is known of the steps of a run. Times are of the mean step; warm-up, validation and checkpoints are excluded."""

    parts_ms: Mapping[str, float]  # of `records.step_parts.PARTS`; a missing part is 0
    work_ms: float | None = None  # of the median step, without `data_wait` and `transfer`; None if not known
    preparing: str | None = None  # the hook around the copy that most of `data_wait` is spent in, if it is
    device: str = "cpu"  # torch's type: `cpu`, `cuda`, `mps`
    steps: int = 1000  # that were measured
    operations: Sequence[Operation] = ()  # of one step; empty where they are not known
    not_recorded: str | None = None  # why there are none
    roofs: Roofs | None = None  # None without a calibration
    communication_ms: float | None = 0.0  # of `backward`, waiting for gradients of other ranks; None if not measured
    busy: float | None = None  # share of the step in which a kernel runs; None where it is not known
    tensor_busy: float | None = None  # share of the step in which tensor cores compute
    memory_busy: float | None = None  # share of the memory's highest bandwidth that the step uses
    mfu: float | None = None  # of the mean step; asked only where the operations are not known
    changed: float = 1.0  # the median step ÷ those right after the steps whose operations were recorded
    others: float = 0.0  # share of the CPU that other processes used meanwhile, where they left no core free
    spread: float = 1.0  # the 90th percentile of the steps ÷ their median


@dataclass(frozen=True)
class Bottleneck:
    """What limits a run."""

    kind: str  # `input`, `transfer`, `communication`, `host`, `memory`, `compute` or `unclear`
    share: float  # of the step's wall time, 0 to 1
    certainty: Certainty
    evidence: str  # one line with the numbers that the verdict rests on
    shares: Mapping[str, float] = field(default_factory=dict)  # of every kind; what is missing to 1 is unknown


def find_bottleneck(step: Step) -> Bottleneck | None:
    """What limits a run, by the rule above; None for a step without a time."""
    parts = {part: step.parts_ms.get(part, 0.0) for part in PARTS}
    total = sum(parts.values())
    if not math.isfinite(total) or total <= 0 or min(parts.values()) < 0:
        return None
    spent = _waiting(step, parts, total)
    # A few long steps are no cause of the others' time: what the mean step has beyond the median one is not known.
    work = total - sum(spent.values())
    if step.work_ms is not None:
        work = min(work, max(step.work_ms - spent["communication"], 0.0))
    why_unknown = "" if step.operations else "no step's operations were recorded"
    if why_unknown and step.not_recorded:
        why_unknown += f" ({step.not_recorded})"
    if step.operations and not 1 / CHANGED <= step.changed <= CHANGED:
        step, why_unknown = replace(step, operations=()), f"the steps changed: {_as_long(step.changed)}"
    if step.operations:
        seen_by_device = {"busy": step.busy, "compute": step.tensor_busy, "memory": step.memory_busy}
        counters = {name: None if share is None else share * total for name, share in seen_by_device.items()}
        spent |= divide(step.operations, step.roofs, step.device, work, counters)
    else:
        spent |= _without_operations(step, parts, work)
    shares = {kind: max(ms, 0.0) / total for kind, ms in spent.items()}
    largest, second = sorted(shares, key=shares.__getitem__, reverse=True)[:2]
    share, unknown = min(shares[largest], 1.0), 1 - sum(shares.values())
    if share < LEAST or unknown > share or _is_preempted(step, largest, spent[largest]):
        line = f"{_others(step)}; " if step.others else ""
        return Bottleneck(UNCLEAR, share, "unclear", line + seen(shares, unknown, why_unknown), shares)
    is_cpu = step.device == "cpu"
    evidence = evidence_of(largest, share, step.operations, step.roofs, is_cpu, work, total, spent, step.preparing)
    doubts = _doubts(step, {largest: shares[largest], second: shares[second]}, unknown)
    line = evidence if not doubts else f"{evidence}; {'; '.join(doubts)}"
    return Bottleneck(largest, share, "probable" if doubts else "clear", line, shares)


def _waiting(step: Step, parts: Mapping[str, float], total: float) -> dict[str, float]:
    """Milliseconds of waiting for data, copies and other ranks, as far as the device idles: overlapped work is free."""
    waits = {
        "input": parts["data_wait"],
        # On MPS a copy waits for the work that was submitted before, so its time may be the device's.
        "transfer": 0.0 if step.device == "mps" and step.busy is None else parts["transfer"],
        "communication": min(step.communication_ms or 0.0, parts["backward"]),
    }
    idle = total if step.busy is None or step.device == "cpu" else total * (1 - min(step.busy, 1.0))
    for kind, ms in waits.items():
        waits[kind] = min(ms, idle)
        idle -= waits[kind]
    return waits


def _without_operations(step: Step, parts: Mapping[str, float], work: float) -> dict[str, float]:
    """What the parts alone tell of the work: the busy share, or the framework's own part and a well-used peak."""
    if step.device != "cpu" and step.busy is not None:
        return {"host": work - min(step.busy * sum(parts.values()), work)}
    known = {} if step.device == "mps" else {"host": parts["other"]}  # on MPS any part may wait for the device
    computing = parts["forward"] + parts["backward"]
    if step.mfu is not None and step.mfu >= WELL_USED and computing > 0:
        known["compute"] = computing
    return known


def _doubts(step: Step, first_two: Mapping[str, float], unknown: float) -> list[str]:
    """Why the verdict is not certain, given the two largest shares, and the share that is not known."""
    (_, share), (second, second_share) = first_two.items()
    doubts = []
    if share - second_share < MARGIN:
        doubts.append(f"{second} is nearly as much ({percent(second_share)})")
    if share - second_share < unknown:
        doubts.append(f"{percent(unknown)} is not known")
    if step.steps < FEW_STEPS:
        doubts.append(f"only {count(step.steps, 'step')} measured")
    if step.roofs is None and {"memory", "compute"} & set(first_two):
        doubts.append("the device is not calibrated")
    if step.communication_ms is None:
        doubts.append("waiting for other ranks is not measured without CommunicationMonitor")
    if step.others:
        doubts.append(_others(step))
    elif step.spread > UNSTEADY:
        doubts.append(f"one step in ten takes {step.spread:.2g} times the median")
    return doubts


def _is_preempted(step: Step, kind: str, ms: float) -> bool:
    """Whether the time of the operations may be that of waiting for the processor, which others use."""
    if step.others <= MAX_OTHERS or kind not in ("memory", "compute") or not step.operations:
        return False
    floor = step_floor(step.operations, step.roofs or TYPICAL)
    return 1e3 * getattr(floor, kind) < LEAST_USED * ms


def _as_long(factor: float) -> str:
    return f"the median step takes {factor:.2g} times as long as those whose operations were recorded"


def _others(step: Step) -> str:
    busy = "the machine was busy: " if step.others > MAX_OTHERS else ""
    return f"{busy}other processes used {percent(step.others)} of the CPU meanwhile"
