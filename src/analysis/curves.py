"""A run's validation metric against training time and samples, from the metrics.csv that it left."""

import csv
from dataclasses import dataclass

from .runs import Run, number

METRICS = ("val/acc", "val/loss")


@dataclass(frozen=True)
class Curve:
    """A validation metric as training went on; equally long lists.

    Attributes:
        metric: `val/acc` or `val/loss`.
        seconds: training time, without validation and checkpoints.
        samples: seen by then.
        values: the metric.
    """

    metric: str
    seconds: list[float]
    samples: list[float]
    values: list[float]

    @property
    def best(self) -> float:
        """The best value reached."""
        return max(self.values) if higher_is_better(self.metric) else min(self.values)

    def seconds_to(self, target: float) -> float | None:
        """Training time until a validation first was at least as good; None if none was."""
        for seconds, value in zip(self.seconds, self.values, strict=True):
            if value == target or (value > target) == higher_is_better(self.metric):
                return seconds
        return None


def higher_is_better(metric: str) -> bool:
    """Whether a metric is an accuracy; the others are losses."""
    return metric.rpartition("/")[2].startswith("acc")


def read_curve(run: Run) -> Curve | None:
    """The run's curve; None where there is no metrics.csv, no validation in it, or no time."""
    path = run.folder / "csv" / "metrics.csv"
    if not path.is_file():  # reading a pipe or a device may never end
        return None
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [{key: _number(text) for key, text in row.items() if key} for row in csv.DictReader(file)]
    except (OSError, ValueError, csv.Error):
        return None
    rows = sorted((row for row in rows if row.get("step") is not None), key=lambda row: row["step"])
    metric = next((name for name in METRICS if any(row.get(name) is not None for row in rows)), None)
    if metric is None or run.global_batch_size is None:
        return None
    times = _Times(rows, number(run.throughput.get("step_ms")))
    # Lightning writes a validation at the number of the update before it, counted from 0: one less than a step's own.
    points = [(row["step"] + 1, row[metric]) for row in rows if row.get(metric) is not None]
    timed = [(times.at(step), run.samples_after(step), value) for step, value in points]
    if any(seconds is None for seconds, _, _ in timed):
        return None
    seconds, samples, values = map(list, zip(*timed, strict=True))
    return Curve(metric, seconds, samples, values)


class _Times:
    """Training time at a step: the logged step times added up, each standing for the steps since the one before it."""

    def __init__(self, rows: list[dict[str, float | None]], mean_step_ms: float | None):
        self._sums: list[tuple[float, float]] = [(0.0, 0.0)]
        self._mean_ms = mean_step_ms
        for row in rows:
            step, seconds = self._sums[-1]
            ms = row.get("time/step_ms")
            if ms is not None:
                self._sums.append((row["step"], seconds + (row["step"] - step) * ms / 1e3))

    def at(self, step: float) -> float | None:
        last, seconds = next(s for s in reversed(self._sums) if s[0] <= step)
        beyond = step - last
        if not beyond:
            return seconds
        mean_ms = self._mean_ms or (1e3 * seconds / last if last else None)
        return None if mean_ms is None else seconds + beyond * mean_ms / 1e3


def _number(text: str | None) -> float | None:
    try:
        return number(float(text)) if text else None
    except (TypeError, ValueError):
        return None
