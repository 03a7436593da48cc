"""Values of a record, which may be old, edited or damaged: each is looked up by its path and is a number, or unknown."""

from typing import Any

_ABSURD = 1e12  # no count, time or rate of a run is as large, and none that counts is as small as its inverse


def at(record: Any, path: str) -> Any:
    """The value at a dotted path (`throughput.mfu`); None if it is missing."""
    for key in path.split("."):
        record = record.get(key) if isinstance(record, dict) else None
    return record


def table(value: Any) -> dict[str, Any]:
    """The value if it is a dict, else an empty one."""
    return value if isinstance(value, dict) else {}


def number(value: Any) -> float | None:
    """A number that can have been measured; None for anything else."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _ABSURD
    return float(value) if usable else None


def positive(value: Any) -> float | None:
    """The same for a value that cannot be 0, such as a duration."""
    known = number(value)
    return known if known and known > 1 / _ABSURD else None


def is_limit(limit: Any) -> bool:
    """Whether a value of `trainer.limit_train_batches` may leave out batches."""
    return limited(10**9, limit) < 10**9


def limited(batches: int, limit: Any) -> int:
    """How many of the batches of an epoch `trainer.limit_train_batches` leaves: a number of them, or a fraction below 1."""
    if isinstance(limit, int) and not isinstance(limit, bool):
        return min(batches, limit)
    return int(batches * limit) if isinstance(limit, float) and 0 < limit < 1 else batches
