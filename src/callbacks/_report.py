"""The summary of a run: a pure function of the results of its fit and of its device's calibration.

The summary is the cost of the steps with FLOP/s, MFU, the bottleneck and advice, and `missing` says why one of them is absent.
Apart from the arguments it depends only on torch's switches for float32 products.
"""

from dataclasses import asdict, replace
from math import inf
from typing import Any

from ..hardware.advice import advise
from ..hardware.bottleneck import CHANGED, Bottleneck, Step, find_bottleneck
from ..hardware.calibration import Calibration, faster_precision, peak_flops_per_sec, undisturbed
from ..hardware.slow_rank import find_slow_rank, part_means
from ..hardware.telemetry import PEAK, with_statistic
from ..records.operations import OperationRow
from ..records.step_parts import PARTS
from ._batches import NO_TENSORS
from ._level import slower_facts
from ._measured import Measured
from ._recording import Flops
from .device import LOGGED

_MAJORITY = 0.5  # of the waits for other ranks or for data, of the FLOPs, or of the bytes
_SIMILAR_SIZE = 0.9  # of a whole update's samples: from here on the mean update has about the same work
_MEAN_KEYS = [key for key in LOGGED if not key.endswith("_gib")]
# A key of `DeviceMonitor.result` → its name in the run's summary. For memory it is the peak, for others the mean.
_DEVICE_FACTS = {PEAK: "memory_peak_gib"} | {
    with_statistic(key, "mean"): key.removeprefix("device/").replace("/", "_") for key in _MEAN_KEYS
}


def report(measured: Measured, machine: Calibration | None) -> dict[str, Any]:
    """Return the summary of a run.

    Args:
        measured: the results of the fit, which has counted steps.
        machine: the calibration of the device; None if the device was not measured.
    """
    summary: dict[str, Any] = {**measured.cost, "title": measured.title, "device": measured.device}
    summary |= {"device_name": measured.device_name, "precision": measured.precision}
    flops, missing = _flops_facts(measured, machine)
    summary |= _rank_facts(measured) | flops | _device_facts(measured) | measured.fit_time
    summary |= {"slower": slower} if (slower := slower_facts(measured.spans, measured.device)) else {}
    if measured.device == "mps":
        untimed = ", ".join(part for part in PARTS if part not in summary["parts_ms"])
        missing["parts_ms"] = f"on mps the time at which the device runs an operation cannot be read: {untimed}"
    bottleneck = find_bottleneck(_bottleneck_input(measured, summary, machine))
    if bottleneck is None:
        missing["bottleneck"] = "the parts of the steps have no time: the clock has jumped"
    else:
        summary["bottleneck"] = _verdict(bottleneck, measured, summary, machine)
    return summary | ({"missing": missing} if missing else {})


def measured_peak(flops: Flops, precision: str, machine: Calibration | None) -> float | None:
    """Return the measured peak FLOP/s of a device for the products of a step; None where it is unknown."""
    machine = undisturbed(machine)
    return peak_flops_per_sec(machine, precision, flops.shares) if machine else None


def _rank_facts(measured: Measured) -> dict[str, Any]:
    """Return the number of ranks, the own times of each, and the slow rank, if any; empty for a single rank."""
    if not measured.ranks:
        return {}
    slow_rank = find_slow_rank(measured.ranks, measured.cost["step_ms"], measured.setting)
    facts = {"processes": len(measured.ranks), "ranks_ms": part_means(measured.ranks)}
    return facts | ({"slow_rank": slow_rank} if slow_rank else {})


def _flops_facts(measured: Measured, machine: Calibration | None) -> tuple[dict[str, float], dict[str, str]]:
    """Return FLOP/s and MFU of one rank as far as they are known, and the reasons for missing ones."""
    flops, peak = measured.flops, measured_peak(measured.flops, measured.precision, machine)
    missing = {} if measured.cost["samples"] else {"samples_per_sec": NO_TENSORS}
    has_changed = not flops.is_given and not 1 / CHANGED <= measured.changed <= CHANGED
    why_not = "the steps have changed since their FLOPs were recorded" if has_changed else NO_TENSORS
    if not flops.per_sample or has_changed or missing:
        why_not = why_not if flops.per_sample else flops.why_not
        return {}, missing | dict.fromkeys(("flops_per_sec", "mfu"), why_not)
    if not peak:
        disturbed = machine.disturbed if machine else None
        missing["mfu"] = disturbed or f"the device's peak at precision {measured.precision} was not measured"
    rate = flops.per_sample * measured.cost["samples_per_sec"] / max(1, len(measured.ranks))
    facts = {"flops_per_sample": flops.per_sample, "flops_per_sec": rate}
    return facts | ({"peak_flops_per_sec": peak, "mfu": rate / peak} if peak else {}), missing


