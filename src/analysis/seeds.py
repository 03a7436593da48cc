"""Runs that differ in their seed alone: the mean of each of their numbers, and how far the runs lie apart."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..records.formatting import significant
from ..records.metrics import FRACTION, metric
from ..records.rates import RATE
from .groups import SweepResults
from .run import Run
from .table import shown_metrics


@dataclass(frozen=True)
class Spread:
    """A number of `count` runs. The standard deviation is that of a sample (n − 1)."""

    name: str
    count: int
    mean: float
    deviation: float
    low: float
    high: float

    @property
    def short(self) -> str:
        """`98.42 ± 0.11 %`."""
        factor, unit = (100, " %") if metric(self.name).unit == FRACTION else (1, "")
        mean, deviation = self.mean * factor, self.deviation * factor
        return f"{mean:.2f} ± {deviation:.2f}{unit}" if unit else f"{significant(mean)} ± {significant(deviation)}"

    @property
    def text(self) -> str:
        """`98.42 ± 0.11 % (98.30 to 98.51)`."""
        if metric(self.name).unit == FRACTION:
            return f"{self.short} ({100 * self.low:.2f} to {100 * self.high:.2f})"
        return f"{self.short} ({significant(self.low)} to {significant(self.high)})"


@dataclass(frozen=True)
class Repeated:
    """Runs of one setting."""

    label: str  # of the group
    batch_size: int | None
    seeds: int  # how many different ones the runs have
    runs: int
    spreads: dict[str, Spread]  # by the name of the number

    @property
    def words(self) -> str:
        """`3 seeds`; runs that share a seed are called runs."""
        return f"{self.seeds} seeds" if self.seeds == self.runs else f"{self.runs} runs"

    @property
    def headline(self) -> str:
        """The means in one line."""
        at = f" at batch size {self.batch_size:,}" if self.batch_size else ""
        rate = [f"{spread.text} samples/s" for name, spread in self.spreads.items() if name == RATE]
        others = [f"{name} {spread.text}" for name, spread in self.spreads.items() if name != RATE]
        return f"{self.label}, {self.words}{at}, mean ± standard deviation (range): {'; '.join([*others, *rate])}."

    def as_json(self) -> dict[str, Any]:
        """For `sweep.json`."""
        known = {name: {"n": s.count, "mean": s.mean, "sd": s.deviation, "min": s.low, "max": s.high}
                 for name, s in self.spreads.items()}  # fmt: skip
        return {"group": self.label, "batch_size": self.batch_size, "seeds": self.seeds, "runs": self.runs, **known}


def repeated(sweep: SweepResults) -> list[Repeated]:
    """Each setting that several runs share: a group at one batch size. Numbers that fewer than two runs have are left out."""
    found = []
    for group in sweep.groups:
        sizes: dict[int | None, list[Run]] = {}
        for run in sorted(group.runs, key=lambda run: run.batch_size or 0):
            if RATE in run.values or run.metrics:
                sizes.setdefault(run.batch_size, []).append(run)
        for size, runs in sizes.items():
            spreads = {name: spread for name in (*shown_metrics(sweep), RATE) if (spread := _spread(runs, name))}
            if spreads:
                seeds = len({run.settings.get("seed") for run in runs})
                found.append(Repeated(group.label, size, seeds, len(runs), spreads))
    return found


def headlines(settings: Sequence[Repeated], sweep: SweepResults) -> list[str]:
    """A line on each group that ran at one batch size; groups at several have a recommendation, and a table."""
    alone = {group.label for group in sweep.groups if len(group.sizes) < 2}
    return [each.headline for each in settings if each.label in alone]


def cells(settings: Sequence[Repeated]) -> list[list[str]]:
    """A table with its headings: the mean, the standard deviation and the range of each number; empty without a setting."""
    names = list(dict.fromkeys(name for each in settings for name in each.spreads))
    if not names:
        return []
    spread = "mean ± sd (range)"
    headings = [
        "setting",
        "batch size",
        "runs",
        *(f"{'samples/s' if name == RATE else name}, {spread}" for name in names),
    ]
    lines = []
    for each in settings:
        numbers = [each.spreads[name].text if name in each.spreads else "" for name in names]
        numbers = [
            f"{text}, n={each.spreads[name].count}" if text and each.spreads[name].count < each.runs else text
            for name, text in zip(names, numbers, strict=True)
        ]
        lines.append([each.label, f"{each.batch_size:,}" if each.batch_size else "", each.words, *numbers])
    return [headings, *lines]


def _spread(runs: Sequence[Run], name: str) -> Spread | None:
    values = [run.values[name] for run in runs if name in run.values]
    if len(values) < 2:
        return None
    return Spread(name, len(values), statistics.fmean(values), statistics.stdev(values), min(values), max(values))
