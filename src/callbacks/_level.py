"""Whether the steps of a fit are slower since some time (hardware/level.py), and what changed with that."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from ..hardware import level
from ..hardware.nvml_readings import SM_CLOCK, THROTTLED
from ..hardware.telemetry import ALLOCATED, RSS
from ..records.step_parts import PARTS

Floats = NDArray[numpy.float64]
READ = (SM_CLOCK, THROTTLED, RSS, ALLOCATED)  # of a DeviceMonitor
OTHERS, VALIDATION = "others_share", "validation_s"
_OF_DIFFERENCE = 0.25  # that a part of the step makes at least, to be named
# What else is named if the later value differs so from the earlier one.
_CHANGED: dict[str, Callable[[float, float], bool]] = {
    OTHERS: lambda early, late: late - early >= 0.05,
    SM_CLOCK: lambda early, late: late <= 0.97 * early,
    THROTTLED: lambda early, late: late - early >= 10,
    RSS: lambda early, late: late >= 1.1 * early,
    ALLOCATED: lambda early, late: late >= 1.1 * early,
    VALIDATION: lambda early, late: late >= 1.08 * early,
}


@dataclass(frozen=True)
class Spans:
    """Equal spans of a fit, without those in which no step counts.

    The columns have a value for each: its start, its first step, `step_ms` of a whole batch, the parts of these, and what was
    read meanwhile. None stands for what is unknown.
    """

    seconds: float
    columns: Mapping[str, Sequence[float | None]]


def slower_facts(spans: Spans | None, device: str = "") -> dict[str, Any]:
    """For the run's summary: since when its steps are slower, by how much, and what changed `beside` it; else empty.

    On a `device` that is the CPU its memory is that of the process, which is named.
    """
    if spans is None:
        return {}
    columns = {key: numpy.array(values, float) for key, values in spans.columns.items()}
    is_timed = bool((columns["step_ms"] > 0).all())  # else the clock has jumped
    found = level.slower_since(columns["step_ms"], spans.seconds) if is_timed else None
    if found is None:
        return {}
    left_out = ALLOCATED if device == "cpu" else ""
    medians = {key: _medians(column, found.span) for key, column in columns.items() if key != left_out}
    difference = sum(medians[part][1] - medians[part][0] for part in PARTS)
    beside = [part for part in PARTS if medians[part][1] - medians[part][0] >= _OF_DIFFERENCE * difference > 0]
    beside += [key for key, is_changed in _CHANGED.items() if key in medians and is_changed(*medians[key])]
    start = columns["start_unix"]
    return {
        "since_unix": float(start[found.span]),
        "until_unix": float(start[-1]) + spans.seconds,
        "step": int(columns["step"][found.span]),
        "ratio": found.ratio,
        "interval": [found.low, found.high],
        "step_ms": list(medians["step_ms"]),
        "beside": {key: list(medians[key]) for key in beside},
    }


def _medians(column: Floats, split: int) -> tuple[float, float]:
    """Before and after; NaN where nothing is known, which is no change."""
    sides = (side[~numpy.isnan(side)] for side in (column[:split], column[split:]))
    early, late = (float(numpy.median(side)) if len(side) else math.nan for side in sides)
    return early, late
