"""`experiment=find_batch_size`: growing batches, until the size is found that fills a device."""

import os
import sys
from collections.abc import Generator, Mapping, Sequence

from .._system import relative
from ..analysis.selection import ENOUGH, INDIFFERENCE
from ..errors import UserError
from ..options.update import largest_part, ranks_asked
from ..records.rates import NEAR_BEST, RATE, why_no_rate
from .plans import Job, Plan, Record, RunFailed
from .search import BatchSizeSearch
from .visits import can_wait

_MOST_AGAIN = 6  # sizes that are measured again
_MOST_TAKEN = 0.9  # of the processor, by other programs


def grow_batch(job: Job, search: BatchSizeSearch) -> Plan:
    """The runs of a BatchSizeSearch, one for each size, in folders below the job's own.

    The sizes near the best rate are then measured once more, side by side, which tells smaller differences. The report
    on these runs has the answer.

    A run that fails for another reason than memory ends the search (RunFailed), because that does not say whether the
    batch fits. A first run without a rate ends it, too (UserError). After a later run without a rate no larger size is
    tried.
    """
    rates: dict[int, float] = {}  # samples/s of each size that fits
    highest: dict[int, float] = {}  # the same if other programs have slowed it by all that they took
    tried: list[int] = []
    enough = job.config.get("enough", ENOUGH)
    update, ranks = job.config.get("global_batch_size"), ranks_asked(job.config) or 1
    limit = update // ranks if update else sys.maxsize

    def run(size: int, number: str, *below: str) -> Job:
        option = {"data.batch_size": size}
        return job.below(os.path.join(*below, str(size)), option, f"{number}: data.batch_size={size}")

    def measure(size: int) -> Generator[Sequence[Job], list[Record], bool]:
        """Run a size; whether it fits, is measured, and is faster than all before it."""
        nonlocal limit
        tried.append(size)
        trial = run(size, f"run {len(tried)} of at most {search.max_runs}")
        (record,) = yield [trial]
        if record["status"] == "out_of_memory":
            return False
        if record["status"] != "finished":
            raise RunFailed.of(trial, record)
        rate = record["throughput"].get(RATE)
        if rate is None:  # as of a size with fewer steps than the warm-up
            if rates:
                print(f"  data.batch_size={size} has no rate: {why_no_rate(record)}", file=sys.stderr, flush=True)
                return False
            raise UserError(
                f"search: needs the rate of a run, and {relative(trial.run_dir)} has none: {why_no_rate(record)}"
            )
        samples = record["dataset"]["train_samples"]  # None of a stream that is not counted
        limit = min(limit, max(1, samples // record.get("processes", 1))) if samples else limit
        is_faster = not rates or rate > (1 + NEAR_BEST) * max(rates.values())
        rates[min(size, limit)] = rate
        highest[min(size, limit)] = rate / (1 - min(record["throughput"].get("others_share") or 0.0, _MOST_TAKEN))
        return is_faster

    size = largest_part(job.config, ranks, search.start)
    while (yield from measure(size)) and size < limit and len(tried) < search.max_runs:
        size = largest_part(job.config, ranks, min(4 * size, limit))
        if size in tried:
            break
    if not rates:
        return
    upper = _smallest(rates, enough) if size in rates else size  # what the answer may be, or where memory ended
    below = max((size for size in tried if size < upper), default=upper)
    between = largest_part(job.config, ranks, max(1, upper // 2))
    if len(tried) < search.max_runs and between > below:
        yield from measure(between)
    again = _to_measure_again(rates, highest, enough - INDIFFERENCE)
    if len(again) > 1 and can_wait(job.config):
        print(f"\n— measured again side by side: data.batch_size={','.join(map(str, again))}", flush=True)
        yield [run(size, "again", "again") for size in again]


def _to_measure_again(rates: Mapping[int, float], highest: Mapping[int, float], near_share: float) -> list[int]:
    """The sizes that may have a share of the best rate, and the next smaller one: the best and the smallest, if there are many."""
    best = max(rates, key=rates.__getitem__)
    near = {size for size, rate in highest.items() if rate >= near_share * rates[best]}
    below = [size for size in rates if size < min(near)]
    others = sorted({*near, *sorted(below)[-1:]} - {best})
    return sorted([best, *others[: _MOST_AGAIN - 1]])


def _smallest(rates: Mapping[int, float], enough: float) -> int:
    """The smallest size that reaches enough of the best rate."""
    return min(size for size, rate in rates.items() if rate >= enough * max(rates.values()))
