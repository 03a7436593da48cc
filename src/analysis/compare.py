"""A against B: for each part of the step, the step and the rates the ratio B ÷ A, and whether B is slower.

Many ratios are compared at once, so that some interval would miss 1 by chance. The intervals together hold the truth with
95 % confidence: half of the 5 % is for the steps, which decide, and half for all other rows (Bonferroni).

The median step decides. Between separate runs, so do the fastest steps, which others disturb the least.
"""

import math
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import printable
from ..records.formatting import percent, significant
from ..records.rates import FIT_RATE, RATE
from ..records.step_parts import PARTS
from .match import Pair, differences, doubts, match
from .ratios import Ratio, common_rounds, time_ratio, took_turns
from .read import find
from .run_times import FASTEST, FASTEST_SHARE, FIT, STEP, time_of, unreadable
from .separate import BETWEEN_RUNS
from .text_table import aligned

SCHEMA = 1  # of the JSON
ERROR_RATE = 0.05  # of all intervals together
_SMALL = 0.02  # of the step: a smaller part is shown, and not compared
_PER_S = "samples/s"
_UNCUT = 10_000  # characters of a line: a label that is cut no longer tells pairs apart
_FASTEST = f"fastest {percent(FASTEST_SHARE)}"
# Of rows that are no part.
_TITLES = {STEP: "step ms", FASTEST: f"  {_FASTEST} ms", RATE: _PER_S, FIT_RATE: f"fit {_PER_S}"}


@dataclass(frozen=True)
class Row:
    """One time or rate of a pair."""

    name: str  # `step`, a part, or a rate
    unit: str  # `ms` or `samples/s`
    a: float
    b: float
    ratio: Ratio | None  # None where it is not compared

    @property
    def verdict(self) -> str:
        """`faster`, `slower`, `no difference shown`, or why nothing can be said."""
        if self.ratio is None:
            return f"below {percent(_SMALL)} of the step"
        if not self.ratio.low:
            return "spread unknown"
        if not self.ratio.differs:
            return "no difference shown"
        return "faster" if (self.ratio.value > 1) == (self.unit == _PER_S) else "slower"

    def as_json(self) -> dict[str, Any]:
        """For `--json`; an unknown interval is left out."""
        found: dict[str, Any] = {"name": self.name, "unit": self.unit, "a": self.a, "b": self.b}
        if self.ratio is not None:
            found["ratio"] = self.ratio.value
            if self.ratio.low and math.isfinite(self.ratio.high):
                found["interval"] = [self.ratio.low, self.ratio.high]
        return {**found, "verdict": self.verdict}


@dataclass(frozen=True)
class Compared:
    """A pair with its rows. The ratios are of the time of a sample, B ÷ A."""

    pair: Pair
    rows: list[Row]
    median: Ratio
    fastest: Ratio | None  # of the fastest steps; None where they are not known, or not needed
    turns: int  # of each side, which both took; 0 for runs apart

    @property
    def slowdown(self) -> Ratio:
        """What decides: the median, or the fastest steps where these are known better and do not contradict it.

        A change may make most steps slower and a few faster; then the median says what the user sees.
        """
        if self.fastest is None or not self.fastest.low:
            return self.median
        if self.fastest.differs and (self.fastest.value > 1) != (self.median.value > 1):
            return self.median
        ratios = [one for one in (self.fastest, self.median) if one.low]
        if slower := [one for one in ratios if one.low > 1]:
            return max(slower, key=lambda one: one.value)
        return min(ratios, key=lambda one: (not one.differs, one.high / one.low))

    @property
    def of(self) -> str:
        """Words that name the steps of `slowdown` if they are the fastest ones."""
        return f" in its {_FASTEST} of steps" if self.slowdown is self.fastest else ""


