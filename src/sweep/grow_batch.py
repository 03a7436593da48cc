"""`experiment=find_batch_size`: growing batches, until the size is found that fills a device."""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..analysis.answer import Answer, answer
from ..analysis.read import find
from ..analysis.table import shown_metrics
from ..checkpointing.resume import with_run_dir
from ..errors import UserError
from ..options.update import largest_part, ranks_asked
from ..records.rates import NEAR_BEST, RATE
from .plans import Job, Plan, RunFailed
from .search import BatchSizeSearch
from .visits import can_wait


def grow_batch(job: Job, title: str = "") -> Plan[int | None]:
    """The runs of a BatchSizeSearch, one for each size, in folders below the job's own.

    Sizes between which the answer is undecided are measured once more, side by side, which tells smaller differences.

    Returns the size that a report on these runs recommends; None if no size fits.

    Raises:
        RunFailed: for a run that fails for another reason than memory: that does not say whether the batch fits.
        UserError: for a run without a rate.
    """
    search = BatchSizeSearch(**{key: value for key, value in job.config["search"].items() if key != "_target_"})
    rates: dict[int, float] = {}  # samples/s of each size that fits
    tried: list[int] = []
    update, ranks = job.config.get("global_batch_size"), ranks_asked(job.config) or 1
    limit = update // ranks if update else sys.maxsize

    def measure(size: int) -> Plan[bool]:
        """Run a size; whether it fits, and is faster than all before it."""
        nonlocal limit
        tried.append(size)
        (record,) = yield [_sized(job, f"{title}run {len(tried)} of at most {search.max_runs}", size)]
        if record["status"] == "out_of_memory":
            return False
        rate = _rate(record)
        limit = min(limit, _largest_batch(record))
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
    upper = _found(job.run_dir, rates) if size in rates else size  # the answer, or where memory ended
    below = max((size for size in tried if size < upper), default=upper)
    between = largest_part(job.config, ranks, max(1, upper // 2))
    if len(tried) < search.max_runs and between > below:
        yield from measure(between)
    undecided = undecided_in(job.run_dir)
    if len(undecided) > 1 and can_wait(job.config):
        yield [_sized(job, f"{title}again", size, "again") for size in undecided]
    return _found(job.run_dir, rates)


def _sized(job: Job, title: str, batch_size: int, *below: str) -> Job:
    """The run with a batch size."""
    option = f"data.batch_size={batch_size}"
    place = os.path.join(job.config["run_dir"], *below, str(batch_size))
    config = {**job.config, "data": {**job.config["data"], "batch_size": batch_size}}
    facts = {**job.facts, "overrides": [*job.facts["overrides"], option]}
    run_dir = job.run_dir.joinpath(*below, str(batch_size))
    return Job(run_dir, with_run_dir(config, job.config["run_dir"], place), facts, f"{title}: {option}")


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


def _largest_batch(record: Mapping[str, Any]) -> int:
    """The largest batch of one rank that the training set can fill; no bound for a stream that is not counted."""
    samples = record["dataset"]["train_samples"]
    return max(1, samples // record.get("processes", 1)) if samples else sys.maxsize


def _found(folder: Path, rates: Mapping[int, float]) -> int:
    """What a report on the runs in a folder recommends; where it recommends none, the smallest size near the best rate."""
    enough = (1 - NEAR_BEST) * max(rates.values())
    return recommended_in(folder) or min(size for size, rate in rates.items() if rate >= enough)


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
