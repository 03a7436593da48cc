"""Look up values of a record, which may be old, edited or damaged, by their paths; None or empty if they are unusable."""

from typing import Any

_ABSURD = 1e12  # no count, time or rate of a run is as large, and no positive one is as small as its inverse


def at(record: Any, path: str) -> Any:
    """Return the value at a dotted path (`throughput.mfu`); None if it is missing."""
    for key in path.split("."):
        record = record.get(key) if isinstance(record, dict) else None
    return record


def table(value: Any) -> dict[str, Any]:
    """Return the value if it is a dict, else an empty dict."""
    return value if isinstance(value, dict) else {}


def number(value: Any) -> float | None:
    """Return a value as a float if it is a plausible measurement; None for anything else."""
    is_plausible = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _ABSURD
    return float(value) if is_plausible else None


def positive(value: Any) -> float | None:
    """Return the same for a value that must be positive, such as a duration."""
    measured = number(value)
    return measured if measured and measured > 1 / _ABSURD else None


def is_limit(limit: Any) -> bool:
    """Whether a value of `trainer.limit_train_batches` may leave out batches."""
    return limited(10**9, limit) < 10**9


def limited(batches: int, limit: Any) -> int:
    """Return how many batches of an epoch `trainer.limit_train_batches` leaves: it is a number, or a fraction below 1."""
    if isinstance(limit, int) and not isinstance(limit, bool):
        return min(batches, limit)
    return int(batches * limit) if isinstance(limit, float) and 0 < limit < 1 else batches
