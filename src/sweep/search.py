"""Searches: the batch size that fills a device, found in a few runs, and the changes that a diagnosis tries."""

import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..analysis.answer import Answer, answer
from ..analysis.read import find
from ..analysis.table import shown_metrics
from ..checkpointing.resume import with_run_dir
from ..errors import UserError
from ..options.types import Fraction, PositiveInt
from ..records.rates import NEAR_BEST, RATE
from .loop import Plan, RunFailed
from .process import Job
from .visits import can_wait


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

    def sizes(
        self,
        limit: Callable[[], int | None] = lambda: None,
        recommended: Callable[[], int | None] = lambda: None,
    ) -> Generator[int, float | None, int | None]:
        """Yield sizes to measure, and receive samples/s for each, or None where it did not fit into memory.

        Args:
            limit: the largest batch that the training set can fill; asked after the first run, None if not known.
            recommended: what a report on the runs so far recommends; None where the rates decide alone.

        Returns the smallest measured size within `within` of the fastest; None if no size could be measured.
        """
        rates: dict[int, float] = {}

        def answer() -> int:
            found = recommended() if self.within == NEAR_BEST else None
            enough = (1 - self.within) * max(rates.values())
            return found if found in rates else min(size for size, rate in rates.items() if rate >= enough)

        tried: list[int] = []
        for power in range(self.max_runs):
            size = self.start * 4**power
            if tried:
                size = min(size, limit() or size)
            if size in tried:
                break
            rate = yield size
            size = min(size, limit() or size)  # what the first batch held
            tried.append(size)
            if rate is None:
                break
            rising = not rates or rate > (1 + self.within) * max(rates.values())
            rates[size] = rate
            if not rising:
                break
        if not rates:
            return None
        upper = answer() if tried[-1] in rates else tried[-1]  # the answer, or where memory ended
        between, below = upper // 2, max((size for size in tried if size < upper), default=upper)
        if len(tried) < self.max_runs and between > below and (rate := (yield between)) is not None:
            rates[between] = rate
        return answer()


def grow_batch(job: Job, title: str = "") -> Plan[int | None]:
    """The runs of a BatchSizeSearch, one for each size, in folders below the job's own; returns the size that was found.

    Sizes between which the answer is undecided are measured once more, side by side, which tells smaller differences.

    Raises:
        RunFailed: for a run that fails for another reason than memory: that does not say whether the batch fits.
        UserError: for a run without a rate.
    """
    search = BatchSizeSearch(**{key: value for key, value in job.config["search"].items() if key != "_target_"})
    records: list[dict[str, Any]] = []

    def limit() -> int | None:
        samples = records[-1]["dataset"]["train_samples"] if records else None  # None: a stream that is not counted
        return max(1, samples // records[-1].get("processes", 1)) if samples else None  # for one rank

    sizes, rate, tried = search.sizes(limit, lambda: recommended_in(job.run_dir)), None, 0
    while True:
        try:
            size = sizes.send(rate)
        except StopIteration as end:
            found = end.value
            break
        tried += 1
        (record,) = yield [_sized(job, f"{title}run {tried} of at most {search.max_runs}", size)]
        rate = None
        if record["status"] == "finished":
            records.append(record)
            rate = _rate(record)
        elif record["status"] != "out_of_memory":
            why = f"  the search ends: {record['status']} does not say whether the batch fits"
            print(why, file=sys.stderr, flush=True)
            raise RunFailed(f"{job.run_dir}: {record.get('error') or record['status']}")
    undecided = undecided_in(job.run_dir)
    if len(undecided) > 1 and can_wait(job.config):
        yield [_sized(job, f"{title}again", size, "again") for size in undecided]
        return recommended_in(job.run_dir) or found
    return found


def _sized(job: Job, title: str, batch_size: int, *below: str) -> Job:
    """The run with a batch size."""
    option = f"data.batch_size={batch_size}"
    place = os.path.join(job.config["run_dir"], *below, str(batch_size))
    config = {**job.config, "data": {**job.config["data"], "batch_size": batch_size}}
    facts = {**job.facts, "overrides": [*job.facts["overrides"], option]}
    run_dir = job.run_dir.joinpath(*below, str(batch_size))
    return Job(run_dir, with_run_dir(config, job.config["run_dir"], place), facts, f"{title}: {option}")


def _rate(record: Mapping[str, Any]) -> float:
    rate = record["throughput"].get(RATE)
    if rate is None:
        place = record["config"]["run_dir"]
        raise UserError(f"search: needs the rate of a run, and {place} has none; leave callbacks.throughput on")
    return rate


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
