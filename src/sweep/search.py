"""The batch size that fills a device, found in a few runs instead of a list of all sizes."""

from collections.abc import Callable

from ..options.types import Fraction, PositiveInt


class BatchSizeSearch:
    """Grows the batch until throughput stops rising or memory ends, then looks once between the last two sizes.

    It grows in steps of four, so that eight runs reach from 8 to 8,192 samples, and then tries the power of two that
    the steps have left out below the answer. No batch is larger than the training set. Throughput stops rising where a
    size is not faster than the fastest before it by more than `within`: the same share within which a report recommends
    the smallest size.

    Args:
        start: the first batch size.
        max_runs: how many runs there may be.
        within: the share of the best throughput that counts as reaching it.
    """

    def __init__(self, start: PositiveInt = 8, max_runs: PositiveInt = 8, within: Fraction = 0.05):
        self.start = start
        self.max_runs = max_runs
        self.within = within

    def find(self, measure: Callable[[int], float | None], most: Callable[[], int | None] = lambda: None) -> int | None:
        """The smallest measured size within `within` of the fastest; None if not one could be measured.

        Args:
            measure: a batch size → samples/s; None if it did not fit into memory. An exception of it ends the search.
            most: the largest batch that the training set can fill; asked after the first run, None if not known.
        """
        rates: dict[int, float] = {}
        tried = self._grow(measure, most, rates)
        if not rates:
            return None
        upper = self.smallest(rates) if tried[-1] in rates else tried[-1]  # the answer, or where memory ended
        gap, below = upper // 2, max((size for size in tried if size < upper), default=upper)
        if len(tried) < self.max_runs and gap > below:
            rate = measure(gap)
            if rate is not None:
                rates[gap] = rate
        return self.smallest(rates)

    def smallest(self, rates: dict[int, float]) -> int:
        """Of the measured sizes within `within` of the fastest."""
        enough = (1 - self.within) * max(rates.values())
        return min(size for size, rate in rates.items() if rate >= enough)

    def _grow(
        self, measure: Callable[[int], float | None], most: Callable[[], int | None], rates: dict[int, float]
    ) -> list[int]:
        """Measure sizes four times as large each, the whole training set last; returns what was tried."""
        tried: list[int] = []
        for power in range(self.max_runs):
            size = self.start * 4**power
            if tried:
                size = min(size, most() or size)
            if size in tried:
                break
            rate = measure(size)
            size = min(size, most() or size)  # what the first batch held
            tried.append(size)
            if rate is None:
                break
            rising = not rates or rate > (1 + self.within) * max(rates.values())
            rates[size] = rate
            if not rising:
                break
        return tried
