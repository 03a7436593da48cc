"""write_report: the folders of a sweep → report.md, report.html, sweep.csv, plots, TensorBoard, and a text for the terminal."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ..errors import UserError, printable
from ..files import refuse_links, why, write_bytes, write_text
from ..records.formatting import count
from ..records.rates import RATE
from ..records.terminal import wrapped
from . import answer_file, page, plots, table, tensorboard
from .answer import Answer, answer
from .groups import Group, SweepResults
from .read import find
from .selection import ENOUGH
from .statements import Statement, failures, headlines, notes, statements
from .text import aligned, page_width, size_blocks


@dataclass(frozen=True)
class Report:
    """What was found."""

    sweep: SweepResults
    frame: pd.DataFrame  # a row for each run, see table.py
    metrics: list[str]  # of quality, the most telling one first
    tables: list[pd.DataFrame]  # the sizes of each group, see table.py
    answers: list[Answer]  # one for each group with two batch sizes or more
    enough: float  # the share of the best rate that a size is to reach
    statements: list[Statement]  # the answers first
    notes: list[str]  # what could not be read, compared or written
    files: list[Path]  # everything that was written

    @property
    def exit_code(self) -> int:
        """1 if not one run finished or was measured, else 0."""
        return 0 if any(run.status == "finished" or RATE in run.values for run in self.sweep.runs) else 1

    @property
    def headlines(self) -> list[str]:
        """All sentences, the answers first."""
        return headlines(self.statements, self.sweep)

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
    def size_texts(self) -> list[tuple[Group, pd.DataFrame]]:
        """The tables of the groups with several batch sizes, as texts."""
        pairs = zip(self.sweep.groups, self.tables, strict=True)
        return [
            (group, table.size_texts(sizes, group.device)) for group, sizes in pairs if len(sizes) > 1 and group.sizes
        ]

    @property
    def text(self) -> str:
        """For the terminal, at most 80 columns wide; only commands are longer."""
        width, said = page_width(), {id(one.group): one for one in self.statements if one.group}
        lines = [*wrapped([self.counts], width), ""]
        for group, texts in self.size_texts:
            lines += size_blocks(group.label, texts)
            lines += [*(_lines(said[id(group)], width) if id(group) in said else []), ""]
        settings = (
            [] if self.size_texts or len(self.sweep.runs) == 1 else table.settings_table(self.sweep, self.metrics[:2])
        )
        lines += [*aligned(settings), ""] if settings else []
        shown = {id(group) for group, _ in self.size_texts}
        for statement in (statement for statement in self.statements if id(statement.group) not in shown):
            lines += _lines(statement.labelled(), width)
        lines += wrapped([f"failed   {failed}"], width) if (failed := failures(self.sweep)) else []
        lines += wrapped([f"note: {note}" for note in self.notes], width)
        return printable("\n".join(lines).rstrip("\n"))

    @property
    def printed(self) -> str:
        """The text, and where `report.html` is."""
        place = next((file for file in self.files if file.name == page.FILE), None)
        shortest = "" if place is None else min(str(place), os.path.relpath(place), key=len)
        return "\n".join([self.text, "", f"report   {shortest}"])

    @property
    def markdown(self) -> str:
        """`report.md`."""
        commands = [f"    {one.command}" for one in self.statements if one.command]
        lines = [f"# {self.title}", "", *(f"- {line}" for line in self.headlines), ""]
        lines += [*(["To know more:", "", *commands, ""] if commands else []), f"{self.counts}.", ""]
        for group, texts in self.size_texts:
            cells = texts.rename(lambda size: f"{size:,}").reset_index(names="batch size")
            lines += [f"## {group.label}", "", table.to_markdown(cells)]
        lines += ["## Runs", ""]
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


def _lines(statement: Statement, width: int) -> list[str]:
    """A statement for the terminal, and the command that decides it."""
    first, *rest = statement.lines
    lines = wrapped([f"→ {first}", *(f"  {line}" for line in rest)], width)
    return [*lines, f"  for more   {statement.command}"] if statement.command else lines


def write_report(
    folders: Iterable[str | os.PathLike[str]],
    out_dir: str | os.PathLike[str],
    enough: float | None = None,
    margin: float | None = None,
) -> Report:
    """Read all runs below the folders, and write the report. What an earlier report wrote in its folder is replaced.

    Args:
        folders: of runs.
        out_dir: the folder of the report.
        enough: the share of the best rate that a batch size is to reach; by default that of the runs' configurations.
        margin: by how much a size may train worse than the best, as in quality.py; likewise.

    Raises:
        UserError: if there is not one readable record, or `out_dir` has or is a link that leads elsewhere, before
            anything is written; or if `out_dir` cannot be written.
    """
    paths, out = [Path(folder) for folder in folders], Path(out_dir)
    report = analyse(paths, enough, margin)
    _refuse_links(out, paths)
    pictures = plots.draw(report.sweep, report.tables, report.answers, report.metrics)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            write_bytes(out / f"{name}.png", picture.png)
        plots.remove_stale(out, keep=pictures)
        report.files.extend(out / f"{name}.png" for name in pictures)
        tensorboard.write(report.sweep.groups, report.tables, out / "tensorboard")
        texts = {
            "report.md": report.markdown,
            page.FILE: page.page(report, pictures),
            answer_file.FILE: answer_file.text_of(report),
            "sweep.csv": report.frame.to_csv(index=False, lineterminator="\n"),
        }
        for name, text in texts.items():
            write_text(out / name, text)
            report.files.append(out / name)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {why(error)}") from error
    return report


def analyse(
    folders: Iterable[str | os.PathLike[str]], enough: float | None = None, margin: float | None = None
) -> Report:
    """What the runs below the folders show, with nothing written; UserError if there is not one readable record."""
    sweep = find(folders)
    enough = enough or next((share for run in sweep.runs if (share := run.share("enough"))), ENOUGH)
    margin = margin or next((share for run in sweep.runs if (share := run.share("margin"))), None)
    metrics, frame = table.shown_metrics(sweep), table.run_table(sweep)
    by_group = {id(group): answer(group, table.quality_metrics(sweep), enough, margin) for group in sweep.groups}
    answers = [answer_ for answer_ in by_group.values() if answer_]
    tables = [table.size_table(group, by_group[id(group)], metrics[:1]) for group in sweep.groups]
    said = statements(sweep, answers, metrics, margin)
    return Report(sweep, frame, metrics, tables, answers, enough, said, list(notes(sweep)), files=[])


def _refuse_links(out: Path, folders: Sequence[Path]) -> None:
    """Refuse links by which the author of a folder could have files elsewhere written or deleted."""
    here = Path(os.path.abspath(out))
    # The default place lies in a folder that may be anybody's. The user typed any other place.
    root = next((folder for folder in folders if here == Path(os.path.abspath(folder)) / "report"), None)
    refuse_links(out, "the report's folder", root, ("report.*", "answer.*", "sweep.*", "*.png", "tensorboard"))
