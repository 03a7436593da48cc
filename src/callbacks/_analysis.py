"""StepAnalysis: what a fit's steps compute and what limits them, beside their times: FLOPs, MFU, the bottleneck, and advice."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from .._lightning import callbacks_of
from ..hardware.bottleneck import CHANGED
from ..hardware.calibration import Calibration, peak_flops_per_sec
from ..hardware.devices import device_name
from ..hardware.flops import UncountableError
from ..hardware.measure import find_calibration
from ..hardware.operations import Operation, merge
from ..records.operations import OperationRow, StepOperations
from ._batches import varies
from ._recording import RecordedUpdates
from ._run_summary import Observations, bottleneck_facts, device_facts, operation_facts, rank_facts
from ._setting import setting_of
from ._table import UpdateTable
from .communication import CommunicationMonitor
from .device import DeviceMonitor

Spans = Sequence[tuple[float, float]]
# Of a calibration: what says which machine and not what it can do.
_IDENTITY = ("device", "device_name", "host", "uuid", "driver", "torch")
_SAME = ("name", "module", "part", "dtype", "dims", "calls", "flops", "bytes", "cold_bytes", "seconds")


class StepAnalysis:
    """Of one fit: the FLOPs of a sample (given, or once recorded), the device's peak, and the summary.

    Args:
        trainer, module: of the fit.
        flops_per_sample: forward and backward, if it is given.
        calibrate: whether the device's peak may be measured, on rank 0, before the first step.

    Attributes:
        per_sample: FLOPs of a sample; None as long as they are not known.
        peak: FLOP/s at the run's precision, as measured; None where that is not known.
        operations: those of a step, once there is a summary.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, flops_per_sample: float | None, calibrate: bool):
        self.per_sample = self._given = flops_per_sample
        self.operations: StepOperations | None = None
        self._trainer, self._module, self._may_measure = trainer, module, calibrate
        self._no_flops = "no step was recorded"
        self._has_learned = False
        self.calibration = find_calibration(trainer.strategy.root_device, calibrate and trainer.is_global_zero)
        self._find_peaks()

    def learn(self, recorded: RecordedUpdates) -> None:
        """Take the FLOPs of a sample from the recorded updates, once; one warning where these have none.

        Sequences of different lengths have none either.
        """
        if self._has_learned or self._given is not None:
            return
        self._has_learned = True
        try:
            if varies(self._module):
                raise UncountableError("sequences of different lengths take different numbers of FLOPs")
            found = recorded.flops()
        except UncountableError as error:
            self._no_flops = str(error)
            if recorded.reason is None and not varies(self._module):
                name = type(self._module).__name__
                rank_zero_warn(f"The FLOPs of {name} cannot be counted, so there is no FLOP/s and no MFU: {error}")
            return
        self.per_sample = found.total
        self._find_peaks(found.shares)

    def _find_peaks(self, shares: Mapping[str, float] | None = None) -> None:
        known, precision = self.calibration, self._trainer.precision
        self.peak = peak_flops_per_sec(known, precision, shares) if known and not known.disturbed else None

    def _no_peak(self) -> str:
        if self.calibration is None:
            return "this device's peak was not measured before" + ("" if self._may_measure else ", and calibrate=False")
        if self.calibration.disturbed:
            return f"the device's peak is not known: {self.calibration.disturbed}"
        return f"the peak at precision {self._trainer.precision} was not measured here"

    def missing(self) -> dict[str, str]:
        """Why FLOP/s or MFU are not among the facts."""
        if not self.per_sample:
            return dict.fromkeys(("flops_per_sec", "mfu"), self._no_flops)
        return {} if self.peak else {"mfu": self._no_peak()}

    def flops_facts(self, samples_per_sec: float) -> dict[str, float]:
        """FLOP/s and MFU of one rank that trains so many samples/s, as far as they are known."""
        if not self.per_sample:
            return {}
        facts = {"flops_per_sample": self.per_sample, "flops_per_sec": self.per_sample * samples_per_sec}
        if self.peak:
            facts |= {"peak_flops_per_sec": self.peak, "mfu": facts["flops_per_sec"] / self.peak}
        return facts

    def summary(
        self,
        cost: Mapping[str, Any],
        table: UpdateTable,
        recorded: RecordedUpdates,
        spans: Spans,
        ranks: Sequence[float],
    ) -> dict[str, Any]:
        """The summary of a run, and `operations`.

        Args:
            cost: of this rank's steps.
            table: the steps.
            recorded: the updates whose operations were recorded.
            spans: when the counted steps ran, by `time.perf_counter`.
            ranks: the mean step of each rank in ms; empty for a single rank.
        """
        trainer, device = self._trainer, self._trainer.strategy.root_device
        callbacks = callbacks_of(trainer)
        communication = next((c.result() for c in callbacks if isinstance(c, CommunicationMonitor)), {})
        sampled = next((c.result(spans) for c in callbacks if isinstance(c, DeviceMonitor)), {})
        observed = Observations(
            recorded.operations(),
            recorded.why_no_operations,
            table.changed(cost["step_ms_median"]),
            table.windows.others_shares(slowed_only=device.type != "cpu"),
        )
        title = getattr(self._module, "title", type(self._module).__name__)
        summary: dict[str, Any] = {**cost, **communication, "title": title, "device": device.type}
        summary |= {"device_name": device_name(device), "precision": str(trainer.precision)}
        summary |= rank_facts(ranks) if ranks else {}
        missing = self.missing()
        has_changed = self._given is None and self.per_sample and not 1 / CHANGED <= observed.changed <= CHANGED
        if has_changed:
            missing = dict.fromkeys(("flops_per_sec", "mfu"), "the steps have changed since their FLOPs were recorded")
        if not summary["samples"]:
            missing["samples_per_sec"] = "the batch has no tensors; batch_size_fn says how many samples it has"
        elif not has_changed:
            summary |= self.flops_facts(summary["samples_per_sec"] / trainer.world_size)
        summary |= device_facts(sampled, summary) | operation_facts(observed, self.calibration)
        setting = setting_of(trainer, summary, self.calibration)
        summary |= bottleneck_facts(summary, self.calibration, observed, setting)
        if "bottleneck" not in summary:
            missing["bottleneck"] = "the parts of the steps have no time: the clock has jumped"
        self.operations = step_operations(observed.operations, summary, self.calibration)
        return summary | ({"missing": missing} if missing else {})


def step_operations(
    operations: Sequence[Operation], summary: Mapping[str, Any], calibration: Calibration | None
) -> StepOperations | None:
    """The record of a step that a run leaves (`operations.json`); None where no operation was recorded.

    Args:
        operations: of one step; those of the same name, module, part, dtype and dimensions are one row.
        summary: of the run.
        calibration: of the device, if it was measured.
    """
    if not operations:
        return None
    batches = summary["batches_per_sec"] * summary["step_ms_median"] / 1e3
    known = calibration.to_dict() if calibration is not None else {}
    rows = merge(operations, lambda each: (each.name, each.module, each.part, each.dtype, each.dims)).values()
    return StepOperations(
        batch_size=summary["batch_size"],
        batches=max(1.0, round(batches, 6)),
        device=summary["device"],
        device_name=summary["device_name"] or "",
        precision=summary["precision"],
        rows=[OperationRow(**{key: getattr(each, key) for key in _SAME}) for each in rows],
        threads=torch.get_num_threads() if summary["device"] == "cpu" else None,
        calibration={key: value for key, value in known.items() if key not in _IDENTITY},
    )
