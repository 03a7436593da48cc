"""Which batch size to take: the smallest that is enough, and what it is sure to give.

The *share* of a size is its rate ÷ the best rate. Its *sure share* is the lower end of the one-sided simultaneous 95 %
interval of its rate ÷ the best rate of all others (multiple comparisons with the best, Hsu 1981; each of the K − 1
comparisons at 0.95 ** (1 / (K − 1)), Šidák). Both are of this sweep, as the machine was while it lasted.

1. Chosen is the smallest size with an estimated share of at least `enough` (0.9) and a sure share of at least `enough` − 0.1.
   The difference is the indifference zone (Bechhofer 1954): of sizes that lie in it, either may be named.
2. Where no size has both, the size with the highest sure share is the best guess, and is called so. So is the only one of
   several sizes whose rate is known.
3. Where every sure share is below 0.6, nothing is chosen. Where no rate is known, there is no Selection.

A sweep is settled, and ends, once the smallest size whose estimated share is enough also has the sure share, and 0.03 more:
it looks many times, and what it sees when it first succeeds is too good (optional stopping). Where the time ends it, rule 1
decides. (A sweep that ended as soon as *any* size has both would name sizes that are two doublings too large.)

Nothing here knows of batch sizes: a size is any number by which the smaller of two is preferred.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from .noise import Rates, Ratio, simultaneous

ENOUGH = 0.9  # of the best rate
INDIFFERENCE = 0.1  # by which the sure share may be lower
SETTLES = 0.03  # by which it is higher where it ends a sweep
LEAST = 0.6  # a sure share below which a best guess would say too little

Rule = Literal["shown", "best_guess", "undecided"]


@dataclass(frozen=True)
class Selection:
    """What the rule finds among the sizes whose rates are known."""

    size: int | None  # chosen, or the best guess
    rule: Rule
    best: int  # the size with the highest rate
    enough: float
    shares: Mapping[int, Ratio]  # of each size, smallest first: its rate ÷ the best one, with simultaneous ends
    sure: Mapping[int, float]  # the sure share of each size, at most 1

    @property
    def wanted(self) -> float:
        """The sure share that a chosen size has at least."""
        return self.enough - INDIFFERENCE

    def is_settled(self, sizes: int) -> bool:
        """Whether more measurements of so many sizes are not needed."""
        smallest = min(size for size, share in self.shares.items() if share.value >= self.enough)
        return len(self.shares) == sizes and self.sure[smallest] >= self.wanted + SETTLES


def select(rates: Rates, sizes: Collection[int] | None = None, enough: float = ENOUGH) -> Selection | None:
    """Apply the rule to some sizes, by default to all. None where the rate of none is known with an interval."""
    among = sorted(rates.settings if sizes is None else sizes)
    known = [s for s in among if s in rates.settings and math.isfinite(rates.reach(s, others=False))]
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
    if shown and (len(known) > 1 or len(among) == 1):
        return Selection(shown[0], "shown", best, enough, shares, sure)
    surest = max(known, key=lambda size: sure[size])
    if sure[surest] >= LEAST:
        return Selection(surest, "best_guess", best, enough, shares, sure)
    return Selection(None, "undecided", best, enough, shares, sure)
