"""Time to target: after which training time the runs of each batch size have reached the same value of a validation metric.

Runs that were trained to a target (experiment=time_to_target) have it in their records. Of other trained runs the target is
the value that half of the sizes reach, and their validations tell when: between the last one below it and the first one at
it. The size that is first in each seed is found within these bounds. What they do not tell apart is not told apart.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..records.formatting import duration, option_value, significant
from ..records.metrics import Metric, metric
from ..records.values import at, number, positive, table
from .run import LEARNING_RATE, Run
from .words import and_


@dataclass(frozen=True)
class Arrival:
    """When a run has reached the target; `seconds` is infinite if it has not, and `after` the time until which it had not."""

    run: Run
    after: float
    seconds: float = math.inf
    samples: float = math.inf

    @property
    def reached(self) -> bool:
        """Whether the run has reached the target."""
        return math.isfinite(self.seconds)


@dataclass(frozen=True)
class Arrivals:
    """The arrivals of a group of runs at one target, by batch size: the first of each seed, whatever its learning rate."""

    metric: Metric
    value: float
    sizes: Mapping[int, Mapping[object, Arrival]]
    is_aim: bool  # whether the runs were trained to this target
    best: float | None = None  # of all runs that were trained to it

    @property
    def target(self) -> str:
        """`val/acc 98.0 %`."""
        return f"{self.metric.key} {self.metric.text(self.value)}"

    def typical(self, size: int) -> Arrival | None:
        """The arrival of the seed with the median time; None where less than half of the seeds have arrived."""
        found = sorted(self.sizes[size].values(), key=lambda one: one.seconds)
        middle = found[len(found) // 2]
        return middle if middle.reached else None

    @cached_property
    def first(self) -> list[tuple[int, ...]]:
        """For each seed, the sizes that may have arrived first."""
        found = []
        for seed in dict.fromkeys(seed for of in self.sizes.values() for seed in of):
            arrived = {size: of[seed] for size, of in self.sizes.items() if seed in of}
            earliest = min(one.seconds for one in arrived.values())
            if math.isfinite(earliest):
                found.append(tuple(size for size, one in arrived.items() if one.after < earliest and one.reached))
        return found

    @property
    def winner(self) -> int | None:
        """The size that is first in more than half of the seeds, and is told apart from the others there."""
        alone = [sizes[0] for sizes in self.first if len(sizes) == 1]
        size = statistics.mode(alone) if alone else None
        return size if size is not None and 2 * alone.count(size) > len(self.first) else None

    @property
    def contenders(self) -> list[int]:
        """The sizes that may have arrived first in a seed, smallest first."""
        return sorted({size for sizes in self.first for size in sizes})

    @property
    def lines(self) -> list[str]:
        """What the runs show, the answer first; empty where runs without a target do not tell sizes apart."""
        if not self.first:
            best = "" if self.best is None else f": the best was {self.metric.text(self.best)}"
            return [f"No run reached {self.target}{best}. Take an easier target, or give more time by search.minutes."]
        if (size := self.winner) is None:
            if not self.is_aim and len(self.contenders) == len(self.sizes):
                return []
            took = [one for s in self.contenders if (one := self.typical(s))]
            spans = sorted({duration(one.seconds): one.seconds for one in took}.items(), key=lambda span: span[1])
            after = f", after {' to '.join(dict.fromkeys((spans[0][0], spans[-1][0])))} of training" if spans else ""
            found = [f"{and_(self.contenders)} reached {self.target} first, and are not told apart{after}."]
        elif len(self.sizes) == 1:
            found = [f"{size:,} reached {self.target}{self._after(size)}; no other size was trained long enough."]
        else:
            found = [f"{size:,} reached {self.target} first{self._seeds(size)}{self._after(size)}."]
        late = [s for s, of in self.sizes.items() if not any(one.reached for one in of.values())]
        if late and self.is_aim:
            found.append(f"Not reached while others could win: {and_(late)}.")
        return found

    def _seeds(self, size: int) -> str:
        count = sum(sizes == (size,) for sizes in self.first)
        return f" with {count} of {len(self.first)} seeds" if len(self.first) > 1 else " (one seed)"

    def _after(self, size: int) -> str:
        if (one := self.typical(size)) is None:
            return ""
        rate = f", at optimizer.lr={option_value(one.run.settings[LEARNING_RATE])}" if self.is_aim else ""
        return f", after {duration(one.seconds)} of training and {significant(one.samples)} samples{rate}"


def arrivals_of(sizes: Mapping[int, Sequence[Run]]) -> Arrivals | None:
    """The arrivals of the runs of each size; None where they have no common target, or none that tells them apart."""
    runs = [(size, run) for size, of_size in sizes.items() for run in of_size]
    aims = [
        found
        for _, run in runs
        if (found := table(run.record.get("target"))) and number(found.get("value")) is not None
    ]
    if aims:
        key, value = str(aims[0].get("metric")), float(aims[0]["value"])
        best = [found for aim in aims if (found := number(aim.get("best"))) is not None]
        return _arrivals(key, value, [(size, _recorded(run)) for size, run in runs if "target" in run.record], best)
    curves = [(size, run, curve) for size, run in runs if (curve := run.curve) and len(curve.values) > 1]
    keys = {curve.metric for *_, curve in curves}
    if len(keys) != 1 or len({size for size, *_ in curves}) < 2:
        return None
    declared = metric(keys.pop())
    sign = 1 if declared.higher_is_better else -1
    bests = {
        s: statistics.median(max(sign * v for v in curve.values) for other, _, curve in curves if other == s)
        for s, *_ in curves
    }
    value = sorted(bests.values(), reverse=True)[max(2, (len(bests) + 1) // 2) - 1]
    value = math.floor(1e3 * value) / 1e3  # of a loss this is its negative, and the target a little higher
    found = []
    for size, run, curve in curves:
        at_it = next((n for n, v in enumerate(curve.values) if sign * v >= value), None)
        before = [0.0, *curve.seconds][at_it] if at_it is not None else curve.seconds[-1]
        reached = {} if at_it is None else {"seconds": curve.seconds[at_it], "samples": curve.samples[at_it]}
        found.append((size, Arrival(run, before, **reached)))
    arrivals = _arrivals(declared.key, sign * value, found)
    return arrivals if arrivals.lines else None


def _recorded(run: Run) -> Arrival:
    """Of a run that was trained to the target."""
    seconds, samples = (run.values.get(key, math.inf) for key in ("time_to_target_s", "samples_to_target"))
    until = "after_seconds" if math.isfinite(seconds) else "seconds"
    return Arrival(run, positive(at(run.record, f"target.{until}")) or 0.0, seconds, samples)


def _arrivals(
    key: str, value: float, found: Sequence[tuple[int, Arrival]], best: Sequence[float] | None = None
) -> Arrivals:
    sizes: dict[int, dict[object, Arrival]] = {}
    for size, one in found:
        of_size, seed = sizes.setdefault(size, {}), one.run.settings.get("seed")
        if seed not in of_size or (one.seconds, -one.after) < (of_size[seed].seconds, -of_size[seed].after):
            of_size[seed] = one
    declared = metric(key)
    top = (min if declared.higher_is_better is False else max)(best) if best else None
    return Arrivals(declared, value, sizes, best is not None, top)
