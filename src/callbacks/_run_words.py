"""The summary of a run in words: the few lines that every run ends with, and the details that are shown on demand."""

from collections.abc import Mapping
from typing import Any

from ..hardware.evidence import limit_row
from ..options.tree import flatten
from ..records.course import fit_words, slower_words, workers_words
from ..records.formatting import percent, significant
from ..records.rates import LOAD_SAID, load_words
from ..records.step_parts import PARTS, StepPart
from ..records.terminal import row
from ..records.values import positive

_NOISE = 0.05  # between two rates: less is not worth a word
_MIN_PART = 0.045  # of the step: smaller parts are added up as the rest
_MUCH_THROTTLED_PCT = 10.0  # of the time; less is not worth a word in the few lines


def headline(summary: Mapping[str, Any], programs: str = "") -> list[str]:
    """The rows that every run ends with: what ran, how fast, where the time goes, what limits it, and what to try.

    Args:
        summary: of the run.
        programs: which other programs took most of the processor, for the terminal alone.
    """
    missing = summary.get("missing", {})
    if "title" not in summary:
        rate = _speed(summary, programs) if "samples_per_sec" in summary else "unknown"
        return [row("speed", f"{rate}: {missing.get('bottleneck', 'nothing was measured')}")]
    slow, found = summary.get("slow_rank"), summary.get("bottleneck")
    rows = {
        "speed": _speed(summary, programs),
        "step": _mean_step(summary),
        "slower": slower_words(summary),
        "fit": fit_words(summary),
        "epochs": workers_words(summary),
        "ranks": slow and f"{slow['evidence']}; {slow['advice']}",
        "device": _device(summary) if summary["device"] != "cpu" else "",
    }
    if found is None:
        rows["limit"] = f"unknown: {missing.get('bottleneck', 'it was not asked')}"
    else:
        rows |= dict([limit_row(found)]) | {"try": found.get("advice")}
    return [_heading(summary), *(row(label, words) for label, words in rows.items() if words)]


def _heading(summary: Mapping[str, Any]) -> str:
    ranks = f"{summary['processes']} × " if summary.get("processes", 1) > 1 else ""
    name = f" ({summary['device_name']})" if summary["device"] != "cpu" and summary.get("device_name") else ""
    accumulated = round(summary.get("batches", 1.0))
    batches = f"{accumulated} × " if accumulated > 1 else ""
    held = [f"batch {ranks}{batches}{summary['batch_size']:,}"] if summary["batch_size"] else []
    words = [summary["title"], *held, summary["device"] + name]
    return " · ".join(words + ([] if summary["precision"] == "32-true" else [summary["precision"]]))


def _speed(summary: Mapping[str, Any], programs: str) -> str:
    """The mean rate, the load beside it, and the rate that others have not lowered where it differs."""
    if "samples_per_sec" not in summary:
        return f"unknown: {summary['missing']['samples_per_sec']}"
    mean, at_median = summary["samples_per_sec_mean"], summary["samples_per_sec"]
    words = f"{significant(mean)} samples/s"
    load = positive(summary.get("others_share")) or 0.0
    if load >= LOAD_SAID:
        words += f" beside {load_words(load)}" + (f", mostly {programs}" if programs else "")
    if abs(at_median - mean) <= _NOISE * mean:
        return words
    where = "in undisturbed steps" if summary.get("update_size_varies") else "at the median step"
    return f"{words} ({significant(at_median)} {where})"


def _mean_step(summary: Mapping[str, Any]) -> str:
    """The mean step and its parts in percent, which add up to 100; small parts and `other` are the rest."""
    parts, total = summary["parts_ms"], sum(summary["parts_ms"].values())
    large = [part for part in PARTS if part != StepPart.OTHER and parts.get(part, 0.0) >= _MIN_PART * total > 0]
    shown = {part: round(100 * parts[part] / total) for part in large}
    rest = 100 - sum(shown.values())
    if rest < 0:  # of rounding
        shown[max(shown, key=lambda part: shown[part])] += rest
    words = [f"{part.removesuffix('_wait')} {share}" for part, share in shown.items()]
    words += [f"rest {rest}"] if rest > 0 else []
    return f"{significant(summary['step_ms'])} ms: {', '.join(words)} %"


def _device(summary: Mapping[str, Any]) -> str:
    words = []
    if "utilization_pct" in summary:
        words.append(f"a kernel ran in {percent(summary['utilization_pct'] / 100)} of the time")
    if summary.get("throttled_pct", 0.0) >= _MUCH_THROTTLED_PCT:
        words.append(f"clocks lowered in {percent(summary['throttled_pct'] / 100)} of the time")
    if "memory_peak_gib" in summary:
        words.append(f"peak memory {significant(summary['memory_peak_gib'])} GiB")
    return ", ".join(words)


def details(summary: Mapping[str, Any]) -> list[str]:
    """Each number of a summary as `key value`, the evidence for the bottleneck, and why one of them is missing."""
    told = {key: value for key, value in summary.items() if key not in ("bottleneck", "missing", "slow_rank", "slower")}
    lines = [f"{key} {_text(key, value)}" for key, value in flatten(told) if value not in ("", None)]
    if found := summary.get("bottleneck"):
        lines.append(f"limit: {found['evidence']}")
        lines += [f"{found['advice']}: {found['advice_effect']}"] if "advice" in found else []
    return lines + [f"no {key}: {reason}" for key, reason in summary.get("missing", {}).items()]


def _text(key: str, value: Any) -> str:
    if isinstance(value, list):
        return (" to " if key.endswith("_interval") else ", ").join(map(significant, value))
    return significant(value) if isinstance(value, float) else str(value)
