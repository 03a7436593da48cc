"""A against B: is B slower, of which parts are their steps, and what differs between the two.

Compared is the time of a sample, by noise.py. It is divided as the mean step of the records is, and no part is tested.
"""

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from ..errors import UserError, printable
from ..options.purpose import PLACES, purpose_of
from ..options.tree import flatten
from ..records.formatting import option_value, percent, significant
from ..records.rates import load_words, why_no_rate
from ..records.step_parts import PARTS
from ..records.terminal import wrapped
from ..records.values import at, number, table
from .groups import SweepResults, loads_of
from .noise import BETWEEN, PROCESSES, Rates, ratio_text
from .read import find
from .run import SEED, Run
from .text import aligned, page_width
from .windows import windows_of

_CONFIDENCE = 0.975  # more than 95 %, because --rerun looks at the interval again and again
_TELLS_NOTHING = 10  # 1,000 %, the least difference that two runs on a busy machine can show
_A, _B = 0, 1  # the settings of the rates
_SHOWN = _SLOWER, _FASTER = ("slower", "faster")  # verdicts
_SAID = {"seed", "search", "resume", "run_dir"}  # a difference says nothing, or is said elsewhere
_RECORDED = {"versions": "versions", "hardware": "hardware", "data": "dataset", "model": "model"}
_MAY_DIFFER = (SEED, "device_name", "cores")  # between the repeats of a side
_LONGEST = 60  # characters of a value


class Comparison:
    """Two folders compared, each of a run or its repeats.

    Args:
        a: a folder.
        b: the other one.
        max_slowdown: the fraction by which the time of a sample may grow.

    Attributes:
        rates: of A and B, in samples/s.
        parts: the time of a sample at these rates, in µs, in each part of the step of A and B that both have timed.
        rate: B ÷ A.
        slowdown: of the time of a sample, B ÷ A.
        verdict: `slower`, `faster`, `no difference shown`, or `noise unknown`.
        load: the share of the processor that other programs took beside the busier side, if worth a word.
        passes: in which A and B were measured side by side; 0 for separate runs.
        assumed: whether separate runs of the same thing are taken to differ by BETWEEN.
        differing: lines by where the records say so.
        warnings: what was left out, and what could not be read.

    Raises:
        UserError: if a folder holds no measured run, or runs that differ in more than the seed.
    """

    def __init__(self, a: str | os.PathLike[str], b: str | os.PathLike[str], max_slowdown: float = 0.05):
        self.names, self.max_slowdown = (str(a), str(b)), max_slowdown
        found = [find([folder]) for folder in (a, b)]
        (of_a, left_of_a), (of_b, left_of_b) = (measured(*side) for side in zip("AB", found, strict=True))
        sides = {_A: of_a, _B: of_b}
        between = None if min(map(len, sides.values())) > 1 else BETWEEN  # repeated runs show it
        processes = 0.0 if between is None else PROCESSES
        steps = Rates(windows_of(sides), between, processes)  # what slows one slows the other
        self.rates = steps.rate(_A), steps.rate(_B)
        us_a, us_b = (1e6 / rate for rate in self.rates)
        in_a, in_b = _part_shares(of_a), _part_shares(of_b)
        self.parts = {part: (us_a * share, us_b * in_b[part]) for part, share in in_a.items() if part in in_b}
        self.rate = steps.ratio(_B, _A, _CONFIDENCE)
        self.slowdown = ratio = steps.ratio(_A, _B, _CONFIDENCE)  # of rates A ÷ B, so of times B ÷ A
        verdict = _SLOWER if ratio.low > 1 else _FASTER if ratio.high < 1 else "no difference shown"
        self.verdict = verdict if ratio.span else "noise unknown"
        self.load = max(loads_of(steps).values(), default=None)
        self.passes = _shared_passes(steps.windows) if steps.together(_A, _B) else 0
        self.assumed = not self.passes and between is not None
        self.differing = differences(of_a[0], of_b[0])
        is_script = any("script" in table(run.record.get("config")) for run in (of_a[0], of_b[0]))
        self._again = "repeat both by batchscope run, in a folder for each" if is_script else "write compare --rerun"
        unreadable = [f"{run.name}: {run.steps}" for run in (*of_a, *of_b) if isinstance(run.steps, str)]
        self.warnings = [*left_of_a, *left_of_b, *(note for side in found for note in side.notes), *unreadable]

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
            return f"No difference can be shown: the steps' noise is not known; to measure it, {self._again}."
        is_shown = f"B is {self.verdict}" if self.verdict in _SHOWN else "No difference shown"
        digits = 3 if f"{self.slowdown.value:.2f}" == f"{1 + self.max_slowdown:.2f}" else 2
        words = (
            f"{is_shown}: a sample takes {ratio_text(self.slowdown.value, digits)} times as long ({self.slowdown.span})"
        )
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
        rate = ["samples/s", *map(significant, self.rates), ratio_text(self.rate.value), self.rate.span, self.verdict]
        parts = [[f"  {name.replace('_', ' ')}, µs/sample", *map(significant, us)] for name, us in self.parts.items()]
        cells = aligned([["", "A", "B", "B ÷ A", "interval", ""], rate, *([*row, "", "", ""] for row in parts)])
        width = page_width()
        return printable("\n".join([*wrapped(lines, width), "", *cells, "", *wrapped(notes, width)]))

    def _how(self) -> Iterator[str]:
        if self.load is not None:
            allowed = "" if self.passes else ", which widens the intervals of separate runs"
            yield f"Measured beside {load_words(self.load)}{allowed}."
        yield f"The interval holds with {percent(_CONFIDENCE, 1)} confidence."
        if self.passes:
            yield f"A and B were measured side by side, in {self.passes} passes."
        if self.assumed:
            yield f"Separate runs of the same thing are taken to differ by {percent(BETWEEN)}."
            if self.slowdown.reach < _TELLS_NOTHING:
                least = percent(self.slowdown.reach)
                yield f"A difference below {least} cannot be shown by them; to show a smaller one, {self._again}."


