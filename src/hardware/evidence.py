"""The words for a bottleneck: its name in one row, and in one line the numbers that the verdict rests on."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..records.formatting import count, duration, percent, with_prefix
from .floor import Roofs
from .operations import Operation
from .step_shares import TYPICAL, share_of_kinds

_NAMES = {
    "input": "waiting for data",
    "transfer": "copying batches to the device",
    "communication": "waiting for other ranks",
    "host": "Python and framework overhead",
    "memory": "memory traffic",
    "compute": "arithmetic",
    "elementwise": "elementwise and similar operations",
}
_MANY_FAULTS = 1000  # a step
_SLIGHT = 0.02  # of the work: less is not worth a word
_WORTH_A_WORD = 0.05  # of the step, in a row


def limit_row(found: Mapping[str, Any]) -> tuple[str, str]:
    """The label and the text of a run's verdict: `limit`, `probably arithmetic (57 % of the step)`.

    Args:
        found: a Bottleneck as a dict, as a record has it.
    """
    if found.get("busy"):
        return "busy", found["evidence"]
    kind = found["kind"]
    if kind in _NAMES:
        probably = "probably " if found["certainty"] == "probable" else ""
        return "limit", f"{probably}{_NAMES[kind]} ({percent(found['share'])} of the step)"
    shares = sorted(found.get("shares", {}).items(), key=lambda item: -item[1])
    known = [f"{_NAMES[name]} {percent(share)}" for name, share in shares if share >= _WORTH_A_WORD]
    unknown = 1 - sum(found.get("shares", {}).values())
    known += [f"unknown {percent(unknown)}"] if shares and unknown >= _WORTH_A_WORD else []
    return "limit", f"unclear: {', '.join(known)}" if known else f"unclear: {found['evidence']}"


def limit_line(found: Mapping[str, Any]) -> str:
    """The verdict with its evidence."""
    certainty = {"probable": "probably ", "unclear": "unclear: "}.get(found["certainty"], "")
    return f"busy: {found['evidence']}" if found.get("busy") else f"limit: {certainty}{found['evidence']}"


def evidence_of(
    kind: str,
    share: float,
    operations: Sequence[Operation],
    roofs: Roofs | None,
    is_cpu: bool,
    work: float,
    total: float,
    spent: float,
    preparing: str | None = None,
    mfu: float | None = None,
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
        spent: milliseconds of the bottleneck.
        preparing: the hook that prepares the batch and is most of `input`, if one is.
        mfu: FLOP/s of the peak, for a step whose operations are not known.
    """
    of_step = f"{percent(share)} of the step is"
    waits = {
        "input": f"preparing the batch in {preparing}" if preparing else "waiting for data",
        "transfer": "moving the batch in transfer_batch_to_device" if is_cpu else "copying the batch to the device",
        "communication": "waiting for the gradients of other ranks",
    }
    if kind in waits:
        return f"{of_step} {waits[kind]}: {duration(spent / 1e3)} of {duration(total / 1e3)}"
    if kind == "host":
        return f"{of_step} {_host(operations, roofs, is_cpu, work)}"
    if not operations:
        return f"{of_step} arithmetic, at {percent(mfu or 0.0)} of the peak measured here"
    seconds = spent / 1e3
    words = {"memory": _memory, "compute": _compute, "elementwise": _elementwise}[kind]
    times = _times(operations, roofs or TYPICAL, is_cpu, kind)
    return f"{of_step} {words(times, roofs or TYPICAL, is_cpu, seconds)}"


def seen(shares: Mapping[str, float], unknown: float, why: str) -> str:
    """What was seen where it names no bottleneck, and why some of the step is not known; empty without a reason."""
    known = sorted(shares.items(), key=lambda item: -item[1])
    parts = [f"{kind} {percent(share)}" for kind, share in known if share >= 0.01]
    if unknown >= 0.01:
        parts.append(f"not known {percent(unknown)}{why and f', because {why}'}")
    return "of the step " + ", ".join(parts)


_Times = Sequence[tuple[Operation, float]]  # of operations: the seconds that each spends on one kind of work


