"""`experiment=find_batch_size`: growing batches, until the size is found that fills a device."""

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..analysis.answer import Answer, answer
from ..analysis.read import find
from ..analysis.table import shown_metrics
from ..errors import UserError
from ..options.update import largest_part, ranks_asked
from ..records.rates import NEAR_BEST, RATE
from .plans import Job, Plan, RunFailed
from .search import BatchSizeSearch
from .visits import can_wait


def grow_batch(job: Job, search: BatchSizeSearch, title: str = "") -> Plan[int | None]:
    """The runs of a BatchSizeSearch, one for each size, in folders below the job's own.

    Sizes between which the answer is undecided are measured once more, side by side, which tells smaller differences.

    Returns the size that a report on these runs recommends; None if no size fits.

    Raises:
        RunFailed: for a run that fails for another reason than memory: that does not say whether the batch fits.
        UserError: for a run without a rate.
    """
    rates: dict[int, float] = {}  # samples/s of each size that fits
    tried: dict[int, Path] = {}  # the folder of each size: beside them, a search that is started again has `again`
    update, ranks = job.config.get("global_batch_size"), ranks_asked(job.config) or 1
    limit = update // ranks if update else sys.maxsize

    def run(size: int, number: str, *below: str) -> Job:
        option = {"data.batch_size": size}
        return job.below(os.path.join(*below, str(size)), option, f"{title}{number}: data.batch_size={size}")

    def measure(size: int) -> Plan[bool]:
        """Run a size; whether it fits, and is faster than all before it."""
        nonlocal limit
        one = run(size, f"run {len(tried) + 1} of at most {search.max_runs}")
        tried[size] = one.run_dir
        (record,) = yield [one]
        if record["status"] == "out_of_memory":
            return False
        rate = _rate(record)
        samples = record["dataset"]["train_samples"]  # None of a stream that is not counted
        limit = min(limit, max(1, samples // record.get("processes", 1))) if samples else limit
        is_faster = not rates or rate > (1 + NEAR_BEST) * max(rates.values())
        rates[min(size, limit)] = rate
        return is_faster

    size = largest_part(job.config, ranks, search.start)
    while (yield from measure(size)) and size < limit and len(tried) < search.max_runs:
        size = largest_part(job.config, ranks, min(4 * size, limit))
        if size in tried:
            break
    if not rates:
        return None
    upper = _found(tried.values(), rates) if size in rates else size  # the answer, or where memory ended
    below = max((size for size in tried if size < upper), default=upper)
    between = largest_part(job.config, ranks, max(1, upper // 2))
    if len(tried) < search.max_runs and between > below:
        yield from measure(between)
    undecided = undecided_in(tried.values())
    if len(undecided) > 1 and can_wait(job.config):
        yield [run(size, "again", "again") for size in undecided]
    return _found([job.run_dir], rates)


def _rate(record: Mapping[str, Any]) -> float:
    """Samples/s of a run that has finished."""
    if record["status"] != "finished":
        why = f"  the search ends: {record['status']} does not say whether the batch fits"
        print(why, file=sys.stderr, flush=True)
        raise RunFailed(f"the search: {record.get('error') or record['status']}")
    rate = record["throughput"].get(RATE)
    if rate is None:
        place = record["config"]["run_dir"]
        raise UserError(f"search: needs the rate of a run, and {place} has none; leave callbacks.throughput on")
    return rate


def _found(folders: Iterable[Path], rates: Mapping[int, float]) -> int:
    """What a report on the runs in some folders recommends; where it recommends none, the smallest size near the best rate."""
    found, enough = _answer_in(folders), (1 - NEAR_BEST) * max(rates.values())
    recommended = found.candidate if found else None
    return recommended or min(size for size, rate in rates.items() if rate >= enough)


def undecided_in(folders: Iterable[Path]) -> list[int]:
    """The batch sizes between which a report on the runs in some folders is undecided; empty if it is not."""
    found = _answer_in(folders)
    return found.decision.between if found and found.decision else []


def _answer_in(folders: Iterable[Path]) -> Answer | None:
    with suppress(UserError):  # no record can be read
        sweep = find(folders)
        return answer(max(sweep.groups, key=lambda group: len(group.sizes)), shown_metrics(sweep))
    return None
