"""The table of a diagnosis: what each change really gave, against a baseline measured at the beginning and at the end."""

import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import UserError, printable
from ..files import refuse_links, why, write_text
from ..records.formatting import count, percent, significant
from ..records.metrics import metric
from ..records.rates import NEAR_BEST, RATE
from ..records.values import at, number, table
from .read import find
from .run import Run

SCHEMA = 1  # of diagnosis.json
BASELINE, CHANGE, AGAIN, TOGETHER = "baseline", "change", "baseline_again", "together"  # roles of a run
_ORDER = (BASELINE, AGAIN, CHANGE, TOGETHER)
_FILES = ("diagnosis.md", "diagnosis.json")
_NUMBERS = (RATE, "step_ms_median", "memory_peak_gib")


@dataclass(frozen=True)
class Trial:
    """One run of a diagnosis."""

    role: str
    options: tuple[str, ...]  # that it changes, as on a command line; none for the baseline
    run: Run

    @property
    def name(self) -> str:
        """What people call the run: its options, or `baseline`."""
        words = " ".join(self.options) or "baseline"
        return f"{words}, at the end" if self.role == AGAIN else words

    @property
    def rate(self) -> float | None:
        """Samples/s; None unless the run finished."""
        return self.run.values.get(RATE) if self.run.status == "finished" else None

    @property
    def bottleneck(self) -> str:
        """`memory 61 %`, `probably host 40 %`, `unclear`, or empty if the record does not say."""
        found = table(at(self.run.record, "throughput.bottleneck"))
        kind, share = str(found.get("kind") or ""), number(found.get("share"))
        probably = "probably " if found.get("certainty") == "probable" else ""
        return kind if share is None or kind in ("", "unclear") else f"{probably}{kind} {percent(share)}"

    @property
    def why_not(self) -> str:
        """Why there is no rate; empty if there is one."""
        said = "no rate was measured" if self.run.status == "finished" else self.run.reason
        return "" if self.rate else f"refused: {said}" if self.run.status == "failed" else said