@dataclass(frozen=True)
class Comparison:
    """Two folders compared."""

    names: tuple[str, str]
    compared: list[Compared]
    differing: dict[str, list[str]]
    warnings: list[str]  # what makes the sides hard to compare, and what was left out
    max_slowdown: float

    @cached_property
    def regressions(self) -> list[Compared]:
        """The pairs of which a slowdown is shown, and is larger than allowed.

        Shown: the whole interval lies above 1. Larger: the estimate lies above the limit. (That the whole interval lies
        above the limit would find a slowdown only if it were much larger than the limit.)
        """
        return [c for c in self.compared if c.slowdown.low > 1 and c.slowdown.value > 1 + self.max_slowdown]

    @property
    def exit_code(self) -> int:
        """3 if a slowdown is shown that is larger than allowed, else 0."""
        return 3 if self.regressions else 0

    @property
    def headlines(self) -> list[str]:
        """The answer, in a line for each pair that is slower, or one line."""
        if self.regressions:
            return [
                f"{_at(c.pair)}B is {_more(c.slowdown.value)} slower than A{c.of} ({_between(c.slowdown)}); "
                f"{percent(self.max_slowdown)} is allowed."
                for c in self.regressions
            ]
        return [self._no_regression()]

    def _no_regression(self) -> str:
        slower = [c for c in self.compared if c.slowdown.low > 1]
        faster = [c for c in self.compared if c.slowdown.high < 1]
        if slower:
            worst = max(slower, key=lambda c: c.slowdown.value)
            line = f"{_at(worst.pair)}B is {_more(worst.slowdown.value)} slower than A{worst.of} ({_between(worst.slowdown)})"
            return f"{line}; {percent(self.max_slowdown)} is allowed."
        if faster:
            best = min(faster, key=lambda c: c.slowdown.value)
            line = f"{_at(best.pair)}B takes {significant(best.slowdown.value)} times as long as A{best.of}"
            return f"{line} ({_between(best.slowdown)}): B is faster."
        widest = max(self.compared, key=lambda c: c.slowdown.high)
        if not widest.slowdown.low:
            return f"{_at(widest.pair)}no difference can be shown, because the spread of the steps is unknown."
        line = f"{_at(widest.pair)}no difference shown{widest.of} ({_between(widest.slowdown)})."
        if widest.slowdown.high > 1 + 2 * self.max_slowdown and not widest.turns:
            line += " compare --rerun runs both in turns, which shows smaller differences."
        return line

    @property
    def text(self) -> str:
        """For the terminal."""
        lines = [f"A  {self.names[0]}", f"B  {self.names[1]}", ""]
        for place, found in self.differing.items():
            lines += [f"{place:14} {line}" for line in found]
        lines += (
            [""] if self.differing else ["Nothing differs in configuration, versions, hardware, data or model.", ""]
        )
        lines += [*aligned(list(self._shown()), width=_UNCUT), ""]
        lines += [f"warning: {line}" for line in self.warnings]
        lines += [self._how(), *self.headlines]
        return printable("\n".join(lines))

    def _shown(self) -> Iterator[list[str]]:
        """The cells of the table: of several pairs, only the steps and what differs."""
        alone = len(self.compared) == 1
        yield ["", "A", "B", "B ÷ A", "interval", ""]
        for compared in self.compared:
            for row in compared.rows:
                name = _TITLES.get(row.name) or f"  {row.name.replace('_', ' ')} ms"
                if alone:
                    yield [name, *_cells(row)]
                elif row.name == STEP:
                    yield [f"{compared.pair.label}: {name}", *_cells(row)]
                elif row.ratio and row.ratio.differs:
                    yield [f"  {name}", *_cells(row)]

    def _how(self) -> str:
        together = f"the intervals hold together with {percent(1 - ERROR_RATE)} confidence"
        apart = "include what runs of the same thing differ by"
        turns = sorted({c.turns for c in self.compared} - {0})
        if not turns:
            return f"Separate runs: {together}, and {apart}."
        number = f"{turns[0]}" if len(turns) == 1 else f"{turns[0]} to {turns[-1]}"
        line = f"In turns, {number} of each side: {together}."
        return line if all(c.turns for c in self.compared) else f"{line} Those of separate runs {apart}."

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "schema": SCHEMA,
            "a": self.names[0],
            "b": self.names[1],
            "max_slowdown": self.max_slowdown,
            "confidence": 1 - ERROR_RATE,
            "regression": bool(self.regressions),
            "headlines": self.headlines,
            "pairs": [
                {
                    "label": c.pair.label,
                    "a": [run.name for run in c.pair.a],
                    "b": [run.name for run in c.pair.b],
                    "turns": c.turns,
                    "regression": c in self.regressions,
                    "decided_by": FASTEST if c.of else STEP,
                    "rows": [row.as_json() for row in c.rows],
                }
                for c in self.compared
            ],
            "differences": self.differing,
            "warnings": self.warnings,
        }


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    max_slowdown: float = 0.05,
    between: float = BETWEEN_RUNS,
) -> Comparison:
    """Compare two folders of runs.

    Args:
        a: a run's folder, or one with several runs.
        b: the same.
        max_slowdown: by which the time of a sample may grow.
        between: see `time_ratio`.

    Raises:
        UserError: if a folder holds no run, or no run of one matches one of the other.
    """
    sides = [find([folder]) for folder in (a, b)]
    pairs, left_over = match(*sides)
    runs = [run for pair in pairs for run in (*pair.a, *pair.b)]
    return Comparison(
        names=(str(a), str(b)),
        compared=[_compare_pair(pair, len(pairs), between) for pair in pairs],
        differing=differences(pairs),
        warnings=[*doubts(pairs), *left_over, *(n for side in sides for n in side.notes), *unreadable(runs)],
        max_slowdown=max_slowdown,
    )


