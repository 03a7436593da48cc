"""The cost of a run's updates, from the table: rates, quantiles, means of the parts, and the metrics of each update."""

import math
from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from ..hardware.slow_rank import RankTimes, block_means
from ..records.intervals import median_interval
from ..records.rates import rate
from ..records.step_parts import PARTS, StepPart
from ._table import MIN_UNDISTURBED, WORK, UpdateTable
from ._writer import Row


def compute_cost(table: UpdateTable, replicas: int = 1) -> dict[str, Any]:
    """Return the cost of this rank's counted updates; empty without a counted update, or where the clock has jumped.

    `samples_per_sec_mean` is the sum of all samples ÷ their time. `samples_per_sec` is the run's rate (records/rates.py): the
    samples of a whole batch ÷ its time. `step_ms_median`, `_p10`, `_p90` and `_p99` are of `UpdateTable.in_median`.
    `step_ms` and the parts are means, which add up. The rates of samples and time steps are those of all ranks.

    Args:
        table: of the fit.
        replicas: how many batches the ranks train on at the same time.
    """
    rows, in_median = table.rows[table.after_warmup()], table.in_median()
    seconds = float(rows["parts_ms"].sum(dtype=float)) / 1e3
    if not in_median.any() or not seconds > 0:
        return {}
    step_ms = table.step_ms(in_median)
    p10, median, p90, p99 = (float(ms) for ms in numpy.quantile(step_ms, (0.1, 0.5, 0.9, 0.99)))
    if median <= 0:
        return {}
    samples, timesteps = (float(rows[name].sum(dtype=float)) for name in ("samples", "timesteps"))
    batches, waits = float(table.rows["batches"][in_median].mean(dtype=float)), rows["waits_ms"][rows["waits_ms"] > 0]
    interval, undisturbed = median_interval(step_ms), int(table.undisturbed().sum())
    # Without samples the batches have no tensors, and the rate is unknown.
    samples_per_sec = rate(table.whole_batch_size() * replicas, table.whole_batch_ms()) if samples else None
    if samples_per_sec is None:
        timesteps_per_sec = rate(float(table.rows["timesteps"][in_median].mean(dtype=float)) * replicas, median)
    else:
        timesteps_per_sec = samples_per_sec * timesteps / samples
    cost: dict[str, Any] = {
        "updates": len(rows),
        "samples": int(samples),
        "seconds": seconds,
        "batch_size": table.batch_size(),
        "batch_size_varies": table.sizes_vary(of_batches=True) or None,
        "update_size_varies": table.sizes_vary(of_batches=False) or None,
        "batches": batches if batches != 1 else None,
        "batches_per_sec": rate(batches, table.whole_batch_ms()),
        "step_ms": 1e3 * seconds / len(rows),
        "step_ms_median": median,
        "step_ms_p10": p10,
        "step_ms_p90": p90,
        "step_ms_p99": p99,
        "parts_ms": _timed_parts(rows["parts_ms"].mean(0, dtype=float), table.parts),
        "work_ms_median": float(numpy.median(table.rows["parts_ms"][in_median][:, WORK].sum(1))),
        "samples_per_sec": samples_per_sec,
        "samples_per_sec_mean": samples * replicas / seconds or None,
        "step_ms_interval": list(interval) if numpy.isfinite(interval).all() else None,
        "undisturbed_steps": undisturbed if undisturbed >= MIN_UNDISTURBED else None,  # the median is of these only
        "communication_ms": float(waits.mean(dtype=float)) if len(waits) else None,
        "excluded_ms": float(rows["excluded_ms"].mean()) or None,
        "timesteps_per_sec": timesteps_per_sec if timesteps else None,
    }
    return {key: value for key, value in cost.items() if value is not None}


def rank_times(table: UpdateTable) -> RankTimes:
    """Return the times of this rank in its counted updates, without waits for other ranks.

    `other` is left out: in it rank 0 broadcasts signals, and the other ranks wait for it.
    """
    rows = table.rows[table.after_warmup()]
    has_waits = rows["waits_ms"] > 0  # else the share of waits in the computing time is unknown
    knows_waits = bool(has_waits.any())
    rows = rows[has_waits] if knows_waits else rows
    parts = dict(zip(PARTS, rows["parts_ms"].astype(float).T, strict=True))
    compute = parts[StepPart.FORWARD] + parts[StepPart.BACKWARD] + parts[StepPart.OPTIMIZER] - rows["waits_ms"]
    return {
        "input_ms": block_means(parts[StepPart.DATA_WAIT]),
        "transfer_ms": block_means(parts[StepPart.TRANSFER]),
        "compute_ms": block_means(compute) if knows_waits else [],
    }


def median_step(table: UpdateTable) -> dict[str, float]:
    """Return the milliseconds of each part in the update of median length; empty without a counted update."""
    rows = table.rows[table.in_median()]
    if not len(rows):
        return {}
    order = numpy.argsort(rows["parts_ms"].sum(1, dtype=float))
    return _timed_parts(rows["parts_ms"][order[len(rows) // 2]], table.parts)


def _timed_parts(ms: NDArray[Any], parts: Sequence[str]) -> dict[str, float]:
    """Return the milliseconds by part, for the parts that are timed, given those of all `PARTS`."""
    return {part: value for part, value in zip(PARTS, ms.tolist(), strict=True) if part in parts}


def compute_metrics(
    rows: NDArray[Any],
    replicas: int,
    flops_per_sample: float | None = None,
    peak: float | None = None,
    parts: Sequence[str] = PARTS,
) -> list[Row]:
    """Return the step and the metrics of each update, given the updates' rows of the table.

    The rates of samples and time steps are those of all ranks, FLOP/s that of one rank. Metrics that are unknown for an update
    are left out, and so are parts that are not timed.
    """
    step_ms = rows["parts_ms"].sum(1, dtype=float)
    timed = {part: rows["parts_ms"][:, column].astype(float) for column, part in enumerate(PARTS) if part in parts}
    metrics = {f"time/{part}_ms": ms for part, ms in timed.items()}
    metrics["time/step_ms"] = step_ms
    seconds = numpy.where(step_ms > 0, step_ms, numpy.nan) / 1e3
    samples, timesteps = (numpy.where(rows[name] > 0, rows[name], numpy.nan) for name in ("samples", "timesteps"))
    metrics["throughput/batches_per_sec"] = rows["batches"] / seconds
    metrics["throughput/samples_per_sec"] = samples * replicas / seconds
    metrics["throughput/timesteps_per_sec"] = timesteps * replicas / seconds
    if flops_per_sample:
        metrics["throughput/flops_per_sec"] = flops_per_sample * samples / seconds
        if peak:
            metrics["throughput/mfu"] = metrics["throughput/flops_per_sec"] / peak
    values = zip(*(column.tolist() for column in metrics.values()), strict=True)
    numbers = ({key: value for key, value in zip(metrics, row, strict=True) if not math.isnan(value)} for row in values)
    return [*zip(rows["step"].tolist(), numbers, strict=True)]
