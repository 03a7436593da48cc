"""Report: what the runs of some folders show, as tables and sentences, as text for the terminal, and as `report.md`."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from .._system import relative
from ..errors import cut, printable
from ..records import values
from ..records.course import course_words
from ..records.formatting import count, significant
from ..records.rates import RATE
from ..records.terminal import wrapped
from . import table
from .anonymous import anonymise, anonymous_command
from .answer import decide
from .between_groups import best_of_sizes, compare_settings, crossovers
from .groups import SweepResults, compared_rates, with_size
from .methods import methods
from .read import read_sweep
from .run import BATCH_SIZE
from .selection import ENOUGH_SHARE
from .text import aligned, page_width, size_blocks

PAGE = "report.html"  # the report's file for a browser
_LONGEST = 60  # characters of a reason


@dataclass(frozen=True)
class Picture:
    """A plot over two columns of a paper (`files`), and as the page shows it."""

    caption: str
    files: dict[str, bytes]  # by format
    on_page: str  # SVG


class Report:
    """What the runs show. The configuration of the runs says which share of the best rate is enough, and the margin of a metric.

    Attributes:
        frame: a row for each run, see table.py.
        metrics: the metrics of quality that have a column, the most telling one first.
        enough: the share of the best rate that a size has to reach.
        answers: one for each group.
        tables: the sizes of each group, see table.py.
        remarks: sentences on several groups, or on why nothing is compared.
        notes: what could not be read, compared or written.
        methods: what was done.
        pictures: the plots that were drawn, by name.
        files: the files that were written, without TensorBoard's.
    """

    def __init__(self, sweep: SweepResults):
        self.sweep = sweep
        self.frame = table.run_table(sweep)
        self.metrics, quality = table.shown_metrics(sweep), table.quality_metrics(sweep)
        self.enough = next((share for run in sweep.runs if (share := run.share("enough"))), ENOUGH_SHARE)
        margin = next((share for run in sweep.runs if (share := run.share("margin"))), None)
        self.answers = [decide(group, quality, self.enough, margin) for group in sweep.groups]
        self.tables = [table.size_table(answer, quality) for answer in self.answers]
        self.remarks = self._remarks(margin)
        self.notes = list(self._notes())
        self.methods = methods(sweep)
        self.pictures: dict[str, Picture] = {}
        self.files: list[Path] = []

    @property
    def exit_code(self) -> int:
        """0 if at least one run finished or was measured, else 1."""
        return 0 if any(run.status == "finished" or RATE in run.values for run in self.sweep.runs) else 1

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
        for words, names in (("on", devices), ("data:", datasets)):
            if any(names):
                line += f"; {words} {', '.join(filter(None, names))}"
        return line

    @property
    def headlines(self) -> list[str]:
        """All sentences, the answers first; where there are several groups, each with the label of its group."""
        lines = [(answer.group.label, line) for answer in self.answers for line in answer.lines]
        return [*(f"{label}: {line}" if len(self.answers) > 1 else line for label, line in lines), *self.remarks]

    @property
    def commands(self) -> list[str]:
        """The options of commands that would tell more than these runs."""
        return list(dict.fromkeys(answer.repeat for answer in self.answers if answer.repeat))

    @cached_property
    def size_texts(self) -> list[pd.DataFrame]:
        """For each group the table of its sizes as texts; empty for a group of one batch size."""
        return [
            table.size_texts(sizes, self.metrics[:2]) if len(sizes) > 1 and answer.group.sizes else pd.DataFrame()
            for answer, sizes in zip(self.answers, self.tables, strict=True)
        ]

    @cached_property
    def setting_texts(self) -> pd.DataFrame:
        """A row of texts for each setting, where several settings ran, each at one batch size; else empty."""
        group_sizes = [{run.batch_size for run in group.runs} for group in self.sweep.groups]
        has_sizes = any(map(len, self.size_texts))
        is_shown = not has_sizes and len(self.sweep.runs) > 1 and all(len(sizes) == 1 for sizes in group_sizes)
        return table.setting_texts(self.sweep, self.tables) if is_shown else pd.DataFrame()

    @property
    def legend(self) -> str:
        """What the headings and marks of the tables mean; empty where there is no table."""
        return table.legend(pd.concat([*self.size_texts, self.setting_texts]).fillna(""))

    @property
    def text(self) -> str:
        """The text for the terminal, at most 80 columns wide; only commands are longer."""
        width, several = page_width(), len(self.answers) > 1
        lines, legend = [*wrapped([self.counts], width), ""], wrapped(filter(None, [self.legend]), width)
        for answer, texts in zip(self.answers, self.size_texts, strict=True):
            if len(texts):
                lines, legend = [*lines, *size_blocks(answer.group.label, texts), *legend], []
            label = f"{answer.group.label}: " if several and not len(texts) else ""
            lines += _paragraph(answer.lines, width, label)
            lines += [""] if len(texts) else []
        if len(settings := self.setting_texts):
            lines += [*aligned([list(settings.columns), *settings.to_numpy().tolist()]), *legend, ""]
        for remark in self.remarks:
            lines += _paragraph([remark], width)
        lines += [f"  for more   {command}" for command in self.commands]
        lines += wrapped([f"failed   {failed}"], width) if (failed := self.failures) else []
        lines += wrapped([f"note: {note}" for note in self.notes], width)
        return printable("\n".join(lines).rstrip("\n"))

    @property
    def printed(self) -> str:
        """The text, and the path of `report.html`."""
        path = next((path for path in self.files if path.name == PAGE), None)
        shortest = "" if path is None else min(str(path), relative(path), key=len)
        return "\n".join([self.text, "", f"report   {shortest}"])

    @property
    def markdown(self) -> str:
        """The content of `report.md`, which names neither a home folder nor this host (anonymous.py)."""
        method, legend, failed = self.methods, self.legend, self.failures
        lines = [f"# {self.title}", "", *(f"- {line}" for line in self.headlines), ""]
        lines += ["Options that would tell more:", "", *_code_block(self.commands)] if self.commands else []
        lines += [f"{self.counts}.", ""]
        for answer, texts in zip(self.answers, self.size_texts, strict=True):
            lines += [f"## {answer.group.label}", "", table.to_markdown(texts.reset_index())] if len(texts) else []
        lines += [table.to_markdown(self.setting_texts)] if len(self.setting_texts) else []
        lines += [f"{legend}.\n"] if legend else []
        lines += [f"Failed: {failed}.", ""] if failed else []
        if self.pictures:
            lines += ["## Plots", "", *(f"![{plot.caption}]({name}.png)\n" for name, plot in self.pictures.items())]
        lines += ["## What was done", "", *_code_block(method.commands)]
        lines += [*(f"- {name}: {text}" for name, text in method.facts.items()), ""]
        lines += ["To quote:", "", f"> {method.sentence}", ""] if method.sentence else []
        if self.notes:
            lines += ["## Notes", "", *(f"- {anonymise(note, host=True)}" for note in self.notes), ""]
        text = anonymise(printable("\n".join(lines)))
        return text.replace("<", "&lt;")  # text of a record is never HTML

    @property
    def failures(self) -> str:
        """The runs that did not finish, and why: `1,024: out of memory`; empty if all did."""
        names_by_reason: dict[str, dict[str, None]] = {}
        for group in self.sweep.groups:
            for run in (run for run in group.runs if run.reason):
                size = run.batch_size if BATCH_SIZE in self.sweep.factors else None
                short_name = f"{size:,}" if size else f"run {run.name}"
                name = with_size(group.label, size) if len(self.answers) > 1 else short_name
                names_by_reason.setdefault(cut(run.reason, _LONGEST), {})[name] = None
        return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in names_by_reason.items())

    def _remarks(self, margin: float | None) -> list[str]:
        """Return sentences on what several groups show; where no group has an answer, also on why."""
        sweep, runs = self.sweep, self.sweep.runs
        if (lines := crossovers(sweep)) or any(answer.compares_sizes for answer in self.answers):
            if len(sweep.groups) > 1 and not any(answer.arrivals for answer in self.answers):
                lines = [*lines, *best_of_sizes(sweep, table.quality_metrics(sweep), margin)]
            return lines
        if self.exit_code:
            [(reason, _)] = Counter(run.reason for run in runs).most_common(1)
            return [f"No run finished, so there is nothing to recommend. Most often: {reason}."]
        if len(runs) == 1:
            rates, speed = compared_rates({0: runs}), ""
            if rates.settings:
                speed = f": {significant(rates.rate(0))} samples/s at batch size {runs[0].batch_size:,}"
            return [f"One run only{speed}. There is nothing to compare."]
        if any(answer.lines for answer in self.answers):
            return []
        lines = compare_settings(sweep, self.metrics, margin) if len(sweep.groups) > 1 else []
        why = "All runs repeat one setting" if len(sweep.groups) == 1 else "Fewer than two settings were measured"
        return lines or [f"{why}, so there is nothing to compare."]

    def _notes(self) -> Iterator[str]:
        runs = self.sweep.runs
        yield from self.sweep.notes
        if names := [run.name for run in runs if run.status == "finished" and RATE not in run.values]:
            yield f"finished without a rate: {', '.join(names)}"
        yield from (f"{run.name}: {text}" for run in runs for text in (run.steps, run.correct) if isinstance(text, str))
        for run in runs:
            yield from (f"{run.name}: {words}" for words in course_words(values.table(run.record.get("throughput"))))
            for option, why in values.table(run.record.get("unread")).items():
                yield f"{run.name}: {' '.join(f'{option} had no effect: {why}'.split())}"


def _code_block(commands: Sequence[str]) -> list[str]:
    return [*(f"    {anonymous_command(command)}" for command in commands), ""] if commands else []


def _paragraph(sentences: Sequence[str], width: int, label: str = "") -> list[str]:
    """Return the lines of sentences that belong together, for the terminal."""
    return wrapped((f"{'  ' if number else f'→ {label}'}{line}" for number, line in enumerate(sentences)), width)


def analyse(folders: Iterable[str | os.PathLike[str]]) -> Report:
    """Return the report on the runs below the folders, and write nothing; UserError if there is not one readable record."""
    return Report(read_sweep(folders))
