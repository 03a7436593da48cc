"""ThroughputMonitor: what every training step cost, in which part, and how much it got done."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from ..hardware.calibration import Calibration, peak_flops_per_sec
from ..hardware.calibration_cache import cached_calibration
from ..hardware.devices import device_name
from ..hardware.flops import count_step
from ..hardware.measure import calibrate_in_subprocess
from ..options.types import NonNegativeInt
from ._batches import samples_in
from ._cost_summary import PART_MS, STEP_MS, CostSummary, bottleneck_of, device_facts, predicted_knee, report
from ._never_raise import never_raise
from ._profiler_hook import attach_profiler_hook, detach_profiler_hook
from ._step_writer import Row, write_steps
from ._stopwatch import PAUSE, Step, Stopwatch, clock_for
from .communication import CommunicationMonitor
from .device import DeviceMonitor

SAMPLES_PER_SEC = "throughput/samples_per_sec"
BATCHES_PER_SEC = "throughput/batches_per_sec"
TIMESTEPS_PER_SEC = "throughput/timesteps_per_sec"
FLOPS_PER_SEC = "throughput/flops_per_sec"
MFU = "throughput/mfu"
KEYS = (SAMPLES_PER_SEC, BATCHES_PER_SEC, TIMESTEPS_PER_SEC, FLOPS_PER_SEC, MFU, STEP_MS, *PART_MS.values())

FLUSH_EVERY = 100  # steps worked out and written together

# What Lightning calls the parts, by the end of its profiler's action names.
_ACTIONS = {
    "train_dataloader_next": "data_wait",
    "batch_to_device": "transfer",
    "training_step": "forward",
    "optimizer_step": "optimizer",
    "lr_scheduler_step": "optimizer",
    "save_checkpoint": PAUSE,
    "on_validation_model_zero_grad": PAUSE,  # the first that is heard of a validation; it ends with on_validation_end
}


class ThroughputMonitor(Callback):
    """Times every training step and its parts, in any Lightning project, without touching the module.

    | Key | Unit | Meaning |
    | --- | --- | --- |
    | `time/step_ms` | ms | wall time of a step: from its batch being asked for to the next one being asked for |
    | `time/data_wait_ms` | ms | waiting for the loader |
    | `time/transfer_ms` | ms | moving the batch to the device |
    | `time/forward_ms` | ms | `training_step` |
    | `time/backward_ms` | ms | the backward pass |
    | `time/optimizer_ms` | ms | zeroing gradients, clipping, the update, the schedule |
    | `time/other_ms` | ms | the rest: framework, callbacks, logging |
    | `throughput/samples_per_sec` | 1/s | over all processes |
    | `throughput/batches_per_sec` | 1/s | steps of one process |
    | `throughput/timesteps_per_sec` | 1/s | for sequences: samples × steps of each |
    | `throughput/flops_per_sec` | FLOP/s | counted forward and backward FLOPs of one process over the step's time |
    | `throughput/mfu` | fraction | of the peak that was measured on this device at this precision |

    The parts add up to the step. On CPU they are read off the host's clock. On CUDA they are the device's own times, by
    events that are read when they have passed: no synchronisation, no `.item()`. On MPS the host's clock is
    read although the device runs behind it: the step and the wait for data are true, and how the rest divides is when
    the host submitted it. torch's timing events for MPS are not used yet, because their times were never confirmed on
    a Mac. Validation, checkpoints and counting FLOPs are left out of every time. With accumulated
    gradients a step is an update, of several batches. Manual optimisation shows the parts that it calls by
    Lightning's names (`manual_backward`, `optimizer.step()`), and the rest as forward.

    The summary has one rate for the run, a whole batch over the median step: see `rates.py`.

    Args:
        every_n_steps: write every n-th step to the loggers; all are measured. 0 writes none, with a warning.
        warmup_steps: left out of the summary, as far as the run is longer.
        batch_size_fn: the samples of a batch, for batches in which the first tensor does not tell.
        timesteps_fn: the time steps of a batch, all samples together; where it is missing, a module's
            `spec.input_shape[0]` is taken if its `spec.kind` is `sequence`.
        flops_per_sample: forward and backward, for modules whose FLOPs cannot be counted.
        calibrate: whether the device's peak may be measured (once, some seconds, cached); otherwise MFU is left out
            unless it was measured before.
        verbose: whether a table is printed when training ends.
    """

    observes_only = True

    def __init__(
        self,
        every_n_steps: NonNegativeInt = 1,
        warmup_steps: NonNegativeInt = 5,
        batch_size_fn: Callable[[Any], int] | None = None,
        timesteps_fn: Callable[[Any], int] | None = None,
        flops_per_sample: float | None = None,
        calibrate: bool = True,
        verbose: bool = True,
    ):
        self.every_n_steps = every_n_steps
        self.warmup_steps = warmup_steps
        self.batch_size_fn = batch_size_fn
        self.timesteps_fn = timesteps_fn
        self.flops_per_sample = flops_per_sample
        self.calibrate = calibrate
        self.verbose = verbose
        self.summary: dict[str, Any] = {}
        self._active = False
        self._device_monitors: list[DeviceMonitor] = []
        self._calibration: Calibration | None = None
        self._peak: float | None = None

    # --- a fit begins and ends ---------------------------------------------------------------------------------------

    @never_raise
    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Know the device's peak before the first step, so that nothing is measured beside the training."""
        if stage == "fit":
            if self.every_n_steps == 0:
                rank_zero_warn("ThroughputMonitor(every_n_steps=0) writes no step to the loggers, only the summary")
            self._calibration = self._calibrate(trainer)
            self._peak = self._peak_of(trainer, pl_module)

    @never_raise
    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Begin anew, whatever an earlier fit has left."""
        self.summary = {}
        self._device = trainer.strategy.root_device
        self._device_monitors = [c for c in trainer.callbacks if isinstance(c, DeviceMonitor)]
        for monitor in self._device_monitors:
            monitor.follow(True)
        self._stopwatch = Stopwatch(clock_for(self._device), partial(self._follow, trainer))
        self._cost = CostSummary(self.warmup_steps)
        self._open: dict[str, float] = {}  # of an update whose batches have not all come
        self._last_step = self._last_update = trainer.global_step
        self._updates = 0
        # Updates after which the summary begins anew: the first one of all, and the end of the warm-up.
        self._uncounted = {min(1, self.warmup_steps), self.warmup_steps} - {0}
        self._flops_known = self.flops_per_sample is not None
        self._flops = self.flops_per_sample
        self._validating = False
        detach_profiler_hook(trainer)
        attach_profiler_hook(trainer, frozenset(_ACTIONS), self._started, self._stopped)
        self._active = True

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Write what is left, sum up, and say it."""
        self._stop(trainer)
        # Every rank takes part, also one that has given up: the others wait for it.
        steps = _steps_of_all(self.summary, trainer) if trainer.world_size > 1 else []
        self._sum_up_and_say(trainer, steps)

    @never_raise
    def _stop(self, trainer: lightning.Trainer) -> None:
        if self._active:
            self._finish(trainer)
            self.summary = self._cost.summary(trainer.world_size)

    @never_raise
    def _sum_up_and_say(self, trainer: lightning.Trainer, steps: list[float | None]) -> None:
        measured, self.summary = self.summary, {}
        without = [rank for rank, step_ms in enumerate(steps) if step_ms is None]
        if len(without) not in (0, len(steps)):
            rank_zero_warn(f"ThroughputMonitor has no summary: process {without[0]} has stopped measuring")
        elif measured:
            self.summary = self._sum_up(measured, trainer, steps)
            if self.verbose and trainer.is_global_zero:
                print("\n" + report(self.summary), flush=True)

    @never_raise
    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        """What was measured until then is true; other processes may be gone, so nothing is gathered from them."""
        if self._active:
            self._finish(trainer)
            self.summary = self._cost.summary(trainer.world_size)

    @never_raise
    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Leave the trainer as it was."""
        detach_profiler_hook(trainer)
        self.disable()

    def disable(self) -> None:
        """Measure no more in this fit."""
        self._active = False
        for monitor in self._device_monitors:
            monitor.follow(False)
        self._device_monitors = []

    # --- a step ------------------------------------------------------------------------------------------------------

    @never_raise
    def _started(self, action: str) -> None:
        if not self._active:
            return
        if action == "train_dataloader_next":
            self._leave_out_warm_up()
            self._stopwatch.begin_step()
        if action == "on_validation_model_zero_grad":
            self._validating = True
        self._stopwatch.enter(_ACTIONS[action])

    def _follow(self, trainer: lightning.Trainer, running: bool) -> None:
        """Have the device sampled in training time alone."""
        for monitor in self._device_monitors:
            if running:
                monitor.resume(trainer)
            else:
                monitor.pause(trainer)

    def _leave_out_warm_up(self) -> None:
        """Where the steps before are not counted in the summary, count nothing that was sampled in them either.

        On CUDA the device is some steps behind the host, so the samples are taken that much early; over many steps that
        makes no difference to their mean.
        """
        if self._updates in self._uncounted:
            self._uncounted.remove(self._updates)
            self._stopwatch.end_step()
            for monitor in self._device_monitors:
                monitor.restart()

    @never_raise
    def _stopped(self, action: str) -> None:
        if self._active and action != "on_validation_model_zero_grad":  # that one ends with the validation
            self._stopwatch.leave(_ACTIONS[action])

    @never_raise
    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """See how much the step holds."""
        step = self._stopwatch.current if self._active else None
        if step is not None:
            step.samples = (self.batch_size_fn or samples_in)(batch)
            step.timesteps = self._timesteps(pl_module, batch, step.samples)
            if not self._flops_known:
                self._stopwatch.enter(PAUSE)
                self._flops = self._count_flops(trainer, pl_module, batch, step.samples)
                self._stopwatch.leave(PAUSE)

    @never_raise
    def on_before_backward(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, loss: Tensor
    ) -> None:
        """Called by automatic and by manual optimisation."""
        if self._active:
            self._stopwatch.enter("backward")

    @never_raise
    def on_after_backward(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """As its beginning."""
        if self._active:
            self._stopwatch.leave("backward")

    @never_raise
    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Note the number of the update, and now and then work out what has been marked."""
        if self._active and self._stopwatch.current is not None:
            self._stopwatch.current.global_step = trainer.global_step
            self._stopwatch.current.trained = True
            if trainer.global_step != self._last_update:
                self._last_update = trainer.global_step
                self._updates += 1
            if len(self._stopwatch.finished) >= FLUSH_EVERY:
                self._work_out(trainer, wait=False)

    @never_raise
    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Validation is not training time."""
        if self._active and not self._validating:
            self._validating = True
            self._stopwatch.enter(PAUSE)

    @never_raise
    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Training goes on."""
        if self._active and self._validating:
            self._validating = False
            self._stopwatch.leave(PAUSE)

    @never_raise
    def on_save_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """The step before a checkpoint ends here, so that the curves reach as far as the checkpoint does."""
        if self._active and self._stopwatch.current is not None and self._stopwatch.current.trained:
            self._stopwatch.end_step()
            self._work_out(trainer, wait=True)

    @never_raise
    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """The last step of an epoch ends here; what is between epochs is no step's."""
        if self._active:
            self._stopwatch.end_step()

    # --- what it comes to --------------------------------------------------------------------------------------------

    def _finish(self, trainer: lightning.Trainer) -> None:
        self._stopwatch.end_step()
        self._work_out(trainer, wait=True)
        self._active = False

    def _work_out(self, trainer: lightning.Trainer, wait: bool) -> None:
        """Turn marks into numbers, as far as they can be read without waiting, and write them."""
        clock, rows = self._stopwatch.clock, []
        if wait and self._stopwatch.finished:
            clock.wait(self._stopwatch.finished[-1].marks[-1][1])
        while self._stopwatch.finished and clock.ready(self._stopwatch.finished[0].marks[-1][1]):
            step = self._stopwatch.finished.popleft()
            if step.trained:
                rows += self._row(step, trainer.world_size)
            for _, mark in step.marks[:-1]:  # the last one is the next step's first
                clock.reuse(mark)
        write_steps(trainer, [row for row in rows if self.every_n_steps and row[0] % self.every_n_steps == 0])

    def _row(self, step: Step, world_size: int) -> list[Row]:
        """The numbers of an update, once all its batches have come."""
        parts = step.parts_ms(self._stopwatch.clock)
        update = self._open
        for key, value in {**parts, "samples": step.samples, "timesteps": step.timesteps, "batches": 1}.items():
            update[key] = update.get(key, 0) + value
        if step.global_step == self._last_step:
            return []
        self._last_step, self._open = step.global_step, {}
        first = not self._cost.updates
        self._cost.add(update)
        # The first step of all pays for what is done once: no rate is read from it.
        return [] if first else [(step.global_step, self._metrics(update, world_size))]

    def _metrics(self, update: dict[str, float], world_size: int) -> dict[str, float]:
        """The one dictionary of everything that is logged of a step."""
        metrics = {name: update[part] for part, name in PART_MS.items()}
        metrics[STEP_MS] = sum(metrics.values())
        seconds = metrics[STEP_MS] / 1e3
        if seconds > 0:
            metrics[BATCHES_PER_SEC] = update["batches"] / seconds
            if update["samples"]:
                metrics[SAMPLES_PER_SEC] = update["samples"] * world_size / seconds
            if update["timesteps"]:
                metrics[TIMESTEPS_PER_SEC] = update["timesteps"] * world_size / seconds
            if self._flops and update["samples"]:
                metrics[FLOPS_PER_SEC] = self._flops * update["samples"] / seconds
                if self._peak:
                    metrics[MFU] = metrics[FLOPS_PER_SEC] / self._peak
        return metrics

    def _sum_up(self, measured: dict[str, Any], trainer: lightning.Trainer, steps: list[float]) -> dict[str, Any]:
        """The run's summary: this process's cost, all processes' rate, and what limits them."""
        summary = dict(measured)
        module = trainer.lightning_module
        summary |= {
            "title": getattr(module, "title", type(module).__name__),
            "device": self._device.type,
            "device_name": device_name(self._device),
            "precision": str(trainer.precision),
        }
        if trainer.world_size > 1:
            summary |= _over_processes(steps)
        for monitor in (c for c in trainer.callbacks if isinstance(c, CommunicationMonitor)):
            summary |= monitor.result()
        if self._flops:
            summary["flops_per_sample"] = self._flops
            summary["flops_per_sec"] = self._flops * summary["samples_per_sec"] / trainer.world_size
            if self._peak:
                summary["peak_flops_per_sec"] = self._peak
                summary["mfu"] = summary["flops_per_sec"] / self._peak
        if self._device_monitors:
            summary |= device_facts(self._device_monitors[0].result(), summary)
        verdict = bottleneck_of(summary, self._calibration)
        if verdict:
            summary["limiter"] = {"kind": verdict.kind, "share": verdict.share, "advice": verdict.advice}
            knee = predicted_knee(verdict, summary["batch_size"], summary["device"])
            if knee:
                summary["limiter"]["predicted_knee"] = knee
        return summary

    def _calibrate(self, trainer: lightning.Trainer) -> Calibration | None:
        """The device's measured abilities: from the cache, or measured now, by one process with nothing beside it."""
        device = trainer.strategy.root_device
        found = cached_calibration(device)
        if found is None and self.calibrate and trainer.is_global_zero:
            print(f"measuring what this {device.type} can do; once, some seconds …", flush=True)
            found = calibrate_in_subprocess(device)
        return found

    def _peak_of(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, shares: Mapping[str, float] | None = None
    ) -> float | None:
        found = self._calibration
        return peak_flops_per_sec(found, trainer.precision, module, shares) if found else None

    def _count_flops(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, batch: Any, samples: int
    ) -> float | None:
        """Forward and backward FLOPs a sample; None, and said once, where they cannot be counted."""
        self._flops_known = True
        counted = count_step(module, batch, samples)
        if counted is None:
            rank_zero_warn(f"The FLOPs of {type(module).__name__} cannot be counted: no FLOP/s and no MFU.")
            return None
        self._peak = self._peak_of(trainer, module, counted.shares)
        return counted.total

    def _timesteps(self, module: lightning.LightningModule, batch: Any, samples: int) -> int:
        if self.timesteps_fn is not None:
            return self.timesteps_fn(batch)
        spec = getattr(module, "spec", None)
        return samples * spec.input_shape[0] if getattr(spec, "kind", None) == "sequence" else 0


def _steps_of_all(summary: dict[str, Any], trainer: lightning.Trainer) -> list[float | None]:
    """The mean step of each rank in ms; None of a rank that has not measured."""
    steps: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(steps, summary.get("step_ms"))
    return steps


def _over_processes(steps: list[float]) -> dict[str, Any]:
    """How many processes there are, and the mean step of the slowest and of the fastest."""
    return {
        "processes": len(steps),
        "slowest_process": steps.index(max(steps)),
        "slowest_step_ms": max(steps),
        "fastest_step_ms": min(steps),
    }