def _device_facts(measured: Measured) -> dict[str, Any]:
    """Return the facts of the run that a DeviceMonitor has sampled.

    The energy of a training sample, in joules, is the mean power, by the energy counter, × the time of a sample. The power is
    that of the training after the warm-up, without validations; the time is that of the counted steps.
    """
    sampled, cost = measured.sampled, measured.cost
    facts = {name: sampled[key] for key, name in _DEVICE_FACTS.items() if key in sampled}
    # The driver's utilisation covers its last second, also before the run; kernel time is that of a whole update.
    if measured.kernel_s is not None and _mean_update_share(measured) > _SIMILAR_SIZE:
        facts["utilization_pct"] = 100 * min(1.0, 1e3 * measured.kernel_s / cost["step_ms"])
    if "energy_j" in sampled and sampled.get("seconds") and cost["samples"]:
        watts = sampled["energy_j"] / sampled["seconds"]
        facts["joules_per_sample"] = watts * cost["seconds"] / cost["samples"]
    return facts


def _mean_update_share(measured: Measured) -> float:
    """Return the samples of the mean update ÷ those of a recorded one, at most 1: a short last batch has less work."""
    cost = measured.cost
    recorded_samples = cost["batch_size"] * cost.get("batches", 1.0)
    return min(1.0, cost["samples"] / cost["updates"] / recorded_samples) if recorded_samples else 1.0


def _mean_update_operations(measured: Measured) -> list[OperationRow]:
    """Return the operations of the mean update: those of the recorded one, scaled by samples except for the optimizer's."""
    share = _mean_update_share(measured)
    return [row if row.part == "optimizer" else row.times(share) for row in measured.operations]


def _bottleneck_input(measured: Measured, summary: dict[str, Any], machine: Calibration | None) -> Step:
    """Return the input of the bottleneck rule for a run."""
    busy = summary.get("utilization_pct")
    return Step(
        summary["parts_ms"],
        work_ms=summary["work_ms_median"],
        device=measured.device,
        steps=summary["updates"],
        operations=_mean_update_operations(measured),
        not_recorded=measured.not_recorded,
        calibration=machine,
        communication_ms=summary.get("communication_ms", None if measured.ranks else 0.0),
        busy=None if busy is None else busy / 100,
        mfu=summary.get("mfu"),
        changed=measured.changed,
        others_share=measured.cost.get("others_share", 0.0),
    )


def _verdict(
    bottleneck: Bottleneck, measured: Measured, summary: dict[str, Any], machine: Calibration | None
) -> dict[str, Any]:
    """Return the bottleneck as facts for the record, with advice unless other programs use the machine."""
    facts: dict[str, Any] = asdict(bottleneck)
    if bottleneck.busy:
        return facts
    del facts["busy"]
    float32_share = sum(share for name, share in (measured.flops.shares or {"": 1.0}).items() if " " not in name)
    peak = summary.get("peak_flops_per_sec")
    faster = faster_precision(machine, measured.precision, peak) if float32_share >= _MAJORITY else None
    optimizer_bytes = sum(row.cold_bytes for row in measured.operations if row.part == "optimizer")
    step_bytes = sum(row.cold_bytes for row in measured.operations)
    if bottleneck.kind == "memory" and optimizer_bytes > _MAJORITY * step_bytes:
        faster = None  # a mixed precision does not change the optimizer's bytes
    is_profiled = measured.setting.profiled or not measured.operations
    setting = replace(measured.setting, faster_precision=faster, profiled=is_profiled)
    slow_share = summary.get("slow_rank", {"share": 0.0})["share"]
    if bottleneck.kind == "communication" and slow_share >= _MAJORITY * bottleneck.share > 0:  # ranks wait for that one
        return facts
    advice, epoch = advise(bottleneck.kind, setting), measured.fit_time.get("epoch", {})
    is_starting = epoch.get("starting_workers_s", 0.0) >= _MAJORITY * bottleneck.share * epoch.get("seconds", inf)
    if bottleneck.kind == "input" and is_starting:
        advice = epoch["advice"], "keeps the workers from one epoch to the next"
    return facts | (dict(zip(("advice", "advice_effect"), advice, strict=True)) if advice else {})
