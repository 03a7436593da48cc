"""The summary of a run in words: the few lines that every run ends with, and the details that are shown on demand."""

from collections.abc import Mapping
from typing import Any

from ..hardware.evidence import limit_line, limit_row
from ..hardware.nvml_readings import THROTTLED_BY
from ..records.formatting import count, percent, significant, with_prefix
from ..records.intervals import TIME_LIMIT
from ..records.step_parts import PARTS, StepPart
from ..records.terminal import row
from ._cost import STALL_MS, STALL_RATIO

_NAMES = {"flops_per_sec": "FLOP/s", "mfu": "MFU", "samples_per_sec": "samples/s"}  # of what may be missing
_NOISE = 0.05  # between two rates or two ranks: less is not worth a word
_MIN_PART = 0.045  # of the step: smaller parts are added up as the rest
_MIN_OTHERS = 0.02  # of the processor: less has slowed no step
_MIN_THROTTLED_PCT = 1.0  # of the time; less is not worth a word
_MUCH_THROTTLED_PCT = 10.0  # the same, for the few lines


def headline(summary: Mapping[str, Any]) -> list[str]:
    """The rows that every run ends with: what ran, how fast, where the time goes, what limits it, and what to try."""
    missing = summary.get("missing", {})
    if "title" not in summary:
        rate = _speed(summary) if "updates" in summary else "unknown"
        return [row("speed", f"{rate}: {missing.get('bottleneck', 'nothing was measured')}")]
    rows = [_heading(summary), row("speed", _speed(summary)), row("step", _mean_step(summary))]
    rows += [row("ranks", _ranks(summary))] if summary.get("processes", 1) > 1 and _differ(summary) else []
    rows += [row("device", facts)] if summary["device"] != "cpu" and (facts := _device(summary)) else []
    found = summary.get("bottleneck")
    if found is None:
        return [*rows, row("limit", f"unknown: {missing.get('bottleneck', 'it was not asked')}")]
    rows.append(row(*limit_row(found)))
    return [*rows, row("try", found["advice"])] if "advice" in found else rows


def _heading(summary: Mapping[str, Any]) -> str:
    ranks = f"{summary['processes']} × " if summary.get("processes", 1) > 1 else ""
    name = f" ({summary['device_name']})" if summary["device"] != "cpu" and summary.get("device_name") else ""
    accumulated = round(summary["batches_per_sec"] * summary["step_ms_median"] / 1e3)
    batches = f"{accumulated} × " if accumulated > 1 else ""
    held = [f"batch {ranks}{batches}{summary['batch_size']:,}"] if summary["batch_size"] else []
    words = [summary["title"], *held, summary["device"] + name]
    return " · ".join(words + ([] if summary["precision"] == "32-true" else [summary["precision"]]))


def _speed(summary: Mapping[str, Any]) -> str:
    if "samples_per_sec" not in summary:
        return f"unknown: {summary['missing']['samples_per_sec']}"
    mean, at_median = summary["samples_per_sec_mean"], summary["samples_per_sec"]
    words = f"{significant(mean)} samples/s"
    if abs(at_median - mean) <= _NOISE * mean:
        return words
    if "undisturbed_share" not in summary or not summary.get("disturbed_windows"):
        return f"{words} ({significant(at_median)} at the median step)"
    taken = summary.get("others_share", 0.0)
    when = "without other programs" if taken > _MIN_OTHERS else "at its usual speed"
    return f"{words} ({significant(at_median)} in the {percent(summary['undisturbed_share'])} of the time {when})"


def _mean_step(summary: Mapping[str, Any]) -> str:
    """The mean step and its parts in percent, which add up to 100; small parts and `other` are the rest."""
    parts, total = summary["parts_ms"], sum(summary["parts_ms"].values())
    large = [part for part in PARTS if part != StepPart.OTHER and parts.get(part, 0.0) >= _MIN_PART * total > 0]
    shown = {part: round(100 * parts[part] / total) for part in large}
    rest = 100 - sum(shown.values())
    words = [f"{part.removesuffix('_wait')} {share}" for part, share in shown.items()]
    words += [f"rest {rest}"] if rest > 0 else []
    return f"{significant(summary['step_ms'])} ms: {', '.join(words)} %"


