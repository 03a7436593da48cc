"""What `search` may be in a configuration: it decides which runs there are."""

from collections.abc import Mapping
from typing import Any

from ..errors import UserError
from ..options.purpose import lightning_module_of
from ..options.types import PositiveFloat, PositiveInt
from ..options.update import batches_of_update, ranks_asked
from ..records.metrics import FRACTION, metric


class BatchSizeSearch:
    """Grows the batch until throughput stops rising or memory ends, then tries the size that was left out below the answer.

    The batch grows by a factor of four, so that six runs reach from 8 to 8,192 samples. No batch is larger than the
    training set. Throughput has stopped rising where a size is not faster than the fastest before it by 5 %. A size of which
    no step is measured, as of too few samples, is the last one that is tried.

    Args:
        start: the first batch size.
        max_runs: the largest number of runs.
    """

    def __init__(self, start: PositiveInt = 8, max_runs: PositiveInt = 8):
        self.start = start
        self.max_runs = max_runs


class Diagnosis:
    """Changes of one run are tried beside it, each alone, and the two best together (see diagnose.py).

    Args:
        batch_factors: by which the batch is to grow, one run for each.
    """

    def __init__(self, batch_factors: tuple[PositiveInt, ...] = (2, 4)):
        self.batch_factors = batch_factors


class TimeToTarget:
    """Batch sizes × learning rates, each trained until a metric of the validation reaches a target (see time_to_target.py).

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


def search_of(config: Mapping[str, Any]) -> Any:
    """The search that a checked configuration asks for, an object of one of these classes; None if it asks for none."""
    options = dict(config["search"] or {})
    name = options.pop("_target_", "").rpartition(".")[2]
    kinds = {kind.__name__: kind for kind in (BatchSizeSearch, Diagnosis, TimeToTarget)}
    return kinds[name](**options) if name else None


def check_time_to_target(config: Mapping[str, Any]) -> None:
    """Raise UserError for a target that no run can have, before any run is begun."""
    target, key, search = config.get("target"), config.get("target_metric"), search_of(config)
    is_own = lightning_module_of(config)
    if is_own:
        raise UserError(
            f"experiment=time_to_target: tries optimizer.lr, and {is_own} is a LightningModule, which has its own "
            "optimizer; it takes a network that a Task trains"
        )
    if target is None or key is None:
        raise UserError("target: needs a value of target_metric, such as target=0.98 target_metric=val/acc")
    if metric(key).unit == FRACTION and not 0 < target <= 1:
        hint = f"; write target={target / 100:g}" if 1 < target <= 100 else ""
        raise UserError(f"target: got {target:g}, and {key} is a fraction between 0 and 1{hint}")
    for size in search.sizes:
        batches_of_update({**config, "data": {**config["data"], "batch_size": size}}, ranks_asked(config) or 1)
    if key.startswith(("test/", "train/")):
        raise UserError(f"target_metric: got '{key}', takes a metric of the validation, such as val/acc or val/loss")
    has_options = "batch_size" in config["data"] and config.get("optimizer", {}).get("lr")
    if not (has_options and search.sizes and search.rates and (config["callbacks"] or {}).get("stop_at_target")):
        raise UserError(
            "experiment=time_to_target: needs search.sizes and search.rates, and a training with data.batch_size, "
            "optimizer.lr and callbacks.stop_at_target"
        )
