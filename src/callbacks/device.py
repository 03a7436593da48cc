"""DeviceMonitor: utilisation, memory and power of the device that trains, sampled a few times a second."""

import itertools
import time
from collections.abc import Iterator
from operator import itemgetter
from statistics import fmean
from typing import Any

import psutil
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from ..hardware.host_memory import private_rss
from ..hardware.nvml_readings import DRAM_ACTIVITY, SM_ACTIVITY, TENSOR_ACTIVITY, THROTTLED, THROTTLED_BY
from ..hardware.probes import (
    CPU,
    POWER,
    PROCESSOR_TIME,
    RSS,
    SM_CLOCK,
    UTILIZATION,
    probes_for,
)
from ..hardware.sampler import Sampler, named
from ..options.types import PositiveFloat
from ._never_raise import never_raise
from ._writer import Row, StepWriter

MEMORY_PEAK = "device/memory_peak_gib"
MEMORY_RESERVED = "device/memory_reserved_gib"
MEMORY_ALLOCATED = "device/memory_allocated_gib"
LOGGED = (
    *(UTILIZATION, PROCESSOR_TIME, SM_ACTIVITY, TENSOR_ACTIVITY, DRAM_ACTIVITY, SM_CLOCK),
    *(THROTTLED, *THROTTLED_BY.values()),
    *(MEMORY_PEAK, MEMORY_RESERVED, MEMORY_ALLOCATED, POWER, CPU, RSS),
)

FLUSH_EVERY = 20  # samples written together
_GIB = 2**30
_OF_CUDA = {
    MEMORY_ALLOCATED: "allocated_bytes.all.current",
    MEMORY_PEAK: "allocated_bytes.all.peak",
    MEMORY_RESERVED: "reserved_bytes.all.peak",
}


