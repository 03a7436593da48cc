"""Searches: the batch size that fills a device, found in a few runs, and the changes that a diagnosis tries."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..analysis.answer import Answer, answer
from ..analysis.read import find
from ..analysis.table import shown_metrics
from ..errors import UserError
from ..options.types import Fraction, PositiveInt
from ..records.rates import NEAR_BEST


class Search:
    """What a configuration's `search` may be: it decides which runs there are."""


class Diagnosis(Search):
    """Changes of one run are tried, each alone, and the two best together (see diagnose.py).

    Args:
        batch_factors: by which the batch is to grow, one run for each.
    """

    def __init__(self, batch_factors: tuple[PositiveInt, ...] = (2, 4)):
        self.batch_factors = batch_factors


def is_diagnosis(config: Mapping[str, Any]) -> bool:
    """Whether a checked configuration asks for a diagnosis."""
    return bool(config["search"]) and config["search"].get("_target_") == f"{__name__}.{Diagnosis.__name__}"


class BatchSizeSearch(Search):
    """Grows the batch until throughput stops rising or memory ends, then tries one size between the last two.

    The batch grows by a factor of four, so that eight runs reach from 8 to 8,192 samples. The last run tries the power
    of two that was left out below the answer. No batch is larger than the training set. Throughput has stopped rising
    where a size is not faster than the fastest before it by more than `within`.

    Args:
        start: the first batch size.
        max_runs: the largest number of runs.
        within: the fraction of the best throughput that a size may lack to count as reaching it. By default the report's
            rules decide (analysis/answer.py); with another fraction, the rates alone.
    """

    def __init__(self, start: PositiveInt = 8, max_runs: PositiveInt = 8, within: Fraction = NEAR_BEST):
        self.start = start
        self.max_runs = max_runs
        self.within = within

    def find(
        self,
        measure: Callable[[int], float | None],
        limit: Callable[[], int | None] = lambda: None,
        recommended: Callable[[], int | None] = lambda: None,
    ) -> int | None:
        """The smallest measured size within `within` of the fastest; None if no size could be measured.

        Args:
            measure: a batch size → samples/s; None if it did not fit into memory. An exception of it ends the search.
            limit: the largest batch that the training set can fill; asked after the first run, None if not known.
            recommended: what a report on the runs so far recommends; None where the rates decide alone.
        """
        rates: dict[int, float] = {}

        def answer() -> int:
            found = recommended() if self.within == NEAR_BEST else None
            return found if found is not None and found in rates else self._smallest(rates)

        tried = self._grow(measure, limit, rates)
        if not rates:
            return None
        upper = answer() if tried[-1] in rates else tried[-1]  # the answer, or where memory ended
        between, below = upper // 2, max((size for size in tried if size < upper), default=upper)
        if len(tried) < self.max_runs and between > below:
            rate = measure(between)
            if rate is not None:
                rates[between] = rate
        return answer()

    def _smallest(self, rates: dict[int, float]) -> int:
        enough = (1 - self.within) * max(rates.values())
        return min(size for size, rate in rates.items() if rate >= enough)

    def _grow(
        self, measure: Callable[[int], float | None], limit: Callable[[], int | None], rates: dict[int, float]
    ) -> list[int]:
        """Measure sizes of four times the one before, the whole training set last; returns the sizes that were tried."""
        tried: list[int] = []
        for power in range(self.max_runs):
            size = self.start * 4**power
            if tried:
                size = min(size, limit() or size)
            if size in tried:
                break
            rate = measure(size)
            size = min(size, limit() or size)  # what the first batch held
            tried.append(size)
            if rate is None:
                break
            rising = not rates or rate > (1 + self.within) * max(rates.values())
            rates[size] = rate
            if not rising:
                break
        return tried


def recommended_in(folder: Path) -> int | None:
    """The batch size that a report recommends for the runs in a folder, or else the smallest that it may be; or None."""
    found = _answer_in(folder)
    return found.candidate if found else None


def undecided_in(folder: Path) -> list[int]:
    """The batch sizes between which a report on the runs in a folder is undecided; empty if it is not."""
    found = _answer_in(folder)
    return found.decision.between if found and found.decision else []


def _answer_in(folder: Path) -> Answer | None:
    with suppress(UserError):  # no record can be read
        sweep = find([folder])
        return answer(max(sweep.groups, key=lambda group: len(group.sizes)), shown_metrics(sweep))
    return None
