"""The bottleneck of a run: the resource that limits its step time.

The step's wall time is divided into shares, and the largest one names the bottleneck.

Waits are measured: `input` (for the loader), `transfer` (of batches to the device), and `communication` (the exchange of
gradients that is not hidden behind the backward pass). The first two count up to the device's idle time: overlapped
work is free. An exchange has kernels of its own, so a device that waits for other ranks is busy.

The rest is the work of the step, and its operations divide it:

- A CPU's operations were timed. What a call costs whatever it computes, and the time between the calls (Python, autograd,
  the framework), is `host`. The rest of an operation's time has one kind. With FLOPs it is `memory` if its traffic needs
  longer than they do at the device's peaks, else `compute`. Without FLOPs it is `memory` if most of its bytes come from
  main memory, else `elementwise`. No rate decides: look-ups and strides reach 1.4 to 2 % of the bandwidth here, and so do
  random numbers. So special functions and sorting are `memory`, too, on values that no cache holds.
- An accelerator computes behind the host, so nobody times its operations. The time in which no kernel runs is `host`. The
  busy time is divided between `memory` and `compute` as the operations need them at the peaks. Where the busy time is not
  known, the operations' needs decide whether the device limits the step or the host, which launches them.

The verdict is `clear`, or `probable` with the reasons for a doubt. It is `unclear` where no share reaches `LEAST`, or where
more of the step is unknown than the largest share. On a machine that others use there is no verdict.

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
from .evidence import NAMES, Timed, evidence_of_work, shares_in_words

Certainty = Literal["clear", "probable", "unclear"]
UNCLEAR = "unclear"  # in place of a kind

LEAST = 0.35  # of the step: less than about a third leaves room for two others as large
MARGIN = 0.1  # of the step, between the largest share and the next one: shares vary by a few percent between runs
FEW_STEPS = 10  # fewer have no median to speak of
BUSY = 0.25  # of the processor, taken by others: no step of such a run is its own
SHARED = 0.1  # the same, for a doubt; an idle virtual machine loses 2 to 3 %
CHANGED = 2.0  # between the work of the recorded steps and of the median one: then they do not stand for it

WELL_FED = 0.25  # of a peak: networks that a peak limits reach 25 to 70 % of it
CALL_S = 30e-6  # what a call costs at most: arguments, dispatch, a new tensor; most take 3 to 20 µs
PRODUCT_CALL_S = 100e-6  # the same of a product, which also picks a kernel and waits for its threads to wake

# For a CPU that is not calibrated: only the ratio between the peaks matters.
_TYPICAL = Calibration("cpu", "", None, "", None, {"fp32": 1e11}, memory_bytes_per_sec=2e10, launch_us=2.0)


@dataclass(frozen=True)
class Step:
    """What is known of the steps of a run. Times are of the mean step; warm-up, validation and checkpoints are excluded."""

    parts_ms: Mapping[str, float]  # of `records.step_parts.PARTS`; a missing part is 0
    work_ms: float | None = None  # of the median step, without `data_wait` and `transfer`; None if not known
    device: str = "cpu"  # torch's type: `cpu`, `cuda`, `mps`
    steps: int = 1000  # that were measured
    operations: Sequence[OperationRow] = ()  # of one step; empty where they are not known
    not_recorded: str | None = None  # why there are none
    calibration: Calibration | None = None
    communication_ms: float | None = 0.0  # of `forward` and `backward`, waiting for other ranks; None if not measured
    busy: float | None = None  # share of the step in which a kernel runs; None where it is not known
    mfu: float | None = None  # of the median step; asked only where the operations are not known
    changed: float = 1.0  # the work of a batch of the median step ÷ one right after the recorded steps
    others_share: float = 0.0  # of the processor, that other programs took


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
    if step.others_share > BUSY:
        return Bottleneck(UNCLEAR, 0.0, "unclear", f"{_others(step.others_share)}: close them and run again", busy=True)
    # The waits for data and copies count as far as the device idles; beside them, the waits for other ranks.
    spent, idle = {}, total * (1 - min(step.busy or 0.0, 1.0))
    for kind, part in (("input", "data_wait"), ("transfer", "transfer")):
        spent[kind] = min(parts[part], idle)
        idle -= spent[kind]
    spent["communication"] = min(step.communication_ms or 0.0, parts["forward"] + parts["backward"])
    # A few long steps are no cause of the others' time: what the mean step has beyond the median one is not known.
    work = total - sum(spent.values())
    if step.work_ms is not None:
        work = min(work, max(step.work_ms - spent["communication"], 0.0))
    timed = _times_by_kind(step)
    if why_unknown := _why_unknown(step, timed, work):
        step, timed = replace(step, operations=()), {}
        spent |= _work_by_parts(step, parts, work)
    elif step.device == "cpu":
        spent |= _work_of_cpu(timed, work)
    else:
        spent |= _work_of_accelerator(step, timed, work, total)
    shares = {kind: max(ms, 0.0) / total for kind, ms in spent.items()}
    largest, second = sorted(shares, key=shares.__getitem__, reverse=True)[:2]
    share, unknown = min(shares[largest], 1.0), 1 - sum(shares.values())
    if share < LEAST or unknown > share:
        return Bottleneck(UNCLEAR, share, "unclear", shares_in_words(shares, unknown, why_unknown), shares)
    first_two = {largest: shares[largest], second: shares[second]}
    doubts = _doubts(step, first_two, unknown)
    line = _evidence(step, largest, share, total / 1e3, timed.get(largest, ()))
    return Bottleneck(largest, share, "probable" if doubts else "clear", "; ".join([line, *doubts]), shares)


def _others(share: float) -> str:
    return f"other programs took {percent(share)} of the processor"


def _busy_ms(step: Step, total: float, work: float) -> float | None:
    """The part of the work in which the device computes; None where nobody knows. The exchange has kernels of its own."""
    if step.busy is None:
        return None
    busy, exchange = min(step.busy, 1.0) * total, step.communication_ms or 0.0
    return min(busy - exchange if busy > exchange else busy, work)


def _times_by_kind(step: Step) -> dict[str, list[Timed]]:
    """The operations by what limits them, each with the seconds that it spends so, or that it needs on an accelerator."""
    found: dict[str, list[Timed]] = {"memory": [], "compute": [], "elementwise": []}
    device = step.calibration or _TYPICAL
    for each in step.operations:
        compute, memory = compute_seconds(each, device), memory_seconds(each, device)
        own, moves = max(compute, memory), memory > compute
        if step.device == "cpu":
            call_s = PRODUCT_CALL_S if each.flops else CALL_S
            own = each.seconds - min(call_s * each.calls, max(each.seconds - own / WELL_FED, 0.0))
            moves = moves if each.flops else 2 * each.cold_bytes > each.bytes
        if own > 0:
            found["memory" if moves else "compute" if each.flops else "elementwise"].append((each, own))
    return found


def _milliseconds(timed: Mapping[str, Sequence[Timed]]) -> dict[str, float]:
    return {kind: 1e3 * sum(seconds for _, seconds in times) for kind, times in timed.items()}


def _why_unknown(step: Step, timed: Mapping[str, Sequence[Timed]], work: float) -> str | None:
    """Why the operations of a step are not known; None if they are."""
    if not step.operations:
        return "no step's operations were recorded" + (f" ({step.not_recorded})" if step.not_recorded else "")
    if not 1 / CHANGED <= step.changed <= CHANGED:
        longer = f"without waits a batch takes {step.changed:.2g} times as long as those whose operations were recorded"
        return f"the steps changed: {longer}"
    recorded = sum(_milliseconds(timed).values())
    if step.device == "cpu" and 0 < CHANGED * work < recorded:
        return (
            f"the operations took {recorded / work:.2g} times as long while they were recorded as a step has for them"
        )
    return None


def _work_by_parts(step: Step, parts: Mapping[str, float], work: float) -> dict[str, float]:
    """What the parts alone tell of the work: the busy share, or the framework's own part; and a well-used peak."""
    busy = _busy_ms(step, sum(parts.values()), work)
    if busy is not None:
        host, computing = work - busy, busy
    elif step.device == "mps":  # where `other` has all but the wait for data
        host, computing = 0.0, work
    else:
        host, computing = parts["other"], parts["forward"] + parts["backward"] - (step.communication_ms or 0.0)
    return {"host": host} | ({"compute": computing} if (step.mfu or 0.0) >= WELL_FED else {})


