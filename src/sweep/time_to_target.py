"""`experiment=time_to_target`: batch sizes × learning rates, each trained until a metric of the validation reaches a target.

The base rate of every size comes first, from the middle of the sizes outwards. Then the sizes go on in the order of their
times. So the best time is known early, and a run ends once it has trained for so much longer that its report shows it to be later.

The limits of a run follow from the records of the runs before it alone. So a sweep that is started again in its folder
gives the runs that it keeps the same configurations.
"""

import math

from ..analysis.target import apart
from ..records.values import at, positive
from .plans import Job, Plan, RunFailed
from .search import TimeToTarget

MARGIN = 1.05  # × the time from which on a run is shown to be later than the best: its own clock is not the report's
SHARES = 3  # a run gets so many equal shares of the time that is left for all runs, and half of it at most


def time_to_target(job: Job, search: TimeToTarget) -> Plan:
    """The runs, in folders below the job's own.

    A run that fails for another reason than memory or a loss that is not finite ends them (RunFailed).
    """
    middle = math.exp(sum(map(math.log, search.sizes)) / len(search.sizes))
    order = sorted(dict.fromkeys(search.sizes), key=lambda size: abs(math.log(size / middle)))
    rates = list(dict.fromkeys(search.rates))
    times: dict[int, float] = {}  # the best one of each size that has reached the target
    left_s, most, runs, done = 60.0 * search.minutes, math.inf, len(order) * len(rates), 0
    for rate in rates:
        for size in sorted(order, key=lambda size: times.get(size, math.inf)):
            if size > most:
                continue
            if left_s <= 0:
                left_out = f"{runs - done} of {runs} runs are left out"
                print(f"\nsearch.minutes={search.minutes:g} are over: {left_out}", flush=True)
                return
            share_s = left_s * max(1 / (runs - done), min(SHARES / (runs - done), 0.5))
            best_s = min(times.values(), default=None)
            done += 1
            seconds = best_s and MARGIN * apart(len(order)) * best_s
            trial = _trial(job, f"run {done} of at most {runs}", size, rate, seconds, share_s)
            (record,) = yield [trial]
            left_s -= positive(record.get("seconds")) or 0.0
            if record["status"] == "out_of_memory":
                most = size - 1
            # That the loss is not finite with so large a learning rate is a result.
            elif record["status"] not in ("finished", "not_finite"):
                raise RunFailed.of(trial, record)
            if samples := at(record, "dataset.train_samples"):
                most = min(most, samples)
            if taken := positive(record.get("time_to_target_s")):
                times[size] = min(taken, times.get(size, math.inf))


def _trial(job: Job, title: str, size: int, rate: float, seconds: float | None, share_s: float) -> Job:
    """The run with a batch size and a learning rate; it may train for `seconds`, and take `share_s` in all."""
    lr = float(f"{rate * job.config['optimizer']['lr']:.4g}")
    options = {"data.batch_size": size, "optimizer.lr": lr}
    trial = job.below(f"{size}-{lr:g}", options, f"{title}: data.batch_size={size} optimizer.lr={lr:g}")
    limits = {"seconds": seconds and round(seconds, 3), "wall_seconds": round(share_s, 3)}
    trial.config["callbacks"]["stop_at_target"] |= limits
    return trial
