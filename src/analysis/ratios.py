"""The ratio of two runs' times, with the interval that measuring both again would give.

Runs that took turns are compared within rounds: what slows a round slows both, and is not in the ratio. Runs that were
measured apart differ by the hour as well (separate.py).
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..records.intervals import drifting_interval, ratio_interval
from ..records.step_parts import PARTS
from ..records.step_times import StepTimes
from ..records.values import table
from .run import Run
from .run_times import FASTEST, FIT, STEP, step_times, stretch_of, time_of
from .separate import BETWEEN_RUNS, log_ratio

MIN_ROUNDS = 3  # fewer have no spread to speak of
_LARGEST_LOG = 700.0  # of a float


@dataclass(frozen=True)
class Ratio:
    """A ratio and its interval; the ends are 0 and infinity where nothing is known of its spread."""

    value: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Whether a difference is shown: the interval does not hold 1."""
        return self.low > 1 or self.high < 1

    def times(self, factor: float) -> "Ratio":
        """The ratio of numbers that differ by a known factor."""
        return Ratio(self.value * factor, self.low * factor, self.high * factor)

    @property
    def inverse(self) -> "Ratio":
        """The ratio of rates, from that of times."""
        return Ratio(1 / self.value, 1 / self.high, math.inf if self.low == 0 else 1 / self.low)


def time_ratio(
    a: Sequence[Run], b: Sequence[Run], name: str, confidence: float, between: float = BETWEEN_RUNS
) -> Ratio | None:
    """The time b ÷ a of a step or a part of it, over all runs of each side; None where a side does not have it.

    Args:
        a: runs that repeat one another, or one run.
        b: the same.
        name: `STEP`, `FASTEST`, `FIT` or a part.
        confidence: of the interval.
        between: standard deviation of the log of median times between separate runs; a share of it counts for `FASTEST`. Not
            used where the runs took turns. 0 for runs of one session, which have the noise of their steps alone.
    """
    of_a, of_b = common_rounds(a, b, name)
    if of_a and any(table(run.record.get("turn")) for run in a):  # the turns of one process resemble each other
        return Ratio(*drifting_interval([y / x for x, y in zip(of_a, of_b, strict=True)], confidence, slower=0.0))
    if of_a:
        return Ratio(*ratio_interval(of_a, of_b, confidence, paired=True))
    if (logs := log_ratio(a, b, name, confidence, between)) is None:
        return None
    return Ratio(*(math.exp(log) if log < _LARGEST_LOG else math.inf for log in logs))


def took_turns(a: Sequence[Run], b: Sequence[Run]) -> int:
    """The rounds in which both sides were measured; 0 where they are too few, and the sides are compared as separate runs."""
    return len(common_rounds(a, b, STEP)[0])


def common_rounds(a: Sequence[Run], b: Sequence[Run], name: str) -> tuple[list[float], list[float]]:
    """The times of both sides in the rounds in which both were measured, in order; empty where these are too few."""
    of_a, of_b = rounds(a, name), rounds(b, name)
    common = sorted(of_a.keys() & of_b.keys())
    if len(common) < MIN_ROUNDS:
        return [], []
    return [of_a[key] for key in common], [of_b[key] for key in common]


def rounds(runs: Sequence[Run], name: str) -> dict[tuple[str, int], float]:
    """The median time in each turn: a stretch of a run that waited for others, or a whole run that followed another one.

    Turns with the same number belong together if they are of one sweep, or of one `compare --rerun` (`turn.of`).
    """
    found: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        turn = table(run.record.get("turn"))
        session = str(turn.get("of") or run.folder.resolve().parent)
        if turn.get("of") and isinstance(turn.get("round"), int):
            if middle := time_of(run, name):
                found.setdefault((session, turn["round"]), []).append(middle)
        elif name not in (FIT, FASTEST) and (times := step_times(run)) is not None and (times.round >= 0).any():
            clean = (times.disturbed != 1) & (times.round >= 0)
            counts = clean if clean.sum() >= MIN_ROUNDS else times.round >= 0
            medians = zip(times.round.tolist(), _stretch_medians(times, name), counts, strict=True)
            for number, middle, is_counted in medians:
                if is_counted and middle > 0:
                    found.setdefault((session, number), []).append(float(middle))
    return {key: statistics.median(values) for key, values in found.items()}


def _stretch_medians(times: StepTimes, name: str) -> list[float]:
    if name == STEP:
        return times.medians().tolist()
    values = times.parts_s[:, PARTS.index(name)]
    owner = stretch_of(times, len(values), times.parts_every)
    parts = (values[owner == number] for number in range(len(times.stretch)))
    return [
        float(np.median(part.astype(float))) if len(part) and np.isfinite(part).all() else math.nan for part in parts
    ]
