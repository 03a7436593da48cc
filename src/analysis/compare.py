"""A against B: whether B is slower, what the parts of a step take in both, and what differs between the two.

The time of a sample is compared (noise.py). It is divided into parts as the mean step of the records is; no part is tested.
"""

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from ..errors import UserError, printable
from ..options.purpose import PATH_PURPOSES, purpose_of
from ..options.tree import flatten
from ..records.formatting import option_value, percent, significant
from ..records.rates import load_words, why_no_rate
from ..records.step_parts import PARTS
from ..records.terminal import wrapped
from ..records.values import at, number, table
from .groups import SweepResults, loads_by_setting
from .noise import PROCESSES_SD, SEPARATE_RUNS_SD, Rates, ratio_text
from .read import read_sweep
from .run import SEED, Run
from .text import aligned, page_width
from .windows import window_table

_CONFIDENCE = 0.975  # more than 95 %, because --rerun looks at the interval again and again
_TELLS_NOTHING = 10  # 1,000 %: an interval that reaches so far, beside a heavy load, is not worth a sentence
_A, _B = 0, 1  # the settings of the rates
_SHOWN = _SLOWER, _FASTER = ("slower", "faster")  # verdicts
_NOT_COMPARED = {"seed", "search", "resume", "run_dir"}  # a difference in these explains nothing, or is shown elsewhere
_RECORD_SECTIONS = {"versions": "versions", "hardware": "hardware", "data": "dataset", "model": "model"}
_MAY_DIFFER = (SEED, "device_name", "cores")  # between the repeats of a side
_LONGEST = 60  # characters of a value


class Comparison:
    """Compare two folders, each with a run or its repeats.

    Args:
        a: the folder of A.
        b: the folder of B.
        max_slowdown: the fraction by which the time of a sample may grow.

    Attributes:
        rates: the rates of A and B, in samples/s.
        parts: for each part of a step that both A and B have timed, the time of a sample in A and in B, in µs, at these rates.
        rate: the rate of B ÷ that of A.
        slowdown: the time of a sample in B ÷ that in A.
        verdict: `slower`, `faster`, `no difference shown`, or `noise unknown`.
        load: the share of the processor that other programs took, on the side with the larger share; None if it is small.
        passes: the number of passes in which A and B were measured side by side; 0 for separate runs.
        assumed: whether SEPARATE_RUNS_SD is assumed for the difference of separate runs of the same thing.
        differing: a line for each difference, by section of the records (`configuration`, `versions`, …).
        warnings: what was left out, and what could not be read.

    Raises:
        UserError: if a folder holds no measured run, or runs that differ in more than the seed.
    """

    def __init__(self, a: str | os.PathLike[str], b: str | os.PathLike[str], max_slowdown: float = 0.05):
        self.names, self.max_slowdown = (str(a), str(b)), max_slowdown
        sweeps = [read_sweep([folder]) for folder in (a, b)]
        (runs_a, skipped_a), (runs_b, skipped_b) = (measured_runs(*side) for side in zip("AB", sweeps, strict=True))
        sides = {_A: runs_a, _B: runs_b}
        between = None if min(map(len, sides.values())) > 1 else SEPARATE_RUNS_SD  # repeated runs show it
        processes = 0.0 if between is None else PROCESSES_SD
        rates = Rates(window_table(sides), between, processes)  # not at equal load: a load slows both sides
        self.rates = rates.rate(_A), rates.rate(_B)
        us_a, us_b = (1e6 / rate for rate in self.rates)
        shares_a, shares_b = _part_shares(runs_a), _part_shares(runs_b)
        self.parts = {part: (us_a * shares_a[part], us_b * shares_b[part]) for part in shares_a if part in shares_b}
        self.rate = rates.ratio(_B, _A, _CONFIDENCE)
        self.slowdown = ratio = rates.ratio(_A, _B, _CONFIDENCE)  # of rates A ÷ B, so of times B ÷ A
        verdict = _SLOWER if ratio.low > 1 else _FASTER if ratio.high < 1 else "no difference shown"
        self.verdict = verdict if ratio.span else "noise unknown"
        self.load = max(loads_by_setting(rates).values(), default=None)
        self.passes = _shared_passes(rates.windows) if rates.together(_A, _B) else 0
        self.assumed = not self.passes and between is not None
        self.differing = differences(runs_a[0], runs_b[0])
        is_script = any("script" in table(run.record.get("config")) for run in (runs_a[0], runs_b[0]))
        self._advice = "repeat both by batchscope run, in a folder for each" if is_script else "write compare --rerun"
        unreadable = [f"{run.name}: {run.steps}" for run in (*runs_a, *runs_b) if isinstance(run.steps, str)]
        self.warnings = [*skipped_a, *skipped_b, *(note for sweep in sweeps for note in sweep.notes), *unreadable]

    @property
    def exit_code(self) -> int:
        """3 if a slowdown is shown that is larger than allowed, else 0.

        A slowdown is shown if the whole interval lies above 1, and larger than allowed if the estimate lies above the limit.
        (To ask for the whole interval above the limit would find only slowdowns that are much larger than the limit.)
        """
        return 3 if self.verdict == _SLOWER and self.slowdown.value > 1 + self.max_slowdown else 0

    @property
    def headline(self) -> str:
        """`B is slower: a sample takes 1.40 times as long (1.21 to 1.62), more than the 1.05 that is allowed.`"""
        if not self.slowdown.span:
            return f"No difference can be shown: the steps' noise is not known; to measure it, {self._advice}."
        verdict = f"B is {self.verdict}" if self.verdict in _SHOWN else "No difference shown"
        digits = 3 if f"{self.slowdown.value:.2f}" == f"{1 + self.max_slowdown:.2f}" else 2
        ratio = f"{ratio_text(self.slowdown.value, digits)} times as long ({self.slowdown.span})"
        words = f"{verdict}: a sample takes {ratio}"
        if self.verdict != _SLOWER:
            return f"{words}."
        limit = f"{1 + self.max_slowdown:g}"
        return f"{words}, more than the {limit} that is allowed." if self.exit_code else f"{words}; {limit} is allowed."

    @property
    def text(self) -> str:
        """The text for the terminal: the answer, what differs, the table, and notes."""
        lines = [self.headline, "", f"A  {self.names[0]}", f"B  {self.names[1]}"]
        lines += [f"   {section}: {line}" for section, differing in self.differing.items() for line in differing]
        lines += [] if self.differing else ["   Nothing differs in configuration, versions, hardware, data or model."]
        notes = [*(f"warning: {line}" for line in self.warnings), *self._method_notes()]
        rate = ["samples/s", *map(significant, self.rates), ratio_text(self.rate.value), self.rate.span, self.verdict]
        parts = [[f"  {name.replace('_', ' ')}, µs/sample", *map(significant, us)] for name, us in self.parts.items()]
        cells = aligned([["", "A", "B", "B ÷ A", "interval", ""], rate, *([*row, "", "", ""] for row in parts)])
        width = page_width()
        return printable("\n".join([*wrapped(lines, width), "", *cells, "", *wrapped(notes, width)]))

    def _method_notes(self) -> Iterator[str]:
        if self.load is not None:
            effect = "" if self.passes else ", which widens the intervals of separate runs"
            yield f"Measured beside {load_words(self.load)}{effect}."
        yield f"The interval holds with {percent(_CONFIDENCE, 1)} confidence."
        if self.passes:
            yield f"A and B were measured side by side, in {self.passes} passes."
        if self.assumed:
            yield f"Separate runs of the same thing are taken to differ by {percent(SEPARATE_RUNS_SD)}."
            if self.slowdown.reach < _TELLS_NOTHING:
                least = percent(self.slowdown.reach)
                yield f"A difference below {least} cannot be shown by them; to show a smaller one, {self._advice}."


