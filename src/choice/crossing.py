"""Devices by size (the n of matrices, or the batch size), and the size from which on another one is faster than the first."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .interval import Interval, digits, times_longer


@dataclass(frozen=True)
class Line:
    """A device and its times."""

    label: str  # `cpu`, `h100`
    here: bool  # measured, and not predicted
    times: Mapping[int, Interval]  # seconds by size, smallest first

    @property
    def name(self) -> str:
        """What a sentence calls it: `this CPU`, `an H100`, `a T4`."""
        article = "this" if self.here else "an" if self.label[0] in "aefhilmnorsx" else "a"
        return f"{article} {self.label.upper()}"


def crossings(lines: Sequence[Line]) -> dict[str, Interval]:
    """The size from which on each other device is faster than the first one, by its label, with the interval of a ratio.

    0 where it is faster at every size that both have; infinity where it is not at the largest, or they share no size.
    """
    found, first = {}, lines[0].times
    for line in lines[1:]:
        ratios = {size: times_longer(first[size], line.times[size]) for size in first if size in line.times}
        found[line.label] = from_on(ratios, ("high", "value", "low"), 1.0)
    return found


def from_on(values: Mapping[int, Any], ends: Sequence[str], threshold: float) -> Interval:
    """The size from which on values are above a threshold, by three of their attributes, the largest one first.

    Between two sizes it lies on the line through the logs. 0 and infinity are as in `crossings`.
    """
    return Interval(
        *(_from_on({size: getattr(value, end) for size, value in values.items()}, threshold) for end in ends)
    )


def _from_on(values: Mapping[int, float], threshold: float) -> float:
    sizes = list(values)
    last = max((place for place, size in enumerate(sizes) if values[size] <= threshold), default=-1)
    if last == len(sizes) - 1:
        return math.inf
    if last < 0:
        return 0.0
    below, above = (math.log(min(max(values[size] / threshold, 1e-9), 1e9)) for size in sizes[last : last + 2])
    return float(sizes[last] * (sizes[last + 1] / sizes[last]) ** (below / (below - above)))


def nearest(lines: Sequence[Line]) -> Interval:
    """The size from which on the first of the other devices is faster; infinity where there is none."""
    known = crossings(lines).values()
    return min(known, key=lambda at: (at.middle, at.low, at.high), default=Interval(math.inf, math.inf, math.inf))


def words(at: Interval) -> str:
    """`90 (60 to 150)`; an end is 0 or `inf` where no size that was tried bounds it."""
    return f"{digits(at.middle)} ({digits(at.low)} to {digits(at.high)})"


def as_json(lines: Sequence[Line], sentence: str) -> dict[str, Any]:
    """Everything in plain containers; of a crossing an end that is infinite is None."""
    ends = {label: asdict(at).items() for label, at in crossings(lines).items()}
    finite = {label: {end: size if math.isfinite(size) else None for end, size in of} for label, of in ends.items()}
    return {"devices": [asdict(line) for line in lines], "crossings": finite, "sentence": sentence}
