"""A against B: is B slower, in which part of the step, and what differs between the two.

Compared is the time of a sample, by noise.py. Many times are compared at once, so all intervals of a comparison hold
together with 95 % confidence: half of the 5 % is for the whole step, which decides, and half for its parts (Bonferroni).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from ..errors import printable
from ..records.formatting import percent, significant
from ..records.rates import RATE, load_words
from ..records.step_parts import PARTS
from ..records.terminal import wrapped
from .groups import loads_of, rates_of
from .match import differences, measured
from .noise import BETWEEN, Rates, Ratio
from .read import find
from .text import aligned
from .windows import STEP, windows_of

_ERROR_RATE = 0.05  # of all intervals together
_SMALL = 0.02  # of the step: a smaller part is not compared
_WIDTH = 80  # columns
_TELLS_NOTHING = 10  # 1,000 %, the least difference that two runs on a busy machine can show
_A, _B = 0, 1  # the settings of the rates
_SHOWN = _SLOWER, _FASTER = ("slower", "faster")  # verdicts


@dataclass(frozen=True)
class Row:
    """The time of a sample in a step or a part of it in µs, or the rate in samples/s."""

    name: str  # `samples_per_sec`, `step`, or a part
    a: float
    b: float
    ratio: Ratio  # B ÷ A
    verdict: str  # `slower`, `faster`, `no difference shown`, or `noise unknown`

    @property
    def unit(self) -> str:
        """Of `a` and `b`."""
        return "samples/s" if self.name == RATE else "µs/sample"

    def cells(self) -> list[str]:
        """For the terminal."""
        title = self.unit if self.name == RATE else f"  {self.name.replace('_', ' ')}, {self.unit}"
        ratio = [f"{self.ratio.value:.2f}", self.ratio.span]
        return [title, significant(self.a), significant(self.b), *ratio, self.verdict]


@dataclass(frozen=True)
class Comparison:
    """Two folders compared, each of a run or its repeats."""

    names: tuple[str, str]
    rows: list[Row]  # the rate, the step, its parts
    load: float | None  # the share of the processor that other programs took beside the busier side, if worth a word
    passes: int  # in which A and B were measured side by side; 0 for separate runs
    assumed: bool  # whether separate runs of the same thing are taken to differ by BETWEEN
    differing: dict[str, list[str]]
    warnings: list[str]  # what was left out, and what could not be read
    max_slowdown: float

    @property
    def slowdown(self) -> Ratio:
        """Of the time of a sample, B ÷ A."""
        return self.rows[1].ratio

    @property
    def verdict(self) -> str:
        """That of the step."""
        return self.rows[1].verdict

    @property
    def shown(self) -> list[Row]:
        """The rate, and the parts that differ."""
        return self.rows[:1] + [row for row in self.rows[2:] if row.verdict in _SHOWN]

    @property
    def exit_code(self) -> int:
        """3 if a slowdown is shown that is larger than allowed, else 0.

        Shown: the whole interval lies above 1. Larger: the estimate lies above the limit. (That the whole interval lies
        above the limit would find a slowdown only if it were much larger than the limit.)
        """
        return 3 if self.verdict == _SLOWER and self.slowdown.value > 1 + self.max_slowdown else 0

    @property
    def headline(self) -> str:
        """`B is slower: a sample takes 1.40 times as long (1.21 to 1.62), more than the 1.05 that is allowed.`"""
        if not self.slowdown.span:
            return "No difference can be shown: the steps' noise is not known; compare --rerun measures it."
        is_shown = f"B is {self.verdict}" if self.verdict in _SHOWN else "No difference shown"
        words = f"{is_shown}: a sample takes {self.slowdown.value:.2f} times as long ({self.slowdown.span})"
        if self.verdict != _SLOWER:
            return f"{words}."
        limit = f"{1 + self.max_slowdown:g}"
        return f"{words}, more than the {limit} that is allowed." if self.exit_code else f"{words}; {limit} is allowed."

    @property
    def text(self) -> str:
        """For the terminal: the answer, then what differs."""
        lines = [self.headline, "", f"A  {self.names[0]}", f"B  {self.names[1]}"]
        lines += [f"   {place}: {line}" for place, found in self.differing.items() for line in found]
        lines += [] if self.differing else ["   Nothing differs in configuration, versions, hardware, data or model."]
        notes = [*(f"warning: {line}" for line in self.warnings), *self._how()]
        table = aligned([["", "A", "B", "B ÷ A", "interval", ""], *(row.cells() for row in self.shown)], _WIDTH)
        return printable("\n".join([*wrapped(lines, _WIDTH), "", *table, "", *wrapped(notes, _WIDTH)]))

    def _how(self) -> Iterator[str]:
        if self.load is not None:
            allowed = "" if self.passes else ", which widens the intervals of separate runs"
            yield f"Measured beside {load_words(self.load)}{allowed}."
        yield f"All intervals together hold with {percent(1 - _ERROR_RATE)} confidence."
        if self.passes:
            yield f"A and B were measured side by side, in {self.passes} passes."
        if self.assumed:
            yield f"Separate runs of the same thing are taken to differ by {percent(BETWEEN)}."
            if self.slowdown.reach < _TELLS_NOTHING:
                least = percent(self.slowdown.reach)
                yield f"A difference below {least} cannot be shown by them; compare --rerun shows smaller ones."


def compare(a: str | os.PathLike[str], b: str | os.PathLike[str], max_slowdown: float = 0.05) -> Comparison:
    """Compare two folders, each of a run or its repeats.

    `max_slowdown` is the fraction by which the time of a sample may grow.

    Raises:
        UserError: if a folder holds no measured run, or runs that differ in more than the seed.
    """
    found = [find([folder]) for folder in (a, b)]
    (of_a, left_of_a), (of_b, left_of_b) = (measured(*side) for side in zip("AB", found, strict=True))
    sides, confidence = {_A: of_a, _B: of_b}, 1 - _ERROR_RATE / 2
    between = None if min(map(len, sides.values())) > 1 else BETWEEN  # repeated runs show it
    steps = rates_of(sides, between, processes=0.0)  # what slows one slows the other
    windows = {part: windows_of(sides, part) for part in PARTS}
    parts = {part: Rates(of, steps.assumed) for part, of in windows.items() if of["setting"].nunique() == 2}
    parts = {p: rates for p, rates in parts.items() if any(steps.rate(s) >= _SMALL * rates.rate(s) for s in sides)}
    of_part = 1 - (1 - confidence) / max(len(parts), 1)
    step = _row(STEP, steps, confidence)
    rate = Row(RATE, steps.rate(_A), steps.rate(_B), step.ratio.inverse, step.verdict)
    passes = _shared_passes(steps.windows) if steps.together(_A, _B) else 0
    unreadable = [f"{run.name}: {run.steps}" for run in (*of_a, *of_b) if isinstance(run.steps, str)]
    return Comparison(
        names=(str(a), str(b)),
        rows=[rate, step, *(_row(part, rates, of_part) for part, rates in parts.items())],
        load=max(loads_of(steps).values(), default=None),
        passes=passes,
        assumed=not passes and steps.assumed is not None,
        differing=differences(of_a[0], of_b[0]),
        warnings=[*left_of_a, *left_of_b, *(note for side in found for note in side.notes), *unreadable],
        max_slowdown=max_slowdown,
    )


def _row(name: str, rates: Rates, confidence: float) -> Row:
    ratio = rates.ratio(_A, _B, confidence)  # of rates A ÷ B, so of times B ÷ A
    verdict = "no difference shown" if not ratio.differs else _SLOWER if ratio.value > 1 else _FASTER
    a, b = (1e6 / rates.rate(setting) for setting in (_A, _B))
    return Row(name, a, b, ratio, verdict if ratio.span else "noise unknown")


def _shared_passes(windows: pd.DataFrame) -> int:
    """In how many passes both sides were measured. Where each pair of runs has its own passes, a pair is one."""
    passes = windows.dropna(subset="pass_").groupby("pass_")
    runs = passes["run"].agg(frozenset)[passes["setting"].nunique() == 2]
    return runs.nunique() if runs.nunique() > 1 else len(runs)
