"""Whether a verdict is right, and whether it contradicts its own numbers."""

from collections.abc import Mapping
from typing import Any

SLACK = 0.02  # shares are rounded, and parts of a step are means
IDLE_PEAK = 0.02  # below this part of the peak a step is not arithmetic
# Below this part of the bandwidth, in its share of the step, memory limits nothing: sorting reaches so much. Strides, look-ups
# and writes to freshly allocated memory reach 1.4 to 13 %.
IDLE_BANDWIDTH = 0.005
UNCLEAR = "unclear"


def is_right(expected: tuple[str, ...], found: Mapping[str, Any] | None) -> bool:
    """Whether the kind is an expected one; "unclear" is right for a mixed case alone, and no verdict is never right."""
    if not found:
        return False
    kind = "compute" if found["kind"] == "elementwise" else found["kind"]  # both: the cores are busy with it
    return kind in expected or (found["kind"] == UNCLEAR and len(expected) > 1)


def contradictions(
    found: Mapping[str, Any] | None, summary: Mapping[str, Any], bandwidth: float | None, paper: float | None = None
) -> list[str]:
    """What in a run's own numbers speaks against its verdict.

    Args:
        found: the summary's `bottleneck`, or None.
        summary: of the run.
        bandwidth: bytes/s measured on this machine.
        paper: bytes that pass through memory in a step, for a summary that has not counted them.
    """
    if not found or found["kind"] == UNCLEAR:
        return []
    parts = summary["parts_ms"]
    step_ms = sum(parts.values())
    said = _against_shares(found["kind"], found["share"], found.get("shares") or {})
    for kind, part in (("input", "data_wait"), ("transfer", "transfer")):
        if found["kind"] == kind and found["share"] > parts[part] / step_ms + SLACK:
            said.append(f"{kind} is {found['share']:.0%}, the step's {part} only {parts[part] / step_ms:.0%}")
    return said + _against_work(found["kind"], found["share"], summary, step_ms, bandwidth, paper)


def _against_shares(kind: str, share: float, shares: Mapping[str, float]) -> list[str]:
    said = []
    if not 0 <= share <= 1:
        said.append(f"a share of {share}")
    if not shares:
        return said
    largest = max(shares, key=shares.__getitem__)
    if shares.get(kind, 0.0) < shares[largest]:
        said.append(f"{kind} has {shares.get(kind, 0.0):.0%}, {largest} {shares[largest]:.0%}")
    if abs(shares.get(kind, 0.0) - share) > SLACK:
        said.append(f"the share is {share:.0%}, among the shares {shares.get(kind, 0.0):.0%}")
    if sum(shares.values()) > 1 + SLACK:
        said.append(f"the shares add up to {sum(shares.values()):.0%}")
    return said


def _against_work(
    kind: str, share: float, summary: Mapping[str, Any], step_ms: float, bandwidth: float | None, paper: float | None
) -> list[str]:
    said = []
    mfu = summary.get("mfu")
    if kind == "compute" and mfu is not None and mfu < IDLE_PEAK:
        said.append(f"compute at {mfu:.1%} of the peak")
    counted = summary.get("step", {})
    moved = counted.get("memory_bytes", paper)
    if kind == "memory" and bandwidth and moved is not None:
        of_bandwidth = moved / (share * step_ms / 1e3) / bandwidth
        if of_bandwidth < IDLE_BANDWIDTH:
            said.append(f"memory at {of_bandwidth:.1%} of the bandwidth")
    for other in {"memory", "compute"} - {kind}:
        least = counted.get("floor_ms", {}).get(other, 0.0) / step_ms
        if least > share + SLACK:
            said.append(f"{kind} is {share:.0%}, but {other} at least {least:.0%}")
    return said