def _compare_pair(pair: Pair, pairs: int, between: float) -> Compared:
    step, in_turns = _times(pair, STEP), took_turns(pair.a, pair.b)
    samples = [side[0].values[RATE] * side[0].values["step_ms_median"] / 1e3 for side in (pair.a, pair.b)]  # of a step
    fast = (0.0, 0.0) if in_turns else _times(pair, FASTEST)
    deciding = {STEP: step} | ({FASTEST: fast} if all(fast) else {})
    confidence = 1 - ERROR_RATE / 2 / pairs / len(deciding)
    ratios = {name: time_ratio(pair.a, pair.b, name, confidence, between) for name in deciding}
    assert ratios[STEP] is not None  # only measured runs are matched
    slowdown = {name: ratio.times(samples[0] / samples[1]) for name, ratio in ratios.items() if ratio}
    known = {name: times for name in (*PARTS, FIT) if all(times := _times(pair, name))}
    if in_turns and not common_rounds(pair.a, pair.b, FIT)[0]:
        known.pop(FIT, None)  # each run's fit was over several turns
    large = [
        n for n, times in known.items() if n == FIT or any(t > _SMALL * s for t, s in zip(times, step, strict=True))
    ]
    found = {name: time_ratio(pair.a, pair.b, name, 1 - ERROR_RATE / 2 / pairs / len(large), between) for name in large}
    rows = [Row(name, "ms", 1e3 * a, 1e3 * b, ratios[name]) for name, (a, b) in deciding.items()]
    rows += [Row(n, "ms", 1e3 * a, 1e3 * b, found.get(n)) for n, (a, b) in known.items() if n != FIT]
    rows.append(Row(RATE, _PER_S, samples[0] / step[0], samples[1] / step[1], slowdown[STEP].inverse))
    if FIT in known and (fit := found[FIT]):
        rows.append(Row(FIT_RATE, _PER_S, 1 / known[FIT][0], 1 / known[FIT][1], fit.inverse))
    return Compared(pair, rows, slowdown[STEP], slowdown.get(FASTEST), in_turns)


def _times(pair: Pair, name: str) -> tuple[float, float]:
    """Seconds of A and B: the geometric mean over the rounds of both, else over repeated runs; 0 where it is unknown."""
    sides: Sequence[list[float]] = common_rounds(pair.a, pair.b, name)
    if not sides[0]:
        sides = [[found for run in runs if (found := time_of(run, name))] for runs in (pair.a, pair.b)]
    a, b = (statistics.geometric_mean(side) if side else 0.0 for side in sides)
    return a, b


def _cells(row: Row) -> list[str]:
    values = [significant(value) for value in (row.a, row.b)]
    if row.ratio is None:
        return [*values, "", "", row.verdict]
    interval = f"{row.ratio.low:.2f} to {row.ratio.high:.2f}" if row.ratio.low else ""
    return [*values, f"{row.ratio.value:.2f}", interval, row.verdict]


def _at(pair: Pair) -> str:
    return f"{pair.label}: " if pair.label else ""


def _more(ratio: float) -> str:
    return f"{100 * (ratio - 1):.1f} %"


def _between(ratio: Ratio) -> str:
    return f"interval {ratio.low:.2f} to {ratio.high:.2f}"
