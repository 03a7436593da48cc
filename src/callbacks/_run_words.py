"""The summary of a run as text: the few lines that every run ends with, and the details on demand."""

from collections.abc import Mapping
from typing import Any

from ..hardware.evidence import limit_row
from ..options.tree import flatten
from ..records.course import fit_words, slower_words, workers_words
from ..records.formatting import percent, significant
from ..records.rates import REPORTED_LOAD, load_words
from ..records.step_parts import PARTS, StepPart
from ..records.terminal import row
from ..records.values import positive

_MIN_DIFFERENCE = 0.05  # between two rates: a smaller one is not mentioned
_MIN_PART = 0.045  # of the step: smaller parts are added up as the rest
_MIN_THROTTLED_PCT = 10.0  # of the time: a smaller share is not mentioned in the few lines


def headline(summary: Mapping[str, Any], programs: str = "") -> list[str]:
    """Return the rows that every run ends with: what ran, how fast, where the time goes, what limits it, and what to try.

    Args:
        summary: of the run.
        programs: the other programs that took most of the processor, for the terminal only.
    """
    missing = summary.get("missing", {})
    if "title" not in summary:
        rate = _speed_words(summary, programs) if "samples_per_sec" in summary else "unknown"
        return [row("speed", f"{rate}: {missing.get('bottleneck', 'nothing was measured')}")]
    slow_rank, bottleneck = summary.get("slow_rank"), summary.get("bottleneck")
    rows = {
        "speed": _speed_words(summary, programs),
        "step": _step_words(summary),
        "slower": slower_words(summary),
        "fit": fit_words(summary),
        "epochs": workers_words(summary),
        "ranks": slow_rank and f"{slow_rank['evidence']}; {slow_rank['advice']}",
        "device": _device_words(summary) if summary["device"] != "cpu" else "",
    }
    if bottleneck is None:
        rows["limit"] = f"unknown: {missing.get('bottleneck', 'it was not asked')}"
    else:
        rows |= dict([limit_row(bottleneck)]) | {"try": bottleneck.get("advice")}
    return [_heading(summary), *(row(label, words) for label, words in rows.items() if words)]


def _heading(summary: Mapping[str, Any]) -> str:
    ranks = f"{summary['processes']} × " if summary.get("processes", 1) > 1 else ""
    name = f" ({summary['device_name']})" if summary["device"] != "cpu" and summary.get("device_name") else ""
    accumulated = round(summary.get("batches", 1.0))
    batches = f"{accumulated} × " if accumulated > 1 else ""
    batch_words = [f"batch {ranks}{batches}{summary['batch_size']:,}"] if summary["batch_size"] else []
    words = [summary["title"], *batch_words, summary["device"] + name]
    return " · ".join(words + ([] if summary["precision"] == "32-true" else [summary["precision"]]))


def _speed_words(summary: Mapping[str, Any], programs: str) -> str:
    """Return the mean rate, the load of other programs, and the rate without that load where it differs."""
    if "samples_per_sec" not in summary:
        return f"unknown: {summary['missing']['samples_per_sec']}"
    mean_rate, median_rate = summary["samples_per_sec_mean"], summary["samples_per_sec"]
    words = f"{significant(mean_rate)} samples/s"
    load = positive(summary.get("others_share")) or 0.0
    if load >= REPORTED_LOAD:
        words += f" beside {load_words(load)}" + (f", mostly {programs}" if programs else "")
    if abs(median_rate - mean_rate) <= _MIN_DIFFERENCE * mean_rate:
        return words
    where = "in undisturbed steps" if summary.get("update_size_varies") else "at the median step"
    return f"{words} ({significant(median_rate)} {where})"


def _step_words(summary: Mapping[str, Any]) -> str:
    """Return the mean step and its parts in percent, which add up to 100; small parts and `other` are the rest."""
    parts, total = summary["parts_ms"], sum(summary["parts_ms"].values())
    large_parts = [part for part in PARTS if part != StepPart.OTHER and parts.get(part, 0.0) >= _MIN_PART * total > 0]
    percentages = {part: round(100 * parts[part] / total) for part in large_parts}
    rest = 100 - sum(percentages.values())
    if rest < 0:  # due to rounding
        percentages[max(percentages, key=lambda part: percentages[part])] += rest
    words = [f"{part.removesuffix('_wait')} {share}" for part, share in percentages.items()]
    words += [f"rest {rest}"] if rest > 0 else []
    return f"{significant(summary['step_ms'])} ms: {', '.join(words)} %"


def _device_words(summary: Mapping[str, Any]) -> str:
    words = []
    if "utilization_pct" in summary:
        words.append(f"a kernel ran in {percent(summary['utilization_pct'] / 100)} of the time")
    if summary.get("throttled_pct", 0.0) >= _MIN_THROTTLED_PCT:
        words.append(f"clocks lowered in {percent(summary['throttled_pct'] / 100)} of the time")
    if "memory_peak_gib" in summary:
        words.append(f"peak memory {significant(summary['memory_peak_gib'])} GiB")
    return ", ".join(words)


def details(summary: Mapping[str, Any]) -> list[str]:
    """Return each number of a summary as `key value`, the evidence for the bottleneck, and the reasons for missing numbers."""
    no_numbers = ("bottleneck", "missing", "slow_rank", "slower")
    numbers = {key: value for key, value in summary.items() if key not in no_numbers}
    lines = [f"{key} {_text(key, value)}" for key, value in flatten(numbers) if value not in ("", None)]
    if bottleneck := summary.get("bottleneck"):
        lines.append(f"limit: {bottleneck['evidence']}")
        lines += [f"{bottleneck['advice']}: {bottleneck['advice_effect']}"] if "advice" in bottleneck else []
    return lines + [f"no {key}: {reason}" for key, reason in summary.get("missing", {}).items()]


def _text(key: str, value: Any) -> str:
    if isinstance(value, list):
        return (" to " if key.endswith("_interval") else ", ").join(map(significant, value))
    return significant(value) if isinstance(value, float) else str(value)
