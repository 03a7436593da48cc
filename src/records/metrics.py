"""The metrics: name, unit, direction, format and meaning, declared once for logging, tables, plots and docs.

A metric is named `<group>/<name>`, in lower case with its unit as suffix. One that is not listed here (a callback or a task
of a user's own) is described by its name: `…acc` is a fraction that should rise, `…loss` a number that should fall.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .formatting import percent, significant
from .step_parts import PARTS


@dataclass(frozen=True)
class Metric:
    """What is measured.

    Attributes:
        key: as it is logged.
        unit: for headings; empty for a plain number.
        meaning: one line.
        higher_is_better: None where neither direction is better by itself.
        text: how a value is shown.
    """

    key: str
    unit: str = ""
    meaning: str = ""
    higher_is_better: bool | None = None
    text: Callable[[float], str] = significant


def _accuracy(value: float) -> str:
    return percent(value, digits=1)


_DECLARED = [
    Metric("throughput/samples_per_sec", "samples/s", "samples of all ranks over the time of the step", True),
    Metric("throughput/batches_per_sec", "batches/s", "batches of one rank", True),
    Metric("throughput/timesteps_per_sec", "time steps/s", "for sequences: samples × steps of each", True),
    Metric("throughput/flops_per_sec", "FLOP/s", "counted forward and backward FLOPs of one rank", True),
    Metric("throughput/mfu", "", "fraction of the peak measured on this device at this precision", True, _accuracy),
    Metric("time/step_ms", "ms", "wall time of a step, from its batch being asked for to the next one", False),
    *(Metric(f"time/{part}_ms", "ms", f"{part.replace('_', ' ')}: a part of the step", False) for part in PARTS),
]
METRICS: dict[str, Metric] = {metric.key: metric for metric in _DECLARED}


def metric(key: str) -> Metric:
    """The declaration of a metric; of an undeclared one what its name says."""
    if key in METRICS:
        return METRICS[key]
    name = key.rpartition("/")[2]
    if name.startswith("acc"):
        return Metric(key, meaning="fraction of correct answers", higher_is_better=True, text=_accuracy)
    return Metric(key, higher_is_better=False if "loss" in name else None)
