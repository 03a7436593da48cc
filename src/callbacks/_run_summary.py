"""What the devices, the ranks and the rule of the bottleneck add to the cost of a run, as facts of its summary."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from .._torch import float32_formats
from ..hardware.advice import Setting, advise
from ..hardware.bottleneck import Step, find_bottleneck
from ..hardware.calibration import CLEARLY_FASTER, Calibration
from ..hardware.device_memory import PEAK, RESERVED
from ..hardware.flop_formulas import kind_of_product
from ..hardware.operations import Operation
from ..hardware.probes import RSS
from ..hardware.processor import usable_cores
from ..hardware.roofline import lower_bound
from ..hardware.sampler import named
from ..records.step_parts import StepPart
from .device import LOGGED

# What DeviceMonitor sums up → its name in the run's summary. Of the memory the highest reading counts.
_MEMORY_FACTS = {PEAK: "memory_peak_gib", RESERVED: "memory_reserved_gib", named(RSS, "max"): "host_rss_gib"}
_MEANS = [key for key in LOGGED if not key.endswith("_gib")]
_DEVICE_FACTS = _MEMORY_FACTS | {named(key, "mean"): key.removeprefix("device/").replace("/", "_") for key in _MEANS}


class Observations(NamedTuple):
    """What was observed of a run besides its times."""

    operations: Sequence[Operation] = ()  # of one step; empty where none was recorded
    reason: str | None = None  # why none was recorded
    changed: float = 1.0  # the median step ÷ those right after the recorded ones
    others_shares: Sequence[float] = ()  # of the processor, in each window; on an accelerator only of disturbed ones


def rank_facts(steps: Sequence[float]) -> dict[str, Any]:
    """How many ranks there are, and the mean step of the slowest and of the fastest, given each rank's in ms."""
    return {
        "processes": len(steps),
        "slowest_process": steps.index(max(steps)),
        "slowest_step_ms": max(steps),
        "fastest_step_ms": min(steps),
    }


def device_facts(sampled: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a DeviceMonitor has sampled, as facts of the run.

    The energy of a sample is the mean power, by the energy counter, × the time of a sample. Both are of the counted steps. On CUDA the sampled
    time begins and ends a few steps before that of the counted steps, which does not change the mean.
    """
    facts = {name: sampled[key] for key, name in _DEVICE_FACTS.items() if key in sampled}
    if "processor_time_pct" in facts:
        facts["cores"] = usable_cores()
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
    median, preparing = summary["step_ms_median"], preparing_hook(summary)
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
            busy=None if (utilization := summary.get("utilization_pct")) is None else utilization / 100,
            mfu=summary.get("mfu"),
            changed=observed.changed,
            spread=summary["step_ms_p90"] / median if median else 1.0,
            others_shares=observed.others_shares,
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


def is_optimizer_traffic(operations: Sequence[Operation]) -> bool:
    """Whether the optimizer moves most of the bytes that pass through memory in a step."""
    of_optimizer = sum(each.cold_bytes for each in operations if each.part == "optimizer")
    return 2 * of_optimizer > sum(each.cold_bytes for each in operations)


def is_tf32_faster(operations: Sequence[Operation], calibration: Calibration | None, form: str) -> bool:
    """Whether matrix products in float32 are most of a step's FLOPs, and the device was measured to be faster in TF32.

    Convolutions do not count: they use TF32 by default. `form` is what torch computes the products in (`float32_formats`).
    """
    if calibration is None or form not in ("none", "ieee"):
        return False
    peaks = calibration.matmul_flops_per_sec
    products = [each for each in operations if each.dtype == "fp32" and kind_of_product(each.name) == "matmul"]
    is_most = 2 * sum(each.flops for each in products) > sum(each.flops for each in operations)
    return is_most and peaks.get("tf32", 0.0) > CLEARLY_FASTER * peaks.get("fp32", math.inf)


def preparing_hook(summary: Mapping[str, Any]) -> str | None:
    """The hook of the user's that takes most of what counts as waiting for data, if one does."""
    hooks = summary.get("preparing_ms", {})
    return next((hook for hook, ms in hooks.items() if 2 * ms > summary["parts_ms"][StepPart.DATA_WAIT]), None)
