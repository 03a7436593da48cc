"""Older records, rewritten step by step to what the present version writes.

| schema | change |
| --- | --- |
| 2 | `throughput.samples_per_sec` is the rate at the median step; it was the mean rate (`samples_per_sec_mean` now) |
| 3 | `throughput.limiter` is called `throughput.bottleneck` |
"""

from typing import Any

from .rates import MEAN_RATE, RATE, rate
from .values import at, positive

SCHEMA = 3
_OLD_RATE = "samples_per_sec_median"
_DERIVED = ("timesteps_per_sec", "batches_per_sec", "flops_per_sec", "mfu")


def upgraded(record: dict[str, Any]) -> dict[str, Any]:
    """The record in the present schema; one whose schema is not an older one is returned as it is."""
    for schema, step in enumerate(_STEPS, 1):
        if record.get("schema") == schema:
            record = {**step(record), "schema": schema + 1}
    return record


def _one_rate(record: dict[str, Any]) -> dict[str, Any]:
    """Schema 1 had a mean rate, and the rate at the median step under another name or not at all."""
    config, throughput = record.get("config"), record.get("throughput")
    changed: dict[str, Any] = {}
    if isinstance(config, dict) and config.get("optimized_metric") == _OLD_RATE:
        changed["config"] = {**config, "optimized_metric": RATE}
    if isinstance(throughput, dict):
        changed["throughput"] = _at_median_step(throughput, record)
    return {**record, **changed}


def _at_median_step(old: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    new = {key: value for key, value in old.items() if key not in (RATE, _OLD_RATE)}
    asked = positive(at(record, "config.data.batch_size"))
    accumulated = positive(at(record, "config.trainer.accumulate_grad_batches")) or 1
    held, mean, median = (positive(old.get(key)) for key in ("batch_size", RATE, "step_ms_median"))
    if mean:
        new[MEAN_RATE] = mean
    size = min(filter(None, (asked, held)), default=None)  # schema 1 could record the size of an epoch's last batch
    if size is None or median is None:
        return new
    processes = positive(record.get("processes", old.get("processes"))) or 1
    new |= {"batch_size": round(size), RATE: rate(size * accumulated * processes, median)}
    if mean:
        derived = {key: positive(old.get(key)) for key in _DERIVED}
        new |= {key: value * new[RATE] / mean for key, value in derived.items() if value}
    return new


def _limiter_is_bottleneck(record: dict[str, Any]) -> dict[str, Any]:
    throughput = record.get("throughput")
    if not isinstance(throughput, dict) or "limiter" not in throughput:
        return record
    renamed = {"bottleneck" if key == "limiter" else key: value for key, value in throughput.items()}
    return {**record, "throughput": renamed}


_STEPS = (_one_rate, _limiter_is_bottleneck)  # from schema 1 to 2, from 2 to 3
