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
from ._own import tell
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

    After the fit `summary` has what `result()` returns.

    Args:
        interval_s: seconds between samples; at least 0.1 s is used.
    """

    observes_only = True

    def __init__(self, interval_s: PositiveFloat = 0.25):
        self.interval_s = interval_s
        self.summary: dict[str, float] = {}
        self._telemetry: Telemetry | None = None  # while it samples
        self._sampled: Telemetry | None = None  # the same, also after the fit
        self._rows: list[Row] = []
        self._logged = 0  # the samples up to the end of the last update
        self._updates = Updates()
        self.grows: dict[str, dict[str, float]] = {}  # memory that has grown: bytes an update, seconds until it is full

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, also in another process: parameters and results, and nothing that measures a fit."""
        known = {name: value for name, value in vars(self).items() if name != "_writer"}
        return known | {"_telemetry": None, "_sampled": None}

    def result(self, since: float = -math.inf) -> dict[str, float]:
        """What was sampled of the training in this fit, or in the last one, also before its end: see `Telemetry.summary`.

        Validations, the time between epochs and waits are left out, but for the peak of memory. `since` is a time of `time.perf_counter()`.
        """
        if self._sampled is None:
            return {}
        self._sampled.sample()
        return self._sampled.summary(since)

    def readings(self, key: str) -> tuple[NDArray[numpy.float64], NDArray[numpy.float64]]:
        """The times, of `time.perf_counter()`, and the values of a key in this fit, or in the last one, shape (N,) each."""
        return (numpy.empty(0), numpy.empty(0)) if self._sampled is None else self._sampled.readings(key)

    def record_facts(self) -> dict[str, Any]:
        """For the run's record: what memory grew, as `memory_growth`."""
        return {"memory_growth": self.grows or None}

    def summary_lines(self) -> list[str]:
        """For the run's last lines: memory that grows, when it will be full, and the usual causes."""
        lines = []
        for place, grown in self.grows.items():
            more, left = memory(1000 * grown["bytes_per_update"]), duration(grown["full_after_s"])
            words = f"the {place}'s grows by {more} in 1,000 updates, at which rate it is full in {left}"
            lines.append(row("memory", f"{words}; usual causes: {_CAUSES}"))
        return lines

    def pause(self) -> None:
        """What follows is no training, until the next batch begins."""
        if self._telemetry is not None and self._telemetry.is_training:
            self._telemetry.sample(is_training=False)

    @override
    @never_raise
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # which may have no training
            self.disable()
            self.summary, self.grows = {}, {}

    @override
    @never_raise
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._rows = []
        self._updates = Updates(trainer.global_step)
        self._writer = StepWriter(trainer)
        queries = queries_for(trainer.strategy.root_device)
        self._telemetry = self._sampled = Telemetry(partial(read, queries), self.interval_s)

    @override
    @never_raise
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:  # also after a validation in mid-epoch
        if self._telemetry is not None and not self._telemetry.is_training:
            self._telemetry.sample(is_training=True)
            self._logged = self._telemetry.samples

    on_train_epoch_start = on_train_batch_start  # fetching the first batch is a part of training

    @override
    @never_raise
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        telemetry, is_update = self._telemetry, self._updates.end_batch(trainer.global_step)
        if telemetry is None or not is_update:  # the gradients are accumulated
            return
        first, self._logged = self._logged, telemetry.samples
        if self._logged > first and telemetry.is_training:  # else the run has waited in it
            values = {key: telemetry.readings(key, first)[1] for key in LOGGED}
            means = {key: float(of_step.mean()) for key, of_step in values.items() if len(of_step)}
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
            self.grows = self._growing(trainer, telemetry)
            tell(trainer, self.summary_lines())

    on_exception = on_train_end

    def disable(self) -> None:
        """Stop measuring in this fit, and end the thread."""
        if self._telemetry is not None:
            self._telemetry.stop()
        self._telemetry = self._sampled = None

    def _growing(self, trainer: Trainer, telemetry: Telemetry) -> dict[str, dict[str, float]]:
        """Which memory has grown all through the training (growth.py)."""
        device, updates = trainer.strategy.root_device, self._updates.count
        found = {}
        for place, key in (("host", RSS), ("device", ALLOCATED))[: 1 + (device.type == "cuda")]:
            seconds, gib = (each.tolist() for each in telemetry.readings(key))
            gib_per_s = growth(seconds, gib)
            if gib_per_s and updates:
                rate = gib_per_s * 2**30
                left = host_memory().available if place == "host" else torch.cuda.mem_get_info(device)[0]
                found[place] = {
                    "bytes_per_update": rate * (seconds[-1] - seconds[0]) / updates,
                    "bytes_per_s": rate,
                    "full_after_s": left / rate,
                }
        return found

    def _write(self) -> None:
        rows, self._rows = self._rows, []
        self._writer.write(rows)
