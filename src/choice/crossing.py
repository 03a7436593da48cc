"""The crossing of two devices: the size (n of n×n matrices, or the batch size) from which on one beats the other."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .interval import Interval, digits, exactly, time_ratio


@dataclass(frozen=True)
class Line:
    """The times of a device by size."""

    label: str  # `cpu`, `h100`
    here: bool  # whether the times were measured; else they are predicted
    times: Mapping[int, Interval]  # seconds by size, smallest first

    @property
    def name(self) -> str:
        """The device's name in a sentence: `this CPU`, `an H100`, `a T4`."""
        article = "this" if self.here else "an" if self.label[0] in "aefhilmnorsx" else "a"
        return f"{article} {self.label.upper()}"


def crossings(lines: Sequence[Line]) -> dict[str, Interval]:
    """Return for each other device, by its label, the size from which on it is faster than the first device.

    Its ends are those of the ratio's interval. It is 0 if the device is faster at every common size, and infinity if the device is
    not faster at the largest common size, or there is none.
    """
    sizes, baseline = {}, lines[0].times
    for line in lines[1:]:
        ratios = {size: time_ratio(baseline[size], line.times[size]) for size in baseline if size in line.times}
        sizes[line.label] = threshold_crossing(ratios, ("high", "value", "low"), 1.0)
    return sizes


def threshold_crossing(values: Mapping[int, Any], names: Sequence[str], threshold: float) -> Interval:
    """Return the size from which on values exceed a threshold, for three of their attributes (`names`, the largest first).

    Between two sizes, log values are interpolated over the log of the size. 0 and infinity are as in `crossings`.
    """
    by_name = ({size: getattr(value, name) for size, value in values.items()} for name in names)
    return Interval(*(_last_crossing(numbers, threshold) for numbers in by_name))


def _last_crossing(values: Mapping[int, float], threshold: float) -> float:
    """Return the size behind which no value is at the threshold or below it."""
    sizes = list(values)
    last_below = max((index for index, size in enumerate(sizes) if values[size] <= threshold), default=-1)
    if last_below == len(sizes) - 1:
        return math.inf
    if last_below < 0:
        return 0.0
    below, above = sizes[last_below : last_below + 2]
    log_below, log_above = (math.log(min(max(values[size] / threshold, 1e-9), 1e9)) for size in (below, above))
    return float(below * (above / below) ** (log_below / (log_below - log_above)))


def nearest_crossing(lines: Sequence[Line]) -> Interval:
    """Return the smallest crossing of all other devices; infinity if there is none."""
    sizes = crossings(lines).values()
    return min(sizes, key=lambda size: (size.middle, size.low, size.high), default=exactly(math.inf))


def crossing_text(interval: Interval) -> str:
    """Return a crossing as text: `90 (60 to 150)`; an end is 0 or `inf` if no tried size bounds it."""
    return f"{digits(interval.middle)} ({digits(interval.low)} to {digits(interval.high)})"


def as_json(lines: Sequence[Line], sentence: str) -> dict[str, Any]:
    """Return lines and crossings in plain containers; an infinite end of a crossing becomes None."""
    ends = {label: asdict(interval).items() for label, interval in crossings(lines).items()}
    finite = {label: {end: n if math.isfinite(n) else None for end, n in items} for label, items in ends.items()}
    return {"devices": [asdict(line) for line in lines], "crossings": finite, "sentence": sentence}
