"""Report: what the runs of some folders show, as tables and sentences, and as the texts of the terminal and of `report.md`."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from .._system import relative
from ..errors import printable
from ..records.formatting import count
from ..records.rates import RATE
from ..records.terminal import wrapped
from . import table
from .anonymous import anonymous, anonymous_command
from .answer import Answer, answer
from .groups import Group, SweepResults
from .methods import Methods, methods
from .read import find
from .selection import ENOUGH
from .statements import Statement, failures, notes, statements
from .text import aligned, page_width, size_blocks

PAGE = "report.html"  # its file for a browser


@dataclass(frozen=True)
class Picture:
    """A plot, over two columns of a paper, and as the page shows it."""

    caption: str
    files: dict[str, bytes]  # by format
    on_page: str  # SVG


@dataclass(frozen=True)
class Report:
    """What the runs show."""

    sweep: SweepResults
    frame: pd.DataFrame  # a row for each run, see table.py
    metrics: list[str]  # of quality that have a column, the most telling one first
    tables: list[pd.DataFrame]  # the sizes of each group, see table.py
    answers: list[Answer]  # one for each group with two batch sizes or more
    enough: float  # the share of the best rate that a size is to reach
    statements: list[Statement]  # the answers first
    notes: list[str]  # what could not be read, compared or written
    pictures: dict[str, Picture]  # that were drawn, by name
    files: list[Path]  # everything that was written

    @property
    def exit_code(self) -> int:
        """1 if not one run finished or was measured, else 0."""
        return 0 if any(run.status == "finished" or RATE in run.values for run in self.sweep.runs) else 1

    @cached_property
    def methods(self) -> Methods:
        """What was done."""
        return methods(self.sweep)

    @property
    def title(self) -> str:
        """`Sweep: cnn, mlp`."""
        return f"Sweep: {', '.join(dict.fromkeys(run.model for run in self.sweep.runs))}"

    @property
    def counts(self) -> str:
        """`8 runs: 7 finished, 1 out of memory; on …`."""
        runs = self.sweep.runs
        statuses = Counter(run.status.replace("_", " ") for run in runs)
        line = f"{count(len(runs), 'run')}: {', '.join(f'{n} {status}' for status, n in statuses.items())}"
        devices = dict.fromkeys(str(run.settings.get("device_name") or run.device) for run in runs)
        datasets = dict.fromkeys(run.dataset for run in runs)
        for words, known in (("on", devices), ("data:", datasets)):
            if any(known):
                line += f"; {words} {', '.join(filter(None, known))}"
        return line

    @property
    def headlines(self) -> list[str]:
        """All sentences, the answers first, each with the label of its group where there are several groups."""
        several = len(self.sweep.groups) > 1
        return [
            f"{s.group.label}: {line}" if several and s.group else line for s in self.statements for line in s.lines
        ]

    @property
    def commands(self) -> list[str]:
        """The options of commands that would tell more than these runs."""
        return list(dict.fromkeys(statement.command for statement in self.statements if statement.command))

    @property
    def size_texts(self) -> list[tuple[Group, pd.DataFrame]]:
        """The tables of the groups with several batch sizes, as texts."""
        pairs = zip(self.sweep.groups, self.tables, strict=True)
        return [
            (group, table.size_texts(sizes, self.metrics[:2]))
            for group, sizes in pairs
            if len(sizes) > 1 and group.sizes
        ]

    @property
    def setting_texts(self) -> pd.DataFrame:
        """A row of texts for each setting, where several ran, each at one batch size; else empty."""
        sizes = [{run.batch_size for run in group.runs} for group in self.sweep.groups]
        is_shown = not self.size_texts and len(self.sweep.runs) > 1 and all(len(of_group) == 1 for of_group in sizes)
        return table.setting_texts(self.sweep, self.tables) if is_shown else pd.DataFrame()

    @property
    def legends(self) -> list[str]:
        """What the headings and marks of the tables mean, in one line; none where there is no table."""
        texts = [*(texts for _, texts in self.size_texts), self.setting_texts]
        words = table.legend(pd.concat(texts).fillna(""))
        return [words] if words else []

    @property
    def text(self) -> str:
        """For the terminal, at most 80 columns wide; only commands are longer."""
        width, rest = page_width(), self.statements
        lines = [*wrapped([self.counts], width), ""]
        legends = self.legends
        for group, texts in self.size_texts:
            said = [line for statement in rest if statement.group is group for line in statement.lines]
            rest = [statement for statement in rest if statement.group is not group]
            lines += [*size_blocks(group.label, texts), *wrapped(legends, width), *_lines(said, width), ""]
            legends = []
        if len(settings := self.setting_texts):
            lines += [*aligned([list(settings.columns), *settings.to_numpy().tolist()]), *wrapped(legends, width), ""]
        for statement in rest:
            label = f"{statement.group.label}: " if statement.group else ""
            lines += _lines([f"{label}{statement.lines[0]}", *statement.lines[1:]], width)
        lines += [f"  for more   {command}" for command in self.commands]
        lines += wrapped([f"failed   {failed}"], width) if (failed := failures(self.sweep)) else []
        lines += wrapped([f"note: {note}" for note in self.notes], width)
        return printable("\n".join(lines).rstrip("\n"))

    @property
    def printed(self) -> str:
        """The text, and where `report.html` is."""
        place = next((file for file in self.files if file.name == PAGE), None)
        shortest = "" if place is None else min(str(place), relative(place), key=len)
        return "\n".join([self.text, "", f"report   {shortest}"])

    @property
    def markdown(self) -> str:
        """`report.md`, which names neither a home folder nor this host (anonymous.py)."""
        lines = [f"# {self.title}", "", *(f"- {line}" for line in self.headlines), ""]
        if self.commands:
            commands = map(anonymous_command, self.commands)
            lines += ["Options that would tell more:", "", *(f"    {command}" for command in commands), ""]
        lines += [f"{self.counts}.", ""]
        for group, texts in self.size_texts:
            lines += [f"## {group.label}", "", table.to_markdown(texts.reset_index())]
        if len(settings := self.setting_texts):
            lines += [table.to_markdown(settings)]
        lines += [f"{words}.\n" for words in self.legends]
        lines += [f"Failed: {failed}.", ""] if (failed := failures(self.sweep)) else []
        if self.pictures:
            lines += ["## Plots", "", *(f"![{of.caption}]({name}.png)\n" for name, of in self.pictures.items())]
        lines += ["## What was done", ""]
        commands = map(anonymous_command, self.methods.commands)
        lines += [*(f"    {command}" for command in commands), ""] if self.methods.commands else []
        lines += [f"And {self.methods.more}.", ""] if self.methods.more else []
        lines += [*(f"- {name}: {anonymous(text, host=True)}" for name, text in self.methods.facts.items()), ""]
        lines += ["To quote:", "", f"> {self.methods.sentence}", ""] if self.methods.sentence else []
        if self.notes:
            lines += ["## Notes", "", *(f"- {anonymous(note, host=True)}" for note in self.notes), ""]
        text = anonymous(printable("\n".join(lines)))
        return text.replace("<", "&lt;")  # nothing that a record says of itself is HTML


def _lines(said: Sequence[str], width: int) -> list[str]:
    """Sentences that belong together, for the terminal."""
    return wrapped((f"{'  ' if number else '→ '}{line}" for number, line in enumerate(said)), width)


def analyse(folders: Iterable[str | os.PathLike[str]]) -> Report:
    """What the runs below the folders show, with nothing written; UserError if there is not one readable record.

    What is enough and which margin a metric has is said by the configuration of the runs, see selection.py and quality.py.
    """
    sweep = find(folders)
    enough = next((share for run in sweep.runs if (share := run.share("enough"))), ENOUGH)
    margin = next((share for run in sweep.runs if (share := run.share("margin"))), None)
    metrics, quality = table.shown_metrics(sweep), table.quality_metrics(sweep)
    known = [(group, answer(group, quality, enough, margin)) for group in sweep.groups]
    answers = [of_group for _, of_group in known if of_group]
    tables = [table.size_table(group, of_group, quality) for group, of_group in known]
    said = statements(sweep, answers, metrics, margin)
    return Report(
        sweep, table.run_table(sweep), metrics, tables, answers, enough, said, list(notes(sweep)), pictures={}, files=[]
    )