def _differ(summary: Mapping[str, Any]) -> bool:
    return summary["slowest_step_ms"] > (1 + _NOISE) * summary["fastest_step_ms"]


def _ranks(summary: Mapping[str, Any]) -> str:
    slowest, fastest = (significant(summary[f"{which}_step_ms"]) for which in ("slowest", "fastest"))
    return f"mean step {slowest} ms on the slowest (rank {summary['slowest_process']}), {fastest} on the fastest"


def _device(summary: Mapping[str, Any]) -> str:
    words = []
    if "sm_activity_pct" in summary:
        words.append(f"SM activity {percent(summary['sm_activity_pct'] / 100)}")
    elif "utilization_pct" in summary:
        words.append(f"a kernel ran in {percent(summary['utilization_pct'] / 100)} of the time")
    if "memory_peak_gib" in summary:
        words.append(f"peak memory {significant(summary['memory_peak_gib'])} GiB")
    if summary.get("throttled_pct", 0.0) >= _MUCH_THROTTLED_PCT:
        words.append(f"clocks lowered in {percent(summary['throttled_pct'] / 100)} of the time")
    return ", ".join(words)


def details(summary: Mapping[str, Any]) -> list[str]:
    """All the numbers of a summary, the evidence for the bottleneck, and why one of them is missing."""
    lines = _measured(summary) if "title" in summary else []
    reasons: dict[str, list[str]] = {}
    for key, reason in summary.get("missing", {}).items():
        reasons.setdefault(reason, []).append(_NAMES.get(key, key))
    return [*lines, *(f"no {' and no '.join(names)}: {reason}" for reason, names in reasons.items())]


def _measured(summary: Mapping[str, Any]) -> list[str]:
    name = f" ({summary['device_name']})" if summary.get("device_name") else ""
    run = (summary["device"] + name, summary["precision"], f"{count(summary['updates'], 'step')} measured")
    parts = " + ".join(f"{part.removesuffix('_wait')} {significant(ms)}" for part, ms in summary["parts_ms"].items())
    mean = significant(summary["step_ms"])
    lines = [
        " · ".join(run),
        f"median step {_median(summary)}; mean {mean} ms = {parts}",
        " · ".join(_rates(summary)),
    ]
    lines += filter(None, [_noise(summary)])
    if "processes" in summary:
        lines.append(
            f"{summary['processes']} ranks, global batch {summary['batch_size'] * summary['processes']:,}, samples/s of "
            f"all ranks; {_ranks(summary)}"
        )
    if "communication_ms" in summary:
        exposed = summary["communication_ms"]
        lines.append(
            f"communication: {significant(exposed)} ms ({percent(exposed / summary['step_ms'])}) of the mean step is not "
            f"hidden behind the backward pass, for {with_prefix(summary['gradient_bytes'], 'B')} of gradients"
        )
    if "bottleneck" in summary:
        found = summary["bottleneck"]
        lines.append(limit_line(found))
        if "predicted_knee" in found:
            lines.append(f"larger batches are predicted to gain up to about {found['predicted_knee']:,}")
        if "advice" in found:
            lines.append(
                f"{found['advice']}: {found['advice_effect']}" if "advice_effect" in found else found["advice"]
            )
    return lines


def _median(summary: Mapping[str, Any]) -> str:
    """The median step with its interval, and why a timed run has ended: `12.3 ms (12.1 to 12.5, known to ± 5 %)`."""
    interval = " to ".join(map(significant, summary.get("step_ms_interval", ())))
    ended = summary.get("ended")
    ended = "at its time limit" if ended == TIME_LIMIT else ended
    counted = summary.get("undisturbed_steps", summary["updates"])
    few = f"of the {counted} without other programs" if 2 * counted < summary["updates"] else ""
    within = ", ".join(filter(None, (few, interval, ended)))
    return f"{significant(summary['step_ms_median'])} ms" + (f" ({within})" if within else "")


