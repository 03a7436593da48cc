"""Whether a claim of an answer is true, by rates and metrics that are known better.

A reference is a rate and how far it may be off, as a fraction; a claim is false only where the reference contradicts it
beyond that.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SHARE_OFF = 0.1  # by which a stated share may be off, as a fraction of it
REACHED = 0.88  # of the best rate, by a size of which 0.9 is claimed


@dataclass(frozen=True)
class Reference:
    """What is true. `off` is how far a ratio of two rates may be off, as a fraction."""

    rates: Mapping[int, float]
    off: float = 0.0
    metrics: Mapping[int, float] = field(default_factory=dict)  # the higher the better
    strict: bool = False  # equal rates contradict `fastest`, too

    def share(self, size: int, of: int) -> float:
        """The rate of a size ÷ that of another."""
        return self.rates[size] / self.rates[of]


def why_false(claim: Mapping[str, Any], truth: Reference) -> str | None:
    """Why a claim is false, in words; None if it is true, or the reference says nothing about it.

    Raises:
        ValueError: for a kind of claim that nobody can judge.
    """
    kind, size = claim["kind"], int(claim["batch_size"])
    if kind not in _JUDGES:
        raise ValueError(f"{kind}: no such kind of claim")
    found = _JUDGES[kind](size, claim, truth)
    return f"{kind} {size}: {found}" if found else None


def _fastest(size: int, claim: Mapping[str, Any], truth: Reference) -> str | None:
    others = {other: truth.share(other, size) for other in claim["among"] if other != size}
    best = max(others, key=lambda other: others[other])
    wrong = others[best] > 1 + truth.off or (truth.strict and others[best] >= 1)
    return f"{best} has {others[best]:.3f} of its rate" if wrong else None


def _reaches(size: int, claim: Mapping[str, Any], truth: Reference) -> str | None:
    best = max(claim["among"], key=lambda other: truth.rates[other])
    share = truth.share(size, best)
    return f"{share:.3f} of the rate of {best}" if share < REACHED * (1 - truth.off) else None


def _share(size: int, claim: Mapping[str, Any], truth: Reference) -> str | None:
    share, said = truth.share(size, int(claim["of"])), claim["share"]
    wrong = abs(said / share - 1) > SHARE_OFF + truth.off
    return f"{share:.3f} of {claim['of']}, and {said:.3f} is said" if wrong else None


def _at_most(size: int, claim: Mapping[str, Any], truth: Reference) -> str | None:
    share = truth.share(size, int(claim["of"]))
    wrong = share > claim["share"] * (1 + truth.off)
    return f"{share:.3f} of {claim['of']}, and at most {claim['share']:.2f} is said" if wrong else None


def _at_least(size: int, claim: Mapping[str, Any], truth: Reference) -> str | None:
    share = truth.share(size, int(claim["of"]))
    wrong = share < claim["share"] * (1 - truth.off)
    return f"{share:.3f} of {claim['of']}, and at least {claim['share']:.2f} is said" if wrong else None


def _worse(size: int, claim: Mapping[str, Any], truth: Reference) -> str | None:
    if size not in truth.metrics:
        return None
    best = max(truth.metrics.values())
    return None if truth.metrics[size] < best else f"its {claim['metric']} is as good as any"


_JUDGES = {
    "fastest": _fastest,
    "reaches": _reaches,
    "share": _share,
    "at_most": _at_most,
    "at_least": _at_least,
    "worse": _worse,
}
