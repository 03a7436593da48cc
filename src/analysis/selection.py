"""Which batch size to take: the smallest that is enough, and what it is sure to give.

The *share* of a size is its rate ÷ the best rate. Its *sure share* is the lower end of the one-sided simultaneous 95 %
interval of its rate ÷ the best rate of all others (multiple comparisons with the best, Hsu 1981; each of the K − 1
comparisons at 0.95 ** (1 / (K − 1)), Šidák). Both describe this sweep, with the machine as it was meanwhile.

1. The chosen size is the smallest with an estimated share of at least `enough` (0.9) and a sure share of at least
   `enough` − 0.1. The difference is the indifference zone (Bechhofer 1954): of two sizes within it, either may be chosen.
2. Where no size has both, the size with the highest sure share is the best guess, and is called so. If the rate of only one
   of several sizes is known, that size is the best guess.
3. Where every sure share is below 0.6, nothing is chosen. Where no rate is known, there is no Selection.

A sweep is settled, and ends, once the smallest size with enough estimated share also has the sure share, and 0.03 more: the
sweep looks many times, and the estimate of its first success is too good (optional stopping). A sweep that ends for lack of
time is decided by rule 1. (A sweep that ended as soon as *any* size has both would choose sizes two doublings too large.)

Nothing here knows of batch sizes: a size is any number of which a smaller one is preferred.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from .noise import Rates, Ratio, simultaneous

ENOUGH_SHARE = 0.9  # the least estimated share of a chosen size
INDIFFERENCE = 0.1  # by how much its sure share may be lower
SETTLES = 0.03  # by how much the sure share has to exceed that to end a sweep
LEAST = 0.6  # the least sure share of a best guess: below it, a guess would say too little

Rule = Literal["shown", "best_guess", "undecided"]


@dataclass(frozen=True)
class Selection:
    """The result of the rule for the sizes whose rates are known."""

    size: int | None  # the chosen size, or the best guess
    rule: Rule
    best: int  # the size with the highest rate
    enough: float
    shares: Mapping[int, Ratio]  # of each size, smallest first: its rate ÷ the best one, with simultaneous ends
    sure: Mapping[int, float]  # the sure share of each size, at most 1

    @property
    def wanted(self) -> float:
        """The least sure share of a chosen size."""
        return self.enough - INDIFFERENCE

    def is_settled(self, sizes: int) -> bool:
        """Whether the rates of all sizes, so many, are known well enough to end the sweep."""
        smallest = min(size for size, share in self.shares.items() if share.value >= self.enough)
        return len(self.shares) == sizes and self.sure[smallest] >= self.wanted + SETTLES


def select(rates: Rates, sizes: Collection[int] | None = None, enough: float = ENOUGH_SHARE) -> Selection | None:
    """Apply the rule to some sizes, by default to all; None where no rate has a finite interval."""
    compared = sorted(rates.settings if sizes is None else sizes)
    known = [s for s in compared if s in rates.settings and math.isfinite(rates.reach(s, allow_load=False))]
    if not known:
        return None
    confidence = simultaneous(len(known) - 1)
    best = max(known, key=rates.rate)
    shares = {size: rates.ratio(size, best, confidence) for size in known}
    sure = {
        size: min([1.0, *(rates.ratio(size, other, confidence).low for other in known if other != size)])
        for size in known
    }
    shown = [size for size in known if shares[size].value >= enough and sure[size] >= enough - INDIFFERENCE]
    if shown and (len(known) > 1 or len(compared) == 1):
        return Selection(shown[0], "shown", best, enough, shares, sure)
    surest = max(known, key=lambda size: sure[size])
    if sure[surest] >= LEAST:
        return Selection(surest, "best_guess", best, enough, shares, sure)
    return Selection(None, "undecided", best, enough, shares, sure)
