"""The table of a diagnosis: what each change really gave, against a baseline measured at the beginning and at the end.

The baselines repeat one setting, so they show what separate runs of the same thing differ by here. A change is recommended
only where the 90 % interval of its rate over theirs (noise.py) lies above 1. Of changes that are not shown to differ from
the fastest one, the one that changes least is recommended: with the fewest options, then with the smallest batch.
"""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import UserError, printable
from ..files import refuse_links, why, write_text
from ..records.formatting import count
from ..records.metrics import metric
from ..records.rates import NEAR_BEST, RATE
from ..records.terminal import wrapped
from ..records.values import at, table
from .groups import rates_of
from .noise import CONFIDENCE, Ratio
from .read import find
from .run import Run
from .text import aligned, busy_line

BASELINE, CHANGE, AGAIN, TOGETHER = "baseline", "change", "baseline_again", "together"  # roles of a run
_ORDER = (BASELINE, AGAIN, CHANGE, TOGETHER)
FILE = "diagnosis.md"
_WIDTH = 80  # columns
_LONGEST = 24  # characters of the kind of a bottleneck, which a record may give as anything


@dataclass(frozen=True)
class Trial:
    """One run of a diagnosis."""

    role: str
    options: tuple[str, ...]  # that it changes, as on a command line; none for the baseline
    run: Run

    @property
    def name(self) -> str:
        """What people call the run: its options, or `baseline`."""
        return "baseline, at the end" if self.role == AGAIN else " ".join(self.options) or "baseline"

    @property
    def is_baseline(self) -> bool:
        """Whether it changes nothing."""
        return self.role in (BASELINE, AGAIN)

    @cached_property
    def rate(self) -> float:
        """Samples/s; 0 unless the run finished."""
        is_measured = self.run.status == "finished" and RATE in self.run.values
        return rates_of({0: [self.run]}).rate(0) if is_measured else 0.0

    @property
    def kind(self) -> str:
        """The kind of the bottleneck: `memory`, `probably host`, `unclear`, or empty."""
        said = table(at(self.run.record, "throughput.bottleneck"))
        probably = "probably " if said.get("certainty") == "probable" else ""
        return probably + " ".join(str(said.get("kind") or "").split())[:_LONGEST]

    @property
    def why_not(self) -> str:
        """Why there is no rate; empty if there is one."""
        said = "no rate was measured" if self.run.status == "finished" else self.run.reason
        return "" if self.rate else f"refused: {said}" if self.run.status == "failed" else said


