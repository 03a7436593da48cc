"""The course of a run in words, of the summary in its record: where its wall time went, how its epochs begin, and since when
its steps are slower. A summary may be old, edited or damaged: what it does not hold is an empty text."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from ..errors import is_text
from .formatting import duration, significant
from .values import number, positive, table

START_UP, STEPS, VALIDATION, FIRST_BATCH, OTHER = "start_up", "steps", "validation", "first_batch", "other"
_NAMES = {
    STEPS: "steps",
    VALIDATION: "validation",
    FIRST_BATCH: "first batches of epochs",
    START_UP: "start-up",
    OTHER: "other",
}
# What may have changed with the time of a step: its name and its unit.
_BESIDE = {
    "data_wait": ("waiting for data", "ms"),
    "transfer": ("copying batches", "ms"),
    "forward": ("forward", "ms"),
    "backward": ("backward", "ms"),
    "optimizer": ("optimizer", "ms"),
    "other": ("the rest of the step", "ms"),  # callbacks and logging; on MPS all that the device does
    "others_share": ("other programs", "% of the processor"),
    "device/sm_clock_mhz": ("clock", "MHz"),
    "device/throttled_pct": ("lowered clocks", "% of the time"),
    "host/rss_gib": ("memory of the process", "GiB"),
    "device/memory_allocated_gib": ("memory of the device", "GiB"),
    "validation_s": ("a validation", "s"),
}
_SAID, _SHORT_S = 0.1, 10.0  # of a fit, in what is neither a step nor start-up; of a shorter fit nothing is said


def course_words(summary: Mapping[str, Any]) -> list[str]:
    """What is to be said beside the rows of a run: how its epochs begin, and since when its steps are slower."""
    slower = slower_words(summary)
    return [words for words in (slower and f"steps are slower {slower}", workers_words(summary)) if words]


def fit_words(summary: Mapping[str, Any]) -> str:
    """`47 s: steps 78, validation 12, … %`, where a tenth of ten seconds or more is neither a step nor start-up."""
    seconds = {part: number(value) or 0.0 for part, value in table(summary.get("fit_parts_s")).items()}
    total = sum(seconds.get(part, 0.0) for part in _NAMES)
    between = total - seconds.get(STEPS, 0.0) - seconds.get(START_UP, 0.0)
    if total < _SHORT_S or min(seconds.values()) < 0 or between < _SAID * total:
        return ""
    shares = {name: round(100 * seconds.get(part, 0.0) / total) for part, name in _NAMES.items()}
    shares[max(shares, key=lambda name: shares[name])] += 100 - sum(shares.values())  # of rounding
    return f"{duration(total)}: {', '.join(f'{name} {share}' for name, share in shares.items() if share)} %"


def workers_words(summary: Mapping[str, Any]) -> str:
    """`an epoch of 8.1 s begins with 3.2 s of starting workers: DataLoader(persistent_workers=True)`, where it does."""
    epoch = table(summary.get("epoch"))
    seconds, starting = positive(epoch.get("seconds")), positive(epoch.get("starting_workers_s"))
    option = epoch.get("advice")
    if seconds is None or starting is None or not is_text(option):
        return ""
    return f"an epoch of {duration(seconds)} begins with {duration(starting)} of starting workers: {option}"


def slower_words(summary: Mapping[str, Any]) -> str:
    """`since 14:20 (step 12,340): a step 12.1 → 16.0 ms; with it waiting for data 1.10 → 4.90 ms`, where that lasts.

    The time is the local one, with the date where the run has ended on another day.
    """
    slower = table(summary.get("slower"))
    since, until, step = (positive(slower.get(key)) for key in ("since_unix", "until_unix", "step"))
    took = _changed(slower.get("step_ms"), "a step", "ms")
    if since is None or until is None or step is None or not took:
        return ""
    try:
        began, ended = datetime.fromtimestamp(since), datetime.fromtimestamp(until)
    except (ValueError, OverflowError, OSError):  # no such time
        return ""
    date = "" if began.date() == ended.date() else f"{began:%d %b} "
    values = table(slower.get("beside"))
    beside = ", ".join(words for key, named in _BESIDE.items() if (words := _changed(values.get(key), *named)))
    return f"since {date}{began:%H:%M} (step {step:,.0f}): {took}" + (f"; with it {beside}" if beside else "")


def _changed(value: Any, name: str, unit: str) -> str:
    """`clock 1,750 → 1,200 MHz` of a pair of numbers; empty for anything else."""
    known = [number(each) for each in value] if isinstance(value, list) and len(value) == 2 else [None]
    if None in known:
        return ""
    factor = 100 if unit == "% of the processor" else 1
    early, late = (significant(factor * (each or 0.0)) for each in known)
    return f"{name} {early} → {late} {unit}"
