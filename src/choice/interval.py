"""A time with its interval: sums, the ratio of two times, and the text of a time.

Every interval has the confidence of analysis (`CONFIDENCE`), so a measured time has the same interval here as in a report.
`convert_interval` converts an interval of another confidence.
"""

import math
import sys
from dataclasses import dataclass

from scipy.special import ndtri, stdtrit

from ..analysis.noise import CONFIDENCE, Ratio

SURE = 0.95  # confidence of a ratio: if it holds, a time that is called shorter is shorter in 39 of 40 cases
_FITTED_DEVICES = 5  # number of devices that the coefficients are fitted to, as degrees of freedom
_LARGEST_FACTOR = 1e100  # between the middle and an end
_UNITS = ((2 * 86400, 86400, "d"), (5400, 3600, "h"), (90, 60, "min"), (1, 1, "s"), (1e-3, 1e-3, "ms"), (0, 1e-6, "µs"))


@dataclass(frozen=True)
class Interval:
    """Seconds (or bytes, or money): the estimate (`middle`), and the ends of its interval of confidence `CONFIDENCE`."""

    low: float
    middle: float
    high: float

    def __add__(self, other: "Interval") -> "Interval":
        """Add ends to ends: most of the error is the device's, and all of its kernels share it."""
        return Interval(self.low + other.low, self.middle + other.middle, self.high + other.high)

    def __sub__(self, other: "Interval") -> "Interval":
        """Subtract the opposite ends, so that the low end is the least difference; no end is below 0."""
        ends = zip(self.ends(), reversed(other.ends()), strict=True)
        return Interval(*(max(0.0, end - subtrahend) for end, subtrahend in ends))

    def __mul__(self, factor: float) -> "Interval":
        """Return the time of `factor` calls."""
        return Interval(self.low * factor, self.middle * factor, self.high * factor)

    def __str__(self) -> str:
        """Return seconds in the unit that suits the middle, with two digits: `2.1–4.0 min`, `49 s`."""
        factor, unit = next((factor, unit) for least, factor, unit in _UNITS if self.middle >= least)
        return f"{(self * (1 / factor)).span()} {unit}"

    def span(self) -> str:
        """Return both ends with two digits, without a unit: `2.1–4.0`; one number if both have the same text."""
        return "–".join(dict.fromkeys((digits(self.low), digits(self.high))))

    def ends(self) -> list[float]:
        """Return `[low, middle, high]`."""
        return [self.low, self.middle, self.high]


def exactly(seconds: float) -> Interval:
    """Return a time without uncertainty."""
    return Interval(seconds, seconds, seconds)


def digits(value: float) -> str:
    """Return a number with two significant digits: `24,000`, `2.1`, `0.015`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.{max(0, 1 - math.floor(math.log10(abs(rounded))))}f}"


def deviations(confidence: float) -> float:
    """Return the half-width of a normal distribution's interval in standard deviations: 1.96 for a confidence of 0.95."""
    return float(ndtri((1 + confidence) / 2))


def convert_interval(low: float, middle: float, high: float, confidence: float, error: float = 0.0) -> Interval:
    """Convert the interval of a lognormal time from `confidence` to `CONFIDENCE`.

    An independent error widens it: `error` is the standard deviation of its logarithm.
    """
    exponent, error_reach = deviations(CONFIDENCE) / deviations(confidence), deviations(CONFIDENCE) * error
    positive_low = max(low, sys.float_info.min)  # positive also where the processor rounds subnormal numbers to 0
    factors = (min(max(factor, 1.0), _LARGEST_FACTOR) for factor in (middle / positive_low, high / middle))
    below, above = (math.exp(math.hypot(exponent * math.log(factor), error_reach)) for factor in factors)
    return Interval(middle / below, middle, middle * above)


def time_ratio(time: Interval, other: Interval) -> Ratio:
    """Return the ratio of a time to the other one with its interval of confidence `SURE`, for lognormal, independent times.

    It uses Student's t: the spread of few fitted devices tells little of the tails (benchmarks/device_choice/orders.py).
    """
    if other.high <= 0 < time.low:
        return Ratio(math.inf, math.inf, math.inf)
    if min(time.low, other.low) <= 0:
        return Ratio(time.middle / other.middle if other.middle else math.inf, 0.0, math.inf)
    value, widening = time.middle / other.middle, stdtrit(_FITTED_DEVICES, (1 + SURE) / 2) / deviations(CONFIDENCE)
    low_reach = math.hypot(math.log(time.low / time.middle), math.log(other.high / other.middle))
    high_reach = math.hypot(math.log(time.high / time.middle), math.log(other.low / other.middle))
    return Ratio(value, value * math.exp(-widening * low_reach), value * math.exp(widening * high_reach))
