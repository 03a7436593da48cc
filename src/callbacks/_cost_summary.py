"""What steps cost in all: sums, medians, the limiter, and the table that a run ends with."""

import math
import statistics
from array import array
from collections.abc import Mapping
from typing import Any

import numpy

from ..hardware.bottleneck import Bottleneck, find_bottleneck
from ..hardware.calibrate import Calibration, faster_precision
from ..records.rates import rate
from ._stopwatch import PARTS

STEP_MS = "time/step_ms"
PART_MS = {part: f"time/{part}_ms" for part in PARTS}


class CostSummary:
    """Adds up updates as they come; the first few are kept apart as warm-up.

    Args:
        warmup: how many updates are left out, as far as there are more.
    """

    def __init__(self, warmup: int):
        self.warmup = warmup
        self.updates = 0
        self._kept: list[Mapping[str, float]] = []  # the warm-up, for runs that are no longer than it
        self._sums: dict[str, float] = {}
        self._step_ms = array("d")
        self._samples = array("d")  # of each of these steps
        self._batches: dict[float, float] = {}  # by what a step holds

    def add(self, update: Mapping[str, float]) -> None:
        """One update: the parts in ms, and the `samples`, `timesteps` and `batches` of it."""
        self.updates += 1
        if self.updates <= self.warmup:
            self._kept.append(dict(update))
        else:
            self._count(update)

    def summary(self, processes: int = 1) -> dict[str, Any]:
        """Everything over the counted updates of this process; empty if there was none.

        `batch_size` is that of a whole batch, and `step_ms_median`, `_p10` and `_p90` are of the steps that held one.
        `samples_per_sec` is the run's rate (see rates.py), and `samples_per_sec_mean` all samples over all the time.
        `step_ms` and the parts are means, which add up.

        Args:
            processes: that take the same steps, by which samples/s and time steps/s are multiplied.
        """
        if not self._step_ms:  # no longer than the warm-up: all but the very first, which pays for what is done once
            for update in self._kept[1:] or self._kept:
                self._count(update)
            self._kept = []
        steps, sums = len(self._step_ms), self._sums
        seconds = sum(self._step_ms) / 1e3
        if not steps or seconds <= 0:
            return {}
        held, ordered = self._whole_steps()
        batches = self._batches.get(held, sums["batches"] / steps)
        median, (low, high) = statistics.median(ordered), numpy.quantile(ordered, (0.1, 0.9))
        if median <= 0:
            return {}
        result = {
            "updates": steps,
            "samples": int(sums["samples"]),
            "seconds": seconds,
            "batch_size": round(held / batches),
            "batches_per_sec": rate(batches, median),
            "samples_per_sec": rate(held * processes, median),
            "samples_per_sec_mean": sums["samples"] * processes / seconds,
            "step_ms": 1e3 * seconds / steps,
            "step_ms_median": median,
            "step_ms_p10": float(low),
            "step_ms_p90": float(high),
            "parts_ms": {part: sums[part] / steps for part in PARTS},
        }
        if sums["timesteps"] and sums["samples"]:
            result["timesteps_per_sec"] = result["samples_per_sec"] * sums["timesteps"] / sums["samples"]
        return result

    def _whole_steps(self) -> tuple[float, list[float]]:
        """How many samples a whole step holds, and the times of those steps in order.

        It is the size with which most of the samples were trained. Where that is the smaller half of them, sizes vary
        by design: then it is the mean size, and all steps count.
        """
        trained: dict[float, float] = {}
        for samples in self._samples:
            trained[samples] = trained.get(samples, 0.0) + samples
        held = max(trained, key=lambda samples: (trained[samples], samples))
        if 2 * trained[held] < self._sums["samples"]:
            return self._sums["samples"] / len(self._samples), sorted(self._step_ms)
        pairs = zip(self._samples, self._step_ms, strict=True)
        return held, sorted(ms for samples, ms in pairs if samples == held)

    def _count(self, update: Mapping[str, float]) -> None:
        for key, value in update.items():
            self._sums[key] = self._sums.get(key, 0.0) + value
        self._step_ms.append(sum(update[part] for part in PARTS))
        self._samples.append(update["samples"])
        self._batches[update["samples"]] = update["batches"]


