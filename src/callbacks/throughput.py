"""ThroughputMonitor: what every training step costs, in which part, and how much it gets done."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from inspect import signature
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from .._lightning import callbacks_of, overrides
from ..distributed.gather import gather
from ..errors import in_one_line
from ..hardware.contention import cpu_seconds, others_share
from ..hardware.devices import cache_bytes
from ..options.types import NonNegativeInt
from ..records.operations import StepOperations
from ..records.step_times import StepTimes
from ..records.terminal import block, is_verbose, say
from ._batches import samples_in, timesteps_in
from ._cost_summary import step_metrics
from ._exclusions import add_exclusion, remove_exclusion, writing
from ._flops_meter import FlopsMeter
from ._followed_devices import FollowedDevices
from ._measurement import Measurement
from ._never_raise import never_raise
from ._profiler_hook import ProfilerHook, attach_profiler_hook, detach_profiler_hook
from ._run_summary import Seen, run_summary, without_bottleneck
from ._run_words import details, headline
from ._setting import own_config
from ._step_operations import step_operations
from ._step_watch import StepWatch
from ._step_writer import Table, write_tables
from ._stopwatch import PARTS_OF_ACTIONS, PAUSE, PREPARING, VALIDATION, Stopwatch, clock_for
from .communication import CommunicationMonitor

# Training on a batch: it begins after on_train_batch_start, where modes of other callbacks may begin.
_BATCH = "run_training_batch"


class ThroughputMonitor(Callback):
    """Times every training step and its parts, in any Lightning project, without touching the module.

    Logs `time/step_ms`, its parts and `throughput/…` at every optimizer step; docs/measuring.md has units and meanings.
    Validation and checkpoints are excluded from the step. With accumulated gradients a step is an
    update of several batches.

    The times are the device's own on CUDA, read from events that have passed: no synchronisation, no `.item()`.
    Elsewhere they are the host's. On MPS the step and the wait for data are true, and the other parts are the times at
    which the host submitted the work. Manual optimisation shows the parts that it calls by Lightning's names
    (`manual_backward`, `optimizer.step()`), and the rest as forward.

    After the fit `summary` has the run's cost, rates and bottleneck; the run's record has it as `throughput`. Where it has no
    bottleneck, FLOP/s or MFU, `summary["missing"]` says why. `operations` has those of a step, if they were recorded.

    Args:
        every_n_steps: write every n-th step to the loggers; all are measured. 0 writes none, with a warning.
        warmup_steps: left out of the summary, as far as the run is longer.
        batch_size_fn: the samples of a batch, for batches in which the length of the first tensor is another number.
        timesteps_fn: the time steps of a batch, all samples together. Without it a module whose `spec.kind` is
            `sequence` has `spec.input_shape[0]` time steps a sample.
        flops_per_sample: forward and backward, for modules whose steps cannot be recorded: compiled and sharded ones.
        calibrate: whether the device's peak may be measured (once, for some seconds; the result is cached). Without
            a measured peak there is no MFU.
        record_operations: whether the operations of the updates 2 to 4 are recorded: the FLOPs of a sample, and evidence
            for the bottleneck. These updates are slower, and no rate is read from them.
        verbose: whether the summary is printed when training ends; `train.py` prints it with the run's last lines.
        details: whether TensorBoard gets the parts of a step, FLOP/s and batches/s too. CSV has them in any case.
    """

    observes_only = True

    def __init__(
        self,
        every_n_steps: NonNegativeInt | None = 1,
        warmup_steps: NonNegativeInt = 5,
        batch_size_fn: Callable[[Any], int] | None = None,
        timesteps_fn: Callable[[Any], int] | None = None,
        flops_per_sample: float | None = None,
        calibrate: bool = True,
        record_operations: bool = True,
        verbose: bool = True,
        details: bool = False,
    ):
        self.every_n_steps = 1 if every_n_steps is None else every_n_steps
        self.warmup_steps = warmup_steps
        self.batch_size_fn = batch_size_fn
        self.timesteps_fn = timesteps_fn
        self.flops_per_sample = flops_per_sample
        self.calibrate = calibrate
        self.record_operations = record_operations
        self.verbose = verbose
        self.details = details
        self.summary: dict[str, Any] = {}
        self.failure: str | None = None  # the exception that has ended the measurement
        self.operations: StepOperations | None = None
        self._active = False
        self._hook: ProfilerHook | None = None
        self._devices = FollowedDevices()
        self._watch = StepWatch(record_operations)
        self._flops = FlopsMeter(flops_per_sample)

    def __getstate__(self) -> dict[str, Any]:
        """For a process that is spawned: the arguments and the results, without what belongs to a fit."""
        known = (*signature(type(self).__init__).parameters, "summary", "operations", "failure")
        return {name: value for name, value in vars(self).items() if name in known}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The inverse of `__getstate__`."""
        ThroughputMonitor.__init__(self)
        vars(self).update(state)
        self._watch, self._flops = StepWatch(self.record_operations), FlopsMeter(self.flops_per_sample)

    def record_facts(self) -> dict[str, Any]:
        """For the run's record: the summary, as `throughput`."""
        return {"throughput": self.summary}

    def summary_lines(self) -> list[str]:
        """For the run's last lines: what ran, how fast, what limits it, and what to try."""
        return headline(self.summary) if self.verbose else []

    def detail_lines(self) -> list[str]:
        """For the details of a run: every number, and the evidence."""
        return details(self.summary) if self.verbose else []

    def step_times(self) -> StepTimes | None:
        """After the fit: the time of each measured step, to be kept with `write_step_times`; None without a summary."""
        measured = getattr(self, "_measured", None)  # which a process that was given the summary does not have
        return measured.cost.steps.times() if measured and "updates" in self.summary else None

    @property
    def measurement(self) -> Measurement | None:
        """What is being measured in this fit; None where nothing is."""
        return self._measured if self._active else None

    @override
    @never_raise
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.summary, self.failure = without_bottleneck("no batch was trained"), None
            if self.every_n_steps == 0:
                rank_zero_warn("ThroughputMonitor(every_n_steps=0) writes no step to the loggers, only the summary")
            self._flops.calibrate(trainer, pl_module, measure=self.calibrate)

    @override
    @never_raise
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = trainer.strategy.root_device
        self.summary, self.operations = {}, None
        self._devices = FollowedDevices(trainer)
        self._stopwatch = Stopwatch(clock_for(device), self._devices.sample)
        self._watch.attach(trainer, pl_module, cache_bytes(device), lambda: self._stopwatch.part)
        self._measured = Measurement(
            self._stopwatch, device, self.warmup_steps, self._watch.last, trainer.global_step, self._devices.restart
        )
        self._flops.restart()
        self._validating, self._writes = False, True
        detach_profiler_hook(trainer, self._hook)
        unused = {hook for hook in PREPARING if not overrides(trainer, hook)}
        endings = frozenset((*PARTS_OF_ACTIONS, _BATCH)) - unused
        self._hook = attach_profiler_hook(trainer, endings, self._on_action_start, self._on_action_end)
        self._active = True
        add_exclusion(trainer, self._exclude)
        self._started = time.perf_counter()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop(trainer)
        # A rank that has stopped measuring gives None; the others wait for it.
        steps = gather(self.summary.get("step_ms"), trainer.world_size) if trainer.world_size > 1 else []
        self._sum_up(trainer, steps)
        self._conclude(trainer, steps)

    @override
    @never_raise
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # Other ranks may be gone: nothing is gathered from them, and the device may wait for them for ever.
        self._stop(trainer, wait=False)
        self.summary |= without_bottleneck(f"the fit ended with {type(exception).__name__}")

    @override
    @never_raise
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        detach_profiler_hook(trainer, self._hook)
        self.disable()

    def disable(self) -> None:
        """Measure no more in this fit."""
        self._active = False
        self._watch.stop()
        self._devices.release()

    @never_raise
    def begin_stretch(self, turn: int) -> None:
        """Between two updates, begin a stretch that lasts until `end_stretch`; from now on none begins by the clock."""
        if self._active:
            self._measured.stretches.by_turns = True
            self._measured.stretches.begin(self._measured.updates, turn)

    @never_raise
    def end_stretch(self, trainer: Trainer) -> None:
        """After an update, end the stretch and read its steps; waits for the device. `measurement.last_stretch()` has them."""
        if self._active:
            self._measured.end()
            self._flush(trainer, wait=True)

    def _exclude(self, part: str) -> AbstractContextManager[None]:
        return self._stopwatch.excluding(part) if self._active else nullcontext()

    @never_raise
    def _on_action_start(self, action: str) -> None:
        if not self._active:
            return
        if action == _BATCH:
            step = self._stopwatch.current
            self._watch.start(self._measured.updates + 1, step.samples if step is not None else 0)
            if step is not None:
                step.watched = self._watch.active
            return
        if action == "train_dataloader_next" or PARTS_OF_ACTIONS[action] == PAUSE:
            self._watch.stop()
        if action == "train_dataloader_next":
            self._measured.begin_step()
        if action == VALIDATION:
            self._validating = True
        self._stopwatch.enter(PARTS_OF_ACTIONS[action])

    @never_raise
    def _on_action_end(self, action: str) -> None:
        if self._active and action not in (_BATCH, VALIDATION):
            self._stopwatch.leave(PARTS_OF_ACTIONS[action])

    @override
    @never_raise
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        step = self._stopwatch.current if self._active else None
        if step is not None:
            step.samples = (self.batch_size_fn or samples_in)(batch)
            step.timesteps = self.timesteps_fn(batch) if self.timesteps_fn else timesteps_in(pl_module, step.samples)

    @override
    @never_raise
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._active:  # automatic and manual optimisation both call this hook
            self._stopwatch.enter("backward")

    @override
    @never_raise
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._active:
            self._stopwatch.leave("backward")

    @override
    @never_raise
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._active and self._stopwatch.current is not None:
            self._stopwatch.current.global_step = trainer.global_step
            self._stopwatch.current.trained = True
            if self._measured.end_batch(trainer.global_step):
                self._flush(trainer, wait=False)

    @override
    @never_raise
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._active and not self._validating:
            self._validating = True
            self._watch.stop()
            self._stopwatch.enter(PAUSE)

    @override
    @never_raise
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._active and self._validating:
            self._validating = False
            self._stopwatch.leave(PAUSE)

    @override
    @never_raise
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # The step before a checkpoint ends here, so that the curves reach as far as the checkpoint.
        if self._active and self._stopwatch.current is not None and self._stopwatch.current.trained:
            self._stopwatch.end_step()
            self._flush(trainer, wait=True)

    @override
    @never_raise
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._active:  # the time between two epochs is in no step
            self._watch.stop()
            self._stopwatch.end_step()

    def _flush(self, trainer: Trainer, wait: bool) -> None:
        """Turn marks into numbers, as far as they can be read without waiting, and write them."""
        with writing(trainer):
            if self._watch.is_over:
                self._flops.learn(trainer, trainer.lightning_module, self._watch)
            numbers, updates, chosen = self._measured.read(wait)
            if self.every_n_steps and self._writes:
                chosen &= numbers % self.every_n_steps == 0
                tables = step_metrics(numbers[chosen], updates[chosen], trainer.world_size, self._flops)
                self._write(trainer, tables)

    def _write(self, trainer: Trainer, tables: list[Table]) -> None:
        """Write to the loggers. One that fails gets no more curves, and the steps are measured on."""
        try:
            write_tables(trainer, tables, self.details)
        except Exception as error:  # noqa: BLE001 - anybody's logger
            self._writes = False
            with suppress(Warning):  # where warnings are errors
                rank_zero_warn(f"ThroughputMonitor writes no more curves: {in_one_line(error)}")

    @never_raise
    def _stop(self, trainer: Trainer, wait: bool = True) -> None:
        remove_exclusion(trainer, self._exclude)
        if self._active:
            self._watch.stop()
            self._measured.end()
            if wait:  # else in the middle of an update, which may be one that is recorded
                self._flops.learn(trainer, trainer.lightning_module, self._watch)
            self._flush(trainer, wait)
            self._active = False
            seconds = time.perf_counter() - self._started - self._stopwatch.measuring_seconds
            self.summary = self._measured.summary(trainer.world_size, seconds)

    @never_raise
    def _sum_up(self, trainer: Trainer, steps: list[float | None]) -> None:
        """Complete this rank's summary, given the mean step of every rank."""
        cost, self.summary = self.summary, {}
        measured = [step for step in steps if step is not None]
        if 0 < len(measured) < len(steps):
            rank_zero_warn(f"ThroughputMonitor has no summary: {_stopped(steps)}")
        elif cost:
            monitors = [c for c in callbacks_of(trainer) if isinstance(c, CommunicationMonitor)]
            communication = monitors[0].result() if monitors else {}
            operations, factor = self._watch.operations(), self._measured.cost.change(cost["step_ms_median"])
            others = others_share(self._measured.load_before, cpu_seconds())
            windows = self._measured.stretches.noise(slowed_alone=trainer.strategy.root_device.type != "cpu")
            seen = Seen(operations, self._watch.reason, others, factor, windows)
            self.summary = run_summary(
                cost | communication, trainer, measured, self._flops, self._devices.result(), seen
            )
            self.operations = step_operations(operations, self.summary, self._flops.calibration)

    @never_raise
    def _conclude(self, trainer: Trainer, steps: list[float | None]) -> None:
        """Say why there is no summary, where there is none, and print it."""
        if not self.summary:
            why = self.failure and f"the measurement ended with {self.failure}"
            why = why or (_stopped(steps) if None in steps else self._measured.why_nothing_is_known())
            self.summary = without_bottleneck(why)
        if trainer.is_global_zero and own_config(trainer.lightning_module) is None:
            lines = [*self.summary_lines(), *(self.detail_lines() if is_verbose() else [])]
            say(f"\n{block(lines)}" if lines else "")


def _stopped(steps: list[float | None]) -> str:
    return f"rank {steps.index(None)} has stopped measuring"
