"""`experiment=find_batch_size`: growing batches, until the size is found that fills a device."""

import os
import sys
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from ..analysis.selection import ENOUGH
from ..errors import UserError
from ..options.types import PositiveInt
from ..records.rates import NEAR_BEST, RATE, why_no_rate
from .folder import KEPT
from .plans import Job, Plan, RunFailed, Search
from .visits import can_wait

_MOST_AGAIN = 5  # sizes, of which each is 5 % faster than the one before it


class BatchSizeSearch(Search):
    """Grows the batch until throughput stops rising or memory ends, then measures the largest sizes side by side.

    The batch grows by a factor of four, so that six runs reach from 8 to 8,192 samples. No batch is larger than the
    training set. Throughput has stopped rising where a size is not faster than the fastest before it by 5 %. Side by
    side with the largest sizes that fit, which tells smaller differences, is the size that was left out below the answer, or
    below the one that did not fit. The report on these runs has the answer.

    Args:
        start: the first batch size.
        max_runs: the largest number of runs in which the batch grows.
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
        """The runs, one for each size, in folders below the job's own.

        A run that fails for another reason than memory ends the search (RunFailed), because that does not say whether the
        batch fits. A killed one says it where a smaller size fits: the system kills a run where the host's memory ends. A
        first run without a rate ends it, too (UserError); a later one is the last that grows.
        """
        rates: dict[int, float] = {}  # samples/s of each size that fits
        size, limit, fits = self.start, sys.maxsize, True
        for number in range(1, self.max_runs + 1):
            trial = _trial(job, size, f"run {number} of at most {self.max_runs}")
            (record,) = yield [trial]
            is_killed = bool(rates) and record["status"] == "killed"
            if not (fits := record["status"] != "out_of_memory" and not is_killed):
                break
            if rates and record["status"] == "finished" and not record["throughput"].get(RATE):
                print(f"  data.batch_size={size} has no rate: {why_no_rate(record)}", file=sys.stderr, flush=True)
                fits = False  # so few of its batches make an epoch that all are warm-up
                break
            rate = trial.rate(record)
            samples = record["dataset"]["train_samples"]  # None of a stream that is not counted
            limit = max(1, samples // record.get("processes", 1)) if samples else limit
            is_faster = not rates or rate > (1 + NEAR_BEST) * max(rates.values())
            rates[min(size, limit)] = rate
            larger = min(4 * size, limit)
            if not is_faster or larger in rates:
                break
            size = larger
        if not rates:
            return
        enough = job.config.get("enough", ENOUGH) * max(rates.values())
        upper = min(size for size, rate in rates.items() if rate >= enough) if fits else size
        below = max((size for size in rates if size < upper), default=upper)
        between = upper // 2
        left_out = [between] if between > below else []
        # A smaller one than the largest has at most 82 % of the best rate.
        again = sorted([*(sorted(rates)[-_MOST_AGAIN:] if can_wait(job.config) else []), *left_out])
        if len(again) > 1:
            print(f"\n— measured again side by side: data.batch_size={','.join(map(str, again))}", flush=True)
        if len(again) > 1 or left_out:
            trials = [_trial(job, size, "again", "again") for size in again]
            for size, trial, record in zip(again, trials, (yield trials), strict=True):
                if size in left_out and record["status"] not in (*KEPT, "killed"):
                    raise RunFailed.of(trial, record)


def _trial(job: Job, size: int, number: str, folder: str = "") -> Job:
    option = {"data.batch_size": size}
    return job.below(os.path.join(folder, str(size)), option, f"{number}: data.batch_size={size}")
