"""Time to target: after which training time the runs of each batch size have reached the target of their training.

A run has reached it between its last validation below it and the first one at it. The size that is first in each seed is found
within these bounds. What they do not tell apart is not told apart. The target is that of experiment=time_to_target. Trained runs
without one are compared at the value that half of the sizes reach.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from ..records.formatting import duration, option_value, significant
from ..records.intervals import TIME_LIMIT
from ..records.metrics import metric
from ..records.values import at, number, positive, table
from .run import LEARNING_RATE, Run
from .text import and_


@dataclass(frozen=True)
class Arrival:
    """When a run has reached the target; `seconds` is infinite if it has not, and `after` the time until which it had not.

    `is_open`: it has not, because its time was over.
    """

    run: Run
    after: float
    seconds: float
    samples: float
    is_open: bool = False


@dataclass(frozen=True)
class Arrivals:
    """The arrivals of a group of runs at one target, by batch size: the first of each seed, whatever its learning rate."""

    target: str  # `val/acc 98.0 %`
    best: str  # value of all runs, as text; empty if it is not known
    sizes: Mapping[int, Mapping[str, Arrival]]

    @cached_property
    def typical(self) -> dict[int, Arrival]:
        """The arrival of the seed with the median time, for each size at which more than half of the seeds have arrived."""
        ordered = {size: sorted(of.values(), key=lambda one: one.seconds) for size, of in sorted(self.sizes.items())}
        middle = {size: found[len(found) // 2] for size, found in ordered.items()}
        return {size: one for size, one in middle.items() if math.isfinite(one.seconds)}

    @cached_property
    def first(self) -> list[list[int]]:
        """For each seed in which a size has arrived, the sizes that may be first; one whose time was over may be, too."""
        found = []
        for seed in dict.fromkeys(seed for of in self.sizes.values() for seed in of):
            runs = {size: of[seed] for size, of in self.sizes.items() if seed in of}
            earliest = min(one.seconds for one in runs.values())
            if math.isfinite(earliest):
                may = {size: one for size, one in runs.items() if math.isfinite(one.seconds) or one.is_open}
                found.append([size for size, one in may.items() if one.after < earliest or one.seconds == earliest])
        return found

    @property
    def winner(self) -> int | None:
        """The size that is first in more than half of the seeds, and is told apart from the others there."""
        alone = [sizes[0] for sizes in self.first if len(sizes) == 1]
        size = statistics.mode(alone) if alone else None
        return size if 2 * alone.count(size or 0) > len(self.first) else None

    @property
    def contenders(self) -> list[int]:
        """The sizes that may have arrived first in a seed, smallest first."""
        return sorted({size for sizes in self.first for size in sizes})

    @property
    def lines(self) -> list[str]:
        """What the runs show, the answer first."""
        if not self.first:
            best = f": the best was {self.best}" if self.best else ""
            return [f"No run reached {self.target}{best}. Take an easier target, or give more time by search.minutes."]
        never = [s for s, of in self.sizes.items() if all(one.seconds == math.inf for one in of.values())]
        stopped = [size for size in never if size in self.contenders]
        if (size := self.winner) is None:
            sizes = [size for size in self.contenders if size not in stopped]
            differ = all(len(sizes) == 1 for sizes in self.first)
            why = "which of them depends on the seed" if differ else "which of them is not told apart"
            which = f": {why}" if len(sizes) > 1 else " of those that did"
            found = [f"{and_(sizes, 'or')} reached {self.target} first{which}."]
        else:
            seeds, count = len(self.first), self.first.count([size])
            words = f"with {count} of {seeds} seeds" if seeds > 1 else "(one seed)"
            found = [f"{size:,} reached {self.target} first {words}{self._after(size)}."]
        if stopped:
            found.append(f"Stopped while still in time: {and_(stopped)}. Give more time by search.minutes.")
        if late := [size for size in never if size not in stopped]:
            found.append(f"Not reached while others could win: {and_(late)}.")
        return found

    def _after(self, size: int) -> str:
        if (one := self.typical.get(size)) is None:
            return ""
        rate = one.run.settings.get(LEARNING_RATE)
        words = f", after {duration(one.seconds)} of training and {significant(one.samples)} samples"
        return f"{words}, at {LEARNING_RATE}={option_value(rate)}" if rate is not None else words


def arrivals_of(sizes: Mapping[int, Sequence[Run]]) -> Arrivals | None:
    """The arrivals of the runs of each size; None where none was trained to a target."""
    runs = [(size, run, table(run.record.get("target"))) for size, of in sizes.items() for run in of]
    runs = [(size, run, target) for size, run, target in runs if number(target.get("value")) is not None]
    if not runs:
        return None
    declared, value = metric(str(runs[0][2].get("metric"))), float(runs[0][2]["value"])
    bests = [best for *_, target in runs if (best := number(target.get("best"))) is not None]
    best = (min if declared.higher_is_better is False else max)(bests) if bests else None
    target = f"{declared.key} {declared.text(value)}"
    found = _first_of_seeds((size, _arrival(run)) for size, run, _ in runs)
    return Arrivals(target, "" if best is None else declared.text(best), found)


def arrivals_at_common_value(sizes: Mapping[int, Sequence[Run]]) -> Arrivals | None:
    """The arrivals at the value that half of the sizes reach, by the validations of runs that were trained to no target.

    None where fewer than two sizes have two validations or more of the same metric.
    """
    curves = [(size, run, run.curve) for size, of in sizes.items() for run in of if run.curve is not None]
    curves = [(size, run, curve) for size, run, curve in curves if len(curve) > 1]
    names = {curve.attrs["metric"] for *_, curve in curves}
    if len(names) != 1 or len({size for size, *_ in curves}) < 2:
        return None
    declared = metric(names.pop())
    sign = -1 if declared.higher_is_better is False else 1
    best = pd.Series([(sign * curve["value"]).max() for *_, curve in curves], [size for size, *_ in curves])
    of_sizes = best.groupby(level=0).median().sort_values(ascending=False)
    value = of_sizes.iloc[max(2, (len(of_sizes) + 1) // 2) - 1]
    found = []
    for size, run, curve in curves:
        is_below = sign * curve["value"] < value
        until = int(is_below.cummin().sum())  # validations before the first one at the value
        before = 0.0 if until == 0 else float(curve["seconds"].iloc[until - 1])
        at_it = curve.iloc[until] if until < len(curve) else {"seconds": math.inf, "samples": math.inf}
        found.append((size, Arrival(run, before, float(at_it["seconds"]), float(at_it["samples"]))))
    return Arrivals(f"{declared.key} {declared.text(sign * value)}", "", _first_of_seeds(found))


def _first_of_seeds(arrivals: Iterable[tuple[int, Arrival]]) -> dict[int, dict[str, Arrival]]:
    """For each size, by seed, the run that arrived first, or was trained longest where none has arrived."""
    found: dict[int, dict[str, Arrival]] = {}
    for size, one in arrivals:
        of_size, seed = found.setdefault(size, {}), str(one.run.settings.get("seed"))
        if seed not in of_size or (one.seconds, -one.after) < (of_size[seed].seconds, -of_size[seed].after):
            of_size[seed] = one
    return found


def _arrival(run: Run) -> Arrival:
    seconds, samples = (run.values.get(key) for key in ("time_to_target_s", "samples_to_target"))
    if seconds is None or samples is None:
        is_open = at(run.record, "target.ended") == f"the {TIME_LIMIT}"
        return Arrival(run, positive(at(run.record, "target.seconds")) or 0.0, math.inf, math.inf, is_open)
    return Arrival(run, positive(at(run.record, "target.after_seconds")) or 0.0, seconds, samples)
