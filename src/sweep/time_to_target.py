"""`experiment=time_to_target`: batch sizes × learning rates, each trained until a metric of the validation reaches a target.

The base rate of every size comes first, from the middle of the sizes outwards. Then the sizes go on in the order of their
times. So the best time is known early, and a run ends once it has trained for so much longer that its report shows it to be later.

The limits of a run follow from the records of the runs before it, and from the clock where one was killed. So a sweep that is started again in its folder
gives the runs that it keeps the same configurations.
"""

import math
import time
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from ..analysis.target import apart
from ..errors import UserError
from ..options.purpose import lightning_module_of
from ..options.types import PositiveFloat, PositiveInt
from ..records.metrics import FRACTION, metric
from ..records.values import at, positive
from .plans import Job, Plan, RunFailed, Search

MARGIN = 1.05  # × the time from which on a run is shown to be later than the best: its own clock is not the report's
SHARES = 3  # a run gets so many equal shares of the time that is left for all runs, and half of it at most


class TimeToTarget(Search):
    """Batch sizes × learning rates, each trained until a metric of the validation reaches a target.

    Args:
        sizes: batch sizes of one device.
        rates: factors of `optimizer.lr`, for each size.
        minutes: of all runs, after which no further run is begun.
    """

    def __init__(
        self,
        sizes: tuple[PositiveInt, ...] = (16, 64, 256, 1024, 4096),
        rates: tuple[PositiveFloat, ...] = (0.25, 0.5, 1.0),
        minutes: PositiveFloat = 15.0,
    ):
        self.sizes = sizes
        self.rates = rates
        self.minutes = minutes

    @override
    def check(self, config: Mapping[str, Any], typed: set[str]) -> None:
        if "data.batch_size" in typed:
            raise UserError("data.batch_size: experiment=time_to_target tries several; write search.sizes=[16,64,256]")
        if is_own := lightning_module_of(config):
            raise UserError(
                f"experiment=time_to_target: tries optimizer.lr, and {is_own} is a LightningModule, which has its own "
                "optimizer; it takes a network that a Task trains"
            )
        target, key = config.get("target"), config.get("target_metric")
        if target is None or key is None:
            raise UserError("target: needs a value of target_metric, such as target=0.98 target_metric=val/acc")
        if metric(key).unit == FRACTION and not 0 < target <= 1:
            hint = f"; write target={target / 100:g}" if 1 < target <= 100 else ""
            raise UserError(f"target: got {target:g}, and {key} is a fraction between 0 and 1{hint}")
        if key.startswith(("test/", "train/")):
            raise UserError(
                f"target_metric: got '{key}', takes a metric of the validation, such as val/acc or val/loss"
            )
        has_options = "batch_size" in config["data"] and config.get("optimizer", {}).get("lr")
        if not (has_options and self.sizes and self.rates and (config["callbacks"] or {}).get("stop_at_target")):
            raise UserError(
                "experiment=time_to_target: needs search.sizes and search.rates, and a training with data.batch_size, "
                "optimizer.lr and callbacks.stop_at_target"
            )

    @override
    def plan(self, job: Job) -> Plan:
        """The runs, in folders below the job's own.

        Where a run lacks memory, or is killed after a smaller size has trained, no size as large is tried again. A run that
        fails for another reason than a loss that is not finite ends them (RunFailed).
        """
        middle = math.exp(sum(map(math.log, self.sizes)) / len(self.sizes))
        order = sorted(dict.fromkeys(self.sizes), key=lambda size: abs(math.log(size / middle)))
        rates = list(dict.fromkeys(self.rates))
        times: dict[int, float] = {}  # the best one of each size that has reached the target
        todo = [(rate, size) for rate in rates for size in order]  # what is not done yet and may fit
        left_s, most, done, trained = 60.0 * self.minutes, math.inf, 0, set[int]()
        for rate in rates:
            for size in sorted(order, key=lambda size: times.get(size, math.inf)):
                if size > most:
                    continue
                if left_s <= 0:
                    left_out = f"{len(todo)} of {done + len(todo)} runs are left out"
                    print(f"\nsearch.minutes={self.minutes:g} are over: {left_out}", flush=True)
                    return
                share_s = left_s * max(1 / len(todo), min(SHARES / len(todo), 0.5))
                todo.remove((rate, size))
                done += 1
                seconds = MARGIN * apart(len(order)) * min(times.values()) if times else None
                trial = _trial(job, f"run {done} of at most {done + len(todo)}", size, rate, seconds, share_s)
                began = time.monotonic()
                (record,) = yield [trial]
                # The system kills a run where the host's memory ends. Its record does not say how long it took.
                is_killed = record["status"] == "killed" and any(one < size for one in trained)
                left_s -= time.monotonic() - began if is_killed else positive(record.get("seconds")) or 0.0
                if record["status"] == "out_of_memory" or is_killed:
                    most = size - 1
                # That the loss is not finite with so large a learning rate is a result.
                elif record["status"] not in ("finished", "not_finite"):
                    raise RunFailed.of(trial, record)
                else:
                    trained.add(size)
                if samples := at(record, "dataset.train_samples"):
                    most = min(most, samples // record.get("processes", 1))
                todo = [one for one in todo if one[1] <= most]
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
