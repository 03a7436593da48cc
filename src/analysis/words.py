"""The words that several answers share, each for one fact."""

import math
import statistics
from collections.abc import Sequence

from ..records.formatting import percent, significant
from ..records.metrics import FRACTION, metric
from .noise import Ratio

KNOWN = 0.1  # a ratio that is known to ± 10 % is a number; of another one the nearer end is said
_MOST_NAMED = 6


def and_(names: Sequence[str | int], word: str = "and") -> str:
    """`64`, `64 and 512`, `8, 64 and 512`; of many the first ones, and how many more there are; of none nothing."""
    words = [f"{name:,}" if isinstance(name, int) else name for name in names[:_MOST_NAMED]]
    words += [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    parts = [", ".join(words[:-1]), *words[-1:]]
    return f" {word} ".join(part for part in parts if part)


def times_as_fast(ratio: Ratio) -> str:
    """How much faster something is that is shown to be faster: `1.88 times as fast`, `at least 1.3 times as fast`."""
    if ratio.reach <= KNOWN:
        return f"{significant(ratio.value)} times as fast"
    factor = at_least(ratio)
    return f"at least {factor:.1f} times as fast" if factor > 1 else "faster"


def at_least(ratio: Ratio) -> float:
    """The lower end of a ratio above 1, rounded down, at least 1."""
    return max(1.0, math.floor(10 * ratio.low) / 10)


def busy_line(share: float, no: str, do: str) -> str:
    """Why a busy machine gets no answer, and what to do."""
    taken = f"The machine was busy: other programs took {percent(share)} of the processor."
    return f"{taken} No {no}. Close them, and {do}."


def reach_text(reach: float) -> str:
    """How far an interval reaches, as a part of the rate: `4 %`; empty where the rate is hardly known."""
    return f"{significant(100 * reach)} %" if reach < 0.01 else percent(reach) if reach < 1 else ""


def mean_and_deviation(key: str, values: Sequence[float]) -> str:
    """A metric of repeated runs, mean ± standard deviation: `98.42 ± 0.11 %`; of one value the value alone."""
    if len(values) < 2:
        return metric(key).text(values[0])
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    if metric(key).unit == FRACTION:
        return f"{100 * mean:.2f} ± {100 * deviation:.2f} %"
    return f"{significant(mean)} ± {significant(deviation)}"
