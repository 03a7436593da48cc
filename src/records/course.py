"""The course of a run in words, of the summary in its record: where its wall time went, how its epochs begin, and since when
its steps are slower. A summary may be old, edited or damaged: what it does not hold is an empty text."""

from collections.abc import Mapping
from typing import Any

from .formatting import duration
from .values import number, positive, table

START_UP, STEPS, VALIDATION, FIRST_BATCH, OTHER = "start_up", "steps", "validation", "first_batch", "other"
_NAMES = {
    STEPS: "steps",
    VALIDATION: "validation",
    FIRST_BATCH: "first batches of epochs",
    START_UP: "start-up",
    OTHER: "other",
}
_SAID = 0.1  # of a fit, in what is neither a step nor start-up


def course_words(summary: Mapping[str, Any]) -> list[str]:
    """What is to be said beside the rows of a run: how its epochs begin, and since when its steps are slower."""
    return [words for words in (workers_words(summary),) if words]


def fit_words(summary: Mapping[str, Any]) -> str:
    """`47 s: steps 78, validation 12, … %`, where a tenth of a fit or more is neither a step nor start-up; else empty."""
    seconds = {part: number(value) or 0.0 for part, value in table(summary.get("fit_parts_s")).items()}
    total = sum(seconds.get(part, 0.0) for part in _NAMES)
    between = total - seconds.get(STEPS, 0.0) - seconds.get(START_UP, 0.0)
    if total <= 0 or min(seconds.values()) < 0 or between < _SAID * total:
        return ""
    shares = {name: round(100 * seconds.get(part, 0.0) / total) for part, name in _NAMES.items()}
    return f"{duration(total)}: {', '.join(f'{name} {share}' for name, share in shares.items() if share)} %"


def workers_words(summary: Mapping[str, Any]) -> str:
    """`an epoch of 8.1 s begins with 3.2 s of starting workers: DataLoader(persistent_workers=True)`, where it does."""
    epoch = table(summary.get("epoch"))
    seconds, starting = positive(epoch.get("seconds")), positive(epoch.get("starting_workers_s"))
    option = epoch.get("advice")
    if seconds is None or starting is None or not isinstance(option, str):
        return ""
    return f"an epoch of {duration(seconds)} begins with {duration(starting)} of starting workers: {option}"