class Findings:
    """What the runs of a diagnosis say.

    Args:
        trials: all of them.
        not_tried: lines on changes that were not tried, with the reason.
    """

    def __init__(self, trials: Iterable[Trial], not_tried: Sequence[str] = ()):
        self.not_tried = list(dict.fromkeys(not_tried))
        self.trials = sorted(trials, key=lambda trial: (_ORDER.index(trial.role), -trial.rate))
        self.changes = [trial for trial in self.trials if trial.role == CHANGE]
        self.baselines = [trial.rate for trial in self.trials if trial.is_baseline and trial.rate]
        self.is_complete = len(self.baselines) > 1  # both show how much the machine itself drifts
        runs: dict[int, list[Run]] = {}
        for trial in (trial for trial in self.trials if trial.rate):
            runs.setdefault(self._setting(trial), []).append(trial.run)
        self._rates = rates_of(runs)

    def _setting(self, trial: Trial) -> int:
        return 0 if trial.is_baseline else 1 + self.trials.index(trial)

    def ratio(self, trial: Trial, confidence: float = CONFIDENCE) -> Ratio | None:
        """The rate of a change over that of the baseline; None where it is not known, and for the baseline."""
        if not trial.rate or trial.is_baseline or not self.baselines:
            return None
        return self._rates.ratio(self._setting(trial), 0, confidence)

    def is_faster(self, trial: Trial, confidence: float = CONFIDENCE) -> bool:
        """Whether a change is shown to be faster than the baseline; never on a busy machine."""
        ratio = self.ratio(trial, confidence)
        return ratio is not None and ratio.low > 1 and self._rates.busy is None

    @cached_property
    def best(self) -> Trial | None:
        """The change to recommend; None if none helps, or the baseline was not measured again.

        Of many changes, one is the fastest by chance. So each is held to a confidence by which all hold together.
        """
        confidence = 1 - (1 - CONFIDENCE) / max(len(self.changes), 1)
        helping = [trial for trial in self.trials if self.is_complete and self.is_faster(trial, confidence)]
        if not helping:
            return None
        first = self._setting(max(helping, key=lambda trial: trial.rate))
        equal = [trial for trial in helping if not self._rates.ratio(self._setting(trial), first).differs]
        return min(equal, key=lambda trial: (len(trial.options), trial.run.batch_size or 0, -trial.rate))

    @property
    def headline(self) -> str:
        """The best change, or why none is recommended."""
        tried = count(len(self.changes), "change")
        if not self.baselines:
            return "The baseline was not measured, so there is nothing to compare."
        if self._rates.busy is not None:
            return busy_line(self._rates.busy, "change is recommended", "start a new diagnosis")
        if not self.is_complete:
            again = "the baseline was not measured again after that"
            return f"Incomplete: {tried} tried, and {again}, so no change is recommended."
        if not self.changes:
            return "No change has been tried."
        if self.best is None:
            return f"No change helps: of {tried} tried, none is shown to be faster than the baseline."
        ratio = self.ratio(self.best) or Ratio(1, 1, 1)
        return f"Recommended: {self.best.name}, {ratio.value:.2f} times ({ratio.span}) the baseline's rate."

    @property
    def remarks(self) -> list[str]:
        """What to know before the table is believed."""
        lines = ["÷ baseline divides by the mean of both baselines"] if self.is_complete else []
        lines += [f"{trial.name}: {' '.join(trial.why_not.split())[:200]}" for trial in self.trials if trial.why_not]
        lines += self.not_tried
        if self.is_complete and abs((drift := self.baselines[-1] / self.baselines[0]) - 1) > NEAR_BEST:
            when = f"at the end the baseline was {drift:.2f} times as fast as at the beginning"
            lines.append(f"{when}: something else uses the machine, or its clock changes")
        if self.best and any(word.startswith("data.batch_size=") for word in self.best.options):
            lines.append("a larger batch also changes how the model learns")
        evident = [(t, at(t.run.record, "throughput.bottleneck.evidence")) for t in self.trials if t.is_baseline]
        return [*lines, *(f"{trial.name}: {trial.kind}: {evidence}" for trial, evidence in evident if evidence)]

    def text(self, line: str | None) -> str:
        """What the terminal and `diagnosis.md` show; `line` is the command with the recommended change."""
        rows = [["run", metric(RATE).heading, "÷ baseline", "90 % interval", "bottleneck"]]
        for trial in self.trials:
            name = " ".join(word.rpartition(".")[2] for word in trial.options) if trial.options else trial.name
            rate = metric(RATE).cell(trial.rate) if trial.rate else "not measured"
            ratio = self.ratio(trial)
            rows.append([name, rate, *([f"{ratio.value:.2f}", ratio.span] if ratio else ["", ""]), trial.kind])
        notes = wrapped([f"note: {remark}" for remark in self.remarks], _WIDTH)
        lines = [*wrapped([self.headline], _WIDTH), *([line] if line else []), "", *aligned(rows, _WIDTH), "", *notes]
        return printable("\n".join(lines))


def find_findings(folder: Path) -> Findings:
    """What the runs in and below a folder say; UserError if there is no run of a diagnosis."""
    trials, not_tried = [], []
    for run in find([folder]).runs:
        known = table(run.record.get("diagnosis"))
        if known.get("role") in _ORDER:
            trials.append(Trial(known["role"], _texts(known.get("options")), run))
            not_tried += _texts(known.get("not_tried"))
    if not trials:
        raise UserError(f"{folder}: holds no diagnosis")
    trials.sort(key=lambda trial: str(trial.run.record.get("started") or "~"))
    return Findings(trials, not_tried)


def holds_one_diagnosis(folder: Path) -> bool:
    """Whether the runs in and below a folder are those of one diagnosis."""
    roles = [table(run.record.get("diagnosis")).get("role") for run in find([folder]).runs]
    return all(role in _ORDER for role in roles) and roles.count(BASELINE) == 1


def best_pair(findings: Findings) -> list[Trial]:
    """The two best single changes that are faster and set different options; fewer if there are no two."""
    faster = list(filter(findings.is_faster, findings.changes))  # the fastest first
    return faster[:1] + [trial for trial in faster[1:] if not _names(faster[0]) & _names(trial)][:1]


def write_diagnosis(folder: Path, out: Path | None = None) -> str:
    """Write `diagnosis.md` to `out`, by default `report` in a folder with runs; returns the terminal's text.

    If the file cannot be written, the text has a line that says so.

    Raises:
        UserError: if there is no diagnosis in the folder.
    """
    findings, root = find_findings(folder), folder if out is None else None
    out = out or folder / "report"
    line = None
    if findings.best:
        from ..options.command_lines import program  # which imports Hydra

        line = f"{' '.join(program())} … {shlex.join(findings.best.options)}"
    text = findings.text(line)
    try:
        refuse_links(out, "the report's folder", root, (FILE,))
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / FILE, f"# Diagnosis\n\n```text\n{text}\n```\n")
    except OSError as error:
        return printable(f"note: {out} cannot be written: {why(error)}\n{text}")
    except UserError as error:
        return f"note: {error}\n{text}"
    return text


def _names(trial: Trial) -> set[str]:
    return {text.partition("=")[0] for text in trial.options}


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()
