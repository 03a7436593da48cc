"""Whether a claim of an answer is true, by rates and metrics that are known better.

A claim is false only where the reference contradicts it by more than the reference itself may be off.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SHARE_OFF = 0.1  # by which a stated share may be off, as a fraction of it
REACHED = 0.88  # of the best rate, by a size of which 0.9 is claimed


@dataclass(frozen=True)
class Reference:
    """What is true. The rates of a simulation are exact; those of a measurement may be off."""

    rates: Mapping[int, float]  # samples/s
    off: Mapping[int, float] = field(default_factory=dict)  # how far a rate may be off, as a fraction
    metrics: Mapping[int, float] = field(default_factory=dict)  # the higher the better

    def share(self, size: int, of: int) -> float:
        """The rate of a size ÷ that of another."""
        return self.rates[size] / self.rates[of]

    def margin(self, size: int, of: int) -> float:
        """How far their ratio may be off, as a fraction."""
        return math.hypot(self.off.get(size, 0.0), self.off.get(of, 0.0))

    def of_best(self, size: int) -> float:
        """The rate of a size ÷ the best one."""
        return self.rates[size] / max(self.rates.values())


def why_false(claim: Mapping[str, Any], truth: Reference) -> str | None:
    """Why a claim is false, in words; None if it is true, or the reference says nothing about it.

    Raises:
        ValueError: for a kind of claim that nobody can judge.
    """
    kind, size = claim["kind"], int(claim["batch_size"])
    if kind == "worse":
        good = truth.metrics and truth.metrics[size] >= max(truth.metrics.values())
        return f"worse {size}: its {claim['metric']} is as good as any" if good else None
    if kind in ("fastest", "reaches"):
        found = _among(kind, size, claim["among"], truth)
    elif kind in ("share", "at_most", "at_least"):
        found = _share(kind, size, int(claim["of"]), float(claim["share"]), truth)
    else:
        raise ValueError(f"{kind}: no such kind of claim")
    return f"{kind} {size}: {found}" if found else None


def _among(kind: str, size: int, among: list[int], truth: Reference) -> str | None:
    """`fastest` is false where another size is as fast, if the rates are exact; `reaches` of a size below 0.88."""
    for other in set(among) - {size}:
        share, margin = truth.share(size, other), truth.margin(size, other)
        as_fast = share < 1 - margin or (share == 1 and not margin)
        if as_fast if kind == "fastest" else share < REACHED * (1 - margin):
            return f"it has {share:.3f} of the rate of {other}"
    return None


def _share(kind: str, size: int, of: int, said: float, truth: Reference) -> str | None:
    share, margin = truth.share(size, of), truth.margin(size, of)
    wrong = {
        "share": abs(said / share - 1) > SHARE_OFF + margin,
        "at_most": share > said * (1 + margin),
        "at_least": share < said * (1 - margin),
    }
    return f"it has {share:.3f} of the rate of {of}, not {kind.replace('_', ' ')} {said:.3f}" if wrong[kind] else None
