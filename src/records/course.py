"""The course of a run in words, from the summary in its record: where its wall time went, how its epochs begin, and since when
its steps are slower. A summary may be old, edited or damaged: for what it lacks a function returns an empty text."""

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
# What may have changed together with the time of a step: key → name and unit.
_COVARIATES = {
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
_MIN_SHARE, _MIN_FIT_S = 0.1, 10.0  # of time in neither steps nor start-up; of a fit


def course_words(summary: Mapping[str, Any]) -> list[str]:
    """Return notes on the speed of a run: since when its steps are slower, and how its epochs begin."""
    slower = slower_words(summary)
    return [words for words in (slower and f"steps are slower {slower}", workers_words(summary)) if words]


def fit_words(summary: Mapping[str, Any]) -> str:
    """Return `47 s: steps 78, validation 12, … %` for a fit of 10 s or more with a tenth in neither steps nor start-up."""
    seconds = {part: number(value) or 0.0 for part, value in table(summary.get("fit_parts_s")).items()}
    total = sum(seconds.get(part, 0.0) for part in _NAMES)
    between = total - seconds.get(STEPS, 0.0) - seconds.get(START_UP, 0.0)
    if total < _MIN_FIT_S or min(seconds.values()) < 0 or between < _MIN_SHARE * total:
        return ""
    shares = {name: round(100 * seconds.get(part, 0.0) / total) for part, name in _NAMES.items()}
    shares[max(shares, key=lambda name: shares[name])] += 100 - sum(shares.values())  # the rounding error
    return f"{duration(total)}: {', '.join(f'{name} {share}' for name, share in shares.items() if share)} %"


def workers_words(summary: Mapping[str, Any]) -> str:
    """Return `an epoch of 8.1 s begins with 3.2 s of starting workers: DataLoader(persistent_workers=True)`, if it does."""
    epoch = table(summary.get("epoch"))
    seconds, starting = positive(epoch.get("seconds")), positive(epoch.get("starting_workers_s"))
    option = epoch.get("advice")
    if seconds is None or starting is None or not is_text(option):
        return ""
    return f"an epoch of {duration(seconds)} begins with {duration(starting)} of starting workers: {option}"


def slower_words(summary: Mapping[str, Any]) -> str:
    """Return `since 14:20 (step 12,340): a step 12.1 → 16.0 ms; with it waiting for data 1.10 → 4.90 ms`, if it lasts.

    The time is local, with the date if the run ended on another day.
    """
    slower = table(summary.get("slower"))
    since, until, step = (positive(slower.get(key)) for key in ("since_unix", "until_unix", "step"))
    step_change = _describe_change(slower.get("step_ms"), "a step", "ms")
    if since is None or until is None or step is None or not step_change:
        return ""
    try:
        began, ended = datetime.fromtimestamp(since), datetime.fromtimestamp(until)
    except (ValueError, OverflowError, OSError):  # no such time
        return ""
    date = "" if began.date() == ended.date() else f"{began:%d %b} "
    changes = table(slower.get("beside"))
    beside = ", ".join(filter(None, (_describe_change(changes.get(key), *names) for key, names in _COVARIATES.items())))
    return f"since {date}{began:%H:%M} (step {step:,.0f}): {step_change}" + (f"; with it {beside}" if beside else "")


def _describe_change(value: Any, name: str, unit: str) -> str:
    """Return `clock 1,750 → 1,200 MHz` for a pair of numbers, and an empty text for anything else."""
    pair = [number(item) for item in value] if isinstance(value, list) and len(value) == 2 else [None]
    if None in pair:
        return ""
    factor = 100 if unit == "% of the processor" else 1
    early, late = (significant(factor * (item or 0.0)) for item in pair)
    return f"{name} {early} → {late} {unit}"
