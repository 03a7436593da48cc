"""DeviceMonitor: utilisation, memory and power of the device that trains, sampled a few times a second."""

import contextlib
import itertools
import math
import time
from collections.abc import Iterable, Iterator
from operator import itemgetter
from statistics import fmean
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from ..hardware.contention import WINDOW_S
from ..hardware.device_memory import PEAK, RESERVED
from ..hardware.probes import probe_for
from ..hardware.sampler import Sampler, Span, Spans, Timeline, named
from ..options.types import PositiveFloat
from ..records.metrics import METRICS
from ._in_order import join, leave
from ._never_raise import never_raise
from ._timer import add_timer, remove_timer
from ._writer import Row, StepWriter

LOGGED = tuple(key for key in METRICS if key.startswith(("device/", "host/")))
FLUSH_EVERY = 20  # samples written together


class DeviceMonitor(Callback):
    """Samples the training device and the process in a thread, and logs each sample at the step nearest to it.

    Logs the metrics in `LOGGED` as far as the device offers them; docs/measuring.md has their units and meanings.
    Samples of validations, and of the time between two epochs, where checkpoints are written, are not logged. Samples
    that share a step are logged as their mean. Rank 0's samples are logged.

    After the fit `summary` has what `result()` returns.

    Args:
        interval_s: seconds between samples; at least 0.1 s is used.
        details: whether TensorBoard gets the readings of the host, clocks and the allocator too. CSV has them in any
            case.
    """

    observes_only = True

    def __init__(self, interval_s: PositiveFloat = 0.25, details: bool = False):
        self.interval_s = interval_s
        self.details = details
        self.summary: dict[str, float] = {}
        self._sampler: Sampler | None = None
        self._timeline = Timeline()  # of this fit, or of the last one
        self._spans = Spans()  # of training
        self._rows: list[Row] = []
        self._last = (0.0, 0)  # when the last step ended, and its number

    def result(self, spans: Iterable[Span] | None = None) -> dict[str, float]:
        """What was sampled in this fit, or in the last one, also before its end: see `Timeline.over`, and the memory's peak.

        Args:
            spans: of `time.perf_counter()` in seconds; by default those of training, without validations and the time
                between epochs.
        """
        if self._sampler is not None:
            self._sampler.sample()
        found = self._timeline.over(self._spans.all() if spans is None else spans)
        peaks = {named(key, "max"): key for key in (PEAK, RESERVED)}  # the maximum of a peak is the peak
        return {peaks.get(key, key): value for key, value in found.items()}

    @contextlib.contextmanager
    def pause(self, part_of_fit: bool = False) -> Iterator[None]:
        """Sample at both ends of a wait, so that no sample holds waiting and training (see `_timer.pause`)."""
        if not part_of_fit:
            self._sample()
        try:
            yield
        finally:
            if not part_of_fit:
                self._sample()

    @never_raise
    def _sample(self) -> None:
        if self._sampler is not None:
            self._sampler.sample()

    @override
    @never_raise
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.disable()
        self.summary, self._rows, self._last = {}, [], (0.0, trainer.global_step)
        self._writer = StepWriter(trainer, self.details)
        self._sampler = Sampler(probe_for(trainer.strategy.root_device, settle_s=WINDOW_S).read, self.interval_s)
        self._sampler.start()
        self._timeline = self._sampler.timeline
        add_timer(trainer, self)
        join(trainer, self)

    @override
    @never_raise
    def on_train_epoch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any = None, batch_idx: int = 0
    ) -> None:
        if self._sampler is not None and not self._spans.running:  # fetching the first batch is a part of training
            self._spans.run(True)
            self._last = (time.perf_counter(), trainer.global_step)

    on_train_batch_start = on_train_epoch_start  # after a validation in mid-epoch

    @override
    @never_raise
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._spans.running:
            self._collect(trainer)
            if len(self._rows) >= FLUSH_EVERY:
                self._write(trainer)

    @override
    @never_raise
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._spans.running:
            self._spans.run(False)
            self._collect(trainer)
            self._write(trainer)

    on_train_epoch_end = on_validation_start

    @override
    @never_raise
    def on_train_end(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException | None = None
    ) -> None:
        if self._sampler is not None:
            if self._spans.running:  # the fit ends in mid-epoch
                self._spans.run(False)
                self._collect(trainer)
            self._sampler.stop()
            self._sampler = None
            self.summary = self.result()
            self._write(trainer, last=True)
        leave(trainer, self)

    on_exception = on_train_end

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.on_train_end(trainer, pl_module)
        remove_timer(trainer, self)

    def disable(self) -> None:
        """Stop measuring in this fit, and end the thread."""
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.stop()
        self._timeline, self._spans = Timeline(), Spans()

    def oldest_step(self) -> float:
        """The first step that may still get a sample."""
        if self._sampler is None:
            return math.inf
        return self._rows[0][0] if self._rows else self._last[1]

    def _collect(self, trainer: Trainer) -> None:
        """Give each sample since the last step, or since training went on, to the step nearest to it."""
        (last_time, last_step), (now, step) = self._last, (time.perf_counter(), trainer.global_step)
        for timestamp, readings in self._timeline.after(last_time):
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
