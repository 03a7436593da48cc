"""The summary of a run in words: the few lines that every run ends with, and the details that are shown on demand."""

from collections.abc import Callable, Container, Mapping
from typing import Any

from ..hardware.evidence import limit_line, limit_row
from ..records.formatting import count, percent, significant, with_prefix
from ..records.intervals import TIME_LIMIT
from ..records.rates import load_words
from ..records.step_parts import PARTS, StepPart
from ..records.terminal import row

_NAMES = {"flops_per_sec": "FLOP/s", "mfu": "MFU", "samples_per_sec": "samples/s"}  # of what may be missing
_NOISE = 0.05  # between two rates or two ranks: less is not worth a word
_MIN_PART = 0.045  # of the step: smaller parts are added up as the rest
_MIN_OTHERS = 0.02  # of the processor: less has slowed no step
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
    rows = [_heading(summary), row("speed", _speed(summary, programs)), row("step", _mean_step(summary))]
    rows += [row("ranks", _ranks(summary))] if _differ(summary) else []
    rows += [row("device", facts)] if summary["device"] != "cpu" and (facts := _device(summary)) else []
    found = summary.get("bottleneck")
    if found is None:
        return [*rows, row("limit", f"unknown: {missing.get('bottleneck', 'it was not asked')}")]
    rows.append(row(*limit_row(found)))
    return [*rows, row("try", found["advice"])] if "advice" in found else rows


def _heading(summary: Mapping[str, Any]) -> str:
    ranks = f"{summary['processes']} × " if summary.get("processes", 1) > 1 else ""
    name = f" ({summary['device_name']})" if summary["device"] != "cpu" and summary.get("device_name") else ""
    batches = f"{_accumulated(summary)} × " if _accumulated(summary) > 1 else ""
    held = [f"batch {ranks}{batches}{summary['batch_size']:,}"] if summary["batch_size"] else []
    words = [summary["title"], *held, summary["device"] + name]
    return " · ".join(words + ([] if summary["precision"] == "32-true" else [summary["precision"]]))


def _accumulated(summary: Mapping[str, Any]) -> int:
    """The batches of an update."""
    return round(summary["batches_per_sec"] * summary["step_ms_median"] / 1e3)


def _speed(summary: Mapping[str, Any], programs: str) -> str:
    """The mean rate, the load beside it, and the rate of the median step where it differs."""
    if "samples_per_sec" not in summary:
        return f"unknown: {summary['missing']['samples_per_sec']}"
    mean, at_median = summary["samples_per_sec_mean"], summary["samples_per_sec"]
    words = f"{significant(mean)} samples/s"
    if load := load_words(summary):
        words += f" {load}, mostly {programs}" if programs else f" {load}"
    if abs(at_median - mean) <= _NOISE * mean:
        return words
    return f"{words} ({significant(at_median)} at the median step)"


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
    return summary.get("slowest_step_ms", 0.0) > (1 + _NOISE) * summary.get("fastest_step_ms", 0.0)


def _ranks(summary: Mapping[str, Any]) -> str:
    slowest, fastest = (significant(summary[f"{which}_step_ms"]) for which in ("slowest", "fastest"))
    rank = summary["slowest_process"]
    return f"work of a step {slowest} ms on the slowest (rank {rank}), {fastest} on the fastest"


def _device(summary: Mapping[str, Any]) -> str:
    is_throttled = summary.get("throttled_pct", 0.0) >= _MUCH_THROTTLED_PCT
    shown = {"utilization_pct", "memory_peak_gib"}
    return ", ".join(_numbers(summary, shown | ({"throttled_pct"} if is_throttled else set())))


def _pct(value: float) -> str:
    return percent(value / 100)


# The numbers of the details, in their order: the key in the summary, how its number is written, and the words around it.
_NUMBERS: tuple[tuple[str, Callable[[Any], str], str], ...] = (
    ("samples_per_sec", significant, "{} samples/s at the median step"),
    ("samples_per_sec_mean", significant, "{} over all steps"),
    ("samples_per_sec_fit", significant, "{} from start to end"),
    ("step_ms_p99", significant, "p99 step {} ms"),
    ("stall_seconds", significant, "pauses took {} s"),
    ("timesteps_per_sec", significant, "{} time steps/s"),
    ("flops_per_sec", lambda value: with_prefix(value, "FLOP/s"), "{}"),
    ("mfu", lambda value: percent(value, digits=1), "MFU {}"),
    ("peak_flops_per_sec", lambda value: with_prefix(value, "FLOP/s"), "peak measured here {}"),
    ("processor_time_pct", _pct, "processor time {} of the usable cores"),
    ("utilization_pct", _pct, "a kernel ran in {} of the time"),
    ("throttled_pct", _pct, "clocks lowered in {} of the time"),
    ("memory_peak_gib", significant, "peak memory {} GiB"),
    ("memory_reserved_gib", significant, "reserved {} GiB"),
    ("joules_per_sample", lambda value: with_prefix(value, "J"), "{}/sample"),
    ("communication_ms", significant, "{} ms of the mean step wait for gradients"),
    ("gradient_bytes", lambda value: with_prefix(value, "B"), "{} of gradients"),
)
_ONLY_ABOVE_0 = ("stall_seconds", "throttled_pct")


def _numbers(summary: Mapping[str, Any], shown: Container[str]) -> list[str]:
    """Those of the numbers that are known, with their words."""
    known = [(summary[key], write, words) for key, write, words in _NUMBERS if key in shown and key in summary]
    return [words.format(write(value)) for value, write, words in known]


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
    numbers = _numbers(summary, {key for key, value in summary.items() if value or key not in _ONLY_ABOVE_0})
    lines = [
        " · ".join(run),
        f"median step {_median(summary)}; mean {significant(summary['step_ms'])} ms = {parts}",
        *([" · ".join(numbers)] if numbers else []),
        *filter(None, [_noise(summary)]),
    ]
    if "processes" in summary:
        samples = summary["batch_size"] * summary["processes"] * _accumulated(summary)
        ranks = f"; {_ranks(summary)}" if "slowest_step_ms" in summary else ""
        lines.append(f"{summary['processes']} ranks, global batch {samples:,}, samples/s of all ranks{ranks}")
    if "bottleneck" in summary:
        found = summary["bottleneck"]
        lines.append(limit_line(found))
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
    """A line on windows that other programs or the system slowed, for the details; None if there were none."""
    bad, windows = summary.get("disturbed_windows", 0), summary.get("windows", 0)
    if not bad:
        return None
    share = summary.get("others_share", 0.0)
    took = f", other programs took {percent(share)} of the processor" if share >= _MIN_OTHERS else ""
    enough = "undisturbed_steps" in summary
    median_is = "the median is of the others" if enough else "too few steps were undisturbed, so the median is of all"
    return f"{bad} of {count(windows, 'window')} slowed from outside{took}; {median_is}"
