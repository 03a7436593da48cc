"""`experiment=find_batch_size`: growing batches, until the size is found that fills a device."""

import os
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from typing_extensions import override

from ..analysis.selection import ENOUGH
from ..errors import UserError
from ..options.types import PositiveInt
from ..options.update import largest_part, ranks_asked
from ..records.rates import NEAR_BEST, RATE, why_no_rate
from .plans import Job, Plan, Record, Search
from .visits import can_wait

_MOST_AGAIN = 6  # sizes, of which each is 5 % faster than the one before it


class BatchSizeSearch(Search):
    """Grows the batch until throughput stops rising or memory ends, then tries the size that was left out below the answer.

    The batch grows by a factor of four, so that six runs reach from 8 to 8,192 samples. No batch is larger than the
    training set. Throughput has stopped rising where a size is not faster than the fastest before it by 5 %. A size of which
    no step is measured, as of too few samples, is the last one that is tried. The largest sizes that fit are then measured
    once more, side by side, which tells smaller differences. The report on these runs has the answer.

    Args:
        start: the first batch size.
        max_runs: the largest number of runs.
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
        batch fits. A first run without a rate ends it, too (UserError).
        """
        rates: dict[int, float] = {}  # samples/s of each size that fits
        tried: list[int] = []
        enough = job.config.get("enough", ENOUGH)
        update, ranks = job.config.get("global_batch_size"), ranks_asked(job.config) or _devices(job.config)
        limit = update // ranks if update else sys.maxsize

        def run(size: int, number: str, folder: str = "") -> Job:
            option = {"data.batch_size": size}
            return job.below(os.path.join(folder, str(size)), option, f"{number}: data.batch_size={size}")

        def measure(size: int) -> Generator[Sequence[Job], list[Record], bool]:
            """Run a size; whether it fits, is measured, and is faster than all before it."""
            nonlocal limit, ranks
            tried.append(size)
            trial = run(size, f"run {len(tried)} of at most {self.max_runs}")
            (record,) = yield [trial]
            if record["status"] == "out_of_memory":
                return False
            if rates and record["status"] == "finished" and not record["throughput"].get(RATE):
                print(f"  data.batch_size={size} has no rate: {why_no_rate(record)}", file=sys.stderr, flush=True)
                return False
            rate = trial.rate(record)
            samples = record["dataset"]["train_samples"]  # None of a stream that is not counted
            ranks = record.get("processes", ranks)
            limit = min(limit, update // ranks if update else limit, max(1, samples // ranks) if samples else limit)
            is_faster = not rates or rate > (1 + NEAR_BEST) * max(rates.values())
            rates[min(size, limit)] = rate
            return is_faster

        size = largest_part(job.config, ranks, self.start)
        while (yield from measure(size)) and size < limit and len(tried) < self.max_runs:
            size = largest_part(job.config, ranks, min(4 * size, limit))
            if size in tried:
                break
        if not rates:
            return
        near = (one for one, rate in rates.items() if rate >= enough * max(rates.values()))
        upper = min(near) if size in rates else size  # what the answer may be, or where memory ended
        below = max((size for size in tried if size < upper), default=upper)
        between = largest_part(job.config, ranks, max(1, upper // 2))
        if len(tried) < self.max_runs and between > below:
            yield from measure(between)
        again = sorted(rates)[-_MOST_AGAIN:]  # a smaller one has at most 82 % of the best rate
        if len(again) > 1 and can_wait(job.config):
            print(f"\n— measured again side by side: data.batch_size={','.join(map(str, again))}", flush=True)
            yield [run(size, "again", "again") for size in again]


def _devices(config: Mapping[str, Any]) -> int:
    """The devices of this machine that a run takes where that is left to the machine."""
    from ..hardware.devices import taken  # imports torch

    return taken(config["trainer"].get("accelerator"))[1]
