"""write_report: the folders of a sweep → report.md, report.html, sweep.csv, sweep.json, plots, TensorBoard, and a text for the terminal."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import UserError, printable
from ..files import refuse_links, write_text
from ..records.formatting import count, percent, significant
from ..records.rates import NEAR_BEST, RATE
from ..records.terminal import wrapped
from . import compiled, plots, scaling, seeds, table, tensorboard
from .crossover import Crossover, crossovers
from .groups import SweepResults
from .notes import limits
from .read import find
from .recommend import Analysis, Recommendation, recommend
from .text_table import aligned, to_text
from .varied import compare_options

SCHEMA = 2  # of sweep.json
_MODEL = "(floor^p + (slope · batch size)^p)^(1/p)"
_ABOUT_FITS = (
    "The error is the median over sizes, each predicted from the others. "
    f"At the knee the rate is {percent(1 - NEAR_BEST)} of the fitted maximum."
)


_ABOUT_SEEDS = "Runs of one setting: the mean ± the standard deviation (of a sample, n − 1), and the range."


@dataclass(frozen=True)
class Report:
    """What was found."""

    sweep: SweepResults
    analyses: list[Analysis]  # one for each group
    recommendations: list[Recommendation]  # for every group with two batch sizes or more
    crossovers: list[Crossover]  # for every model that ran on several devices
    others: list[str]  # lines on sweeps over another option than the batch size
    notes: list[str]  # what could not be read, compared, drawn or written
    files: list[Path]  # everything that was written

    @property
    def exit_code(self) -> int:
        """1 if not one run finished or was measured, else 0."""
        return 0 if any(run.status == "finished" or RATE in run.values for run in self.sweep.runs) else 1

    @cached_property
    def headlines(self) -> list[str]:
        """The recommendation first; without one, what else can be said."""
        lines = [line for r in self.recommendations for line in (r.headline, *(f"  {remark}" for remark in r.remarks))]
        lines += [crossover.headline for crossover in self.crossovers]
        lines += scaling.headlines(self.sweep.runs)
        lines += compiled.gains(self.sweep.runs, self.sweep.varied)
        return lines + self.others

    @cached_property
    def seeds(self) -> list[list[str]]:
        """The table of what several seeds gave, its headings first; empty if no setting ran twice."""
        return seeds.cells(seeds.repeated(self.sweep))

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
        """For the terminal, and as wide."""
        sentences = [*self.headlines, *(f"note: {note}" for note in self.notes)]
        over_seeds = [*aligned(self.seeds), ""] if self.seeds else []
        return printable(
            "\n".join([*wrapped([self.counts]), "", to_text(self.sweep), *over_seeds, *wrapped(sentences)])
        )

    @property
    def spoken(self) -> str:
        """The recommendation and what ran, as Markdown."""
        lines = [f"  - {line.strip()}" if line.startswith("  ") else f"- **{line}**" for line in self.headlines]
        return printable("\n".join([*lines, "", f"{self.counts}."]))

    @property
    def printed(self) -> str:
        """The text, and where `report.md` and `report.html` are."""
        places = [min(str(file), os.path.relpath(file), key=len) for file in self.files if file.stem == "report"]
        return "\n".join([self.text, "", *(f"report   {place}" for place in places)])

    @property
    def markdown(self) -> str:
        """`report.md`."""
        lines = ["# Sweep", "", self.spoken, "", "## Runs", "", table.to_markdown(self.sweep)]
        if self.seeds:
            lines += ["## Repeated runs", "", f"{_ABOUT_SEEDS}", "", *_as_markdown(self.seeds), ""]
        if any(analysis.fit for analysis in self.analyses):
            lines += ["## The time of a step", "", *self._fits(), ""]
        pictures = [file for file in self.files if file.suffix == ".png"]
        if pictures:
            lines += ["## Plots", "", *(f"![{plots.CAPTIONS[file.stem]}]({file.name})\n" for file in pictures)]
        if self.notes:
            lines += ["## Notes", "", *(f"- {note}" for note in self.notes), ""]
        return printable("\n".join(lines)).replace("<", "&lt;")  # nothing that a record says of itself is HTML

    def _fits(self) -> list[str]:
        return [f"A step takes `{_MODEL}`. {_ABOUT_FITS}", "", *_as_markdown(self._fit_rows())]

    def _fit_rows(self) -> list[list[str]]:
        """The fits, their headings first."""
        rows = [["group", "floor ms", "slope µs/sample", "p", "knee", "error %"]]
        for analysis in self.analyses:
            fit, error = analysis.fit, analysis.error
            if fit:
                knee = "" if fit.knee is None else f"{fit.knee:,.0f}"
                off = "" if error is None else f"{100 * error:.1f}"
                cells = (significant(fit.floor_ms), significant(1e3 * fit.slope_ms), f"{fit.sharpness:g}", knee, off)
                rows.append([analysis.group.label, *cells])
        return rows

    def html(self) -> str:
        """`report.html`."""
        from . import html_report  # which imports Bokeh, and takes a second

        fits = self._fit_rows()
        models = dict.fromkeys(run.model for run in self.sweep.runs)
        text = html_report.Text(
            title=f"Sweep: {', '.join(models)}",
            headlines=self.headlines,
            counts=self.counts,
            fits=fits if len(fits) > 1 else [],
            about_fits=f"A step takes {_MODEL}. {_ABOUT_FITS}",
            seeds=self.seeds,
            about_seeds=_ABOUT_SEEDS,
            notes=self.notes,
        )
        return html_report.page(self.sweep, self.analyses, self.recommendations, text)

    def as_json(self) -> dict[str, Any]:
        """`sweep.json`."""
        return {
            "schema": SCHEMA,
            "varied": self.sweep.varied,
            "recommendations": [{**_known(asdict(r)), "headline": r.headline} for r in self.recommendations],
            "crossovers": [{**_known(asdict(c)), "headline": c.headline} for c in self.crossovers],
            "fits": [
                _known({"group": a.group.label, **asdict(fit), "knee": fit.knee, "leave_one_out_error": a.error})
                for a in self.analyses
                if (fit := a.fit)
            ],
            "repeated": [each.as_json() for each in seeds.repeated(self.sweep)],
            "rows": table.rows(self.sweep),
            "notes": self.notes,
        }


def _as_markdown(cells: Sequence[Sequence[str]]) -> list[str]:
    header, *rows = cells
    lines = [f"| {' | '.join(header)} |", f"| --- |{(len(header) - 1) * ' ---: |'}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


HTML = "report.html"
FILES: dict[str, Callable[[Report], str]] = {  # beside the plots
    "report.md": lambda report: report.markdown,
    HTML: lambda report: report.html(),
    "sweep.csv": lambda report: table.to_csv(report.sweep),
    "sweep.json": lambda report: json.dumps(report.as_json(), indent=2, ensure_ascii=False) + "\n",
}


def _why_no_html() -> str:
    """A note if Bokeh is missing, else an empty string."""
    try:
        from . import html_report  # noqa: F401
    except ImportError as error:
        return f"no {HTML}: {error}"
    return ""


def _known(facts: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if value is not None}


def write_report(folders: Iterable[str | os.PathLike[str]], out_dir: str | os.PathLike[str]) -> Report:
    """Read all runs below the folders, and write the report.

    Raises:
        UserError: if there is not one readable record, or `out_dir` has or is a link that leads elsewhere, before
            anything is written; or if `out_dir` cannot be written.
    """
    paths, out = [Path(folder) for folder in folders], Path(out_dir)
    sweep = find(paths)
    _refuse_links(out, paths)
    analyses = [Analysis(group) for group in sweep.groups]
    metrics = table.shown_metrics(sweep)
    try:
        out.mkdir(parents=True, exist_ok=True)
        pictures, missing = plots.draw(analyses, out)
        missing.append(_why_no_html())
        texts = [name for name in FILES if name != HTML or not missing[-1]]
        report = Report(
            sweep=sweep,
            analyses=analyses,
            recommendations=[found for a in analyses if (found := recommend(a, metrics))],
            crossovers=crossovers(analyses),
            others=_others(sweep),
            notes=[*sweep.notes, *scaling.doubts(sweep.runs), *limits(sweep, analyses), *filter(None, missing)],
            files=[*(out / name for name in texts), *pictures],
        )
        if note := tensorboard.write(sweep.groups, plots.cards(analyses), report.spoken, out / "tensorboard"):
            report.notes.append(note)
        for name in texts:
            write_text(out / name, FILES[name](report))
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error}") from error
    return report


def _refuse_links(out: Path, folders: Sequence[Path]) -> None:
    """Refuse links by which the author of a folder could have files elsewhere written or deleted."""
    here = Path(os.path.abspath(out))
    # The default place lies in a folder that may be anybody's. The user typed any other place.
    root = next((folder for folder in folders if here == Path(os.path.abspath(folder)) / "report"), None)
    refuse_links(out, "the report's folder", root, ("report.*", "sweep.*", "*.png", "tensorboard"))


def _others(sweep: SweepResults) -> list[str]:
    """What can be said of runs that differ in something else than batch size alone."""
    runs = sweep.runs
    if not any(RATE in run.values or run.status == "finished" for run in runs):
        [(reason, _)] = Counter(run.reason for run in runs).most_common(1)
        return [f"No run finished, so there is nothing to recommend. Most often: {reason}."]
    if len(runs) == 1:
        rate = runs[0].values.get(RATE)
        speed = f": {significant(rate)} samples/s at batch size {runs[0].batch_size:,}" if rate else ""
        return [f"One run only{speed}. Several batch sizes are needed for a recommendation."]
    if any(len(group.sizes) > 1 for group in sweep.groups):
        return []
    found = [*compare_options(sweep), *seeds.headlines(seeds.repeated(sweep), sweep)]
    return found or ["One measured run only: nothing to compare it with."]