class Findings:
    """What the runs of a diagnosis say."""

    def __init__(self, trials: Iterable[Trial], not_tried: Sequence[str] = ()):
        self.not_tried = list(dict.fromkeys(not_tried))  # lines on changes that were not tried, with the reason
        self.trials = sorted(trials, key=lambda trial: (_ORDER.index(trial.role), -(trial.rate or 0.0)))

    @cached_property
    def baselines(self) -> list[float]:
        """The rates of the baseline: at the beginning, and at the end if the diagnosis came that far."""
        return [trial.rate for trial in self.trials if trial.role in (BASELINE, AGAIN) and trial.rate]

    @property
    def is_complete(self) -> bool:
        """Whether the changes stand between two measured baselines, which show how much the machine itself drifts."""
        return len(self.baselines) > 1

    def ratio(self, trial: Trial) -> float | None:
        """A run's rate over the mean rate of the baseline."""
        if trial.rate is None or not self.baselines:
            return None
        return trial.rate * len(self.baselines) / sum(self.baselines)

    def is_faster(self, trial: Trial) -> bool:
        """Whether a run is faster than the faster baseline by 5 %, and by more than separates the two baselines."""
        if trial.role in (BASELINE, AGAIN) or not trial.rate or not self.baselines:
            return False
        fastest, slowest = max(self.baselines), min(self.baselines)
        return trial.rate > fastest + max(NEAR_BEST * fastest, fastest - slowest)

    def helps(self, trial: Trial) -> bool:
        """Whether a change can be recommended: it is faster, and was compared with a baseline on both sides."""
        return self.is_complete and self.is_faster(trial)

    @property
    def best(self) -> Trial | None:
        """The fastest run with a change that helps; None if no change helps."""
        return max((one for one in self.trials if self.helps(one)), key=lambda one: one.rate or 0.0, default=None)

    @property
    def headline(self) -> str:
        """One sentence: the best change, or that none helps."""
        best, changes = self.best, [trial for trial in self.trials if trial.role == CHANGE]
        if not self.baselines:
            return "The baseline was not measured, so there is nothing to compare."
        if not self.is_complete:
            return (
                f"Incomplete: {count(len(changes), 'change')} tried, and the baseline was not measured again after that, "
                "so no change is recommended."
            )
        if not changes:
            return "No change has been tried."
        if best is None:
            tried = count(len(changes), "change")
            return f"No change helps: of {tried} tried, none is clearly faster than the baseline."
        gain = significant(self.ratio(best) or 0.0)
        others = [trial for trial in self.trials if trial.role == TOGETHER and trial is not best and trial.rate]
        also = f"; {others[0].name} together give {significant(self.ratio(others[0]) or 0.0)} times" if others else ""
        return f"Best: {best.name}, {gain} times the baseline{also}."

    @property
    def remarks(self) -> list[str]:
        """What to know before the table is believed."""
        lines = list(self.not_tried)
        if self.is_complete:
            drift = self.baselines[-1] / self.baselines[0] - 1
            if abs(drift) > NEAR_BEST:
                lines.append(
                    f"the baseline itself was {percent(abs(drift))} {'faster' if drift > 0 else 'slower'} at the end "
                    "than at the beginning: something else uses the machine, or its clock changes"
                )
        if self.best and any(word.startswith("data.batch_size=") for word in self.best.options):
            lines.append("a larger batch also changes how the model learns")
        return lines

    def columns(self) -> list[tuple[str, list[str]]]:
        """Headings and cells; columns without values are left out."""
        ratios = [self.ratio(trial) for trial in self.trials]
        numbers = ((name, [trial.run.values.get(name) for trial in self.trials]) for name in _NUMBERS)
        shown = [(metric(name).heading, [_cell(name, value) for value in values]) for name, values in numbers]
        found = [
            ("run", [trial.name for trial in self.trials]),
            shown[0],
            ("÷ baseline", ["" if ratio is None else significant(ratio) for ratio in ratios]),
            shown[1],
            ("bottleneck", [trial.bottleneck for trial in self.trials]),
            shown[2],
            ("not measured", [textwrap.shorten(t.why_not, 90, placeholder=" …") for t in self.trials]),
        ]
        return [(heading, cells) for heading, cells in found if any(cells)]

    def text(self, line: str | None) -> str:
        """For the terminal; `line` is the command with the best change."""
        columns = self.columns()
        widths = [max(map(len, (heading, *cells))) for heading, cells in columns]
        left = [heading in ("run", "bottleneck", "not measured") for heading, _ in columns]
        lines = zip(*([heading, *cells] for heading, cells in columns), strict=True)
        rows = [
            "  ".join(c.ljust(w) if is_left else c.rjust(w) for c, w, is_left in zip(one, widths, left, strict=True))
            for one in lines
        ]
        notes = [f"note: {remark}" for remark in self.remarks]
        return printable("\n".join([*map(str.rstrip, rows), "", *notes, self.headline, *([line] if line else [])]))

    def markdown(self, line: str | None) -> str:
        """`diagnosis.md`."""
        headings, cells = zip(*self.columns(), strict=True)
        rows = [headings, ["---"] * len(headings), *zip(*cells, strict=True)]
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        notes = [f"- {remark}" for remark in self.remarks]
        command = ["", f"    {line}"] if line else []
        return printable("\n".join(["# Diagnosis", "", self.headline, *command, "", *lines, "", *notes, ""]))

    def as_json(self, line: str | None) -> dict[str, Any]:
        """`diagnosis.json`."""
        rows = []
        for trial in self.trials:
            known = {name: trial.run.values.get(name) for name in _NUMBERS}
            known |= {"ratio": self.ratio(trial), "bottleneck": at(trial.run.record, "throughput.bottleneck")}
            row = {"run": trial.run.name, "role": trial.role, "options": list(trial.options), **known}
            row |= {"status": trial.run.status, "reason": trial.why_not or None, "helps": self.helps(trial)}
            rows.append({key: value for key, value in row.items() if value is not None})
        found = {"schema": SCHEMA, "complete": self.is_complete, "headline": self.headline, "command": line}
        found |= {"remarks": self.remarks, "rows": rows}
        return {key: value for key, value in found.items() if value is not None}


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
    return set(roles) <= set(_ORDER) and roles.count(BASELINE) == 1


def best_pair(findings: Findings) -> list[Trial]:
    """The two best single changes that are faster and set different options; fewer if there are no two."""
    found: list[Trial] = []
    faster = [trial for trial in findings.trials if trial.role == CHANGE and findings.is_faster(trial)]
    for trial in sorted(faster, key=lambda one: -(one.rate or 0.0)):
        if not _names(found) & _names([trial]):
            found.append(trial)
    return found[:2]


def write_diagnosis(folder: Path, command: Callable[[Trial], str], out: Path | None = None) -> str:
    """Write `diagnosis.md` and `diagnosis.json` to `out`, by default `report` in a folder with runs; the terminal's text.

    `command` gives the command line that trains with the changes of a run. If the files cannot be written, the text has
    a line that says so.

    Raises:
        UserError: if there is no diagnosis in the folder.
    """
    findings, root = find_findings(folder), folder if out is None else None
    out = out or folder / "report"
    line = command(findings.best) if findings.best else None
    content = json.dumps(findings.as_json(line), indent=2, ensure_ascii=False)
    refused = ""
    try:
        refuse_links(out, "the report's folder", root, _FILES)
        out.mkdir(parents=True, exist_ok=True)
        for name, text in zip(_FILES, (findings.markdown(line), f"{content}\n"), strict=True):
            write_text(out / name, text)
    except OSError as error:
        refused = f"note: {out} cannot be written: {why(error)}\n"
    except UserError as error:
        refused = f"note: {error}\n"
    return printable(refused) + findings.text(line)


def _names(trials: Iterable[Trial]) -> set[str]:
    return {text.partition("=")[0] for trial in trials for text in trial.options}


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _cell(name: str, value: float | None) -> str:
    return "" if value is None else metric(name).cell(value)
