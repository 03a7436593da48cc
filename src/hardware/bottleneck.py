"""The bottleneck of a run: the resource that limits its step time, with the evidence for it.

The step's wall time is divided into shares. `input`, `transfer` and `communication` are measured: waiting for data, copying
to the device, and the exchange of gradients that is not hidden behind the backward pass. `step_shares.py` divides the rest
into `host`, `memory`, `compute` and `elementwise`.

The largest share names the bottleneck. The verdict is `clear`, or `probable` where the evidence is thin: few steps, a
busy machine, a device that is not calibrated, or another share that is nearly as large. It is `unclear` where no share
reaches `LEAST`, or where more of the step is unknown than the largest share: also where the steps whose operations are
known do not stand for the others. Where others took more than `BUSY` of the processor in most windows, there is no
verdict: no time of such a run is its own.

Runs and explanations are judged by `find_bottleneck` alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

from ..records.formatting import count, percent
from ..records.step_parts import PARTS
from .contention import Noise
from .evidence import evidence_of, seen
from .floor import Roofs
from .operations import Operation
from .step_shares import divide, recorded_excess

Certainty = Literal["clear", "probable", "unclear"]
UNCLEAR = "unclear"  # in place of a kind
LEAST = 0.35
MARGIN = 0.1  # of the step, between the largest share and the next one
FEW_STEPS = 10
WELL_USED = 0.25  # of the peak: at least so much of it is reached by networks that arithmetic limits
CHANGED = 2.0  # between the recorded steps and the median one: then they do not stand for it
SLOWER = 1.2  # the same, for a doubt
UNSTEADY = 1.5  # the 90th percentile of the steps ÷ their median
BUSY = 0.25  # of the processor, taken by other processes and the hypervisor


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
    windows: Sequence[Noise] = ()  # what disturbed each; on an accelerator only windows that were slowed


@dataclass(frozen=True)
class Bottleneck:
    """What limits a run."""

    kind: str  # `input`, `transfer`, `communication`, `host`, `memory`, `compute`, `elementwise` or `unclear`
    share: float  # of the step's wall time, 0 to 1
    certainty: Certainty
    evidence: str  # one line with the numbers that the verdict rests on
    shares: Mapping[str, float] = field(default_factory=dict)  # of every kind; what is missing to 1 is unknown
    busy: bool = False  # whether there is no verdict because others used the processor


def find_bottleneck(step: Step) -> Bottleneck | None:
    """What limits a run, by the rule above; None for a step without a time."""
    parts = {part: step.parts_ms.get(part, 0.0) for part in PARTS}
    total = sum(parts.values())
    if not math.isfinite(total) or total <= 0 or min(parts.values()) < 0:
        return None
    if taken := _taken(step.windows):
        return Bottleneck(UNCLEAR, 0.0, "unclear", taken, busy=True)
    spent = _waiting(step, parts, total)
    # A few long steps are no cause of the others' time: what the mean step has beyond the median one is not known.
    work = total - sum(spent.values())
    if step.work_ms is not None:
        work = min(work, max(step.work_ms - spent["communication"], 0.0))
    step, why_unknown = _representative(step, work)
    if step.operations:
        seen_by_device = {"busy": step.busy, "compute": step.tensor_busy, "memory": step.memory_busy}
        counters = {name: None if share is None else share * total for name, share in seen_by_device.items()}
        spent |= divide(step.operations, step.roofs, step.device, work, counters)
    else:
        spent |= _without_operations(step, parts, work)
    is_cpu = step.device == "cpu"
    shares = {kind: max(ms, 0.0) / total for kind, ms in spent.items()}
    largest, second = sorted(shares, key=shares.__getitem__, reverse=True)[:2]
    share, unknown = min(shares[largest], 1.0), 1 - sum(shares.values())
    if share < LEAST or unknown > share:
        line = f"{_others(step)}; " if step.others else ""
        return Bottleneck(UNCLEAR, share, "unclear", line + seen(shares, unknown, why_unknown), shares)
    evidence = evidence_of(
        largest, share, step.operations, step.roofs, is_cpu, work, total, spent[largest], step.preparing, step.mfu
    )
    doubts = _doubts(step, {largest: shares[largest], second: shares[second]}, unknown, work)
    line = evidence if not doubts else f"{evidence}; {'; '.join(doubts)}"
    return Bottleneck(largest, share, "probable" if doubts else "clear", line, shares)


def _taken(windows: Sequence[Noise]) -> str | None:
    """What others took of the processor, and what to do about it; None if it was little in most windows."""
    known = [each.others_share for each in windows if not math.isnan(each.others_share)]
    if not known or (taken := median(known)) <= BUSY:
        return None
    return f"other programs took {percent(taken)} of the processor: close them and run again"


def _representative(step: Step, work: float) -> tuple[Step, str]:
    """The step without operations where those do not stand for it, and why they are not known."""
    if not step.operations:
        return step, "no step's operations were recorded" + (f" ({step.not_recorded})" if step.not_recorded else "")
    if not 1 / CHANGED <= step.changed <= CHANGED:
        longer = f"the median step takes {step.changed:.2g} times as long as those whose operations were recorded"
        return replace(step, operations=()), f"the steps changed: {longer}"
    if (excess := _excess(step, work)) > CHANGED:
        return replace(step, operations=()), _slower(excess)
    return step, ""


def _excess(step: Step, work: float) -> float:
    """By which factor the recorded operations take longer than a step has for them; 1 on an asynchronous device."""
    return recorded_excess(step.operations, step.roofs, work) if step.device == "cpu" and work > 0 else 1.0


def _slower(excess: float) -> str:
    return f"the operations took {excess:.2g} times as long while they were recorded as a step has for them"


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


def _doubts(step: Step, first_two: Mapping[str, float], unknown: float, work: float) -> list[str]:
    """Why the verdict is not certain, given the two largest shares, and the share that is not known."""
    (_, share), (second, second_share) = first_two.items()
    doubts = []
    if share - second_share < MARGIN:
        doubts.append(f"{second} is nearly as much ({percent(second_share)})")
    if share - second_share < unknown:
        doubts.append(f"{percent(unknown)} is not known")
    if step.steps < FEW_STEPS:
        doubts.append(f"only {count(step.steps, 'step')} measured")
    if step.roofs is None and {"memory", "compute", "elementwise"} & set(first_two):
        doubts.append("the device is not calibrated")
    if (excess := _excess(step, work)) > SLOWER:
        doubts.append(_slower(excess))
    if step.communication_ms is None:
        doubts.append("waiting for other ranks is not measured without CommunicationMonitor")
    if step.others:
        doubts.append(_others(step))
    elif step.spread > UNSTEADY:
        doubts.append(f"one step in ten takes {step.spread:.2g} times the median")
    return doubts


def _others(step: Step) -> str:
    return f"other programs used {percent(step.others)} of the processor meanwhile"
