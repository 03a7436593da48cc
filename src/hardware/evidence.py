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
    is_cpu: bool,
    work: float,
    total: float,
    spent: Mapping[str, float],
    preparing: str | None = None,
) -> str:
    """What was seen of the bottleneck.

    Args:
        kind: of the bottleneck.
        share: of it, of the step.
        operations: of one step.
        roofs: of the device; None if it is not calibrated.
        is_cpu: whether the device is a CPU, so that the operations' seconds are those of their work.
        work: milliseconds of the step without waiting for data, copies and other ranks.
        total: milliseconds of the step.
        spent: milliseconds of every kind.
        preparing: the hook that prepares the batch and is most of `input`, if one is.
    """
    of_step = f"{percent(share)} of the step"
    step = duration(total / 1e3)
    if kind == "input":
        what = f"preparing the batch in {preparing}" if preparing else "waiting for data"
        return f"{of_step} is {what}: {duration(spent[kind] / 1e3)} of {step}"
    if kind == "transfer":
        what = "moving the batch in transfer_batch_to_device" if is_cpu else "copying the batch to the device"
        return f"{of_step} is {what}: {duration(spent[kind] / 1e3)} of {step}"
    if kind == "communication":
        return f"{of_step} is waiting for the gradients of other ranks: {duration(spent[kind] / 1e3)} of {step}"
    if kind == "host":
        return f"{of_step} is {_host(operations, roofs, is_cpu, work)}"
    roofs = roofs or TYPICAL
    chosen = _of_kind(operations, roofs, is_cpu, kind)
    seconds = sum(each.seconds for each in chosen) if is_cpu else spent[kind] / 1e3
    return f"{of_step} is {(_memory if kind == 'memory' else _compute)(chosen, roofs, is_cpu, seconds)}"


def seen(shares: Mapping[str, float], unknown: float, why: str) -> str:
    """What was seen where it names no bottleneck, and why some of the step is not known; empty without a reason."""
    known = sorted(shares.items(), key=lambda item: -item[1])
    parts = [f"{kind} {percent(share)}" for kind, share in known if share >= 0.01]
    if unknown >= 0.01:
        parts.append(f"not known {percent(unknown)}{why and f', because {why}'}")
    return "of the step " + ", ".join(parts)


def _host(operations: Sequence[Operation], roofs: Roofs | None, is_cpu: bool, work: float) -> str:
    calls = sum(operation.calls for operation in operations)
    if not is_cpu:
        least = f" of at least {duration(roofs.launch_s)} each" if roofs else ""
        return f"the host's: {round(calls):,} launches{least}"
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


def _memory(chosen: Sequence[Operation], roofs: Roofs, is_cpu: bool, seconds: float) -> str:
    moved = sum(each.cold_bytes for each in chosen)
    best = roofs.bytes_per_sec if _is_measured(roofs) else None
    roof = f" of the {with_prefix(best, 'B/s')} measured here" if best else ""
    faults = sum(each.page_faults for each in chosen)
    fresh = f", with {count(round(faults), 'page fault')} for freshly allocated memory" if faults > _MANY_FAULTS else ""
    rate = f", at {with_prefix(moved / seconds, 'B/s')}{roof}" if seconds else ""
    lines = sum(each.scattered_bytes for each in chosen)
    apart = f" out of order ({with_prefix(lines, 'B')} in whole cache lines)" if 2 * lines > moved else ""
    return f"moving {with_prefix(moved, 'B')} through memory{apart}{rate}{fresh}{_most(chosen, roofs, is_cpu)}"


def _compute(chosen: Sequence[Operation], roofs: Roofs, is_cpu: bool, seconds: float) -> str:
    products = [each for each in chosen if each.flops]
    others = [each for each in chosen if not each.flops]
    if is_cpu and sum(each.seconds for each in products) < sum(each.seconds for each in others):
        return f"computing, mostly in other operations than products and convolutions{_most(others, roofs, is_cpu)}"
    at_roof = sum(roofs.compute_seconds(each) for each in products)
    timed = sum(each.seconds for each in products) if is_cpu else seconds
    reached = f", at {percent(at_roof / timed)} of the peak measured here" if timed and _is_measured(roofs) else ""
    flops = with_prefix(sum(each.flops for each in products), "FLOP")
    return f"arithmetic: {flops}{reached}{_most(products, roofs, is_cpu)}"


def _is_measured(roofs: Roofs) -> bool:
    return roofs is not TYPICAL


def _of_kind(operations: Sequence[Operation], roofs: Roofs, is_cpu: bool, kind: str) -> list[Operation]:
    """The operations that are mostly of a kind."""
    if is_cpu:
        return [each for each in operations if share_of_kinds(each, roofs).get(kind, 0.0) >= 0.5]
    needs = {"memory": roofs.memory_seconds, "compute": roofs.compute_seconds}
    other: Callable[[Operation], float] = needs["compute" if kind == "memory" else "memory"]
    return [each for each in operations if needs[kind](each) > other(each)]


def _most(operations: Sequence[Operation], roofs: Roofs, is_cpu: bool) -> str:
    """The operation that takes most of the time of these; where it is not known, the one that needs most."""
    if not operations:
        return ""

    def seconds(each: Operation) -> float:
        return each.seconds if is_cpu else max(roofs.compute_seconds(each), roofs.memory_seconds(each))

    top = max(merge(operations, lambda each: (each.name, each.module)).values(), key=seconds)
    where = f" of {top.module}" if top.module else ""
    return f", most of it in {top.name.removeprefix('aten.')}{where}"
