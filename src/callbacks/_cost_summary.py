"""What the steps of a run cost: the metrics of each update, and their sums, means and median over the run."""

from array import array
from collections.abc import Mapping
from typing import Any

import numpy

from ..records.rates import FIT_RATE, rate
from ..records.step_parts import PARTS, StepPart
from ._flops_meter import FlopsMeter
from ._stopwatch import PREPARING, WRITING, Clock, Step

# A stall is a step that takes more than STALL_RATIO × the median and more than STALL_MS longer than it. The ratio lets
# pass what belongs to a model, such as sequences of different lengths. The 50 ms let pass what a scheduler or a garbage
# collector does to a short step: such hiccups are many, and the p99 shows them. A rule by standard deviations would
# raise its own threshold with every stall; one by the median does not.
STALL_RATIO, STALL_MS = 3.0, 50.0


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
            update = {key: update.get(key, 0.0) + self._open.get(key, 0.0) for key in {**self._open, **update}}
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
        self._trained = 0.0  # samples of all updates, warm-up included
        self._kept: list[Mapping[str, float]] = []  # the warm-up, for runs that are no longer than it
        self._watched: list[Mapping[str, float]] = []
        self._sums: dict[str, float] = {}
        self._step_ms = array("d")
        self._work_ms = array("d")  # of these steps, without waiting for data and copying them
        self._samples = array("d")  # of each of these steps
        self._batches: dict[float, float] = {}  # by the samples of a step

    def add(self, update: Mapping[str, float]) -> None:
        """Add an update: its parts in ms, its `samples`, `timesteps` and `batches`, and whether it was `watched`."""
        self.updates += 1
        self._trained += update["samples"]
        if update.get("watched"):
            self._watched.append(dict(update))
        elif self.updates <= self.warmup:
            self._kept.append(dict(update))
        else:
            self._count(update)

    def summary(self, world_size: int = 1, fit_seconds: float | None = None) -> dict[str, Any]:
        """The cost over the counted updates of this rank; empty if there is none.

        `batch_size` is that of a whole batch, and `step_ms_median`, `_p10`, `_p90` and `_p99` are of the steps that held
        one. `samples_per_sec` is the run's rate (see records/rates.py), and `samples_per_sec_mean` all samples over all
        of their time. `step_ms` and the parts are means, which add up. Samples/s and time steps/s are those of all ranks.

        Args:
            world_size: the number of ranks.
            fit_seconds: wall time of the whole fit without the time that counts FLOPs and memory, for `samples_per_sec_fit`: every sample that was trained, those of
                the warm-up included, over it.
        """
        self._count_short_run()
        steps, sums = len(self._step_ms), self._sums
        seconds = sum(self._step_ms) / 1e3
        if not steps or seconds <= 0:
            return {}
        held, whole = self._whole_steps()
        batches = self._batches.get(held, sums["batches"] / steps)
        low, median, high, highest = (float(ms) for ms in numpy.quantile(whole, (0.1, 0.5, 0.9, 0.99)))
        if median <= 0:
            return {}
        result: dict[str, Any] = {
            "updates": steps,
            "samples": int(sums["samples"]),
            "seconds": seconds,
            "batch_size": round(held / batches),
            "batches_per_sec": rate(batches, median),
            "samples_per_sec": rate(held * world_size, median),
            "samples_per_sec_mean": sums["samples"] * world_size / seconds,
            "step_ms": 1e3 * seconds / steps,
            "step_ms_median": median,
            "step_ms_p10": low,
            "step_ms_p90": high,
            "step_ms_p99": highest,
            "parts_ms": {part: sums[part] / steps for part in PARTS},
            "work_ms_median": float(numpy.median(self._work_ms)),
            **self._stalls(median),
        }
        if fit_seconds:
            result |= {"fit_seconds": fit_seconds, FIT_RATE: self._trained * world_size / fit_seconds}
        if WRITING in sums:
            result["writing_ms"] = sums[WRITING] / steps
        if any(hook in sums for hook in PREPARING):
            result["preparing_ms"] = {hook: sums[hook] / steps for hook in PREPARING if hook in sums}
        if sums["timesteps"] and sums["samples"]:
            result["timesteps_per_sec"] = result["samples_per_sec"] * sums["timesteps"] / sums["samples"]
        return result

    def _count_short_run(self) -> None:
        """Count a run that is no longer than the warm-up: all but the first update, which pays for one-time work."""
        if not self._step_ms:
            for update in self._kept[1:] or self._watched or self._kept:
                self._count(update)
            self._kept = []

    def _stalls(self, median: float) -> dict[str, float]:
        """How many steps were stalls, and the seconds that they took beyond the median."""
        step_ms = numpy.frombuffer(self._step_ms)
        stalled = step_ms[step_ms > max(STALL_RATIO * median, median + STALL_MS)]
        return {"stalls": len(stalled), "stall_seconds": float((stalled - median).sum()) / 1e3}

    def _whole_steps(self) -> tuple[float, list[float]]:
        """The samples of a whole step, and the times of the whole steps in ms.

        It is the size with which most of the samples were trained. If that is less than half of them, sizes vary by
        design: then it is the mean size, and all steps count.
        """
        trained: dict[float, float] = {}
        for samples in self._samples:
            trained[samples] = trained.get(samples, 0.0) + samples
        held = max(trained, key=lambda samples: (trained[samples], samples))
        if 2 * trained[held] < self._sums["samples"]:
            return self._sums["samples"] / len(self._samples), list(self._step_ms)
        pairs = zip(self._samples, self._step_ms, strict=True)
        return held, [ms for samples, ms in pairs if samples == held]

    def _count(self, update: Mapping[str, float]) -> None:
        for key, value in update.items():
            self._sums[key] = self._sums.get(key, 0.0) + value
        self._step_ms.append(sum(update[part] for part in PARTS))
        self._work_ms.append(sum(update[part] for part in PARTS if part not in (StepPart.DATA_WAIT, StepPart.TRANSFER)))
        self._samples.append(update["samples"])
        self._batches[update["samples"]] = update["batches"]
