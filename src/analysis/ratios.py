"""The ratio of two runs' times, with the interval that measuring both again would give.

Runs that took turns are compared within rounds: what slows a round slows both, and is not in the ratio. Runs that were
measured apart differ by the hour as well: `BETWEEN_RUNS` is the least that separate runs of the same thing are taken to
differ by.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from ..records.intervals import drifting_interval, median_interval, ratio_interval, student_t
from ..records.rates import FIT_RATE
from ..records.step_parts import PARTS
from ..records.step_times import StepTimes
from ..records.values import at, positive, table
from .run import Run

STEP, FIT = "step", "fit"  # a time by its name: of a step, of a sample over the whole fit, or a part of the step
BETWEEN_RUNS = 0.05  # standard deviation of log times between separate runs of the same thing: assumed
MIN_ROUNDS = 3  # fewer have no spread to speak of
_SUMMARY_CONFIDENCE = 0.95  # of the interval in a record's summary
_FEWEST, _PER_INDEPENDENT = 30, 4  # without single steps: the steps of a run, and how many of them count as one
_USUAL_SHARE = 0.05  # of the processor, taken by others and the hypervisor when a machine is quiet
_USUAL_PROBE = 0.03  # in logs: by so much the probe differs on a quiet machine


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
        name: `STEP`, `FIT` or a part.
        confidence: of the interval.
        between: standard deviation of log times between separate runs; not used where the runs took turns. 0 for runs of one
            session, which have the noise of their steps alone.
    """
    of_a, of_b = common_rounds(a, b, name)
    if of_a and any(table(run.record.get("turn")) for run in a):  # the turns of one process resemble each other
        return Ratio(*drifting_interval([y / x for x, y in zip(of_a, of_b, strict=True)], confidence, slower=0.0))
    if of_a:
        return Ratio(*ratio_interval(of_a, of_b, confidence, paired=True))
    return _apart(a, b, name, confidence, between)


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
            if middle := median_time(run, name):
                found.setdefault((session, turn["round"]), []).append(middle)
        elif name != FIT and (times := step_times(run)) is not None and (times.round >= 0).any():
            clean = (times.disturbed != 1) & (times.round >= 0)
            counts = clean if clean.sum() >= MIN_ROUNDS else times.round >= 0
            medians = zip(times.round.tolist(), _stretch_medians(times, name), counts, strict=True)
            for number, middle, is_counted in medians:
                if is_counted and middle > 0:
                    found.setdefault((session, number), []).append(float(middle))
    return {key: statistics.median(values) for key, values in found.items()}


def median_time(run: Run, name: str) -> float | None:
    """Seconds: the median, or of a part the mean where the record has no single steps."""
    if name == STEP and (recorded := run.values.get("step_ms_median")):
        return recorded / 1e3
    if name == FIT:
        return 1 / run.values[FIT_RATE] if FIT_RATE in run.values else None
    values = _single(run, name)
    if len(values):
        return positive(float(np.median(values)))
    return positive(run.parts_ms.get(name, 0.0) / 1e3)


def has_interval(run: Run) -> bool:
    """Whether the run measured how well its median step is known; the runs of older versions did not."""
    return step_times(run) is not None or _interval(run) is not None


def step_times(run: Run) -> StepTimes | None:
    """The single steps of a run; None without any, or where the file cannot be read (see `unreadable`)."""
    return run.steps if isinstance(run.steps, StepTimes) else None


def unreadable(runs: Sequence[Run]) -> list[str]:
    """A line on each file of step times that cannot be read."""
    return [f"{run.name}: {run.steps}" for run in runs if isinstance(run.steps, str)]


def _single(run: Run, name: str) -> np.ndarray:
    """The single steps (or parts) of a run, those of undisturbed stretches if there are enough; empty if unknown."""
    times = step_times(run)
    if times is None:
        return np.empty(0)
    values = times.step_s if name == STEP else times.parts_s[:, PARTS.index(name)]
    clean = ~_left_out(times)[_stretch_of(times, len(values), 1 if name == STEP else times.parts_every)]
    kept = values[clean].astype(float)  # the mean of two large float32 is infinite
    return kept[np.isfinite(kept)]


def _left_out(times: StepTimes) -> np.ndarray:
    """Which stretches do not count: the disturbed ones, unless hardly any other is left."""
    bad = times.disturbed == 1
    steps = sum(len(one) for one, is_bad in zip(times.of_stretches(), bad, strict=True) if not is_bad)
    return bad if steps >= min(_FEWEST, len(times.step_s) / 2) else np.zeros(len(bad), bool)


def _stretch_of(times: StepTimes, count: int, every: int) -> np.ndarray:
    """The stretch of every `every`-th step."""
    return np.searchsorted(times.stretch, np.arange(count) * every, side="right") - 1


def _stretch_medians(times: StepTimes, name: str) -> list[float]:
    if name == STEP:
        return times.medians().tolist()
    values = times.parts_s[:, PARTS.index(name)]
    owner = _stretch_of(times, len(values), times.parts_every)
    parts = (values[owner == number] for number in range(len(times.stretch)))
    return [
        float(np.median(part.astype(float))) if len(part) and np.isfinite(part).all() else math.nan for part in parts
    ]