def _noise(summary: Mapping[str, Any]) -> str | None:
    """A line on windows that something else has slowed, for the details; None if there were none."""
    bad, windows = summary.get("disturbed_windows", 0), summary.get("windows", 0)
    if not bad:
        return None
    share = summary.get("others_share", 0.0)
    took = f", other programs took {percent(share)} of the processor" if share >= _MIN_OTHERS else ""
    enough = "undisturbed_steps" in summary
    median_is = "the median is of the others" if enough else "the others have too few steps, so the median is of all"
    return f"{bad} of {count(windows, 'window')} slowed from outside{took}; {median_is}"


def _rates(summary: Mapping[str, Any]) -> list[str]:
    rates = []
    if "samples_per_sec" in summary:
        rate, mean = significant(summary["samples_per_sec"]), significant(summary["samples_per_sec_mean"])
        rates = [f"{rate} samples/s at the median step, {mean} over all steps"]
    if "samples_per_sec_fit" in summary:
        rates[0] += f", {significant(summary['samples_per_sec_fit'])} from start to end"
    if "step_ms_p99" in summary:
        rates.append(f"p99 step {significant(summary['step_ms_p99'])} ms")
    if summary.get("stalls"):
        least = max(STALL_RATIO * summary["step_ms_median"], summary["step_ms_median"] + STALL_MS)
        pauses = f"{count(summary['stalls'], 'pause')} > {significant(least)} ms"
        rates.append(f"{pauses} took {significant(summary['stall_seconds'])} s")
    if "timesteps_per_sec" in summary:
        rates.append(f"{significant(summary['timesteps_per_sec'])} time steps/s")
    if "flops_per_sec" in summary:
        flops = with_prefix(summary["flops_per_sec"], "FLOP/s")
        if "mfu" in summary:
            peak = with_prefix(summary["peak_flops_per_sec"], "FLOP/s")
            flops += f", MFU {percent(summary['mfu'], digits=1)} of the {peak} measured here"
        if "mfu_of_datasheet" in summary:
            flops += f", {percent(summary['mfu_of_datasheet'], digits=1)} of the datasheet's"
        rates.append(flops)
    rates += _device_details(summary)
    if "joules_per_sample" in summary:
        rates.append(f"{with_prefix(summary['joules_per_sample'], 'J')}/sample")
    return rates


def _device_details(summary: Mapping[str, Any]) -> list[str]:
    """What the device did and held, in the words of who measured it: NVML's utilisation says nothing of how much ran."""
    words = []
    if "processor_time_pct" in summary:
        share, cores = percent(summary["processor_time_pct"] / 100), summary["cores"]
        words.append(f"processor time {share} of {cores:g} core{'' if cores == 1 else 's'}")
    if "utilization_pct" in summary:
        words.append(f"a kernel ran in {percent(summary['utilization_pct'] / 100)} of the time")
    if "sm_activity_pct" in summary:
        words.append(f"SM activity {percent(summary['sm_activity_pct'] / 100)}")
    if summary.get("throttled_pct", 0.0) >= _MIN_THROTTLED_PCT:
        causes = {cause: summary.get(f"throttled_{cause}_pct", 0.0) for cause in THROTTLED_BY}
        shares = [f"{cause} {percent(pct / 100)}" for cause, pct in causes.items() if pct >= _MIN_THROTTLED_PCT]
        words.append(f"clocks lowered in {percent(summary['throttled_pct'] / 100)} of the time ({', '.join(shares)})")
    if "memory_peak_gib" in summary:
        reserved = summary.get("memory_reserved_gib")
        words.append(f"peak {significant(summary['memory_peak_gib'])} GiB")
        words[-1] += f" ({significant(reserved)} reserved)" if reserved is not None else ""
    return words
