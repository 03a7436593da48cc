"""What `search` may be in a configuration: it decides which runs there are."""

from collections.abc import Mapping
from typing import Any

from ..options.types import PositiveInt


class Diagnosis:
    """Changes of one run are tried, each alone, and the two best together (see diagnose.py).

    Args:
        batch_factors: by which the batch is to grow, one run for each.
    """

    def __init__(self, batch_factors: tuple[PositiveInt, ...] = (2, 4)):
        self.batch_factors = batch_factors


def is_diagnosis(config: Mapping[str, Any]) -> bool:
    """Whether a checked configuration asks for a diagnosis."""
    return bool(config["search"]) and config["search"].get("_target_") == f"{__name__}.{Diagnosis.__name__}"


class BatchSizeSearch:
    """Grows the batch until throughput stops rising or memory ends, then tries the size that was left out below the answer.

    The batch grows by a factor of four, so that eight runs reach from 8 to 8,192 samples. No batch is larger than the
    training set. Throughput has stopped rising where a size is not faster than the fastest before it by 5 %.

    Args:
        start: the first batch size.
        max_runs: the largest number of runs.
    """

    def __init__(self, start: PositiveInt = 8, max_runs: PositiveInt = 8):
        self.start = start
        self.max_runs = max_runs
