"""The summary of a run: a pure function of what its fit has measured and of what its machine can do.

FLOP/s, MFU, the bottleneck and advice are added to the cost of the steps, and `missing` says why one of them is absent.
Besides the arguments only torch's switches for float32 products count.
"""

from dataclasses import asdict, replace
from math import inf
from typing import Any

from ..hardware.advice import advise
from ..hardware.bottleneck import CHANGED, Bottleneck, Step, find_bottleneck
from ..hardware.calibration import Calibration, faster_precision, peak_flops_per_sec, undisturbed
from ..hardware.slow_rank import find_slow_rank, part_means
from ..hardware.telemetry import PEAK, named
from ..records.operations import OperationRow
from ..records.step_parts import PARTS
from ._batches import NO_TENSORS
from ._level import slower_facts
from ._measured import Measured
from ._recording import Flops
from .device import LOGGED

_MOST = 0.5  # of the waits for other ranks or for data, of the FLOPs, or of the bytes
_ALIKE = 0.9  # of its samples: the mean update takes about the work of a whole one
_MEANS = [key for key in LOGGED if not key.endswith("_gib")]
# What DeviceMonitor sums up → its name in the run's summary. Of the memory the highest reading counts.
_DEVICE_FACTS = {PEAK: "memory_peak_gib"} | {
    named(key, "mean"): key.removeprefix("device/").replace("/", "_") for key in _MEANS
}


def report(measured: Measured, machine: Calibration | None) -> dict[str, Any]:
    """The summary of a run.

    Args:
        measured: by the fit, which has counted steps.
        machine: the calibration of the device; None if it was not measured.
    """
    summary: dict[str, Any] = {**measured.cost, "title": measured.title, "device": measured.device}
    summary |= {"device_name": measured.device_name, "precision": measured.precision}
    flops, missing = _flops_facts(measured, machine)
    summary |= _rank_facts(measured) | flops | _device_facts(measured) | measured.fit_time
    summary |= {"slower": slower} if (slower := slower_facts(measured.spans, measured.device)) else {}
    if measured.device == "mps":
        untimed = ", ".join(part for part in PARTS if part not in summary["parts_ms"])
        missing["parts_ms"] = f"on mps nobody tells when the device does what the host submits: {untimed}"
    found = find_bottleneck(_step(measured, summary, machine))
    if found is None:
        missing["bottleneck"] = "the parts of the steps have no time: the clock has jumped"
    else:
        summary["bottleneck"] = _verdict(found, measured, summary, machine)
    return summary | ({"missing": missing} if missing else {})


def peak_of(flops: Flops, precision: str, machine: Calibration | None) -> float | None:
    """The FLOP/s that a device was measured to reach in a step; None where that is not known."""
    machine = undisturbed(machine)
    return peak_flops_per_sec(machine, precision, flops.shares) if machine else None


def _rank_facts(measured: Measured) -> dict[str, Any]:
    """How many ranks there are, what each spends by itself, and which one is slow; empty for a single rank."""
    if not measured.ranks:
        return {}
    slow = find_slow_rank(measured.ranks, measured.cost["step_ms"], measured.setting)
    facts = {"processes": len(measured.ranks), "ranks_ms": part_means(measured.ranks)}
    return facts | ({"slow_rank": slow} if slow else {})


def _flops_facts(measured: Measured, machine: Calibration | None) -> tuple[dict[str, float], dict[str, str]]:
    """FLOP/s and MFU of one rank, as far as they are known, and why what is missing is missing."""
    flops, peak = measured.flops, peak_of(measured.flops, measured.precision, machine)
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
    """What a DeviceMonitor has sampled, as facts of the run.

    The energy of a sample, in joules, is the mean power, by the energy counter, × the time of a sample. The power is that
    of the training after the warm-up, without validations; the time is that of the counted steps.
    """
    sampled, cost = measured.sampled, measured.cost
    facts = {name: sampled[key] for key, name in _DEVICE_FACTS.items() if key in sampled}
    # The driver's is that of its last second, also before the run; that of kernels is of a whole update.
    if measured.kernel_s is not None and _mean_update(measured) > _ALIKE:
        facts["utilization_pct"] = 100 * min(1.0, 1e3 * measured.kernel_s / cost["step_ms"])
    if "energy_j" in sampled and sampled.get("seconds") and cost["samples"]:
        watts = sampled["energy_j"] / sampled["seconds"]
        facts["joules_per_sample"] = watts * cost["seconds"] / cost["samples"]
    return facts


def _mean_update(measured: Measured) -> float:
    """The samples of the mean update ÷ those of the recorded ones, at most 1: a short last batch takes less work."""
    cost = measured.cost
    recorded = cost["batch_size"] * cost.get("batches", 1.0)
    return min(1.0, cost["samples"] / cost["updates"] / recorded) if recorded else 1.0


def _of_mean_update(measured: Measured) -> list[OperationRow]:
    """The operations of the mean update. The optimizer's are the same in every update."""
    share = _mean_update(measured)
    return [row if row.part == "optimizer" else row.times(share) for row in measured.operations]


def _step(measured: Measured, summary: dict[str, Any], machine: Calibration | None) -> Step:
    """What the rule of the bottleneck asks of a run."""
    busy = summary.get("utilization_pct")
    return Step(
        summary["parts_ms"],
        work_ms=summary["work_ms_median"],
        device=measured.device,
        steps=summary["updates"],
        operations=_of_mean_update(measured),
        not_recorded=measured.not_recorded,
        calibration=machine,
        communication_ms=summary.get("communication_ms", None if measured.ranks else 0.0),
        busy=None if busy is None else busy / 100,
        mfu=summary.get("mfu"),
        changed=measured.changed,
        others_share=measured.cost.get("others_share", 0.0),
    )


def _verdict(
    found: Bottleneck, measured: Measured, summary: dict[str, Any], machine: Calibration | None
) -> dict[str, Any]:
    """A bottleneck for the record, with advice; on a machine that others use without."""
    facts: dict[str, Any] = asdict(found)
    if found.busy:
        return facts
    del facts["busy"]
    single = sum(share for name, share in (measured.flops.shares or {"": 1.0}).items() if " " not in name)
    peak = summary.get("peak_flops_per_sec")
    faster = faster_precision(machine, measured.precision, peak) if single >= _MOST else None
    of_optimizer = sum(row.cold_bytes for row in measured.operations if row.part == "optimizer")
    if found.kind == "memory" and of_optimizer > _MOST * sum(row.cold_bytes for row in measured.operations):
        faster = None  # a mixed precision does not change the optimizer's bytes
    is_shown = measured.setting.profiled or not measured.operations
    setting = replace(measured.setting, faster_precision=faster, profiled=is_shown)
    slow = summary.get("slow_rank", {"share": 0.0})
    if found.kind == "communication" and slow["share"] >= _MOST * found.share > 0:  # that rank is what is waited for
        return facts
    advice, epoch = advise(found.kind, setting), measured.fit_time.get("epoch", {})
    is_starting = epoch.get("starting_workers_s", 0.0) >= _MOST * found.share * epoch.get("seconds", inf)
    if found.kind == "input" and is_starting:
        advice = epoch["advice"], "keeps the workers from one epoch to the next"
    return facts | (dict(zip(("advice", "advice_effect"), advice, strict=True)) if advice else {})
