"""write_report: the folders of a sweep → report.md, report.html, sweep.csv, sweep.json, plots, TensorBoard, and a text for the terminal."""

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from ..errors import UserError, printable
from ..files import refuse_links, why, write_bytes, write_text
from ..records.formatting import count, significant
from ..records.rates import RATE
from ..records.terminal import wrapped
from . import page, plots, table, tensorboard
from .answer import Answer, answer
from .devices import Crossover, crossovers, scaling, scaling_lines, scaling_notes
from .groups import SweepResults
from .read import find
from .run import BATCH_SIZE
from .settings import compare_settings, compile_gains, seeds_line
from .text import failures, group_block, settings_table
from .text_table import page_width

SCHEMA = 3  # of sweep.json


@dataclass(frozen=True)
class Report:
    """What was found."""

    sweep: SweepResults
    frame: pd.DataFrame  # a row for each run, see table.py
    metrics: list[str]  # of quality, the most telling one first
    answers: list[Answer]  # one for each group with two batch sizes or more
    crossovers: list[Crossover]  # one for each pair of devices that ran the same
    others: list[str]  # sentences on runs that differ in something else than the batch size
    notes: list[str]  # what could not be read, compared, drawn or written
    files: list[Path]  # everything that was written

    @property
    def exit_code(self) -> int:
        """1 if not one run finished or was measured, else 0."""
        return 0 if any(run.status == "finished" or RATE in run.values for run in self.sweep.runs) else 1

    @cached_property
    def headlines(self) -> list[str]:
        """The answers first, each with the label of its group where there are several."""
        several = len(self.sweep.groups) > 1
        lines = [f"{a.group.label}: {line}" if several else line for a in self.answers for line in a.lines]
        return [*lines, *(crossover.headline for crossover in self.crossovers), *self.others]

    @property
    def counts(self) -> str:
        """`8 runs: 7 finished, 1 out of memory; on …`."""
        runs = self.sweep.runs
        statuses = Counter(run.status.replace("_", " ") for run in runs)
        line = f"{count(len(runs), 'run')}: {', '.join(f'{n} {status}' for status, n in statuses.items())}"
        devices = dict.fromkeys(str(run.settings.get("device_name") or run.device) for run in runs)
        datasets = dict.fromkeys(run.dataset for run in runs)
        for words, found in (("on", devices), ("data:", datasets)):
            if any(found):
                line += f"; {words} {', '.join(filter(None, found))}"
        return line

    @property
    def text(self) -> str:
        """For the terminal, at most 80 columns wide; only commands are longer."""
        width = page_width()
        lines = [*wrapped([self.counts], width), ""]
        answers = {id(found.group): found for found in self.answers}
        if any(len(group.sizes) > 1 for group in self.sweep.groups):
            for group in (group for group in self.sweep.groups if group.sizes):
                lines += [*group_block(group, answers.get(id(group)), self.metrics), ""]
        elif len(self.sweep.runs) > 1 and (found := settings_table(self.sweep, self.metrics)):
            lines += [*found, ""]
        said = [*(crossover.headline for crossover in self.crossovers), *self.others]
        lines += wrapped([f"→ {line}" for line in said], width)
        lines += failures(self.sweep)
        lines += wrapped([f"note: {note}" for note in self.notes], width)
        return printable("\n".join(lines).rstrip("\n"))

    @property
    def printed(self) -> str:
        """The text, and where `report.html` is."""
        place = next((file for file in self.files if file.name == page.FILE), None)
        shortest = "" if place is None else min(str(place), os.path.relpath(place), key=len)
        return "\n".join([self.text, "", f"report   {shortest}"])

    @property
    def spoken(self) -> str:
        """The answer and what ran, as Markdown."""
        return printable("\n".join([*(f"- {line}" for line in self.headlines), "", f"{self.counts}."]))

    @property
    def markdown(self) -> str:
        """`report.md`."""
        lines = [f"# {self.title}", "", self.spoken, "", "## Runs", ""]
        lines.append(table.to_markdown(table.shown(self.sweep, self.frame)))
        pictures = [file for file in self.files if file.suffix == ".png"]
        if pictures:
            lines += ["## Plots", "", *(f"![{plots.CAPTIONS[file.stem]}]({file.name})\n" for file in pictures)]
        if self.notes:
            lines += ["## Notes", "", *(f"- {note}" for note in self.notes), ""]
        return printable("\n".join(lines)).replace("<", "&lt;")  # nothing that a record says of itself is HTML

    @property
    def title(self) -> str:
        """`Sweep: cnn, mlp`."""
        return f"Sweep: {', '.join(dict.fromkeys(run.model for run in self.sweep.runs))}"

    def as_dict(self) -> dict[str, Any]:
        """`sweep.json`."""
        return {
            "schema": SCHEMA,
            "varied": self.sweep.varied,
            "answers": [found.as_dict() for found in self.answers],
            "crossovers": [crossover.as_dict() for crossover in self.crossovers],
            "lines": self.headlines,
            "rows": table.records(self.frame),
            "notes": self.notes,
        }


