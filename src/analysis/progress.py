"""Progress: by how much a sample of a larger batch gets less done, from the gradient noise scale of the runs.

With the noise scale φ (callbacks/noise_scale.py) a sample in an update of B samples makes φ/(φ + B) of the progress that it makes
in a small one (McCandlish et al. 2018). Against the smallest size of a sweep, B₀, that is the efficiency (φ + B₀)/(φ + B).
Times samples/s it is the goodput (Pollux, Qiao et al. 2021): the size with the largest one reaches a given quality first.

A sentence that compares several sizes holds with 95 % confidence for all of them together (Bonferroni): the rates and φ enter it
with the intervals of that confidence. φ is recorded with a 90 % interval, whose ends in logs are moved by the ratio of the quantiles.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

import numpy as np
from scipy.special import stdtrit

from ..records.formatting import percent, significant
from ..records.values import at, number, positive
from .noise import CONFIDENCE, STATED, Rates, Ratio
from .run import Run
from .text import KNOWN, and_

_FEWEST = 10  # comparisons of a run that has a noise scale (callbacks/noise_scale.py)
_UNBIASED = ("batches", "halves")  # the gradients that a noise scale compares without a bias to speak of


@dataclass(frozen=True)
class Progress:
    """The noise scale of a group of runs, and what follows from it for each size. A size is samples a device and step."""

    scales: Sequence[Ratio]  # φ of each run in samples, with its 90 % interval; `high` may be infinite
    freedom: float  # degrees of freedom of these intervals
    updates: Mapping[int, float]  # samples of an update, by size
    rates: Rates
    is_early: bool  # whether it is of timed runs, which see the beginning of a training alone
    is_unbiased: bool  # whether φ compares batches or halves of one update, and not two updates

    @cached_property
    def scale(self) -> Ratio:
        """φ of all runs, with its 90 % interval."""
        return self.scale_at(CONFIDENCE)

    def scale_at(self, confidence: float) -> Ratio:
        """φ of all runs, with the interval of a confidence."""
        return pooled(self.scales, confidence, self.freedom) or Ratio(math.inf, 0.0, math.inf)

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
        rates, scale = self.rates.ratio(a, b, confidence), self.scale_at(confidence)
        ends = [self.efficiency(a, phi) / self.efficiency(b, phi) for phi in (scale.low, scale.high)]
        value = self.goodput(a) / self.goodput(b)
        return Ratio(value, rates.low * min(ends), rates.high * max(ends))

    def first(self, sizes: Collection[int]) -> list[int]:
        """The sizes that may reach a given quality first, smallest first; one where it is known."""
        best = max(sizes, key=self.goodput)
        together = 1 - (1 - STATED) / max(1, len(sizes) - 1)
        return sorted(size for size in sizes if size == best or self.ratio(size, best, together).high >= 1)

    def decided(self, sizes: Collection[int]) -> int | None:
        """The one of several sizes that reaches a given quality first; None unless that is known of a whole training."""
        first = self.first(sizes) if self.is_unbiased and not self.is_early and len(sizes) > 1 else []
        return first[0] if len(first) == 1 else None

    def lines(self, is_decided: bool = False) -> list[str]:
        """What it says of the sizes whose rates are known, the noise scale first.

        `is_decided` is whether the answer names the size that reaches a given quality first.
        """
        known, scale = self.known, self.scale
        high = f"to {significant(scale.high)}" if math.isfinite(scale.high) else "or more"
        early = " at the beginning of the training, and it grows" if self.is_early else ""
        interval = f"{significant(scale.value)} samples ({significant(scale.low)} {high})"
        half = "An update of more samples loses more than half of them to noise."
        lines = [f"Gradient noise scale: {interval}{early}. {half}"]
        if len(known) < 2:
            return lines
        first, fastest = self.first(known), max(known, key=self.rates.rate)
        if not is_decided and len(first) < len(known):
            which = "; which of them is not known" if len(first) > 1 else ""
            lines.append(f"By it {and_(first, 'or')} reaches a given quality first{which}.")
        lost = {phi: 1 - self.efficiency(fastest, phi) / self.efficiency(known[0], phi) for phi in astuple(scale)}
        if fastest > known[0] and abs(lost[scale.high] - lost[scale.low]) <= 2 * KNOWN:
            compared = f"of which {percent(lost[scale.value])} is lost to noise, compared with {known[0]:,}"
            lines.append(f"{fastest:,} has the highest rate, {compared}.")
        return lines


def progress_of(sizes: Mapping[int, Sequence[Run]], rates: Rates, is_early: bool = False) -> Progress | None:
    """The progress of sizes by their runs' noise scales; None where no run has one, or a size has no rate."""
    runs = [run for of_size in sizes.values() for run in of_size if noise_scale_of(run)]
    scales = [scale for run in runs if (scale := noise_scale_of(run))]
    pairs = [number(at(run.record, "noise_scale.pairs")) for run in runs]
    is_unbiased = all(at(run.record, "noise_scale.of") in _UNBIASED for run in runs)
    freedom = max(_FEWEST, min((n or _FEWEST for n in pairs), default=_FEWEST)) - 1
    updates = {size: found for size, of_size in sizes.items() if (found := of_size[0].global_batch_size)}
    if not scales or not updates or updates.keys() - set(rates.settings):
        return None
    return Progress(scales, freedom, updates, rates, is_early, is_unbiased)


def noise_scale_of(run: Run) -> Ratio | None:
    """The noise scale of a run in samples, with its interval; None where the run has none."""
    value, low = (positive(at(run.record, f"noise_scale.{key}")) for key in ("samples", "low"))
    high = number(at(run.record, "noise_scale.high"))
    return Ratio(value, min(low or 0.0, value), max(high or math.inf, value)) if value else None


def pooled(scales: Sequence[Ratio], confidence: float = CONFIDENCE, freedom: float = _FEWEST - 1) -> Ratio | None:
    """One noise scale of several runs: the mean of their logs, with its t interval, or their own intervals if these are wider.

    Runs differ by more than their intervals, because the noise scale grows in the course of a training. Runs without both
    ends count only where no run has them: then the one that is known best stands for all.

    Args:
        scales: with their 90 % intervals.
        confidence: of the interval that is returned.
        freedom: degrees of freedom of the runs' own intervals.
    """
    wider = float(stdtrit(freedom, (1 + confidence) / 2) / stdtrit(freedom, (1 + CONFIDENCE) / 2))
    known = [scale for scale in scales if scale.low > 0 and math.isfinite(scale.high)]
    if not known:
        best = max(scales, key=lambda scale: scale.low, default=None)
        return best and Ratio(best.value, best.low * (best.low / best.value) ** (wider - 1), best.high)
    x, n = np.log([scale.value for scale in known]), len(known)
    within = wider * float(np.mean([math.log(scale.high / scale.low) for scale in known])) / 2
    between = float(stdtrit(n - 1, (1 + confidence) / 2) * x.std(ddof=1)) if n > 1 else 0.0
    mean, half = float(x.mean()), max(within, between) / math.sqrt(n)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))