def _work_of_cpu(timed: Mapping[str, Sequence[Timed]], work: float) -> dict[str, float]:
    """The milliseconds of each kind; what the operations do not spend is the host's."""
    spent = _milliseconds(timed)
    busy = sum(spent.values())
    if busy > work:  # they were recorded in a slower moment than the mean step
        spent = {kind: ms * work / busy for kind, ms in spent.items()}
    return spent | {"host": max(work - busy, 0.0)}


def _work_of_accelerator(
    step: Step, timed: Mapping[str, Sequence[Timed]], work: float, total: float
) -> dict[str, float]:
    """The milliseconds of each kind, as far as they are known."""
    busy = _busy_ms(step, total, work)
    # Their ratio divides a busy time that is known; without one, peaks that others have lowered tell no time.
    machine = undisturbed(step.calibration) if busy is None else step.calibration
    if machine is None:
        return {} if busy is None else {"host": work - busy}
    needed = _milliseconds(timed)
    device = sum(needed.values())
    launch = sum(1e3 * launch_seconds(each, machine) for each in step.operations)
    if busy is None and device >= WELL_FED * work and device >= launch:
        busy = work
    if busy is None and launch >= WELL_FED * work:
        busy = min(device / WELL_FED, max(work - launch, 0.0))
    if busy is None:
        return {"host": launch} | needed
    return {"host": work - busy} | ({kind: busy * ms / device for kind, ms in needed.items()} if device else {})


