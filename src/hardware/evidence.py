"""The texts for a bottleneck: its name in one row, and a line with the numbers behind the verdict."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from ..records.formatting import count, percent, with_prefix
from ..records.operations import OperationRow
from .calibration import Calibration, compute_seconds

Timed = tuple[OperationRow, float]  # an operation, and some of its seconds
NAMES = {
    "input": "waiting for data",
    "transfer": "copying batches to the device",
    "communication": "waiting for other ranks",
    "host": "Python and framework overhead",
    "memory": "memory traffic",
    "compute": "arithmetic",
    "elementwise": "elementwise and similar operations",
}
_LEAST_NAMED_SHARE = 0.05  # of the step


def limit_row(bottleneck: Mapping[str, Any]) -> tuple[str, str]:
    """Return the label and the text of a recorded Bottleneck: `limit`, `probably arithmetic (57 % of the step)`."""
    if bottleneck.get("busy"):
        return "load", bottleneck["evidence"]
    if bottleneck["kind"] not in NAMES:
        return "limit", f"unclear: {bottleneck['evidence']}"
    probably = "probably " if bottleneck["certainty"] == "probable" else ""
    return "limit", f"{probably}{NAMES[bottleneck['kind']]} ({percent(bottleneck['share'])} of the step)"


def describe_shares(shares: Mapping[str, float], unknown: float, why: str | None) -> str:
    """Return the shares of a step without a bottleneck, and why a part of the step is unknown."""
    largest_first = sorted(shares.items(), key=lambda item: -item[1])
    words = [f"{NAMES[kind]} {percent(share)}" for kind, share in largest_first if share >= _LEAST_NAMED_SHARE]
    words += [f"unknown {percent(unknown)}"] if unknown >= _LEAST_NAMED_SHARE else []
    return ", ".join(words) + (f", because {why}" if why else "")


def describe_work(kind: str, timed: Sequence[Timed], seconds: float, device: Calibration | None) -> str:
    """Describe the operations of one kind: their total work, the share of the device's peak, and the operation with most time.

    `timed` has each operation's seconds of this kind (needed ones on an accelerator); `seconds` is their total in the step.
    """
    rows = [row for row, _ in timed]
    if kind == "memory":
        bytes_moved = sum(row.cold_bytes for row in rows)
        words = f"moving {with_prefix(bytes_moved, 'B')} through memory"
        if seconds and bytes_moved:
            words += f", at {with_prefix(bytes_moved / seconds, 'B/s')}"
        if seconds and bytes_moved and device and device.memory_bytes_per_sec:
            words += f" of the {with_prefix(device.memory_bytes_per_sec, 'B/s')} measured here"
    elif kind == "compute":
        needed_s = sum(compute_seconds(row, device) for row in rows) if device else 0.0
        words = f"arithmetic: {with_prefix(sum(row.flops for row in rows), 'FLOP')}"
        words += f", at {percent(needed_s / seconds)} of the peak measured here" if needed_s and seconds else ""
    else:
        calls = count(round(sum(row.calls for row in rows)), "operation")
        words = f"{NAMES[kind]}: {calls} on {with_prefix(sum(row.bytes for row in rows), 'B')}"
    seconds_by_place: defaultdict[str, float] = defaultdict(float)
    for row, row_seconds in timed:
        seconds_by_place[row.name.removeprefix("aten.") + (f" of {row.module}" if row.module else "")] += row_seconds
    place, largest = max(seconds_by_place.items(), key=itemgetter(1))
    return f"{words}; {percent(largest / sum(seconds_by_place.values()))} of it in {place}"
