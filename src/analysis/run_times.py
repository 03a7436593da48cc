"""The times of a run: of its median step, of its fastest steps, of a part of the step, and of the whole fit."""

from collections.abc import Sequence

import numpy as np

from ..records.rates import FIT_RATE
from ..records.step_parts import PARTS
from ..records.step_times import StepTimes
from ..records.values import positive
from .run import Run

# A time by its name; the parts of the step have their own.
STEP, FASTEST, FIT = "step", "fastest_steps", "fit"
FASTEST_SHARE = 0.01  # of the steps: the time of the fastest steps is this quantile
_FEWEST_OF_FASTEST, _SHORTEST_S = 300, 10.0  # steps, and seconds of them: fewer hold no calm moment of the machine
_PROBE_S = (1e-7, 10.0)  # what the fixed product can have taken
_FEWEST = 30  # undisturbed steps that are enough


def time_of(run: Run, name: str) -> float | None:
    """Seconds: the median, or of a part the mean where the record has no single steps; of `FASTEST` the quantile."""
    if name == STEP and (recorded := run.values.get("step_ms_median")):
        return recorded / 1e3
    if name == FIT:
        return 1 / run.values[FIT_RATE] if FIT_RATE in run.values else None
    values = single_times(run, name)
    if name == FASTEST:
        is_long = len(values) >= _FEWEST_OF_FASTEST and measured_seconds(run) >= _SHORTEST_S
        return positive(float(np.quantile(values, FASTEST_SHARE))) if is_long else None
    if len(values):
        return positive(float(np.median(values)))
    return positive(run.parts_ms.get(name, 0.0) / 1e3)


def step_times(run: Run) -> StepTimes | None:
    """The single steps of a run; None without any, or where the file cannot be read (see `unreadable`)."""
    return run.steps if isinstance(run.steps, StepTimes) else None


def measured_seconds(run: Run) -> float:
    """The time of all measured steps; 0 without any."""
    times = step_times(run)
    return 0.0 if times is None else float(times.step_s[np.isfinite(times.step_s)].astype(float).sum())


def unreadable(runs: Sequence[Run]) -> list[str]:
    """A line on each file of step times that cannot be read."""
    return [f"{run.name}: {run.steps}" for run in runs if isinstance(run.steps, str)]


def single_times(run: Run, name: str) -> np.ndarray:
    """The single steps (or parts) of a run, those of undisturbed stretches if there are enough; empty if unknown."""
    times = step_times(run)
    if times is None:
        return np.empty(0)
    of_parts = name in PARTS
    values = times.parts_s[:, PARTS.index(name)] if of_parts else times.step_s
    clean = ~left_out(times)[stretch_of(times, len(values), times.parts_every if of_parts else 1)]
    kept = values[clean].astype(float)  # the mean of two large float32 is infinite
    return kept[np.isfinite(kept)]


def left_out(times: StepTimes) -> np.ndarray:
    """Which stretches do not count: the disturbed ones, unless hardly any other is left."""
    bad = times.disturbed == 1
    steps = sum(len(one) for one, is_bad in zip(times.of_stretches(), bad, strict=True) if not is_bad)
    return bad if steps >= min(_FEWEST, len(times.step_s) / 2) else np.zeros(len(bad), bool)


def stretch_of(times: StepTimes, count: int, every: int) -> np.ndarray:
    """The stretch of every `every`-th step."""
    return np.searchsorted(times.stretch, np.arange(count) * every, side="right") - 1


def probe_seconds(runs: Sequence[Run], name: str = STEP) -> float:
    """The time of the fixed product beside the steps that count: the median, of `FASTEST` the quantile; 0 if unknown."""
    known = [times.probe_s[~left_out(times)] for run in runs if (times := step_times(run)) is not None]
    found = np.concatenate(known) if known else np.empty(0)
    found = found[(found > _PROBE_S[0]) & (found < _PROBE_S[1])]
    share = FASTEST_SHARE if name == FASTEST else 0.5
    return float(np.quantile(found, share)) if len(found) else 0.0
