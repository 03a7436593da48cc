"""Progress: by how much a sample of a larger batch gets less done, from the gradient noise scale of the runs.

With the noise scale φ (callbacks/noise_scale.py) a sample in an update of B samples makes φ/(φ + B) of the progress that it makes
in a small one (McCandlish et al. 2018). Against the smallest size of a sweep, B₀, that is the efficiency (φ + B₀)/(φ + B).
Times samples/s it is the goodput (Pollux, Qiao et al. 2021): the size with the largest one reaches a given quality first.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from ..records.formatting import percent, significant
from ..records.values import at, number, positive
from .noise import CONFIDENCE, STATED, Rates, Ratio
from .run import Run
from .text import KNOWN, and_


@dataclass(frozen=True)
class Progress:
    """The noise scale of a group of runs, and what follows from it for each size. A size is samples a device and step."""

    scale: Ratio  # φ in samples; `high` may be infinite
    updates: Mapping[int, float]  # samples of an update, by size
    rates: Rates
    is_early: bool  # whether it is of timed runs, which see the beginning of a training alone

    @property
    def known(self) -> list[int]:
        """The sizes whose rates are known, smallest first."""
        return sorted(size for size in self.updates if math.isfinite(self.rates.reach(size)))

    def efficiency(self, size: int, scale: float | None = None) -> float:
        """The progress of a sample at a size ÷ that at the smallest one; at most 1."""
        phi = self.scale.value if scale is None else scale
        return 1.0 if math.isinf(phi) else (phi + min(self.updates.values())) / (phi + self.updates[size])

    def goodput(self, size: int) -> float:
        """Samples/s × efficiency."""
        return self.rates.rate(size) * self.efficiency(size)

    def ratio(self, a: int, b: int, confidence: float = CONFIDENCE) -> Ratio:
        """The goodput of a ÷ that of b. Its interval reaches as far as those of the rates and of φ together."""
        rates = self.rates.ratio(a, b, confidence)
        ends = [self.efficiency(a, phi) / self.efficiency(b, phi) for phi in (self.scale.low, self.scale.high)]
        value = self.goodput(a) / self.goodput(b)
        return Ratio(value, rates.low * min(ends), rates.high * max(ends))

    def first(self, sizes: Collection[int]) -> list[int]:
        """The sizes that may reach a given quality first, smallest first; one where it is known."""
        best = max(sizes, key=self.goodput)
        return sorted(size for size in sizes if size == best or self.ratio(size, best, STATED).high >= 1)

    @property
    def lines(self) -> list[str]:
        """What it says of the sizes whose rates are known, the noise scale first."""
        known, scale = self.known, self.scale
        high = f"to {significant(scale.high)}" if math.isfinite(scale.high) else "or more"
        early = " at the beginning of the training, and it grows" if self.is_early else ""
        half = "An update of more samples loses more than half of them to noise."
        found = [
            f"Gradient noise scale: {significant(scale.value)} samples ({significant(scale.low)} {high}){early}. {half}"
        ]
        if len(known) < 2:
            return found
        first = self.first(known)
        if len(first) == 1:
            found.append(f"By it {first[0]:,} reaches a given quality first.")
        elif len(first) < len(known):
            found.append(f"By it {and_(first, 'or')} reaches a given quality first; which of them is not known.")
        fastest = max(known, key=self.rates.rate)
        low, high, lost = (
            1 - self.efficiency(fastest, phi) / self.efficiency(known[0], phi)
            for phi in (scale.low, scale.high, scale.value)
        )
        if fastest > known[0] and abs(high - low) <= 2 * KNOWN:
            share = percent(lost)
            found.append(
                f"{fastest:,} has the highest rate, of which {share} is lost to noise, compared with {known[0]:,}."
            )
        return found


def progress_of(sizes: Mapping[int, Sequence[Run]], rates: Rates, is_early: bool = False) -> Progress | None:
    """The progress of sizes by their runs' noise scales; None where no run has one, or a size has no rate."""
    runs = [run for of_size in sizes.values() for run in of_size]
    scale = pooled([found for run in runs if (found := noise_scale_of(run))])
    updates = {size: found for size, of_size in sizes.items() if (found := of_size[0].global_batch_size)}
    if scale is None or not updates or updates.keys() - set(rates.settings):
        return None
    return Progress(scale, updates, rates, is_early)


def noise_scale_of(run: Run) -> Ratio | None:
    """The noise scale of a run in samples, with its interval; None where the run has none."""
    value, low = (positive(at(run.record, f"noise_scale.{key}")) for key in ("samples", "low"))
    high = number(at(run.record, "noise_scale.high"))
    return Ratio(value, min(low or 0.0, value), max(high or math.inf, value)) if value else None


def pooled(scales: Sequence[Ratio]) -> Ratio | None:
    """One noise scale of several runs: the mean of their logs, with its t interval, or their own intervals if these are wider.

    Runs differ by more than their intervals, because the noise scale grows in the course of a training. Runs without both
    ends count only where no run has them: then the one that is known best stands for all.
    """
    known = [one for one in scales if one.low > 0 and math.isfinite(one.high)]
    if not known:
        return max(scales, key=lambda one: one.low, default=None)
    x, n = np.log([one.value for one in known]), len(known)
    within = float(np.mean([math.log(one.high / one.low) for one in known])) / 2
    between = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2) * x.std(ddof=1)) if n > 1 else 0.0
    mean, half = float(x.mean()), max(within, between) / math.sqrt(n)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
