"""The bottleneck of a run: the resource that limits its step time, with the evidence for it.

The step's wall time is divided into shares. `input`, `transfer` and `communication` are measured: waiting for data, copying
to the device, and the exchange of gradients that is not hidden behind the backward pass. `step_shares.py` divides the rest
into `host`, `memory` and `compute`.

The largest share names the bottleneck. The verdict is `clear`, or `probable` where the evidence is thin: few steps, a
disturbed machine, a device that is not calibrated, or another share that is nearly as large. It is `unclear` where no share
reaches `LEAST`, or where more of the step is unknown than the largest share.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..records.formatting import count, percent
from ..records.step_parts import PARTS
from .evidence import evidence_of, seen
from .floor import Roofs
from .operations import Operation
from .step_shares import divide

Certainty = Literal["clear", "probable", "unclear"]
UNCLEAR = "unclear"  # in place of a kind
LEAST = 0.35
MARGIN = 0.1  # of the step, between the largest share and the next one
FEW_STEPS = 10
WELL_USED = 0.25  # of the peak: at least so much of it is reached by networks that arithmetic limits
UNSTEADY = 1.5  # the 90th percentile of the steps ÷ their median


@dataclass(frozen=True)
class Step:
    """What is known of the steps of a run. Times are of the mean step; warm-up, validation and checkpoints are excluded."""

    parts_ms: Mapping[str, float]  # of `records.step_parts.PARTS`; a missing part is 0
    work_ms: float | None = None  # of the median step, without `data_wait` and `transfer`; None if not known
    device: str = "cpu"  # torch's type: `cpu`, `cuda`, `mps`
    steps: int = 1000  # that were measured
    operations: Sequence[Operation] = ()  # of one step; empty where they are not known
    roofs: Roofs | None = None  # None without a calibration
    communication_ms: float | None = 0.0  # of `backward`, waiting for gradients of other ranks; None if not measured
    busy: float | None = None  # share of the step in which the device computes (SM activity); None on a CPU
    tensor_busy: float | None = None  # share of the step in which tensor cores compute
    memory_busy: float | None = None  # share of the memory's highest bandwidth that the step uses
    mfu: float | None = None  # of the mean step; asked only where the operations are not known
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
    if step.operations:
        seen_by_device = {"busy": step.busy, "compute": step.tensor_busy, "memory": step.memory_busy}
        counters = {name: None if share is None else share * total for name, share in seen_by_device.items()}
        spent |= divide(step.operations, step.roofs, step.device, work, counters)
    else:
        spent |= _without_operations(step, parts, work)
    shares = {kind: max(ms, 0.0) / total for kind, ms in spent.items()}
    largest, second = sorted(shares, key=shares.__getitem__, reverse=True)[:2]
    share, unknown = min(shares[largest], 1.0), 1 - sum(shares.values())
    if share < LEAST or unknown > share:
        line = f"{_others(step)}; " if step.others else ""
        return Bottleneck(UNCLEAR, share, "unclear", line + seen(shares, unknown, bool(step.operations)), shares)
    evidence = evidence_of(largest, share, step.operations, step.roofs, step.device == "cpu", work, total, spent)
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


def _others(step: Step) -> str:
    return f"other processes used {percent(step.others)} of the CPU meanwhile"
