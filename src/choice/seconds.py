"""A time that is not known exactly, and how two of them add up."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """Seconds: the middle, and the ends between which the truth lies in 80 of 100 cases."""

    low: float
    middle: float
    high: float

    def __add__(self, other: "Interval") -> "Interval":
        """Ends add to ends: most of the error is a device's own, which all of its kernels share."""
        return Interval(self.low + other.low, self.middle + other.middle, self.high + other.high)

    def __mul__(self, factor: float) -> "Interval":
        """The time of so many calls."""
        return Interval(self.low * factor, self.middle * factor, self.high * factor)


def exactly(seconds: float) -> Interval:
    """A time without uncertainty."""
    return Interval(seconds, seconds, seconds)


def total(intervals: Iterable[Interval]) -> Interval:
    """The time of all of them, one after the other."""
    return sum(intervals, start=exactly(0.0))
