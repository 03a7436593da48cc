"""The words for a bottleneck: its name in one row, and in one line the numbers that the verdict rests on."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from ..records.formatting import count, percent, with_prefix
from ..records.operations import OperationRow
from .calibration import Calibration, compute_seconds

Timed = tuple[OperationRow, float]  # an operation, and seconds of it
NAMES = {
    "input": "waiting for data",
    "transfer": "copying batches to the device",
    "communication": "waiting for other ranks",
    "host": "Python and framework overhead",
    "memory": "memory traffic",
    "compute": "arithmetic",
    "elementwise": "elementwise and similar operations",
}
_WORTH_A_WORD = 0.05  # of the step


def limit_row(found: Mapping[str, Any]) -> tuple[str, str]:
    """The label and the text of a recorded Bottleneck: `limit`, `probably arithmetic (57 % of the step)`."""
    if found.get("busy"):
        return "load", found["evidence"]
    if found["kind"] not in NAMES:
        return "limit", f"unclear: {found['evidence']}"
    probably = "probably " if found["certainty"] == "probable" else ""
    return "limit", f"{probably}{NAMES[found['kind']]} ({percent(found['share'])} of the step)"


def shares_in_words(shares: Mapping[str, float], unknown: float, why: str | None) -> str:
    """The shares of a step that name no bottleneck, and why some of it is not known."""
    known = sorted(shares.items(), key=lambda item: -item[1])
    words = [f"{NAMES[kind]} {percent(share)}" for kind, share in known if share >= _WORTH_A_WORD]
    words += [f"unknown {percent(unknown)}"] if unknown >= _WORTH_A_WORD else []
    return ", ".join(words) + (f", because {why}" if why else "")


def evidence_of_work(kind: str, timed: Sequence[Timed], seconds: float, device: Calibration | None) -> str:
    """What was seen of work: the sum of it, at which part of the device's peak, and the operation of a module that takes most.

    `timed` has the seconds that each operation spends so, or needs on an accelerator, `seconds` are theirs in the step.
    """
    operations = [each for each, _ in timed]
    if kind == "memory":
        moved = sum(each.cold_bytes for each in operations)
        words = f"moving {with_prefix(moved, 'B')} through memory"
        if seconds and moved:
            words += f", at {with_prefix(moved / seconds, 'B/s')}"
        if seconds and moved and device and device.memory_bytes_per_sec:
            words += f" of the {with_prefix(device.memory_bytes_per_sec, 'B/s')} measured here"
    elif kind == "compute":
        needed = sum(compute_seconds(each, device) for each in operations) if device else 0.0
        words = f"arithmetic: {with_prefix(sum(each.flops for each in operations), 'FLOP')}"
        words += f", at {percent(needed / seconds)} of the peak measured here" if needed and seconds else ""
    else:
        calls = count(round(sum(each.calls for each in operations)), "operation")
        words = f"{NAMES[kind]}: {calls} on {with_prefix(sum(each.bytes for each in operations), 'B')}"
    by_place: defaultdict[str, float] = defaultdict(float)
    for each, spent in timed:
        by_place[each.name.removeprefix("aten.") + (f" of {each.module}" if each.module else "")] += spent
    place, largest = max(by_place.items(), key=itemgetter(1))
    return f"{words}; {percent(largest / sum(by_place.values()))} of it in {place}"