class AllocatorProbe:
    """GiB of the device's memory that training holds, now and at most. Reading it waits for nothing.

    CUDA and AMD: the tensors in torch's allocator, their peak since the probe was made, validation included, and the peak
    of what the allocator has reserved for them on the device. MPS: the same tensors, and their highest sample. CPU: the
    process's memory in RAM without the libraries' files, and its highest sample.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._process = psutil.Process()
        self._peak = 0.0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> dict[str, float]:
        """The readings by metric; empty for any other device."""
        if self._device.type == "cuda":
            stats = torch.cuda.memory_stats(self._device)  # empty before the first allocation
            return {key: stats.get(name, 0) / _GIB for key, name in _OF_CUDA.items()}
        if self._device.type == "mps":
            held = torch.mps.current_allocated_memory() / _GIB
        elif self._device.type == "cpu":
            held = private_rss(self._process) / _GIB
        else:
            return {}
        self._peak = max(self._peak, held)
        return {MEMORY_ALLOCATED: held, MEMORY_PEAK: self._peak}


class DeviceMonitor(Callback):
    """Samples the training device and the process in a thread, and logs each sample at the step nearest to it.

    Logs the metrics in `LOGGED` as far as the device offers them; docs/measuring.md has their units and meanings.
    Nothing is sampled during validation, or between two epochs, where checkpoints are written. Samples that share a step
    are logged as their mean. Rank 0's samples are logged.

    A callback that times the steps may define the training time by `follow`, `pause`, `resume` and `restart`.
    ThroughputMonitor does, so that power and energy are those of the steps in its summary.

    After the fit `summary` (before its end: `result()`) has what `Sampler.summary` returns, and the memory's peak.

    Args:
        interval_s: seconds between samples; at least 0.1 s is used.
        details: whether TensorBoard gets the readings of the host, clocks and the allocator too. CSV has them in any
            case.
    """

    observes_only = True

    def __init__(self, interval_s: PositiveFloat = 0.25, details: bool = False):
        self.interval_s = interval_s
        self.details = details
        self.summary: dict[str, float | str] = {}
        self._sampler: Sampler | None = None
        self._following = False
        self._rows: list[Row] = []
        self._last = (0.0, 0)  # when the last step ended, and its number

    @override
    @never_raise
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.disable()
        self.summary, self._rows = {}, []
        self._writer = StepWriter(trainer, self.details)
        device = trainer.strategy.root_device
        self._sampler = Sampler([*probes_for(device), AllocatorProbe(device)], self.interval_s)
        self._last = (time.perf_counter(), trainer.global_step)
        self._sampler.start()
        if self._following:
            self.follow(True)

    @override
    def on_train_epoch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any = None, batch_idx: int = 0
    ) -> None:
        if not self._following:  # fetching the first batch is a part of training
            self.resume(trainer)

    on_train_batch_start = on_train_epoch_start  # after a validation in mid-epoch

    @override
    @never_raise
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._collect(trainer)
        if len(self._rows) >= FLUSH_EVERY:
            self._write(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._following:
            self.pause(trainer)

    on_train_epoch_end = on_validation_start

    @override
    def on_train_end(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException | None = None
    ) -> None:
        self._finish(trainer)

    on_exception = on_train_end

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._finish(trainer)
        self._following = False

    def disable(self) -> None:
        """Stop measuring in this fit, and end the thread."""
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.stop()

    def result(self, spans: object = None) -> dict[str, float | str]:
        """The summary up to the last sample, also before the fit has ended."""
        if self._sampler is None:
            return self.summary
        peaks = {named(key, "max"): key for key in (MEMORY_PEAK, MEMORY_RESERVED)}  # the maximum of a peak is the peak
        return {peaks.get(key, key): value for key, value in self._sampler.summary().items()}

    @never_raise
    def follow(self, following: bool) -> None:
        """Until the fit ends, sample only between `resume` and `pause`; with False, sample by the monitor's own hooks again."""
        self._following = following
        if following and self._sampler is not None:
            self._sampler.pause()
            self._sampler.restart()

    @never_raise
    def pause(self, trainer: Trainer) -> None:
        """Stop sampling: training time ends here."""
        if self._sampler is not None and not self._sampler.paused:
            self._sampler.pause()
            self._collect(trainer)
            self._write(trainer)

    @never_raise
    def resume(self, trainer: Trainer) -> None:
        """Sample again: training time continues."""
        if self._sampler is not None and self._sampler.paused:
            self._sampler.resume()
            self._last = (time.perf_counter(), trainer.global_step)

    @never_raise
    def restart(self) -> None:
        """Start a new summary; the samples so far are still logged."""
        if self._sampler is not None:
            self._sampler.restart()

    @never_raise
    def _finish(self, trainer: Trainer) -> None:
        if self._sampler is not None:
            self._sampler.stop()
            self.summary = self.result()
            self._collect(trainer)
            self._sampler = None
            self._write(trainer, last=True)

    def _collect(self, trainer: Trainer) -> None:
        if self._sampler is None:
            return
        (last_time, last_step), (now, step) = self._last, (time.perf_counter(), trainer.global_step)
        for timestamp, readings in self._sampler.drain():
            nearest = last_step if timestamp - last_time < now - timestamp else step
            self._rows.append((nearest, {key: readings[key] for key in LOGGED if key in readings}))
        self._last = (now, step)

    def _write(self, trainer: Trainer, last: bool = False) -> None:
        """Write the rows, but unless they are the last keep those of the latest step, which may get more."""
        written = [row for row in self._rows if last or row[0] != self._last[1]]
        self._rows = self._rows[len(written) :]
        self._writer.write_rows(_by_step(written))


def _by_step(rows: list[Row]) -> Iterator[Row]:
    """The mean of the rows that share a step."""
    for step, group in itertools.groupby(rows, key=itemgetter(0)):
        readings = [row for _, row in group]
        keys = dict.fromkeys(key for row in readings for key in row)
        yield step, {key: fmean(row[key] for row in readings if key in row) for key in keys}
