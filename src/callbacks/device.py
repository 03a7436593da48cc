"""DeviceMonitor: utilisation, memory and power of the device that trains, sampled a few times a second."""

import math
from functools import partial
from typing import Any

import numpy
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from numpy.typing import NDArray
from typing_extensions import override

from ..hardware.growth import growth
from ..hardware.host_memory import host_memory
from ..hardware.telemetry import ALLOCATED, RSS, Telemetry, queries_for, read
from ..options.types import PositiveFloat
from ..records.formatting import duration, memory
from ..records.metrics import METRICS
from ..records.terminal import row
from ._never_raise import never_raise
from ._training_program import print_last_lines
from ._updates import Updates
from ._writer import Row, StepWriter

_CAUSES = "losses or outputs that keep their graph, a metric that is never reset, a list or cache without a limit"
LOGGED = tuple(key for key in METRICS if key.startswith(("device/", "host/")))
FLUSH_EVERY = 20  # samples written together


class DeviceMonitor(Callback):
    """Samples the training device and the process in a thread, and logs each sample at the step in which it was taken.

    Logs the metrics in `LOGGED` as far as the device offers them; docs/measuring.md has their units and meanings.
    Samples of validations, and of the time between two epochs, where checkpoints are written, are not logged. Samples
    of one step are logged as their mean. Rank 0's samples are logged.

    After the fit `summary` has the value of `result()`.

    Args:
        interval_s: seconds between samples; at least 0.1 s is used.
    """

    observes_only = True

    def __init__(self, interval_s: PositiveFloat = 0.25):
        self.interval_s = interval_s
        self.summary: dict[str, float] = {}
        self._telemetry: Telemetry | None = None  # None while nothing is sampled
        self._last_telemetry: Telemetry | None = None  # the same, and kept after the fit
        self._rows: list[Row] = []
        self._num_logged = 0  # the number of samples until the end of the last update
        self._updates = Updates()
        self.memory_growth: dict[str, dict[str, float]] = {}  # facts of `host` or `device`, if its memory grows

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, also for another process: parameters and results, without what measures a fit."""
        state = {name: value for name, value in vars(self).items() if name != "_writer"}
        return state | {"_telemetry": None, "_last_telemetry": None}

    def result(self, since: float = -math.inf) -> dict[str, float]:
        """Return `Telemetry.summary` of the training so far in this fit, or of the last fit.

        Validations, the time between epochs and waits are left out, except for the peak of memory. `since` is by `time.perf_counter()`.
        """
        if self._last_telemetry is None:
            return {}
        self._last_telemetry.sample()
        return self._last_telemetry.summary(since)

    def readings(self, key: str) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
        """Return the times, of `time.perf_counter()`, and the values of a key in this fit or the last one, shape (N,) each."""
        return (numpy.empty(0), numpy.empty(0)) if self._last_telemetry is None else self._last_telemetry.readings(key)

    def record_facts(self) -> dict[str, Any]:
        """Return the growth of memory as `memory_growth`, for the run's record."""
        return {"memory_growth": self.memory_growth or None}

    def summary_lines(self) -> list[str]:
        """Return the run's last lines: memory that grows, when it will be full, and the usual causes."""
        lines = []
        for owner, facts in self.memory_growth.items():
            increase, time_left = memory(1000 * facts["bytes_per_update"]), duration(facts["full_after_s"])
            words = f"the {owner}'s grows by {increase} in 1,000 updates, at which rate it is full in {time_left}"
            lines.append(row("memory", f"{words}; usual causes: {_CAUSES}"))
        return lines

    def pause(self) -> None:
        """Note that the time until the next batch is no training."""
        if self._telemetry is not None and self._telemetry.is_training:
            self._telemetry.sample(is_training=False)

    @override
    @never_raise
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # a fit may have no training
            self.disable()
            self.summary, self.memory_growth = {}, {}

    @override
    @never_raise
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._rows = []
        self._updates = Updates(trainer.global_step)
        self._writer = StepWriter(trainer)
        queries = queries_for(trainer.strategy.root_device)
        self._telemetry = self._last_telemetry = Telemetry(partial(read, queries), self.interval_s)

    @override
    @never_raise
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:  # also after a validation within an epoch
        if self._telemetry is not None and not self._telemetry.is_training:
            self._telemetry.sample(is_training=True)
            self._num_logged = self._telemetry.samples

    on_train_epoch_start = on_train_batch_start  # fetching the first batch is a part of training

    @override
    @never_raise
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        telemetry, is_update = self._telemetry, self._updates.end_batch(trainer.global_step)
        if telemetry is None or not is_update:  # the gradients are accumulated
            return
        num_before, self._num_logged = self._num_logged, telemetry.samples
        if self._num_logged > num_before and telemetry.is_training:  # else the run has waited in this update
            readings = {key: telemetry.readings(key, num_before)[1] for key in LOGGED}
            means = {key: float(values.mean()) for key, values in readings.items() if len(values)}
            self._rows.append((trainer.global_step, means))
        if len(self._rows) >= FLUSH_EVERY:
            self._write()

    @override
    @never_raise
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.pause()
        if self._telemetry is not None:
            self._write()

    on_train_epoch_end = on_validation_start

    @override
    @never_raise
    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        telemetry, self._telemetry = self._telemetry, None
        if telemetry is not None:
            telemetry.stop()
            self._write()
            self.summary = telemetry.summary()
            self.memory_growth = self._find_growth(trainer, telemetry)
            print_last_lines(trainer, self.summary_lines())

    on_exception = on_train_end

    def disable(self) -> None:
        """Stop measuring in this fit, and end the thread."""
        if self._telemetry is not None:
            self._telemetry.stop()
        self._telemetry = self._last_telemetry = None

    def _find_growth(self, trainer: Trainer, telemetry: Telemetry) -> dict[str, dict[str, float]]:
        """Return the facts of the memory, host or device, that has grown throughout the training (growth.py)."""
        device, updates = trainer.strategy.root_device, self._updates.count
        facts = {}
        for owner, key in (("host", RSS), ("device", ALLOCATED))[: 1 + (device.type == "cuda")]:
            seconds, gib = (values.tolist() for values in telemetry.readings(key))
            gib_per_s = growth(seconds, gib)
            if gib_per_s and updates:
                bytes_per_s = gib_per_s * 2**30
                free_bytes = host_memory().available if owner == "host" else torch.cuda.mem_get_info(device)[0]
                facts[owner] = {
                    "bytes_per_update": bytes_per_s * (seconds[-1] - seconds[0]) / updates,
                    "bytes_per_s": bytes_per_s,
                    "full_after_s": free_bytes / bytes_per_s,
                }
        return facts

    def _write(self) -> None:
        rows, self._rows = self._rows, []
        self._writer.write(rows)
