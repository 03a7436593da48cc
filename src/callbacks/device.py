"""DeviceMonitor: how busy the device that trains is, what it holds and draws, a few times a second."""

import itertools
import time
from collections.abc import Iterator
from operator import itemgetter
from statistics import fmean
from typing import Any

import lightning
import psutil
import torch
from lightning.pytorch.callbacks import Callback

from ..hardware.probes import CPU, POWER, RSS, SM_ACTIVITY, UTILIZATION, probes_for
from ..hardware.sampler import Sampler, named
from ..options.types import PositiveFloat
from ._never_raise import never_raise
from ._step_writer import Row, write_steps

MEMORY_PEAK = "device/memory_peak_gib"
MEMORY_ALLOCATED = "device/memory_allocated_gib"
LOGGED = (UTILIZATION, SM_ACTIVITY, MEMORY_PEAK, MEMORY_ALLOCATED, POWER, CPU, RSS)

FLUSH_EVERY = 20  # samples written together
_GIB = 2**30


class AllocatorProbe:
    """What training holds of the device's memory; counters of the host's, so reading them waits for nothing.

    CUDA and AMD: the tensors in torch's allocator, and their peak since the probe was made, validation included: it
    has to fit as well. MPS: the same, with the highest sample for a peak. CPU: the memory of the process that is in
    RAM, whatever it holds, and its highest sample.

    Args:
        device: the one that trains.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._process = psutil.Process()
        self._peak = 0.0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> dict[str, float]:
        """GiB now, and the peak."""
        if self._device.type == "cuda":
            held, peak = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
            return {MEMORY_ALLOCATED: held / _GIB, MEMORY_PEAK: peak / _GIB}
        if self._device.type == "mps":
            held = torch.mps.current_allocated_memory() / _GIB
        elif self._device.type == "cpu":
            held = self._process.memory_info().rss / _GIB
        else:
            return {}
        self._peak = max(self._peak, held)
        return {MEMORY_ALLOCATED: held, MEMORY_PEAK: self._peak}


class DeviceMonitor(Callback):
    """Samples the training device and the process in a thread, and logs each sample at the step nearest to it.

    | Key | Unit | Meaning |
    | --- | --- | --- |
    | `device/utilization_pct` | % | GPU: share of the last 1/6 to 1 s in which any kernel ran; CPU: share of its cores |
    | `device/sm_activity_pct` | % | share of the multiprocessors that were busy, on NVIDIA Hopper and later |
    | `device/memory_peak_gib` | GiB | highest `memory_allocated` since training began, validation included |
    | `device/memory_allocated_gib` | GiB | tensors in torch's allocator; on a CPU the process's memory in RAM |
    | `device/power_w` | W | of the whole device |
    | `host/cpu_pct` | % | of the process; 100 is one core fully busy |
    | `host/rss_gib` | GiB | memory of the process that is in RAM |

    What the device does not offer is left out. Nothing is sampled during validation, nor between an epoch's end and
    the next one's start, where checkpoints are written. Samples that share a step are logged as their mean. With
    several devices each process samples its own, and the first one's are logged.

    A callback that times the steps may say instead what is training time, by `follow`, `pause`, `resume` and `restart`:
    ThroughputMonitor does, so that power and energy are those of the very steps that its summary counts.

    After the fit `summary` (before its end: `result()`) has the mean over time of everything that is read
    (`device/power_mean_w`, …), the maximum of memory (`host/rss_max_gib`, `device/memory_peak_gib`), the `seconds`
    sampled, and where the device measures it `energy_j`, in joules, with `energy_source`: `counter` or `power_integral`.

    Args:
        interval_s: seconds between samples; 0.1 at least, whatever is asked for.
    """

    observes_only = True

    def __init__(self, interval_s: PositiveFloat = 0.25):
        self.interval_s = interval_s
        self.summary: dict[str, float | str] = {}
        self._sampler: Sampler | None = None
        self._following = False
        self._rows: list[Row] = []
        self._last = (0.0, 0)  # when the last step ended, and its number

    @never_raise
    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Begin anew, whatever an earlier fit has left."""
        self.disable()
        self.summary, self._rows = {}, []
        device = trainer.strategy.root_device
        self._sampler = Sampler([*probes_for(device), AllocatorProbe(device)], self.interval_s)
        self._last = (time.perf_counter(), trainer.global_step)
        self._sampler.start()
        if self._following:
            self._hold()

    @never_raise
    def on_train_epoch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Go on: fetching the first batch is a part of training."""
        if not self._following:
            self._resume(trainer)

    @never_raise
    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Go on after a validation in mid-epoch."""
        if not self._following:
            self._resume(trainer)

    @never_raise
    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Find the step of what was sampled during this one."""
        self._collect(trainer)
        if len(self._rows) >= FLUSH_EVERY:
            self._write(trainer)

    @never_raise
    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Pause, and write what there is."""
        if not self._following:
            self._pause(trainer)

    @never_raise
    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """As at validation."""
        if not self._following:
            self._pause(trainer)

    @never_raise
    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Stop, and sum up."""
        self._finish(trainer)

    @never_raise
    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        """As at the end: what was sampled so far is true of the run so far."""
        self._finish(trainer)

    @never_raise
    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        """Leave no thread behind, however the run ended."""
        self._finish(trainer)
        self._following = False

    def disable(self) -> None:
        """Measure no more in this fit; leave no thread behind."""
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.stop()

    def result(self) -> dict[str, float | str]:
        """What `summary` will be, up to the last sample: for who asks before the fit has ended."""
        return self.summary if self._sampler is None else _tidy(self._sampler.summary())

    # --- for a callback that times the steps -------------------------------------------------------------------------

    @never_raise
    def follow(self, following: bool) -> None:
        """From now on, until the fit ends, sample only between `resume` and `pause`; or, with False, no longer."""
        self._following = following
        if following:
            self._hold()

    @never_raise
    def pause(self, trainer: lightning.Trainer) -> None:
        """Training time ends here; what follows is not sampled."""
        self._pause(trainer)

    @never_raise
    def resume(self, trainer: lightning.Trainer) -> None:
        """Training time goes on."""
        self._resume(trainer)

    @never_raise
    def restart(self) -> None:
        """What was sampled until now is not counted in the summary; it is logged all the same."""
        if self._sampler is not None:
            self._sampler.restart()

    def _hold(self) -> None:
        """Wait for the first `resume`."""
        if self._sampler is not None:
            self._sampler.pause()
            self._sampler.restart()

    def _resume(self, trainer: lightning.Trainer) -> None:
        if self._sampler is not None and self._sampler.paused:
            self._sampler.resume()
            self._last = (time.perf_counter(), trainer.global_step)

    def _pause(self, trainer: lightning.Trainer) -> None:
        if self._sampler is not None and not self._sampler.paused:
            self._sampler.pause()
            self._collect(trainer)
            self._write(trainer)

    def _finish(self, trainer: lightning.Trainer) -> None:
        if self._sampler is not None:
            self._sampler.stop()
            self.summary = self.result()
            self._collect(trainer)
            self._sampler = None
            self._write(trainer, last=True)

    def _collect(self, trainer: lightning.Trainer) -> None:
        if self._sampler is None:
            return
        (last_time, last_step), (now, step) = self._last, (time.perf_counter(), trainer.global_step)
        for timestamp, readings in self._sampler.drain():
            nearest = last_step if timestamp - last_time < now - timestamp else step
            self._rows.append((nearest, {key: readings[key] for key in LOGGED if key in readings}))
        self._last = (now, step)

    def _write(self, trainer: lightning.Trainer, last: bool = False) -> None:
        """Write the rows; unless they are the last, keep those of the latest step, which may get more."""
        written = [row for row in self._rows if last or row[0] != self._last[1]]
        self._rows = self._rows[len(written) :]
        write_steps(trainer, _by_step(written))


def _by_step(rows: list[Row]) -> Iterator[Row]:
    """The mean of the rows that share a step."""
    for step, group in itertools.groupby(rows, key=itemgetter(0)):
        readings = [row for _, row in group]
        keys = dict.fromkeys(key for row in readings for key in row)
        yield step, {key: fmean(row[key] for row in readings if key in row) for key in keys}


def _tidy(summary: dict[str, float | str]) -> dict[str, float | str]:
    """Of a peak only the highest says something."""
    summary.pop(named(MEMORY_PEAK, "mean"), None)
    peak = summary.pop(named(MEMORY_PEAK, "max"), None)
    return summary if peak is None else summary | {MEMORY_PEAK: peak}
