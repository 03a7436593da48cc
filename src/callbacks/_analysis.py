"""StepAnalysis: what a fit's steps compute and what limits them, beside their times: FLOPs, MFU, the bottleneck, and advice."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from .._lightning import callbacks_of
from .._torch import float32_formats
from ..hardware.advice import Setting, advise
from ..hardware.bottleneck import CHANGED, Step, find_bottleneck
from ..hardware.calibration import CLEARLY_FASTER, Calibration, peak_flops_per_sec
from ..hardware.device_memory import PEAK, RESERVED
from ..hardware.devices import device_name
from ..hardware.flop_formulas import kind_of_product
from ..hardware.flops import UncountableError
from ..hardware.measure import find_calibration
from ..hardware.operations import merge
from ..hardware.roofline import lower_bound
from ..hardware.sampler import Span, named
from ..records.operations import OperationRow, StepOperations
from ..records.step_parts import StepPart
from ._batches import NO_TENSORS, varies
from ._recording import RecordedUpdates
from ._setting import setting_of
from ._table import UpdateTable
from .device import LOGGED, DeviceMonitor

_MEANS = [key for key in LOGGED if not key.endswith("_gib")]
# What DeviceMonitor sums up → its name in the run's summary. Of the memory the highest reading counts.
_DEVICE_FACTS = {PEAK: "memory_peak_gib", RESERVED: "memory_reserved_gib"} | {
    named(key, "mean"): key.removeprefix("device/").replace("/", "_") for key in _MEANS
}
# Of a calibration: what says which machine and not what it can do.
_IDENTITY = ("device", "device_name", "host", "uuid", "driver", "torch")


class Observations(NamedTuple):
    """What was observed of a run besides its times."""

    operations: Sequence[OperationRow] = ()  # of one step; empty where none was recorded
    reason: str | None = None  # why none was recorded
    changed: float = 1.0  # the median step ÷ those right after the recorded ones
    others_share: float = 0.0  # of the processor, for most of the time; on an accelerator only where they disturbed
    kernel_s: float | None = None  # seconds of a step in which a kernel ran, by a trace


class StepAnalysis:
    """Of one fit: the FLOPs of a sample (given, or once recorded), the device's peak, and the summary.

    Args:
        trainer, module: of the fit.
        flops_per_sample: forward and backward, if it is given.
        calibrate: whether the device's peak may be measured, on rank 0, before the first step.

    Attributes:
        calibration: of the device; None where it was not measured.
        per_sample: FLOPs of a sample; None as long as they are not known.
        peak: FLOP/s at the run's precision, as measured; None where that is not known.
        operations: those of a step, once there is a summary.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, flops_per_sample: float | None, calibrate: bool):
        self.per_sample = flops_per_sample
        self.operations: StepOperations | None = None
        self._trainer, self._module, self._may_measure = trainer, module, calibrate
        self._is_given = self._has_learned = flops_per_sample is not None
        self._no_flops = "no step was recorded"
        self.calibration = find_calibration(trainer.strategy.root_device, calibrate and trainer.is_global_zero)
        self._find_peak()

    def learn(self, recorded: RecordedUpdates) -> None:
        """Take the FLOPs of a sample from the recorded updates, once; one warning where these have none.

        Sequences of different lengths have none either.
        """
        if self._has_learned:
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
        self._find_peak(found.shares)

    def _find_peak(self, shares: Mapping[str, float] | None = None) -> None:
        known, precision = self.calibration, self._trainer.precision
        self.peak = peak_flops_per_sec(known, precision, shares) if known and not known.disturbed else None

    def summary(
        self,
        cost: Mapping[str, Any],
        table: UpdateTable,
        recorded: RecordedUpdates,
        spans: Sequence[Span],
        ranks: Sequence[float],
        kernel_s: float | None = None,
    ) -> dict[str, Any]:
        """The summary of a run, and `operations`.

        Args:
            cost: of this rank's steps, and of its exchanges of gradients.
            table: the steps.
            recorded: the updates whose operations were recorded.
            spans: when the counted steps ran, by `time.perf_counter`.
            ranks: as `rank_facts` takes them; empty for a single rank.
            kernel_s: seconds of a step in which a kernel ran; None without a trace.
        """
        trainer, device = self._trainer, self._trainer.strategy.root_device
        sampled = next((one.result(spans) for one in callbacks_of(trainer) if isinstance(one, DeviceMonitor)), {})
        observed = Observations(
            recorded.operations(),
            recorded.why_no_operations,
            table.changed(cost["step_ms_median"]),
            table.windows.typical_share(slowed_only=device.type != "cpu"),
            kernel_s,
        )
        title = getattr(self._module, "title", type(self._module).__name__)
        summary: dict[str, Any] = {**cost, "title": title, "device": device.type}
        summary |= {"device_name": device_name(device), "precision": str(trainer.precision)}
        summary |= rank_facts(ranks) if ranks else {}
        flops, missing = self._flops_facts(summary, observed.changed)
        summary |= flops | device_facts(sampled, summary) | operation_facts(observed, self.calibration)
        setting = setting_of(trainer, summary, self.calibration)
        summary |= bottleneck_facts(summary, self.calibration, observed, setting)
        if "bottleneck" not in summary:
            missing["bottleneck"] = "the parts of the steps have no time: the clock has jumped"
        self.operations = step_operations(observed.operations, summary, self.calibration)
        return summary | ({"missing": missing} if missing else {})

    def _flops_facts(self, summary: Mapping[str, Any], changed: float) -> tuple[dict[str, float], dict[str, str]]:
        """FLOP/s and MFU of one rank, as far as they are known, and why what is missing is missing."""
        both = ("flops_per_sec", "mfu")
        if not self.per_sample:
            missing = dict.fromkeys(both, self._no_flops)
        elif not self._is_given and not 1 / CHANGED <= changed <= CHANGED:
            missing = dict.fromkeys(both, "the steps have changed since their FLOPs were recorded")
        else:
            missing = {} if self.peak else {"mfu": self._no_peak()}
        if not summary["samples"]:
            return {}, missing | {"samples_per_sec": NO_TENSORS}
        if not self.per_sample or "flops_per_sec" in missing:
            return {}, missing
        rate = self.per_sample * summary["samples_per_sec"] / self._trainer.world_size
        facts = {"flops_per_sample": self.per_sample, "flops_per_sec": rate}
        return facts | ({"peak_flops_per_sec": self.peak, "mfu": rate / self.peak} if self.peak else {}), missing

    def _no_peak(self) -> str:
        if self.calibration is None:
            return "this device's peak was not measured before" + ("" if self._may_measure else ", and calibrate=False")
        if self.calibration.disturbed:
            return f"the device's peak is not known: {self.calibration.disturbed}"
        return f"the peak at precision {self._trainer.precision} was not measured here"