def write_report(folders: Iterable[str | os.PathLike[str]], out_dir: str | os.PathLike[str]) -> Report:
    """Read all runs below the folders, and write the report. What an earlier report wrote in its folder is replaced.

    Raises:
        UserError: if there is not one readable record, or `out_dir` has or is a link that leads elsewhere, before
            anything is written; or if `out_dir` cannot be written.
    """
    paths, out = [Path(folder) for folder in folders], Path(out_dir)
    sweep = find(paths)
    _refuse_links(out, paths)
    report = _analysed(sweep)
    pictures = plots.draw(sweep, report.answers, report.metrics)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            write_bytes(out / f"{name}.png", picture.png)
        plots.remove_stale(out, keep=pictures)
        report.files.extend(out / f"{name}.png" for name in pictures)
        if note := tensorboard.write(sweep.groups, report.metrics, pictures, report.spoken, out / "tensorboard"):
            report.notes.append(note)
        texts = {
            "report.md": report.markdown,
            page.FILE: page.page(report, pictures),
            "sweep.csv": table.to_csv(report.frame),
            "sweep.json": json.dumps(_finite(report.as_dict()), indent=2, ensure_ascii=False, default=str) + "\n",
        }
        for name, text in texts.items():
            write_text(out / name, text)
            report.files.append(out / name)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {why(error)}") from error
    return report


def _analysed(sweep: SweepResults) -> Report:
    """The report before anything is written."""
    metrics, several = table.shown_metrics(sweep), scaling(sweep.runs)
    processes = {run.name: run.processes for run in sweep.runs}
    frame = table.run_table(sweep, {name: ratio.value / processes[name] for name, ratio in several.items()})
    answers = [found for group in sweep.groups if (found := answer(group, metrics))]
    return Report(
        sweep=sweep,
        frame=frame,
        metrics=metrics,
        answers=answers,
        crossovers=crossovers(sweep.groups),
        others=[*_others(sweep, metrics, answers), *scaling_lines(sweep.runs, several), *compile_gains(sweep)],
        notes=[*sweep.notes, *scaling_notes(sweep.runs, several), *_notes(sweep)],
        files=[],
    )


def _refuse_links(out: Path, folders: Sequence[Path]) -> None:
    """Refuse links by which the author of a folder could have files elsewhere written or deleted."""
    here = Path(os.path.abspath(out))
    # The default place lies in a folder that may be anybody's. The user typed any other place.
    root = next((folder for folder in folders if here == Path(os.path.abspath(folder)) / "report"), None)
    refuse_links(out, "the report's folder", root, ("report.*", "sweep.*", "*.png", "tensorboard"))


def _others(sweep: SweepResults, metrics: Sequence[str], answers: Sequence[Answer]) -> list[str]:
    """What can be said of runs that differ in something else than batch size alone."""
    runs = sweep.runs
    if not any(RATE in run.values or run.status == "finished" for run in runs):
        [(reason, _)] = Counter(run.reason for run in runs).most_common(1)
        return [f"No run finished, so there is nothing to recommend. Most often: {reason}."]
    if len(runs) == 1:
        rate = runs[0].values.get(RATE)
        speed = f": {significant(rate)} samples/s at batch size {runs[0].batch_size:,}" if rate else ""
        return [f"One run only{speed}. Several batch sizes are needed for a recommendation."]
    if answers:
        return []
    if any(len(group.sizes) > 1 for group in sweep.groups):
        return ["Fewer than two batch sizes were measured as they were asked for, so none is recommended."]
    found = compare_settings(sweep, metrics) if len(sweep.groups) > 1 else []
    found += filter(None, (seeds_line(group, metrics) for group in sweep.groups))
    return found or ["One measured run only: nothing to compare it with."]


def _notes(sweep: SweepResults) -> list[str]:
    """Which conclusions the runs do not allow."""
    notes = ["nothing varied: the runs repeat one another"] if len(sweep.runs) > 1 and not sweep.varied else []
    if BATCH_SIZE in sweep.varied and any(len(group.sizes) > 1 for group in sweep.groups):
        alone = [group.label for group in sweep.groups if len(group.sizes) == 1]
        notes += [f"{label}: one batch size was measured, so none is recommended" for label in alone]
    without = [run.name for run in sweep.runs if run.status == "finished" and RATE not in run.values]
    if without:
        notes.append(f"finished without a rate: {', '.join(without)}")
    return notes + [f"{run.name}: {run.steps}" for run in sweep.runs if isinstance(run.steps, str)]


def _finite(value: Any) -> Any:
    """The value with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