def _part_shares(runs: Sequence[Run]) -> dict[str, float]:
    """Return the share of the mean step that each timed part takes, as the mean over repeated runs."""
    part_shares: dict[str, list[float]] = {part: [] for part in PARTS}
    for run in (run for run in runs if "step_ms" in run.values):
        for part, shares in part_shares.items():
            ms = number(at(run.record, f"throughput.parts_ms.{part}"))
            shares += [ms / run.values["step_ms"]] if ms is not None and ms >= 0 else []
    return {part: statistics.fmean(shares) for part, shares in part_shares.items() if shares}


def _shared_passes(windows: pd.DataFrame) -> int:
    """Return the number of passes in which both sides were measured; where each pair of runs has its own passes, of pairs."""
    passes = windows.dropna(subset="pass_").groupby("pass_")
    runs = passes["run"].agg(frozenset)[passes["setting"].nunique() == 2]
    return runs.nunique() if runs.nunique() > 1 else len(runs)


def measured_runs(name: str, side: SweepResults) -> tuple[list[Run], list[str]]:
    """Return the measured runs of side `A` or `B`, which repeat one another, and a line for each run that was not measured.

    Raises:
        UserError: if runs of the side differ in more than the seed, or none was measured.
    """
    if factors := [key for key in side.factors if key not in _MAY_DIFFER]:
        raise UserError(
            f"compare: {name} holds runs that differ in {', '.join(factors)}; takes one run, or its repeats"
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
    """Return a line for each difference between two runs, by section; sections without a difference are left out."""
    sections_a, sections_b = _sections(a), _sections(b)
    lines = {section: [*_differing_lines(sections_a[section], sections_b[section])] for section in sections_a}
    return {section: differing for section, differing in lines.items() if differing}


def _sections(run: Run) -> dict[str, dict[str, Any]]:
    """Return the options of a run without folders, and other sections of its record; callbacks and loggers take time, too."""
    config = table(run.record.get("config"))
    options = {
        key: value
        for key, value in flatten(config)
        if not {key, key.partition(".")[0]} & _NOT_COMPARED and purpose_of(key, config) not in PATH_PURPOSES
    }
    return {"configuration": options} | {name: table(run.record.get(key)) for name, key in _RECORD_SECTIONS.items()}


def _differing_lines(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each key that differs: `lr: 0.1 → 0.2`."""
    for key in dict.fromkeys([*a, *b]):
        if (key in a) != (key in b) or a[key] != b[key]:
            yield f"{key}: {' → '.join(_value_text(side[key]) if key in side else '—' for side in (a, b))}"


def _value_text(value: Any) -> str:
    """Return a value with all its digits, and a long text by its begin and its end."""
    text = repr(value) if isinstance(value, float) else option_value(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 3]}…{text[-_LONGEST // 2 :]}"
