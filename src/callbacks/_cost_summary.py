"""What the steps of a run cost: the metrics of each update, and their sums, means and median over the run."""

import statistics
from array import array
from collections.abc import Mapping
from typing import Any

import numpy

from ..records.rates import rate
from ..records.step_parts import PARTS
from ._flops_meter import FlopsMeter
from ._stopwatch import Clock, Step


class UpdateBuilder:
    """Joins the batches of an update, which is one batch unless gradients are accumulated."""

    def __init__(self, last_step: int):
        self._last_step = last_step  # Lightning's `global_step` before the first batch
        self._open: dict[str, float] = {}

    def add(self, step: Step, clock: Clock) -> dict[str, float] | None:
        """Add a batch. Returns the update, its parts in ms and what it holds, if this was its last batch."""
        update = step.parts_ms(clock)
        update |= {"samples": step.samples, "timesteps": step.timesteps, "batches": 1, "watched": step.watched}
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


class CostSummary:
    """Adds up updates as they come, without the first `warmup` ones as far as there are more."""

    def __init__(self, warmup: int):
        self.warmup = warmup
        self.updates = 0
        self._kept: list[Mapping[str, float]] = []  # the warm-up, for runs that are no longer than it
        self._watched: list[Mapping[str, float]] = []
        self._sums: dict[str, float] = {}
        self._step_ms = array("d")
        self._samples = array("d")  # of each of these steps
        self._batches: dict[float, float] = {}  # by the samples of a step

    def add(self, update: Mapping[str, float]) -> None:
        """Add an update: its parts in ms, its `samples`, `timesteps` and `batches`, and whether it was `watched`."""
        self.updates += 1
        if update.get("watched"):
            self._watched.append(dict(update))
        elif self.updates <= self.warmup:
            self._kept.append(dict(update))
        else:
            self._count(update)

    def summary(self, world_size: int = 1) -> dict[str, Any]:
        """The cost over the counted updates of this rank; empty if there is none.

        `batch_size` is that of a whole batch, and `step_ms_median`, `_p10` and `_p90` are of the steps that held one.
        `samples_per_sec` is the run's rate (see records/rates.py), and `samples_per_sec_mean` all samples over all of
        their time. `step_ms` and the parts are means, which add up. Samples/s and time steps/s are those of all ranks.
        """
        if not self._step_ms:  # no longer than the warm-up: all but the first update, which pays for one-time work
            for update in self._kept[1:] or self._watched or self._kept:
                self._count(update)
            self._kept = []
        steps, sums = len(self._step_ms), self._sums
        seconds = sum(self._step_ms) / 1e3
        if not steps or seconds <= 0:
            return {}
        held, ordered = self._whole_steps()
        batches = self._batches.get(held, sums["batches"] / steps)
        median, (low, high) = statistics.median(ordered), numpy.quantile(ordered, (0.1, 0.9))
        if median <= 0:
            return {}
        result = {
            "updates": steps,
            "samples": int(sums["samples"]),
            "seconds": seconds,
            "batch_size": round(held / batches),
            "batches_per_sec": rate(batches, median),
            "samples_per_sec": rate(held * world_size, median),
            "samples_per_sec_mean": sums["samples"] * world_size / seconds,
            "step_ms": 1e3 * seconds / steps,
            "step_ms_median": median,
            "step_ms_p10": float(low),
            "step_ms_p90": float(high),
            "parts_ms": {part: sums[part] / steps for part in PARTS},
        }
        if sums["timesteps"] and sums["samples"]:
            result["timesteps_per_sec"] = result["samples_per_sec"] * sums["timesteps"] / sums["samples"]
        return result

    def _whole_steps(self) -> tuple[float, list[float]]:
        """The samples of a whole step, and the times of the whole steps in order.

        It is the size with which most of the samples were trained. If that is less than half of them, sizes vary by
        design: then it is the mean size, and all steps count.
        """
        trained: dict[float, float] = {}
        for samples in self._samples:
            trained[samples] = trained.get(samples, 0.0) + samples
        held = max(trained, key=lambda samples: (trained[samples], samples))
        if 2 * trained[held] < self._sums["samples"]:
            return self._sums["samples"] / len(self._samples), sorted(self._step_ms)
        pairs = zip(self._samples, self._step_ms, strict=True)
        return held, sorted(ms for samples, ms in pairs if samples == held)

    def _count(self, update: Mapping[str, float]) -> None:
        for key, value in update.items():
            self._sums[key] = self._sums.get(key, 0.0) + value
        self._step_ms.append(sum(update[part] for part in PARTS))
        self._samples.append(update["samples"])
        self._batches[update["samples"]] = update["batches"]
