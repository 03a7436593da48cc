"""What is logged of a step: the metrics of one update."""

from collections.abc import Mapping

from ..records.step_parts import PARTS
from ._flops_meter import FlopsMeter
from ._stopwatch import Clock, Step


class UpdateBuilder:
    """Joins the batches of an update, which is one batch unless gradients are accumulated.

    Args:
        last_step: Lightning's `global_step` before the first batch.
    """

    def __init__(self, last_step: int):
        self._last_step = last_step
        self._open: dict[str, float] = {}

    def add(self, step: Step, clock: Clock) -> dict[str, float] | None:
        """Add a batch. Returns the update, its parts in ms and what it holds, if this was its last batch."""
        update = step.parts_ms(clock)
        update |= {"samples": step.samples, "timesteps": step.timesteps, "batches": 1}
        if self._open:
            update = {key: value + self._open[key] for key, value in update.items()}
        if step.global_step == self._last_step:
            self._open = update
            return None
        self._last_step, self._open = step.global_step, {}
        return update


def step_metrics(update: Mapping[str, float], world_size: int, flops: FlopsMeter) -> dict[str, float]:
    """The metrics of an update. Samples and time steps are those of all ranks, FLOP/s those of one."""
    metrics = {f"time/{part}_ms": update[part] for part in PARTS}
    metrics["time/step_ms"] = sum(metrics.values())
    seconds = metrics["time/step_ms"] / 1e3
    if seconds > 0:
        metrics["throughput/batches_per_sec"] = update["batches"] / seconds
        if update["samples"]:
            metrics["throughput/samples_per_sec"] = update["samples"] * world_size / seconds
        if update["timesteps"]:
            metrics["throughput/timesteps_per_sec"] = update["timesteps"] * world_size / seconds
        if flops.per_sample and update["samples"]:
            metrics["throughput/flops_per_sec"] = flops.per_sample * update["samples"] / seconds
            if flops.peak:
                metrics["throughput/mfu"] = metrics["throughput/flops_per_sec"] / flops.peak
    return metrics