def rank_facts(steps: Sequence[float]) -> dict[str, Any]:
    """How many ranks there are, and the work of the slowest and of the fastest.

    Given the mean step of each rank in ms without the parts in which a rank waits for others; NaN where these are not
    measured.
    """
    if math.isnan(sum(steps)):
        return {"processes": len(steps)}
    return {
        "processes": len(steps),
        "slowest_process": steps.index(max(steps)),
        "slowest_step_ms": max(steps),
        "fastest_step_ms": min(steps),
    }


def device_facts(sampled: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a DeviceMonitor has sampled, as facts of the run.

    The energy of a sample is the mean power, by the energy counter, × the time of a sample. Both are of the counted steps.
    On CUDA the sampled time begins and ends a few steps before that of the counted steps, which does not change the mean.
    """
    facts = {name: sampled[key] for key, name in _DEVICE_FACTS.items() if key in sampled}
    if "energy_j" in sampled and sampled.get("seconds") and summary["samples"]:
        watts = sampled["energy_j"] / sampled["seconds"]
        facts["joules_per_sample"] = watts * summary["seconds"] / summary["samples"]
    return facts


def operation_facts(observed: Observations, calibration: Calibration | None) -> dict[str, Any]:
    """How many operations a step has, what they move, and the least time that they take on a calibrated device."""
    operations = observed.operations
    if not operations:
        return {"step": {"not_recorded": observed.reason}} if observed.reason else {}
    facts: dict[str, Any] = {
        "operations": round(sum(each.calls for each in operations)),
        "bytes": round(sum(each.bytes for each in operations)),
        "memory_bytes": round(sum(each.cold_bytes for each in operations)),
    }
    if calibration is not None:
        bound = lower_bound(operations, calibration)
        facts["floor_ms"] = {key: 1e3 * seconds for key, seconds in bound.items()}
    return {"step": facts}


def bottleneck_facts(
    summary: Mapping[str, Any], calibration: Calibration | None, observed: Observations, setting: Setting
) -> dict[str, Any]:
    """The bottleneck of a run, the evidence for it, and advice."""
    median, hooks = summary["step_ms_median"], summary.get("preparing_ms", {})
    # The hook of the user's that takes most of what counts as waiting for data, if one does.
    preparing = next((hook for hook, ms in hooks.items() if 2 * ms > summary["parts_ms"][StepPart.DATA_WAIT]), None)
    found = find_bottleneck(
        Step(
            summary["parts_ms"],
            preparing=preparing,
            work_ms=summary["work_ms_median"],
            device=summary["device"],
            steps=summary["updates"],
            operations=observed.operations,
            not_recorded=observed.reason,
            calibration=calibration,
            communication_ms=summary.get("communication_ms", None if "processes" in summary else 0.0),
            busy=_busy(summary, observed.kernel_s),
            mfu=summary.get("mfu"),
            changed=observed.changed,
            spread=summary["step_ms_p90"] / median if median else 1.0,
            others_share=observed.others_share,
        )
    )
    if found is None:
        return {}
    facts: dict[str, Any] = asdict(found)
    if found.busy:
        return {"bottleneck": facts}
    del facts["busy"]
    setting = replace(
        setting,
        preparing=preparing,
        optimizer_traffic=is_optimizer_traffic(observed.operations),
        tf32_is_faster=is_tf32_faster(observed.operations, calibration, float32_formats(summary["device"])["matmul"]),
    )
    if advice := advise(found.kind, setting):
        facts |= {"advice": advice.change, "advice_effect": advice.effect}
    return {"bottleneck": facts}


def is_optimizer_traffic(operations: Sequence[OperationRow]) -> bool:
    """Whether the optimizer moves most of the bytes that pass through memory in a step."""
    of_optimizer = sum(each.cold_bytes for each in operations if each.part == "optimizer")
    return 2 * of_optimizer > sum(each.cold_bytes for each in operations)


def is_tf32_faster(operations: Sequence[OperationRow], calibration: Calibration | None, form: str) -> bool:
    """Whether matrix products in float32 are most of a step's FLOPs, and the device was measured to be faster in TF32.

    Convolutions do not count: they use TF32 by default. `form` is what torch computes the products in (`float32_formats`).
    """
    if calibration is None or form not in ("none", "ieee"):
        return False
    peaks = calibration.matmul_flops_per_sec
    products = [each for each in operations if each.dtype == "fp32" and kind_of_product(each.name) == "matmul"]
    is_most = 2 * sum(each.flops for each in products) > sum(each.flops for each in operations)
    return is_most and peaks.get("tf32", 0.0) > CLEARLY_FASTER * peaks.get("fp32", math.inf)


def _busy(summary: Mapping[str, Any], kernel_s: float | None) -> float | None:
    """The fraction of the median step in which a kernel ran: by a trace, or else as sampled."""
    if kernel_s is not None:
        return min(1.0, 1e3 * kernel_s / summary["step_ms_median"])
    sampled = summary.get("utilization_pct")
    return None if sampled is None else sampled / 100


def step_operations(
    operations: Sequence[OperationRow], summary: Mapping[str, Any], calibration: Calibration | None
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
        rows=list(rows),
        threads=torch.get_num_threads() if summary["device"] == "cpu" else None,
        calibration={key: value for key, value in known.items() if key not in _IDENTITY},
    )
