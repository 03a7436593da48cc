"""The evidence for a bottleneck in one line: the numbers that the verdict rests on."""

from collections.abc import Callable, Mapping, Sequence

from ..records.formatting import count, duration, percent, with_prefix
from .floor import Roofs
from .operations import Operation, merge
from .step_shares import TYPICAL, share_of_kinds

_MANY_FAULTS = 1000  # a step
_SLIGHT = 0.02  # of the work: less is not worth a word


def evidence_of(
    kind: str,
    share: float,
    operations: Sequence[Operation],
    roofs: Roofs | None,
    work: float,
    total: float,
    spent: Mapping[str, float],
) -> str:
    """What was seen of the bottleneck.

    Args:
        kind: of the bottleneck.
        share: of it, of the step.
        operations: of one step.
        roofs: of the device; None if it is not calibrated.
        work: milliseconds of the step without waiting for data, copies and other ranks.
        total: milliseconds of the step.
        spent: milliseconds of every kind.
    """
    of_step = f"{percent(share)} of the step"
    step = duration(total / 1e3)
    if kind == "input":
        return f"{of_step} is waiting for data: {duration(spent[kind] / 1e3)} of {step}"
    if kind == "transfer":
        return f"{of_step} is copying the batch to the device: {duration(spent[kind] / 1e3)} of {step}"
    if kind == "communication":
        return f"{of_step} is waiting for the gradients of other ranks: {duration(spent[kind] / 1e3)} of {step}"
    if kind == "host":
        return f"{of_step} is {_host(operations, roofs, work)}"
    return f"{of_step} is {(_memory if kind == 'memory' else _compute)(operations, roofs, spent[kind])}"


def seen(shares: Mapping[str, float], unknown: float, has_operations: bool) -> str:
    """What was seen where it names no bottleneck."""
    known = sorted(shares.items(), key=lambda item: -item[1])
    parts = [f"{kind} {percent(share)}" for kind, share in known if share >= 0.01]
    if unknown >= 0.01:
        why = "" if has_operations else ", because no step's operations were recorded"
        parts.append(f"not known {percent(unknown)}{why}")
    return "of the step " + ", ".join(parts)


def _host(operations: Sequence[Operation], roofs: Roofs | None, work: float) -> str:
    calls = sum(operation.calls for operation in operations)
    if roofs is not None and roofs.asynchronous:
        return f"the host's: {round(calls):,} launches of at least {duration(roofs.launch_s)} each"
    between = max(work - 1e3 * sum(operation.seconds for operation in operations), 0.0)
    small = [each for each in operations if share_of_kinds(each, roofs or TYPICAL)["host"] > 0.5]
    number, seconds = sum(each.calls for each in small), sum(each.seconds for each in small)
    found = []
    if between > _SLIGHT * work or not number:
        found.append(f"{duration(between / 1e3)} of Python, autograd and framework around {_calls(calls)}")
    if number and 1e3 * seconds > 0.1 * work:
        found.append(f"{_calls(number)} that are mostly their call, {duration(seconds / number)} each")
    return f"overhead: {', and '.join(found)}"


def _calls(number: float) -> str:
    return count(round(number), "operation")


def _memory(operations: Sequence[Operation], roofs: Roofs | None, spent: float) -> str:
    moved = sum(operation.cold_bytes for operation in operations)
    chosen = _of_kind(operations, roofs, "memory")
    rate = sum(each.cold_bytes for each in chosen) / (sum(each.seconds for each in chosen) or spent / 1e3)
    roof = (
        ""
        if roofs is None or not roofs.bytes_per_sec
        else f" of the {with_prefix(roofs.bytes_per_sec, 'B/s')} measured here"
    )
    faults = sum(each.page_faults for each in chosen)
    fresh = f", with {count(round(faults), 'page fault')} for freshly allocated memory" if faults > _MANY_FAULTS else ""
    return f"moving {with_prefix(moved, 'B')} through memory, at {with_prefix(rate, 'B/s')}{roof}{fresh}{_most(chosen)}"


def _compute(operations: Sequence[Operation], roofs: Roofs | None, spent: float) -> str:
    chosen = _of_kind(operations, roofs, "compute")
    flops = sum(operation.flops for operation in chosen)
    seconds = sum(each.seconds for each in chosen)
    if roofs is None or roofs.asynchronous or not seconds:
        seconds = spent / 1e3
    products = sum(each.seconds for each in chosen if each.flops)
    if 2 * products < sum(each.seconds for each in chosen):
        return f"computing in other operations than products and convolutions{_most(chosen)}"
    at_roof = sum(roofs.compute_seconds(each) for each in chosen) if roofs else 0.0
    reached = f", at {percent(at_roof / seconds)} of the peak measured here" if roofs else ""
    return f"arithmetic: {with_prefix(flops, 'FLOP')}{reached}{_most(chosen)}"


def _of_kind(operations: Sequence[Operation], roofs: Roofs | None, kind: str) -> list[Operation]:
    """The operations that are mostly of a kind."""
    roofs = roofs or TYPICAL
    if roofs.asynchronous:
        needs = {"memory": roofs.memory_seconds, "compute": roofs.compute_seconds}
        other: Callable[[Operation], float] = needs["compute" if kind == "memory" else "memory"]
        return [each for each in operations if needs[kind](each) > other(each)]
    return [each for each in operations if share_of_kinds(each, roofs).get(kind, 0.0) >= 0.5]


def _most(operations: Sequence[Operation]) -> str:
    """The operation that takes most of the time of these."""
    if not operations:
        return ""
    top = max(merge(operations, lambda each: (each.name, each.module)).values(), key=lambda each: each.seconds)
    where = f" of {top.module}" if top.module else ""
    return f", most of it in {top.name.removeprefix('aten.')}{where}"
