"""A time that is not known exactly: sums, the ratio of two, and its text.

Every interval has the confidence of analysis (`CONFIDENCE`), so that a measured time is known here as well as in a report.
What is known with another confidence is converted where it enters (`converted`).
"""

import math
import sys
from dataclasses import dataclass

from scipy.special import ndtri, stdtrit

from ..analysis.noise import CONFIDENCE, Ratio

SURE = 0.95  # of the interval of a ratio: if it is right, a time that is called shorter is so in 39 of 40 cases
_DEVICES = 5  # that the coefficients are fitted to, as degrees of freedom
_MOST = 1e100  # from the middle to an end
_UNITS = ((2 * 86400, 86400, "d"), (5400, 3600, "h"), (90, 60, "min"), (1, 1, "s"), (1e-3, 1e-3, "ms"), (0, 1e-6, "µs"))


@dataclass(frozen=True)
class Interval:
    """Seconds (or bytes, or money): the middle, and the ends of the interval of `CONFIDENCE` that the truth lies in."""

    low: float
    middle: float
    high: float

    def __add__(self, other: "Interval") -> "Interval":
        """Ends add to ends: most of the error is a device's own, which all of its kernels share."""
        return Interval(self.low + other.low, self.middle + other.middle, self.high + other.high)

    def __sub__(self, other: "Interval") -> "Interval":
        """What is left of it after the other, at least nothing; a low end is left where most is taken."""
        ends = zip(self.ends(), reversed(other.ends()), strict=True)
        return Interval(*(max(0.0, end - taken) for end, taken in ends))

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
        """`[low, middle, high]`."""
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


def deviations(confidence: float) -> float:
    """How many standard deviations the interval of a normal distribution reaches to either side: 1.96 for 0.95."""
    return float(ndtri((1 + confidence) / 2))


def converted(low: float, middle: float, high: float, confidence: float, error: float = 0.0) -> Interval:
    """The interval of a lognormal time that is known with another confidence.

    It is wider by an independent error, of which `error` is the standard deviation of the logarithm.
    """
    power, own = deviations(CONFIDENCE) / deviations(confidence), deviations(CONFIDENCE) * error
    least = max(low, sys.float_info.min)  # a processor that rounds smaller numbers to 0 has no others
    factors = (min(max(factor, 1.0), _MOST) for factor in (middle / least, high / middle))
    below, above = (math.exp(math.hypot(power * math.log(factor), own)) for factor in factors)
    return Interval(middle / below, middle, middle * above)


def times_longer(time: Interval, other: Interval) -> Ratio:
    """How many times as long as the other a time is, and the interval of `SURE`, if both are lognormal and independent.

    It is by Student's t: the spread of a few fitted devices tells little of its tails (benchmarks/device_choice/orders.py).
    """
    if other.high <= 0 < time.low:
        return Ratio(math.inf, math.inf, math.inf)
    if min(time.low, other.low) <= 0:
        return Ratio(time.middle / other.middle if other.middle else math.inf, 0.0, math.inf)
    value, wider = time.middle / other.middle, stdtrit(_DEVICES, (1 + SURE) / 2) / deviations(CONFIDENCE)
    low = math.hypot(math.log(time.low / time.middle), math.log(other.high / other.middle))
    high = math.hypot(math.log(time.high / time.middle), math.log(other.low / other.middle))
    return Ratio(value, value * math.exp(-wider * low), value * math.exp(wider * high))