def _part_shares(runs: Sequence[Run]) -> dict[str, float]:
    """The share of the mean step that each part takes, the mean over repeated runs; without parts that no run has timed."""
    shares: dict[str, list[float]] = {part: [] for part in PARTS}
    for run in (run for run in runs if "step_ms" in run.values):
        for part, of_runs in shares.items():
            ms = number(at(run.record, f"throughput.parts_ms.{part}"))
            of_runs += [ms / run.values["step_ms"]] if ms is not None and ms >= 0 else []
    return {part: statistics.fmean(of_runs) for part, of_runs in shares.items() if of_runs}


def _shared_passes(windows: pd.DataFrame) -> int:
    """In how many passes both sides were measured. Where each pair of runs has its own passes, a pair is one."""
    passes = windows.dropna(subset="pass_").groupby("pass_")
    runs = passes["run"].agg(frozenset)[passes["setting"].nunique() == 2]
    return runs.nunique() if runs.nunique() > 1 else len(runs)


def measured(name: str, side: SweepResults) -> tuple[list[Run], list[str]]:
    """The measured runs of side `A` or `B`, which repeat one another, and a line on each that was not measured.

    Raises:
        UserError: if runs of the side differ in more than the seed, or none was measured.
    """
    if several := [key for key in side.factors if key not in _MAY_DIFFER]:
        raise UserError(
            f"compare: {name} holds runs that differ in {', '.join(several)}; takes one run, or its repeats"
        )
    lines = [
        f"{name}, {run.name}: not measured ({run.reason or why_no_rate(run.record)})"
        for run in side.runs
        if not run.samples_a_step
    ]
    runs = [run for run in side.runs if run.samples_a_step]
    if not runs:
        raise UserError(f"compare: {'; '.join(lines[:4])}")
    return runs, lines


def differences(a: Run, b: Run) -> dict[str, list[str]]:
    """What differs between two runs, by where the records say so; places without a difference are left out."""
    before, after = _facts(a), _facts(b)
    found = {place: [*_differing(before[place], after[place])] for place in before}
    return {place: lines for place, lines in found.items() if lines}


def _facts(run: Run) -> dict[str, dict[str, Any]]:
    """All options but folders, also those of callbacks and loggers, which take time; and what else a record has."""
    config = table(run.record.get("config"))
    options = {
        key: value
        for key, value in flatten(config)
        if not {key, key.partition(".")[0]} & _SAID and purpose_of(key, config) not in PLACES
    }
    return {"configuration": options} | {place: table(run.record.get(key)) for place, key in _RECORDED.items()}


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """A line for each key: `lr: 0.1 → 0.2`."""
    for key in dict.fromkeys([*before, *after]):
        if (key in before) != (key in after) or before[key] != after[key]:
            yield f"{key}: {' → '.join(_shown(side[key]) if key in side else '—' for side in (before, after))}"


def _shown(value: Any) -> str:
    """A value, all its digits; of a long text its begin and its end."""
    text = repr(value) if isinstance(value, float) else option_value(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 3]}…{text[-_LONGEST // 2 :]}"
