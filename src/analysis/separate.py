"""The ratio of runs that were measured apart: by what their steps or repeated runs differ, and by the hour.

What disturbs a machine makes most steps slower, and few faster. So the fastest steps of two runs of the same thing differ by
less than their medians do (Chen and Revels 2016, Robust benchmarking in noisy environments, arXiv:1608.04295, which takes the
minimum), as long as each run had a calm moment. Whether it had one is only known by the fixed product beside the steps.
"""

import math
import statistics
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from ..records.intervals import median_interval, student_t
from ..records.values import at, positive
from .run import Run
from .run_times import (
    FASTEST,
    FASTEST_SHARE,
    FIT,
    STEP,
    left_out,
    measured_seconds,
    probe_seconds,
    single_times,
    step_times,
    time_of,
)

# Standard deviation of log times between separate runs of the same thing (benchmarks/compare.py), and what share of it the
# fastest steps differ by: in runs that measured so many seconds, and in shorter ones (docs/log.md).
BETWEEN_RUNS = 0.1
_LONG_S, _OF_FASTEST, _OF_FASTEST_IN_SHORT_RUNS = 25.0, 0.4, 0.6
_SUMMARY_CONFIDENCE = 0.95  # of the interval in a record's summary
_FEWEST, _PER_INDEPENDENT = 30, 4  # without single steps: the steps of a run, and how many of them count as one
_USUAL_SHARE = 0.05  # of the processor, taken by others and the hypervisor when a machine is quiet
_USUAL_PROBE = 0.03  # in logs: by so much the probe differs on a quiet machine


def log_ratio(
    a: Sequence[Run], b: Sequence[Run], name: str, confidence: float, between: float
) -> tuple[float, float, float] | None:
    """The log of the time b ÷ a, and the ends of its interval; None where a side does not have it.

    The interval has the spread of the steps, or of repeated runs, and what separate runs differ by.
    """
    a, b = ([run for run in side if time_of(run, name)] for side in (a, b))
    if not a or not b:
        return None
    logs = [[math.log(time_of(run, name) or math.nan) for run in side] for side in (a, b)]
    center = statistics.fmean(logs[1]) - statistics.fmean(logs[0])
    within = _of_repeats(logs, confidence) or _of_steps(a, b, name, confidence)
    if within is None:
        return center, -math.inf, math.inf
    between *= _share_of_fastest(a, b) if name == FASTEST else 1.0
    hours = NormalDist().inv_cdf((1 + confidence) / 2) * between * math.sqrt(2)
    low, high = (math.hypot(reach, hours) for reach in within)
    slowed = (_slowed(a, b, name), _slowed(b, a, name)) if between else (0.0, 0.0)
    return center, center - low - slowed[1], center + high + slowed[0]


def _share_of_fastest(a: Sequence[Run], b: Sequence[Run]) -> float:
    """By what share of the medians' difference the fastest steps differ: all of it where no probe tells of slow runs."""
    if not all(_probes(a, b, FASTEST)):
        return 1.0
    is_long = all(measured_seconds(run) >= _LONG_S for run in (*a, *b))
    return _OF_FASTEST if is_long else _OF_FASTEST_IN_SHORT_RUNS


def has_interval(run: Run) -> bool:
    """Whether the run measured how well its median step is known; the runs of older versions did not."""
    return step_times(run) is not None or _interval(run) is not None


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
    """The same by what is known of each run's time; None where that is nothing."""
    first, second = _reaches(a[0], name, confidence), _reaches(b[0], name, confidence)
    if first is None or second is None:
        return None
    return math.hypot(first[1], second[0]), math.hypot(first[0], second[1])


def _reaches(run: Run, name: str, confidence: float) -> tuple[float, float] | None:
    """How far the interval of a run's time reaches below and above, in logs; None where it is unknown."""
    if name == FIT:
        return 0.0, 0.0  # one number, not a median of many: only separate runs tell how far it spreads
    values = single_times(run, name)
    if name == FASTEST:
        reach = NormalDist().inv_cdf((1 + confidence) / 2) * _jackknife_error(values, FASTEST_SHARE)
        return reach, reach
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


def _jackknife_error(values: np.ndarray, share: float) -> float:
    """The standard error of the log of a quantile of successive values, by leaving out each tenth of them in turn."""
    left = (np.delete(values, tenth) for tenth in np.array_split(np.arange(len(values)), 10))
    logs = [math.log(found) for rest in left if (found := float(np.quantile(rest, share))) > 0]
    return math.sqrt(9 * statistics.pvariance(logs)) if len(logs) == 10 else math.inf


def _interval(run: Run) -> list[float] | None:
    """The interval of the median step in the summary, in ms."""
    found = at(run.record, "throughput.step_ms_interval")
    return found if isinstance(found, list) and len(found) == 2 and all(map(positive, found)) else None


def _slowed(side: Sequence[Run], other: Sequence[Run], name: str) -> float:
    """By how much, in logs, a side may have been slowed: without that it would be faster.

    It is what others took of the processor, or how much slower the machine's probe was than beside the other side.
    """
    taken = max((-math.log1p(-_taken(run)) for run in side), default=0.0)
    probe, of_other = _probes(side, other, name)
    return max(taken, math.log(probe / of_other) - _USUAL_PROBE) if probe and of_other else taken


def _probes(side: Sequence[Run], other: Sequence[Run], name: str) -> tuple[float, float]:
    """What the probe took beside each side; 0 where it is unknown, or the machines differ."""
    same = len({_machine(run) for run in (*side, *other)}) == 1
    return (probe_seconds(side, name), probe_seconds(other, name)) if same else (0.0, 0.0)


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
        others, steal = (np.clip(np.nan_to_num(each), 0, 1) for each in (times.others_share, times.steal_share))
        taken = float((others + steal)[~left_out(times)].mean()) if len(others) else 0.0
    return min(0.99, max(0.0, taken - _USUAL_SHARE))