def _times(operations: Sequence[Operation], roofs: Roofs, is_cpu: bool, kind: str) -> _Times:
    """The seconds that operations spend on a kind of work; on an asynchronous device those that they need."""
    if is_cpu:
        times = [(each, each.seconds * share_of_kinds(each, roofs).get(kind, 0.0)) for each in operations]
    else:
        needs = [(each, roofs.memory_seconds(each), roofs.compute_seconds(each)) for each in operations]
        times = [
            (each, max(memory, compute)) for each, memory, compute in needs if (memory > compute) == (kind == "memory")
        ]
    return [(each, seconds) for each, seconds in times if seconds > 0]


def _mainly(times: _Times, is_cpu: bool) -> list[Operation]:
    """The operations that spend at least half of their time so; all of them if none does."""
    return [each for each, seconds in times if not is_cpu or 2 * seconds >= each.seconds] or [each for each, _ in times]


def _host(operations: Sequence[Operation], roofs: Roofs | None, is_cpu: bool, work: float) -> str:
    calls = sum(operation.calls for operation in operations)
    if not calls:
        return "the framework's, between the parts of the step" if is_cpu else "time in which the device idles"
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


def _memory(times: _Times, roofs: Roofs, is_cpu: bool, seconds: float) -> str:
    chosen = _mainly(times, is_cpu)
    seconds = sum(each.seconds for each in chosen) if is_cpu else seconds
    moved, faults = sum(each.cold_bytes for each in chosen), sum(each.page_faults for each in chosen)
    if not moved:
        return f"page faults: {round(faults):,}, for freshly allocated memory{_largest(times)}"
    best = roofs.bytes_per_sec if _is_measured(roofs) else None
    roof = f" of the {with_prefix(best, 'B/s')} measured here" if best else ""
    fresh = f", with {count(round(faults), 'page fault')} for freshly allocated memory" if faults > _MANY_FAULTS else ""
    rate = f", at {with_prefix(moved / seconds, 'B/s')}{roof}" if seconds else ""
    lines = sum(each.scattered_bytes for each in chosen)
    apart = f" out of order ({with_prefix(lines, 'B')} in whole cache lines)" if 2 * lines > moved else ""
    return f"moving {with_prefix(moved, 'B')} through memory{apart}{rate}{fresh}{_largest(times)}"


def _compute(times: _Times, roofs: Roofs, is_cpu: bool, seconds: float) -> str:
    products = _mainly(times, is_cpu)
    if not products:  # a device's counter alone has seen it
        return "computing in operations whose FLOPs are not counted"
    at_roof = sum(roofs.compute_seconds(each) for each in products)
    timed = sum(each.seconds for each in products) if is_cpu else seconds
    reached = f", at {percent(at_roof / timed)} of the peak measured here" if timed and _is_measured(roofs) else ""
    return f"arithmetic: {with_prefix(sum(each.flops for each in products), 'FLOP')}{reached}{_largest(times)}"


def _elementwise(times: _Times, roofs: Roofs, is_cpu: bool, seconds: float) -> str:
    chosen = _mainly(times, is_cpu)
    calls, moved = sum(each.calls for each in chosen), sum(each.bytes for each in chosen)
    return f"elementwise and similar operations: {_calls(calls)} on {with_prefix(moved, 'B')}{_largest(times)}"


def _is_measured(roofs: Roofs) -> bool:
    return roofs is not TYPICAL


def _largest(times: _Times) -> str:
    """The operation of a module that takes most of the time; `most of it` only where it is more than half."""
    total = sum(seconds for _, seconds in times)
    by_place: dict[tuple[str, str], float] = {}
    for each, seconds in times:
        place = (each.name, each.module)
        by_place[place] = by_place.get(place, 0.0) + seconds
    if not by_place:
        return ""
    (name, module), seconds = max(by_place.items(), key=lambda item: item[1])
    place = name.removeprefix("aten.") + (f" of {module}" if module else "")
    return (
        f"; most of it in {place}" if 2 * seconds > total else f"; largest: {place}, {percent(seconds / total)} of it"
    )
