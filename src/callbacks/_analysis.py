"""StepAnalysis: what a fit's steps compute and what limits them, beside their times: FLOPs, MFU, the bottleneck, and advice."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning import LightningModule, Trainer

from .._lightning import callbacks_of
from ..hardware.devices import cache_bytes
from ..records.operations import StepOperations
from ._flops_meter import FlopsMeter
from ._recording import RecordedUpdates
from ._run_summary import Observations, run_summary
from ._step_operations import step_operations
from ._table import UpdateTable
from .communication import CommunicationMonitor
from .device import DeviceMonitor

Spans = Sequence[tuple[float, float]]


class StepAnalysis:
    """Of one fit. `recorded` has its recorded updates, and `flops` what MFU is made of.

    Args:
        trainer, module: of the fit.
        record_operations: whether the updates 2 to 4 are recorded.
        flops_per_sample: forward and backward, if it is given.
        calibrate: whether the device's peak may be measured.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        record_operations: bool,
        flops_per_sample: float | None,
        calibrate: bool,
    ):
        self.recorded = RecordedUpdates(record_operations)
        self.flops = FlopsMeter(flops_per_sample)
        self.flops.calibrate(trainer, module, measure=calibrate)
        self.operations: StepOperations | None = None

    def begin(self, trainer: Trainer, module: LightningModule, part: Callable[[], str]) -> None:
        """Prepare for the first update; `part` returns the part of the step that runs now."""
        self.recorded.attach(trainer, module, cache_bytes(trainer.strategy.root_device), part)

    def learn(self, trainer: Trainer, is_over: bool = False) -> None:
        """Take the FLOPs of a sample from the recorded updates, once all are there or the fit is over."""
        if self.recorded.is_over or is_over:
            self.flops.learn(trainer, trainer.lightning_module, self.recorded)

    def summary(
        self, trainer: Trainer, cost: Mapping[str, Any], table: UpdateTable, spans: Spans, ranks: Sequence[float]
    ) -> dict[str, Any]:
        """The summary of a run.

        Args:
            trainer: of the fit.
            cost: of this rank's steps.
            table: the steps.
            spans: when the counted steps ran, by `time.perf_counter`.
            ranks: the mean step of each rank in ms; empty for a single rank.
        """
        callbacks = callbacks_of(trainer)
        communication = next((c.result() for c in callbacks if isinstance(c, CommunicationMonitor)), {})
        sampled = next((c.result(spans) for c in callbacks if isinstance(c, DeviceMonitor)), {})
        operations = self.recorded.operations()
        is_accelerator = trainer.strategy.root_device.type != "cpu"
        observed = Observations(
            operations,
            self.recorded.why_no_operations,
            table.changed(cost["step_ms_median"]),
            table.windows.taken(slowed_alone=is_accelerator) if table.windows else (),
        )
        summary = run_summary({**cost, **communication}, trainer, ranks, self.flops, sampled, observed)
        self.operations = step_operations(operations, summary, self.flops.calibration)
        return summary
