"""The words for a bottleneck: its name in one row, and in one line the numbers that the verdict rests on."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..records.formatting import count, duration, percent, with_prefix
from .operations import Operation
from .roofline import Peaks

Timed = tuple[Operation, float]  # an operation, and seconds of it
_NAMES = {
    "input": "waiting for data",
    "transfer": "copying batches to the device",
    "communication": "waiting for other ranks",
    "host": "Python and framework overhead",
    "memory": "memory traffic",
    "compute": "arithmetic",
    "elementwise": "elementwise and similar operations",
}
_WORTH_A_WORD = 0.05  # of the step, in a row
_SLOW = 0.1  # of the bandwidth; a product by value reaches 13 % where the system clears the memory of its result first
_WHY_SLOW = " (slow: fresh memory, strides, look-ups, or a costly function of each value)"


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


def shares_in_words(shares: Mapping[str, float], unknown: float, why: str | None) -> str:
    """The shares of a step that name no bottleneck, and why some of it is not known."""
    known = sorted(shares.items(), key=lambda item: -item[1])
    parts = [f"{kind} {percent(share)}" for kind, share in known if share >= 0.01]
    if unknown >= 0.01:
        parts.append(f"not known {percent(unknown)}" + (f", because {why}" if why else ""))
    return "of the step " + ", ".join(parts)


def evidence_of(
    kind: str,
    share: float,
    step_s: float,
    operations: Sequence[Operation],
    timed: Sequence[Timed],
    peaks: Peaks | None,
    *,
    preparing: str | None = None,
    mfu: float | None = None,
    is_cpu: bool = True,
) -> str:
    """What was seen of the bottleneck: `80 % of the step is waiting for data: 8 ms of 10 ms`.

    Args:
        kind: of the bottleneck.
        share: of it, of the step.
        step_s: seconds of the step.
        operations: of one step; empty where they are not known.
        timed: those of this kind, each with the seconds that it spends so, or needs on an accelerator.
        peaks: of the device; None if it is not calibrated.
        preparing: the hook that prepares the batch and is most of `input`, if one is.
        mfu: FLOP/s of the peak, for a step whose operations are not known.
        is_cpu: whether the operations were timed.
    """
    calls = count(round(sum(each.calls for each in operations)), "operation")
    what = {
        "input": f"preparing the batch in {preparing}" if preparing else "waiting for data",
        "transfer": "copying the batch to the device",
        "communication": "waiting for the gradients of other ranks",
        "host": "Python and framework overhead" + (f" around {calls}" if operations else ""),
    }
    if kind in what:
        return f"{percent(share)} of the step is {what[kind]}: {duration(share * step_s)} of {duration(step_s)}"
    seconds = sum(each.seconds for each, _ in timed) if is_cpu else share * step_s
    of_kind = {"memory": _memory, "compute": _compute, "elementwise": _elementwise}[kind]
    if not operations and mfu is not None:
        return f"{percent(share)} of the step is arithmetic, at {percent(mfu)} of the peak measured here"
    return f"{percent(share)} of the step is {of_kind(timed, peaks, seconds)}{_largest(timed)}"


def _memory(timed: Sequence[Timed], peaks: Peaks | None, seconds: float) -> str:
    moved = sum(each.cold_bytes for each, _ in timed)
    rate = f", at {with_prefix(moved / seconds, 'B/s')}" if seconds and moved else ""
    if rate and peaks and peaks.bytes_per_sec:
        rate += f" of the {with_prefix(peaks.bytes_per_sec, 'B/s')} measured here"
        rate += _WHY_SLOW if moved / seconds < _SLOW * peaks.bytes_per_sec else ""
    return f"moving {with_prefix(moved, 'B')} through memory{rate}"


def _compute(timed: Sequence[Timed], peaks: Peaks | None, seconds: float) -> str:
    if not timed:  # a device's counter alone has seen it
        return "computing in operations whose FLOPs are not counted"
    needed = sum(map(peaks.compute_seconds, (each for each, _ in timed))) if peaks else 0.0
    reached = f", at {percent(needed / seconds)} of the peak measured here" if needed and seconds else ""
    return f"arithmetic: {with_prefix(sum(each.flops for each, _ in timed), 'FLOP')}{reached}"


def _elementwise(timed: Sequence[Timed], peaks: Peaks | None, seconds: float) -> str:
    calls, moved = sum(each.calls for each, _ in timed), sum(each.bytes for each, _ in timed)
    return f"elementwise and similar operations: {count(round(calls), 'operation')} on {with_prefix(moved, 'B')}"


def _largest(timed: Sequence[Timed]) -> str:
    """The operation of a module that takes most of the time, and how much of it."""
    by_place: dict[str, float] = {}
    for each, seconds in timed:
        place = each.name.removeprefix("aten.") + (f" of {each.module}" if each.module else "")
        by_place[place] = by_place.get(place, 0.0) + seconds
    if not by_place:
        return ""
    place, seconds = max(by_place.items(), key=lambda item: item[1])
    return f"; {percent(seconds / sum(by_place.values()))} of it in {place}"
