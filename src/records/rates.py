"""The rate of a run: what `samples_per_sec` of a record's `throughput` is, and how an older record says it.

A run has one rate: the samples of a whole batch, of all devices, over the median time of a step. A few slow steps do
not change it, and neither does an epoch's short last batch. What is derived from it (time steps/s, FLOP/s, MFU) follows
it. `samples_per_sec_mean` is another number, all samples over all of their time. The parts of a step are means as well,
because only means add up: to `step_ms`, the mean step.
"""

from typing import Any

RATE, MEAN_RATE = "samples_per_sec", "samples_per_sec_mean"
_FOLLOWING = ("timesteps_per_sec", "batches_per_sec", "flops_per_sec", "mfu")
_ACCUMULATE = "accumulate_grad_batches"
_ABSURD = 1e12  # no count, time or rate of a run is as large, and none that counts is as small as its inverse


def rate(samples: float, step_ms: float) -> float:
    """Samples/s of steps that hold so many samples each, of all devices, and whose median is `step_ms`."""
    return 1e3 * samples / step_ms


def upgraded(record: dict[str, Any]) -> dict[str, Any]:
    """A record of schema 1 as one of schema 2; any other is returned as it is.

    In schema 1 `samples_per_sec` was the mean rate, what follows it were means, too, and the rate was called
    `samples_per_sec_median` or left out.
    """
    if record.get("schema") != 1:
        return record
    record = {**record, "schema": 2}
    config, throughput = record.get("config"), record.get("throughput")
    if isinstance(config, dict) and config.get("optimized_metric") == "samples_per_sec_median":
        record["config"] = {**config, "optimized_metric": RATE}
    if isinstance(throughput, dict):
        record["throughput"] = _upgraded(throughput, record)
    return record


def _upgraded(old: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    known = {key: value for key, value in old.items() if key not in (RATE, "samples_per_sec_median")}
    asked, accumulated = (_option(record, *path) for path in (("data", "batch_size"), ("trainer", _ACCUMULATE)))
    held, mean, median = (_positive(old.get(key)) for key in ("batch_size", RATE, "step_ms_median"))
    if mean:
        known[MEAN_RATE] = mean
    size = min(filter(None, (asked, held)), default=None)  # the last batch of an epoch may have held a few more
    if size is None or median is None:
        return known
    processes = _positive(record.get("processes", old.get("processes"))) or 1
    known |= {"batch_size": round(size), RATE: rate(size * (accumulated or 1) * processes, median)}
    if mean:
        following = {key: _positive(old.get(key)) for key in _FOLLOWING}
        known |= {key: value * known[RATE] / mean for key, value in following.items() if value}
    return known


def _option(record: dict[str, Any], group: str, name: str) -> float | None:
    config = record.get("config")
    options = config.get(group) if isinstance(config, dict) else None
    return _positive(options.get(name)) if isinstance(options, dict) else None


def _positive(value: Any) -> float | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and 1 / _ABSURD < value < _ABSURD
    return value if usable else None
