"""Devices compared as they were measured: from which batch size on one is faster, and what several reach together."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..records.formatting import count, percent, significant
from ..records.rates import RATE
from .groups import Group, rates_of
from .noise import Ratio
from .run import HARDWARE, SEED, Run
from .settings import times_as_fast

# Settings that follow from the number of devices, or do not matter beside it.
_ALONG = ("trainer.devices", "trainer.num_nodes", SEED, "trainer.strategy", "trainer", "threads")


@dataclass(frozen=True)
class Crossover:
    """Two devices compared at the batch sizes that ran on both."""

    base: str  # the model, and what else the two groups share
    first: str  # the device that is faster at small sizes, if the other one is at large sizes
    second: str
    ratios: dict[int, Ratio]  # by size, the rate of the second device over that of the first

    @property
    def headline(self) -> str:
        """The answer in one line. A device is called faster only where the interval shows it."""
        slower, faster = ([s for s, r in self.ratios.items() if shown(r)] for shown in (_is_below, _is_above))
        if not slower and not faster:
            return f"{self.base}: no difference between {self.first} and {self.second} is shown{self._sizes([])}."
        if not slower or not faster:
            at = faster or slower
            names = (self.second, self.first) if faster else (self.first, self.second)
            return f"{self.base}: {names[0]} is faster than {names[1]}{self._sizes(at)}{self._most(at)}."
        if max(slower) < min(faster):
            between = f"from a batch size between {max(slower):,} and {min(faster):,} on"
            return f"{self.base}: {self.second} is faster than {self.first} {between}{self._most(faster)}."
        return f"{self.base}: {self.first} is faster{self._sizes(slower)}, {self.second}{self._sizes(faster)}."

    def _sizes(self, at: Sequence[int]) -> str:
        """At which sizes something holds; all of them for an empty list."""
        sizes = sorted(self.ratios)
        if len(sizes) == 1:
            return f" at the one size that ran on both ({sizes[0]:,})"
        if len(at) in (0, len(sizes)):
            return f" at {'every' if at else 'any'} size that ran on both ({sizes[0]:,} to {sizes[-1]:,})"
        return f" at {', '.join(f'{size:,}' for size in at)}"

    def _most(self, at: Sequence[int]) -> str:
        """The largest of the ratios at some sizes: `, up to 12.1 times as fast (at 512)`."""
        ratios = {size: ratio if _is_above(ratio) else ratio.inverse for size, ratio in self.ratios.items()}
        most = max(at, key=lambda size: ratios[size].value)
        words = times_as_fast(ratios[most])
        if words == "faster":
            return ""
        if len(at) == 1:
            return f", {words}"
        return f", {words} at {most:,}" if words.startswith("at least") else f", up to {words} (at {most:,})"

    def as_dict(self) -> dict[str, Any]:
        """For `sweep.json`."""
        ratios = [{"batch_size": s, "ratio": r.value, "interval": [r.low, r.high]} for s, r in self.ratios.items()]
        return {"base": self.base, "devices": [self.first, self.second], "ratios": ratios, "headline": self.headline}


def _is_above(ratio: Ratio) -> bool:
    return ratio.low > 1


def _is_below(ratio: Ratio) -> bool:
    return ratio.high < 1


def crossovers(groups: Sequence[Group]) -> list[Crossover]:
    """For each model that ran on several devices, each pair of them that has a batch size in common."""
    found = []
    for one, two in itertools.combinations(groups, 2):
        if one.base == two.base:
            devices = [group.device for group in groups if group.base == one.base]
            several = any(devices.count(group.device) > 1 for group in (one, two))
            found.append(_crossover(one, two, _names(one, two, HARDWARE[1:] if several else HARDWARE)))
    return [crossover for crossover in found if crossover]


def _crossover(one: Group, two: Group, names: tuple[str, str] | None) -> Crossover | None:
    sizes = [size for size in one.sizes if size in two.sizes]
    if names is None or not sizes:
        return None
    sides = {2 * n: one.sizes[size] for n, size in enumerate(sizes)}
    rates = rates_of(sides | {2 * n + 1: two.sizes[size] for n, size in enumerate(sizes)})
    if rates.busy is not None:
        return None
    ratios = {size: rates.ratio(2 * n + 1, 2 * n) for n, size in enumerate(sizes)}
    shown = [ratio for ratio in ratios.values() if ratio.differs]
    if shown and _is_below(shown[-1]):  # the first device is faster at large sizes
        return Crossover(one.base, names[1], names[0], {size: ratio.inverse for size, ratio in ratios.items()})
    return Crossover(one.base, *names, ratios)


def _names(one: Group, two: Group, keys: Sequence[str]) -> tuple[str, str] | None:
    """What the devices of two groups are called: by the first of these settings that sets them apart."""
    for key in keys:
        first, second = (group.runs[0].settings.get(key) for group in (one, two))
        if first != second and first and second:
            return (f"{first} threads", f"{second} threads") if key == "threads" else (str(first), str(second))
    return None


def scaling(runs: Sequence[Run]) -> dict[str, Ratio]:
    """By the name of each run on several devices: its rate over that of a run on one device that differs in nothing else.

    The batch size of each device is the same. A run on several devices without such a run is left out.
    """
    single: dict[str, list[Run]] = {}
    for run in runs:
        if RATE in run.values and run.processes == 1:
            single.setdefault(_alike(run), []).append(run)
    several = (run for run in runs if run.processes > 1 and RATE in run.values and _alike(run) in single)
    return {run.name: rates_of({0: single[_alike(run)], 1: [run]}).ratio(1, 0) for run in several}


def _alike(run: Run) -> str:
    return repr(sorted((key, repr(value)) for key, value in run.settings.items() if key not in _ALONG))


def scaling_lines(runs: Sequence[Run], found: dict[str, Ratio]) -> list[str]:
    """A line for each run on several devices that can be compared."""
    lines = []
    for run in (run for run in runs if run.name in found):
        ratio, devices = found[run.name], run.processes
        known = f"{significant(ratio.low)} to {significant(ratio.high)}" if ratio.low > 0 else "its interval is unknown"
        line = (
            f"{run.model}: {devices} devices with {run.batch_size:,} samples each reach {significant(ratio.value)} times "
            f"the samples/s of one ({known}), a scaling efficiency of {percent(ratio.value / devices)}"
        )
        if "communication_share" in run.values:
            line += f"; they wait for gradients in {percent(run.values['communication_share'])} of a step"
        lines.append(f"{line}.")
    return lines


def scaling_notes(runs: Sequence[Run], found: dict[str, Ratio]) -> list[str]:
    """What makes a comparison of devices unfair: on a CPU the processes share the cores."""
    notes = []
    for run in (run for run in runs if run.name in found):
        threads = run.settings.get("threads")
        alone = {r.settings.get("threads") for r in runs if _alike(r) == _alike(run) and r.processes == 1}
        if threads is not None and alone != {threads}:
            before = " or ".join(map(str, sorted(filter(None, alone))))
            notes.append(f"{run.name}: each process had {count(threads, 'thread')}; the run on one device had {before}")
    return notes
