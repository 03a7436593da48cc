"""From which batch size on one device is faster than another."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..records.formatting import estimate, significant
from .fit import Fit
from .recommend import MAX_EXTRAPOLATION, Analysis


@dataclass(frozen=True)
class Crossover:
    """Two devices compared at the batch sizes that ran on both.

    The kind is `measured`, `extrapolated` (by fits, beyond the sizes that ran), `always` (`large` is faster at every size),
    or `unclear` (the faster device changes several times).
    """

    base: str  # the model, and what else the two groups share
    small: str  # the device that is faster at small sizes
    large: str  # the device that is faster at large sizes
    kind: Literal["measured", "extrapolated", "always", "unclear"]
    between: tuple[int, int]  # the two sizes that ran on both and bracket the change, or the range of sizes that ran
    near: float | None  # where the devices are equally fast, interpolated from the rates or extrapolated by the fits
    ratio: float  # the rate of the faster device over that of the other, where it is largest

    @property
    def headline(self) -> str:
        """The answer in one line."""
        low, high = (f"{size:,}" for size in self.between)
        up_to = f", up to {significant(self.ratio)}×" if self.ratio >= 1.05 else ""
        near = "" if self.near is None else estimate(self.near)
        if self.kind == "measured":
            faster = f"{self.base}: {self.large} is faster than {self.small}"
            return f"{faster} from a batch size between {low} and {high} on (near {near}){up_to}."
        if self.kind == "unclear":
            return f"{self.base}: {self.small} and {self.large} alternate in being faster between {low} and {high}."
        ran = f"at every size that ran on both ({low} to {high})" if low != high else f"at the one size on both ({low})"
        if self.kind == "always":
            return f"{self.base}: {self.large} is always faster than {self.small}, {ran}{up_to}."
        here, when = (self.small, "above") if (self.near or 0) > self.between[1] else (self.large, "below")
        other = self.large if here == self.small else self.small
        return (
            f"{self.base}: {here} is faster than {other} {ran}{up_to}; extrapolated, not measured: "
            f"{other} would be faster {when} about {near}."
        )


def crossovers(analyses: Iterable[Analysis]) -> list[Crossover]:
    """For every model that ran on several devices, each pair of them that has a batch size in common."""
    by_base: dict[str, list[Analysis]] = {}
    for analysis in analyses:
        if analysis.group.device and analysis.group.rates:
            by_base.setdefault(analysis.group.base, []).append(analysis)
    return [
        crossover
        for base, members in by_base.items()
        for first, second in itertools.combinations(sorted(members, key=lambda a: a.group.device != "cpu"), 2)
        if first.group.device != second.group.device and (crossover := _crossover(base, first, second))
    ]


def _crossover(base: str, first: Analysis, second: Analysis) -> Crossover | None:
    one, two = first.group.rates, second.group.rates
    sizes = sorted(set(one) & set(two))
    if not sizes:
        return None
    names = (first.group.device, second.group.device)
    lead = [math.log(two[size] / one[size]) for size in sizes]  # above 0 the second device is faster
    largest_ratio = math.exp(max(map(abs, lead)))
    changes = [i for i in range(len(sizes) - 1) if (lead[i] > 0) != (lead[i + 1] > 0)]
    if len(changes) % 2:
        small, large = names if lead[-1] > 0 else names[::-1]
        middle = changes[len(changes) // 2]
        share = lead[middle] / (lead[middle] - lead[middle + 1])
        near = sizes[middle] * (sizes[middle + 1] / sizes[middle]) ** share
        bracket = (sizes[changes[0]], sizes[changes[-1] + 1])
        return Crossover(base, small, large, "measured", bracket, near, math.exp(abs(lead[-1])))
    if changes:  # the device that is faster at the smallest size is faster at the largest one too
        return Crossover(base, *names, "unclear", (sizes[changes[0]], sizes[changes[-1] + 1]), None, largest_ratio)
    loser, winner = names if lead[0] > 0 else names[::-1]
    near = _beyond(first.trusted, second.trusted, lead[0] > 0, sizes)
    if near is None:
        return Crossover(base, loser, winner, "always", (sizes[0], sizes[-1]), None, largest_ratio)
    small, large = (winner, loser) if near > sizes[-1] else (loser, winner)
    return Crossover(base, small, large, "extrapolated", (sizes[0], sizes[-1]), near, largest_ratio)


def _beyond(one: Fit | None, two: Fit | None, two_leads: bool, sizes: list[int]) -> float | None:
    """The size, within 8 times of those that ran, at which by the fits the lead changes; None if there is none."""
    if one is None or two is None:
        return None
    for edge, step in ((sizes[-1], 1.02), (sizes[0], 1 / 1.02)):
        size = float(edge)
        if (two.step_ms(size) < one.step_ms(size)) != two_leads:
            continue  # the fits contradict the measurement
        while size * step >= 1 and edge / MAX_EXTRAPOLATION <= size * step <= edge * MAX_EXTRAPOLATION:
            size *= step
            if (two.step_ms(size) < one.step_ms(size)) != two_leads:
                return size
    return None