def device_facts(sampled: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a device monitor saw, as facts of the run.

    Energy is the mean power by the time a sample took. Both are of the counted steps; on CUDA the sampled time begins
    and ends a little before theirs, which a mean does not notice.
    """
    names = {
        "device/utilization_mean_pct": "utilization_pct",
        "device/sm_activity_mean_pct": "sm_activity_pct",
        "device/memory_peak_gib": "memory_peak_gib",
        "device/power_mean_w": "power_w",
        "host/cpu_mean_pct": "host_cpu_pct",
        "host/rss_max_gib": "host_rss_gib",
    }
    facts = {name: sampled[key] for key, name in names.items() if key in sampled}
    if "energy_j" in sampled and sampled.get("seconds"):
        watts = sampled["energy_j"] / sampled["seconds"]
        facts["joules_per_sample"] = watts * summary["seconds"] / summary["samples"]
        facts["energy_source"] = sampled["energy_source"]
    return facts


def bottleneck_of(summary: Mapping[str, Any], calibration: Calibration | None) -> Bottleneck | None:
    """What limits the run that a summary is of."""
    busy, peak = summary.get("sm_activity_pct"), summary.get("peak_flops_per_sec")
    return find_bottleneck(
        summary["parts_ms"],
        device=summary["device"],
        busy=None if busy is None else busy / 100,
        flops_per_sec=_mean_flops_per_sec(summary),
        peak_flops_per_sec=peak,
        launch_us=calibration.launch_us if calibration else None,
        copy_bytes_per_sec=calibration.copy_bytes_per_sec if calibration else None,
        batch_size=summary["batch_size"],
        faster_precision=faster_precision(calibration, summary["precision"], peak),
    )


def _mean_flops_per_sec(summary: Mapping[str, Any]) -> float | None:
    """FLOP/s over the mean step, as the parts are: at the median step's, arithmetic could seem to exceed the peak."""
    if "flops_per_sec" not in summary or not summary["samples_per_sec"]:
        return None
    return summary["flops_per_sec"] * summary["samples_per_sec_mean"] / summary["samples_per_sec"]


def predicted_knee(verdict: Bottleneck | None, batch_size: int, device: str) -> int | None:
    """The batch size, a power of two, near which a run that the host limits would stop gaining from a larger one.

    The host's share `s` of a step does not grow with the batch, the rest does. On an asynchronous device the rest is
    hidden behind the host until it is as long: at `b / (1 − s)`. On a CPU the two add up, and 95 % of the best rate is
    reached where the host's share has fallen to 5 %: at `19 · b · s / (1 − s)`. None where something else limits.
    """
    if verdict is None or verdict.kind != "host" or not 0 < verdict.share < 1:
        return None
    rest = 1 - verdict.share
    knee = batch_size * (19 * verdict.share / rest if device == "cpu" else 1 / rest)
    return 2 ** math.ceil(math.log2(knee)) if knee > batch_size else None


def report(summary: Mapping[str, Any]) -> str:
    """The table in words: the device, the step and its parts, the rates, what limits them."""
    name = f" ({summary['device_name']})" if summary.get("device_name") else ""
    parts = " + ".join(f"{part.removesuffix('_wait')} {ms:.2f}" for part, ms in summary["parts_ms"].items())
    run = (summary["title"], f"batch {summary['batch_size']:,}", summary["device"] + name, summary["precision"])
    lines = [
        " · ".join([*run, f"{summary['updates']:,} step{'s'[: summary['updates'] > 1]} measured"]),
        f"median step {summary['step_ms_median']:.2f} ms; mean {summary['step_ms']:.2f} ms = {parts}",
        " · ".join(_rates(summary)),
    ]
    if "processes" in summary:
        lines.append(
            f"{summary['processes']} processes, a batch of {summary['batch_size'] * summary['processes']:,} and samples/s of "
            f"all; the mean step takes {summary['fastest_step_ms']:.2f} ms in the fastest and "
            f"{summary['slowest_step_ms']:.2f} ms in the slowest, process {summary['slowest_process']}"
        )
    if "communication_ms" in summary:
        share = summary["communication_ms"] / summary["step_ms"]
        lines.append(
            f"communication {summary['communication_ms']:.2f} ms of the mean step ({share:.0%}) is not hidden behind "
            f"the backward pass: {_si(summary['gradient_bytes'])}B of gradients"
        )
    if "limiter" in summary:
        limit = summary["limiter"]
        knee = f" The knee is predicted near {limit['predicted_knee']:,}." if "predicted_knee" in limit else ""
        lines.append(f"limited by: {limit['kind']}. {limit['advice']}{knee}")
    return "\n".join(lines)


def _rates(summary: Mapping[str, Any]) -> list[str]:
    mean = rate_text(summary["samples_per_sec_mean"])
    rates = [f"{rate_text(summary['samples_per_sec'])} samples/s at the median step, {mean} over all steps"]
    if "timesteps_per_sec" in summary:
        rates.append(f"{rate_text(summary['timesteps_per_sec'])} time steps/s")
    if "flops_per_sec" in summary:
        flops = f"{_si(summary['flops_per_sec'])}FLOP/s"
        if "mfu" in summary:
            flops += f", MFU {summary['mfu']:.1%} of the {_si(summary['peak_flops_per_sec'])}FLOP/s measured here"
        rates.append(flops)
    busy = summary.get("sm_activity_pct", summary.get("utilization_pct"))
    if busy is not None:
        rates.append(f"device busy {busy:.0f} %")
    if "memory_peak_gib" in summary:
        rates.append(f"peak {summary['memory_peak_gib']:.2g} GiB")
    if "joules_per_sample" in summary:
        rates.append(f"{_si(summary['joules_per_sample'])}J/sample")
    return rates


def rate_text(rate: float) -> str:
    """A rate to be read: whole, or with two digits where it is less than ten."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def _si(value: float) -> str:
    """Three digits and a prefix: `10.3 T`, `0.9 m`."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value / 1e-6:.3g} µ"
