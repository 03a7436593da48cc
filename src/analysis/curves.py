"""A validation metric against training time and samples, from the step file of a run."""

from dataclasses import dataclass

import numpy as np

from ..records.metrics import best_first, metric
from ..records.step_file import read_rows
from ..records.values import number
from .run import Run

_Row = dict[str, float]


@dataclass(frozen=True)
class Curve:
    """A validation metric in the course of training; the lists have the same length."""

    metric: str  # such as `val/acc`
    seconds: list[float]  # training time, without validation and checkpoints
    samples: list[float]  # trained on by then
    values: list[float]

    @property
    def best(self) -> float:
        """The best value reached."""
        return max(self.values) if metric(self.metric).higher_is_better else min(self.values)

    def seconds_to(self, target: float) -> float | None:
        """Training time until the first validation that was at least as good; None if there was none."""
        rises = bool(metric(self.metric).higher_is_better)
        reached = (s for s, v in zip(self.seconds, self.values, strict=True) if v == target or (v > target) == rises)
        return next(reached, None)


def read_curve(run: Run) -> Curve | None:
    """The curve of the run's most telling validation metric; None without a step file, a validation or step times."""
    try:
        names, texts = read_rows(run.folder / "csv" / "metrics.csv")
    except OSError:
        return None
    if not any(name.startswith("val/") for name in names):
        return None
    rows = sorted((row for row in map(_numbers, texts) if "step" in row), key=lambda row: row["step"])
    validated = [n for n in best_first(name for name in names if name.startswith("val/")) if any(n in r for r in rows)]
    name = next((n for n in validated if metric(n).higher_is_better is not None), None)
    if name is None or run.global_batch_size is None:
        return None
    # Lightning logs a validation at the number of the update before it, counted from 0: one less than that of its step.
    points = {row["step"] + 1: row[name] for row in rows if name in row}
    seconds = _seconds_at(list(points), rows, run.values.get("step_ms"))
    if seconds is None:
        return None
    return Curve(name, seconds, [run.samples_after(step) or 0.0 for step in points], list(points.values()))


def _numbers(texts: dict[str, str]) -> _Row:
    found: _Row = {}
    for name, text in texts.items():
        try:
            value = number(float(text))
        except ValueError:
            continue
        if value is not None:
            found[name] = value
    return found


def _seconds_at(wanted: list[float], rows: list[_Row], mean_step_ms: float | None) -> list[float] | None:
    """Training time at some steps. A logged step time counts for the steps since the one logged before it."""
    steps, seconds = [0.0], [0.0]
    for row in rows:
        if "time/step_ms" in row:
            seconds.append(seconds[-1] + (row["step"] - steps[-1]) * row["time/step_ms"] / 1e3)
            steps.append(row["step"])
    if steps[-1] < wanted[-1]:  # not logged: the mean step counts
        if not mean_step_ms and not steps[-1]:
            return None
        mean = mean_step_ms / 1e3 if mean_step_ms else seconds[-1] / steps[-1]
        seconds.append(seconds[-1] + (wanted[-1] - steps[-1]) * mean)
        steps.append(wanted[-1])
    return [float(s) for s in np.interp(wanted, steps, seconds)]