def _evidence(step: Step, kind: str, share: float, step_s: float, timed: Sequence[Timed]) -> str:
    """The numbers that a verdict rests on, given the seconds of the step and the operations of this kind."""
    of_step = f"{percent(share)} of the step is"
    if timed:
        seconds = sum(each.seconds for each, _ in timed) if step.device == "cpu" else share * step_s
        return f"{of_step} {evidence_of_work(kind, timed, seconds, undisturbed(step.calibration))}"
    if kind == "compute":  # its operations are not known
        return f"{of_step} arithmetic, at {percent(step.mfu or 0.0)} of the peak measured here"
    calls = sum(each.calls for each in step.operations) if kind == "host" else 0
    around = f" around {count(round(calls), 'operation')}" if calls else ""
    return f"{of_step} {NAMES[kind]}{around}: {duration(share * step_s)} of {duration(step_s)}"


def _doubts(step: Step, first_two: Mapping[str, float], unknown: float) -> list[str]:
    """Why the verdict is not certain, given the two largest shares, and the share that is not known."""
    (_, share), (second, second_share) = first_two.items()
    is_work, others = {"memory", "compute", "elementwise"} & set(first_two), step.others_share
    doubts = {
        f"{second} is nearly as much ({percent(second_share)})": share - second_share < MARGIN,
        f"{percent(unknown)} is not known": share - second_share < unknown,
        f"only {count(step.steps, 'step')} measured": step.steps < FEW_STEPS,
        "the device's peaks are not known": undisturbed(step.calibration) is None and bool(is_work),
        "the device may compute while the host waits": step.device == "mps" and "input" in first_two,
        "waiting for other ranks is not measured here": step.communication_ms is None,
        _others(others): others > SHARED,
    }
    return [words for words, holds in doubts.items() if holds]