def _apart(a: Sequence[Run], b: Sequence[Run], name: str, confidence: float, between: float) -> Ratio | None:
    """The ratio of separate runs: the spread of their steps or of repeated runs, and what separate runs differ by."""
    logs = [[math.log(found) for run in side if (found := median_time(run, name))] for side in (a, b)]
    if not all(logs):
        return None
    center = statistics.fmean(logs[1]) - statistics.fmean(logs[0])
    within = _of_repeats(logs, confidence) or _of_steps(a, b, name, confidence)
    if within is None:
        return Ratio(math.exp(center), 0.0, math.inf)
    hours = NormalDist().inv_cdf((1 + confidence) / 2) * between * math.sqrt(2)
    low, high = (math.hypot(reach, hours) for reach in within)
    slowed = (_slowed(a, b), _slowed(b, a)) if between else (0.0, 0.0)
    return Ratio(math.exp(center), math.exp(center - low - slowed[1]), math.exp(min(700, center + high + slowed[0])))


def _of_repeats(logs: list[list[float]], confidence: float) -> tuple[float, float] | None:
    """How far the interval reaches below and above by what repeated runs differ; None without repeated runs."""
    freedom = sum(len(side) - 1 for side in logs)
    if not freedom:
        return None
    squares = sum((len(side) - 1) * statistics.variance(side) for side in logs if len(side) > 1)
    error = math.sqrt(squares / freedom * sum(1 / len(side) for side in logs))
    reach = student_t((1 + confidence) / 2, freedom) * error
    return reach, reach


def _of_steps(a: Sequence[Run], b: Sequence[Run], name: str, confidence: float) -> tuple[float, float] | None:
    """The same by what is known of each median; None where that is nothing."""
    first, second = _reaches(a[0], name, confidence), _reaches(b[0], name, confidence)
    if first is None or second is None:
        return None
    return math.hypot(first[1], second[0]), math.hypot(first[0], second[1])


def _reaches(run: Run, name: str, confidence: float) -> tuple[float, float] | None:
    """How far the interval of a run's median reaches below and above, in logs; None where it is unknown."""
    if name == FIT:
        return 0.0, 0.0  # one number, not a median of many: only separate runs tell how far it spreads
    values = _single(run, name)
    if len(values):
        low, high = median_interval(values, confidence)
        middle = float(np.median(values))
        return (math.log(middle / low), math.log(high / middle)) if 0 < low <= high < math.inf else None
    throughput = run.record.get("throughput")
    scale = NormalDist().inv_cdf((1 + confidence) / 2)
    low, middle, high = (positive(at(throughput, f"step_ms_{at_}")) for at_ in ("p10", "median", "p90"))
    if name != STEP or middle is None:
        return None
    if interval := _interval(run):
        scale /= NormalDist().inv_cdf((1 + _SUMMARY_CONFIDENCE) / 2)
        return max(0.0, scale * math.log(middle / interval[0])), max(0.0, scale * math.log(interval[1] / middle))
    updates = positive(at(throughput, "updates")) or 0
    if updates < _FEWEST or low is None or high is None:
        return None
    # The median of independent normal values has 1.25 times the standard error of their mean; p10 to p90 are 2.56 deviations.
    reach = scale * 1.2533 * math.log(high / low) / 2.563 / math.sqrt(updates / _PER_INDEPENDENT)
    return reach, reach


def _interval(run: Run) -> list[float] | None:
    """The interval of the median step in the summary, in ms."""
    found = at(run.record, "throughput.step_ms_interval")
    return found if isinstance(found, list) and len(found) == 2 and all(map(positive, found)) else None


def _slowed(side: Sequence[Run], other: Sequence[Run]) -> float:
    """By how much, in logs, a side may have been slowed: without that it would be faster.

    It is what others took of the processor, or how much slower the machine's probe was than beside the other side.
    """
    taken = max((-math.log1p(-_taken(run)) for run in side), default=0.0)
    probes = [probe_seconds(runs) for runs in (side, other)]
    if not all(probes) or len({_machine(run) for run in (*side, *other)}) > 1:
        return taken
    return max(taken, math.log(probes[0] / probes[1]) - _USUAL_PROBE)


def probe_seconds(runs: Sequence[Run]) -> float:
    """The median time of the fixed product beside the steps that count; 0 where it is unknown."""
    known = [times.probe_s[~_left_out(times)] for run in runs if (times := step_times(run)) is not None]
    found = np.concatenate(known) if known else np.empty(0)
    found = found[np.isfinite(found) & (found > 0)]
    return float(np.median(found)) if len(found) else 0.0


def _machine(run: Run) -> tuple[str, ...]:
    """Where the probe takes the same time: the same processor, and the same torch, whose product it is."""
    return tuple(str(at(run.record, path)) for path in ("hardware.device_name", "hardware.cpu_cores", "versions.torch"))


def _taken(run: Run) -> float:
    """The share of the processor that others and the hypervisor took while counted steps ran, beyond the usual."""
    times = step_times(run)
    if times is None:
        shares = (positive(at(run.record, f"throughput.{name}")) or 0.0 for name in ("others_share", "steal_share"))
        taken = sum(shares)
    else:
        shares = np.nan_to_num(times.others_share) + np.nan_to_num(times.steal_share)
        taken = float(shares[~_left_out(times)].mean()) if len(shares) else 0.0
    return min(0.99, max(0.0, taken - _USUAL_SHARE))
