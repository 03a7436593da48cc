"""`experiment=time_to_target`: batch sizes × learning rates, each trained until a validation metric reaches a target.

All sizes are trained with the first learning rate, from the middle size outwards. With each further rate the sizes
follow in the order of their times. So the best time is known early. A run ends once it is surely later than the best.

The limits of a run follow from the records of the runs before it, and from the clock where a run was killed. So a sweep
that is started again in its folder computes the same configurations for the runs that it keeps.
"""

import math
import time
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from ..analysis.target import least_time_ratio
from ..errors import UserError
from ..options.purpose import lightning_module_of
from ..options.types import PositiveFloat, PositiveInt
from ..records.metrics import FRACTION, metric
from ..records.values import at, positive
from .plans import Job, Plan, RunFailed, Search

MARGIN = 1.05  # × the time after which the report tells a run from the best: the run's clock is not the report's
SHARES = 3  # a run may take this many equal shares of the remaining time, and half of it at most


class TimeToTarget(Search):
    """Trains batch sizes × learning rates, each until a validation metric reaches a target.

    Args:
        sizes: batch sizes of one device.
        rates: factors of `optimizer.lr`, for each size.
        minutes: the time of all runs, after which no further run begins.
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
        if module := lightning_module_of(config):
            raise UserError(
                f"experiment=time_to_target: tries optimizer.lr, and {module} is a LightningModule, which has its own "
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
        """Yield the runs, in subfolders of the job's folder.

        Where a run is out of memory, or is killed after a smaller size has trained, no size as large is tried again. A
        run that fails for another reason than a loss that is not finite ends the search (RunFailed).
        """
        middle = math.exp(sum(map(math.log, self.sizes)) / len(self.sizes))
        sizes = sorted(dict.fromkeys(self.sizes), key=lambda size: abs(math.log(size / middle)))
        rates = list(dict.fromkeys(self.rates))
        best_times: dict[int, float] = {}  # seconds of training, by size, of the sizes that have reached the target
        remaining = [(rate, size) for rate in rates for size in sizes]  # without sizes that do not fit
        remaining_s, max_size, started, trained_sizes = 60.0 * self.minutes, math.inf, 0, set[int]()
        for rate in rates:
            for size in sorted(sizes, key=lambda size: best_times.get(size, math.inf)):
                if size > max_size:
                    continue
                if remaining_s <= 0:
                    skipped = f"{len(remaining)} of {started + len(remaining)} runs are left out"
                    print(f"\nsearch.minutes={self.minutes:g} are over: {skipped}", flush=True)
                    return
                wall_s = remaining_s * max(1 / len(remaining), min(SHARES / len(remaining), 0.5))
                remaining.remove((rate, size))
                started += 1
                train_s = MARGIN * least_time_ratio(len(sizes)) * min(best_times.values()) if best_times else None
                trial = _trial(job, f"run {started} of at most {started + len(remaining)}", size, rate, train_s, wall_s)
                began = time.monotonic()
                (record,) = yield [trial]
                # The system kills a run when the host runs out of memory. The record has no duration then.
                was_killed = record["status"] == "killed" and any(trained < size for trained in trained_sizes)
                remaining_s -= time.monotonic() - began if was_killed else positive(record.get("seconds")) or 0.0
                if record["status"] == "out_of_memory" or was_killed:
                    max_size = size - 1
                # A loss that is not finite is a result: the learning rate is too large.
                elif record["status"] not in ("finished", "not_finite"):
                    raise RunFailed.from_record(trial, record)
                else:
                    trained_sizes.add(size)
                if samples := at(record, "dataset.train_samples"):
                    max_size = min(max_size, samples // record.get("processes", 1))
                remaining = [pair for pair in remaining if pair[1] <= max_size]
                if time_s := positive(record.get("time_to_target_s")):
                    best_times[size] = min(time_s, best_times.get(size, math.inf))


def _trial(job: Job, title: str, size: int, rate: float, train_s: float | None, wall_s: float) -> Job:
    """Return the run with a batch size and a learning rate; it may train for `train_s`, and take `wall_s` in all."""
    lr = float(f"{rate * job.config['optimizer']['lr']:.4g}")
    options = {"data.batch_size": size, "optimizer.lr": lr}
    trial = job.below(f"{size}-{lr:g}", options, f"{title}: data.batch_size={size} optimizer.lr={lr:g}")
    limits = {"seconds": train_s and round(train_s, 3), "wall_seconds": round(wall_s, 3)}
    trial.config["callbacks"]["stop_at_target"] |= limits
    return trial
