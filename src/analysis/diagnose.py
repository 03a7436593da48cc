"""The table of a diagnosis: what each change really gave, against the baseline.

A change that was visited side by side with the baseline is compared within their passes: what slowed one slowed the other.
Of a change that ran at another time, the interval is that of separate runs (noise.py). The lower ends of the intervals of all
changes hold together with 95 % confidence (Šidák). A change helps where its interval lies above 1, and the fastest change that
helps is recommended.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .._system import command_line
from ..errors import cut, printable
from ..records.formatting import count, significant
from ..records.rates import RATE, load_words
from ..records.terminal import wrapped
from ..records.values import at, table
from .groups import rates_of
from .noise import Ratio, ratio_text, simultaneous
from .run import Run
from .text import aligned, page_width

_LONGEST = 24  # characters of a bottleneck's kind, which a record may give as anything
_LONGEST_REASON = 200  # characters of an error, likewise


@dataclass
class Trial:
    """The baseline, or a change that was tried."""

    options: tuple[str, ...]  # that it changes, as on a command line; none for the baseline
    runs: list[Run]
    rate: float = 0.0  # samples/s; 0 unless a run finished
    ratio: Ratio | None = None  # of its rate to the baseline's, each end alone sure; None where they cannot be compared
    why_not: str = ""  # why it cannot be compared with the baseline; empty if it can

    @property
    def name(self) -> str:
        """What people call it: its options, or `baseline`."""
        return " ".join(self.options) or "baseline"

    @property
    def measured(self) -> list[Run]:
        """The runs that finished with a rate."""
        return [run for run in self.runs if run.status == "finished" and RATE in run.values]

    @property
    def run(self) -> Run:
        """The run that its facts are of: the last one that was measured."""
        return (self.measured or self.runs)[-1]

    @property
    def kind(self) -> str:
        """The kind of the bottleneck: `memory`, `probably host`, `unclear`, or empty."""
        said = table(at(self.run.record, "throughput.bottleneck"))
        probably = "probably " if said.get("certainty") == "probable" else ""
        return probably + cut(" ".join(str(said.get("kind") or "").split()), _LONGEST)


class Findings:
    """What the runs of a diagnosis say; other runs are left out. `load`: the share of the processor that others took, if worth a word."""

    def __init__(self, runs: Iterable[Run]):
        runs_of: dict[tuple[str, ...], list[Run]] = {(): []}
        for run in sorted(runs, key=lambda run: str(run.record.get("started") or "~")):
            if (options := _options(run)) is not None:
                runs_of.setdefault(options, []).append(run)
        self.baseline, *changes = trials = [Trial(*of) for of in runs_of.items()]
        measured = {number: trial.measured for number, trial in enumerate(trials) if trial.measured}
        rates, confidence = rates_of(measured), simultaneous(len(measured.keys() - {0}))
        self.load = rates.load
        for number, trial in enumerate(trials):  # the baseline first
            if number not in measured:
                trial.why_not = _why_not_measured(trial)
                continue
            trial.rate = rates.rate(number)
            ratio = rates.ratio(number, 0, confidence) if self.baseline.rate else None
            if ratio and ratio.span:
                trial.ratio = ratio
            else:
                trial.why_not = (
                    "too few steps were measured to know their noise" if ratio else "the baseline has no rate"
                )
        self.changes = sorted(changes, key=lambda trial: -trial.rate)
        self.trials = [self.baseline] * bool(self.baseline.runs) + self.changes
        helping = (trial for trial in self.changes if trial.ratio and trial.ratio.low > 1)  # the fastest first
        self.best = next(helping, None)  # the change to recommend; None if none helps

    @property
    def headline(self) -> str:
        """The best change, or why none is recommended."""
        if not self.baseline.rate:
            return "The baseline was not measured, so there is nothing to compare."
        if not self.changes:
            return "No change has been tried."
        compared = [(trial, trial.ratio) for trial in self.changes if trial.ratio]  # the fastest first
        if not compared:
            return f"No change can be compared with the baseline: {self.changes[0].why_not.rstrip('.')}."
        trial, ratio = next((pair for pair in compared if pair[0] is self.best), compared[0])
        beside = "" if self.load is None else f", beside {load_words(self.load)}"
        if self.best:
            digits = 2 if ratio.low >= 1.01 else 3
            least = math.floor(ratio.low * 10**digits) / 10**digits  # what is claimed is not rounded up
            times = f"{ratio.value:.2f} times the baseline's rate, at least {least:.{digits}f} in this diagnosis"
            return f"Recommended: {trial.name}, {times}{beside}."
        tried = f"of {count(len(compared), 'change')} compared, none is shown to be faster than the baseline"
        return (
            f"No change helps: {tried}; the best is {trial.name} with {ratio_text(ratio.value)} ({ratio.span}){beside}."
        )

    @property
    def remarks(self) -> list[str]:
        """What to know before the table is believed."""
        lines = [f"{trial.name}: {trial.why_not}" for trial in self.trials if trial.why_not]
        if len(self.changes) > 1 and not all(trial.why_not for trial in self.changes):
            lines.append("the lower ends of all intervals hold together with 95 % confidence")
        if self.best and any(word.startswith("data.batch_size=") for word in self.best.options):
            lines.append("a larger batch also changes how the model learns")
        evidence = at(self.baseline.run.record, "throughput.bottleneck.evidence") if self.baseline.runs else None
        return [*lines, f"baseline: {self.baseline.kind}: {evidence}"] if evidence else lines

    @property
    def text(self) -> str:
        """For the terminal."""
        line = [f"batchscope train … {command_line(self.best.options)}"] if self.best else []
        rows = [["run", "samples/s", "÷ baseline", "interval", "bottleneck"]]
        for trial in self.trials:
            name = " ".join(word.rpartition(".")[2] for word in trial.options) or trial.name
            rate = significant(trial.rate) if trial.rate else "not measured"
            ratio = trial.ratio if trial.options else None
            rows.append([name, rate, *([ratio_text(ratio.value), ratio.span] if ratio else ["", ""]), trial.kind])
        width, notes = page_width(), [f"note: {remark}" for remark in self.remarks]
        lines = [*wrapped([self.headline], width), *line, "", *aligned(rows), "", *wrapped(notes, width)]
        return printable("\n".join(lines))


def _why_not_measured(trial: Trial) -> str:
    """Why a trial has no rate; empty for a baseline that did not run."""
    if not trial.runs:
        return ""
    status = {"failed": "refused: ", "not_finite": "not finite: "}.get(trial.run.status, "")
    return cut(f"{status}{trial.run.reason or 'no rate was measured'}", _LONGEST_REASON)


def _options(run: Run) -> tuple[str, ...] | None:
    """The options that a run of a diagnosis changes, none for the baseline; None for any other run."""
    options = table(run.record.get("diagnosis")).get("options")
    return tuple(map(str, options)) if isinstance(options, list) else None
