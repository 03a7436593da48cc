"""A validation metric in the course of training, from the CSV file of a run."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..records.metrics import best_first, metric
from ..records.step_file import read_rows
from ..records.values import number

if TYPE_CHECKING:
    from .run import Run


@dataclass(frozen=True)
class Curve:
    """A validation metric in the course of training; the lists have the same length."""

    metric: str  # such as `val/acc`
    seconds: list[float]  # training time, at the mean step: without validation and checkpoints
    samples: list[float]  # trained on by then
    values: list[float]


def read_curve(run: "Run") -> Curve | None:
    """The curve of the run's most telling validation metric; None without one, or where no step was measured."""
    try:
        names, rows = read_rows(run.folder / "csv" / "metrics.csv")
    except OSError:
        return None
    step_ms = run.values.get("step_ms")
    for name in best_first(name for name in names if name.startswith("val/")):
        # Lightning logs a validation at the number of the update before it, counted from 0: one less than that of its step.
        points = {_number(row.get("step")) + 1: _number(row[name]) for row in rows}
        points = {step: points[step] for step in sorted(points) if math.isfinite(step + points[step])}
        if points and step_ms and run.global_batch_size and metric(name).higher_is_better is not None:
            samples = [run.samples_after(step) or 0.0 for step in points]
            return Curve(name, [step * step_ms / 1e3 for step in points], samples, list(points.values()))
    return None


def _number(text: str | None) -> float:
    """NaN for what is no number that can have been measured."""
    try:
        found = number(float(text or "nan"))
    except ValueError:
        found = None
    return math.nan if found is None else found
