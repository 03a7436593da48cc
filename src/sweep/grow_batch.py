"""`experiment=find_batch_size`: grow the batch until the size is found that fills the device."""

import os
import sys
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from ..analysis.selection import ENOUGH_SHARE
from ..errors import UserError
from ..options.types import PositiveInt
from ..records.rates import NEAR_BEST, RATE, REPORTED_LOAD, why_no_rate
from ..records.values import at, positive
from .folder import KEPT_STATUSES
from .plans import Job, Plan, RunFailed, Search
from .visits import can_wait

_MAX_REMEASURED = 5  # the largest sizes of the growth, of which each is 5 % faster than the size before it


class BatchSizeSearch(Search):
    """Grows the batch until throughput stops rising or memory runs out, then measures the largest sizes side by side.

    The batch grows by a factor of four, so that six runs reach from 8 to 8,192 samples. No batch is larger than the
    training set. Throughput has stopped rising at a size that is not 5 % faster than the fastest size before it; beside
    other programs, at two of them. The second measurement, which tells smaller differences, has the largest sizes that
    fit, and the skipped size below the answer, or below the size that did not fit. The report on these runs has the answer.

    Args:
        start: the first batch size.
        max_runs: the most runs in which the batch grows.
    """

    def __init__(self, start: PositiveInt = 8, max_runs: PositiveInt = 8):
        self.start = start
        self.max_runs = max_runs

    @override
    def check(self, config: Mapping[str, Any], typed: set[str]) -> None:
        if "data.batch_size" in typed:
            raise UserError("data.batch_size: experiment=find_batch_size finds it; search.start=8 is the first size")

    @override
    def plan(self, job: Job) -> Plan:
        """Yield a run for each size, in a subfolder of the job's folder.

        A run that fails for another reason than memory ends the search (RunFailed): it does not show whether the batch
        fits. A killed run counts as out of memory if a smaller size fits: the system kills a run when the host runs out
        of memory. A first run without a rate ends the search (UserError); a later run without a rate ends the growth.
        """
        rates: dict[int, float] = {}  # samples/s of each size that fits
        size, limit, fits, stalled = self.start, sys.maxsize, True, 0
        for number in range(1, self.max_runs + 1):
            trial = _trial(job, size, f"run {number} of at most {self.max_runs}")
            (record,) = yield [trial]
            was_killed = bool(rates) and record["status"] == "killed"
            if not (fits := record["status"] != "out_of_memory" and not was_killed):
                break
            if rates and record["status"] == "finished" and not record["throughput"].get(RATE):
                print(f"  data.batch_size={size} has no rate: {why_no_rate(record)}", file=sys.stderr, flush=True)
                fits = False  # an epoch has so few of these batches that all are warm-up
                break
            rate = trial.rate(record)
            samples = record["dataset"]["train_samples"]  # None for a stream of unknown length
            limit = max(1, samples // record.get("processes", 1)) if samples else limit
            is_faster = not rates or rate > (1 + NEAR_BEST) * max(rates.values())
            rates[min(size, limit)] = rate
            larger, stalled = min(4 * size, limit), 0 if is_faster else stalled + 1
            is_loaded = (positive(at(record, "throughput.others_share")) or 0.0) >= REPORTED_LOAD
            if stalled > is_loaded or larger in rates:
                break
            size = larger
        if not rates:
            return
        enough_rate = job.config.get("enough", ENOUGH_SHARE) * max(rates.values())
        upper = min(size for size, rate in rates.items() if rate >= enough_rate) if fits else size
        lower = max((size for size in rates if size < upper), default=upper)
        middle = upper // 2
        skipped = [middle] if middle > lower else []
        # A size below these has at most 82 % of the best rate.
        sizes = sorted([*(sorted(rates)[-_MAX_REMEASURED:] if can_wait(job.config) else []), *skipped])
        if len(sizes) > 1:
            print(f"\n— measured again side by side: data.batch_size={','.join(map(str, sizes))}", flush=True)
        if len(sizes) > 1 or skipped:
            trials = [_trial(job, size, "again", "again") for size in sizes]
            for size, trial, record in zip(sizes, trials, (yield trials), strict=True):
                if size in skipped and record["status"] not in (*KEPT_STATUSES, "killed"):
                    raise RunFailed.from_record(trial, record)


def _trial(job: Job, size: int, title: str, folder: str = "") -> Job:
    options = {"data.batch_size": size}
    return job.below(os.path.join(folder, str(size)), options, f"{title}: data.batch_size={size}")
