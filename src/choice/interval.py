"""A time that is not known exactly: sums, which of two is shorter, and its text."""

import math
from dataclasses import dataclass

TEN_TO_NINETY = 2 * 1.2815515594457  # standard deviations between the 10th and the 90th percentile
CALLED_FROM = 0.75  # the probability from which on one of two times is called the shorter one
_UNITS = ((2 * 86400, 86400, "d"), (5400, 3600, "h"), (90, 60, "min"), (1, 1, "s"), (1e-3, 1e-3, "ms"), (0, 1e-6, "µs"))


@dataclass(frozen=True)
class Interval:
    """Seconds (or bytes, or money): the middle, and the ends between which the truth lies in 80 of 100 cases."""

    low: float
    middle: float
    high: float

    def __add__(self, other: "Interval") -> "Interval":
        """Ends add to ends: most of the error is a device's own, which all of its kernels share."""
        return Interval(self.low + other.low, self.middle + other.middle, self.high + other.high)

    def __mul__(self, factor: float) -> "Interval":
        """The time of so many calls."""
        return Interval(self.low * factor, self.middle * factor, self.high * factor)

    def __str__(self) -> str:
        """Seconds in the unit that suits the middle, with two digits: `2.1–4.0 min`, `49 s`."""
        factor, unit = next((factor, unit) for least, factor, unit in _UNITS if self.middle >= least)
        return f"{(self * (1 / factor)).span()} {unit}"

    def span(self) -> str:
        """Both ends with two digits, without a unit: `2.1–4.0`; one number where both are written alike."""
        return "–".join(dict.fromkeys((digits(self.low), digits(self.high))))

    def ends(self) -> list[float]:
        """`[low, middle, high]`, for JSON."""
        return [self.low, self.middle, self.high]


def exactly(seconds: float) -> Interval:
    """A time without uncertainty."""
    return Interval(seconds, seconds, seconds)


def digits(value: float) -> str:
    """A number with two significant digits: `24,000`, `2.1`, `0.015`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.{max(0, 1 - math.floor(math.log10(abs(rounded))))}f}"


def probability_shorter(first: Interval, second: Interval) -> float:
    """That the first time is the shorter one, if both are lognormal and independent. From `CALLED_FROM` on it is called."""
    if min(first.low, second.low) <= 0:
        return 0.5 if first.middle == second.middle else float(first.middle < second.middle)
    spread = math.hypot(*(math.log(each.high / each.low) / TEN_TO_NINETY for each in (first, second)))
    distance = math.log(second.middle / first.middle)
    if spread == 0:
        return 0.5 if distance == 0 else float(distance > 0)
    return 0.5 * (1 + math.erf(distance / spread / math.sqrt(2)))
