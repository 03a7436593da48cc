"""write_report: a sweep's folders → report.md, sweep.csv, sweep.json, plots, TensorBoard, and a text for the terminal."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import UserError, printable
from ..files import atomic_write, refuse_links
from . import plots, scaling, table, tensorboard
from .recommend import (
    Analysis,
    Crossover,
    Recommendation,
    compare_options,
    crossovers,
    recommend,
    repeats,
    same_samples,
)
from .runs import BATCH_SIZE, Run, SweepResults, find

SCHEMA = 2  # of sweep.json
_UNSTEADY = 2  # times from the 10th to the 90th percentile of a run's steps
_CAPTIONS = {
    "throughput": "Samples per second against batch size",
    "step_time": "Where the time of a step goes",
    "device": "How busy the device is, and the memory it needs",
    "validation": "The validation metric against time and against samples",
}


@dataclass(frozen=True)
class Report:
    """What was found out.

    Attributes:
        sweep: the runs.
        analyses: a group each.
        recommendations: for every group with two batch sizes or more.
        crossovers: for every model that ran on several devices.
        others: lines on sweeps over something else than the batch size.
        notes: what could not be read, compared, drawn or written.
        files: everything that was written.
    """

    sweep: SweepResults
    analyses: list[Analysis]
    recommendations: list[Recommendation]
    crossovers: list[Crossover]
    others: list[str]
    notes: list[str]
    files: list[Path]

    @property
    def exit_code(self) -> int:
        """1 if not one run finished or was measured, else 0."""
        return 0 if any(run.status == "finished" or run.samples_per_sec for run in self.sweep.runs) else 1

    @cached_property
    def headlines(self) -> list[str]:
        """The recommendation first; what can be said without one otherwise."""
        lines = [line for r in self.recommendations for line in (r.headline, *(f"  {remark}" for remark in r.remarks))]
        lines += [crossover.headline for crossover in self.crossovers]
        lines += scaling.headlines(self.sweep.runs)
        return lines + self.others

    @property
    def counts(self) -> str:
        """`8 runs: 7 finished, 1 out of memory; on …`."""
        runs = self.sweep.runs
        statuses = Counter(run.status.replace("_", " ") for run in runs)
        where = dict.fromkeys(str(run.settings.get("device_name") or run.device) for run in runs)
        data = dict.fromkeys(
            str(run.record["dataset"]["name"])
            for run in runs
            if isinstance(run.record.get("dataset"), dict) and run.record["dataset"].get("name")
        )
        line = f"{len(runs)} run{'s'[: len(runs) > 1]}: {', '.join(f'{n} {status}' for status, n in statuses.items())}"
        if any(where):
            line += f"; on {', '.join(filter(None, where))}"
        return f"{line}; data: {', '.join(data)}" if data else line

    @property
    def text(self) -> str:
        """For the terminal."""
        parts = [self.counts, "", table.to_text(self.sweep), *self.headlines]
        parts += [f"note: {note}" for note in self.notes]
        return printable("\n".join(parts))

    @property
    def markdown(self) -> str:
        """`report.md`."""
        lines = ["# Sweep", ""]
        for line in self.headlines:
            lines.append(f"  - {line.strip()}" if line.startswith("  ") else f"- **{line}**")
        lines += ["", f"{self.counts}.", "", "## Runs", "", table.to_markdown(self.sweep)]
        if any(analysis.fit for analysis in self.analyses):
            lines += ["## The time of a step", "", *self._fits(), ""]
        pictures = [file for file in self.files if file.suffix == ".png"]
        if pictures:
            lines += ["## Plots", ""]
            lines += [f"![{_CAPTIONS.get(file.stem, file.stem)}]({file.name})\n" for file in pictures]
        if self.notes:
            lines += ["## What this report could not do", "", *(f"- {note}" for note in self.notes), ""]
        return printable("\n".join(lines))

    def _fits(self) -> list[str]:
        lines = [
            "A step takes `(floor^p + (slope · batch size)^p)^(1/p)`. The knee is where 95 % of the fitted maximum is",
            "reached; the error is the median over sizes, each predicted from the others.",
            "",
            "| group | floor ms | slope µs/sample | p | knee | error % |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for analysis in self.analyses:
            fit, error = analysis.fit, analysis.error
            if fit:
                knee = "" if fit.knee is None else f"{fit.knee:,.0f}"
                off = "" if error is None else f"{100 * error:.1f}"
                cells = (f"{fit.floor_ms:.3g}", f"{1e3 * fit.slope_ms:.3g}", f"{fit.sharpness:g}", knee, off)
                lines.append(f"| {analysis.group.label} | {' | '.join(cells)} |")
        return lines

    def as_json(self) -> dict[str, Any]:
        """`sweep.json`."""
        return {
            "schema": SCHEMA,
            "varied": self.sweep.varied,
            "recommendations": [{**_known(asdict(r)), "headline": r.headline} for r in self.recommendations],
            "crossovers": [{**_known(asdict(c)), "headline": c.headline} for c in self.crossovers],
            "fits": [
                _known({"group": a.group.label, **asdict(a.fit), "knee": a.fit.knee, "leave_one_out_error": a.error})
                for a in self.analyses
                if a.fit
            ],
            "rows": table.rows(self.sweep),
            "notes": self.notes,
        }


def write_report(folders: Iterable[str | os.PathLike[str]], out_dir: str | os.PathLike[str]) -> Report:
    """Read all runs below the folders, and write what they say.

    Raises:
        UserError: if there is not one readable record, or `out_dir` has or is a link that leads elsewhere, before
            anything is written; or if `out_dir` cannot be written.
    """
    folders = [Path(folder) for folder in folders]
    sweep = find(folders)
    out = Path(out_dir)
    _refuse_links(out, folders)
    analyses = [Analysis(group) for group in sweep.groups]
    metrics = table.shown_metrics(sweep)
    found = [recommendation for a in analyses if (recommendation := recommend(a, metrics))]
    try:
        out.mkdir(parents=True, exist_ok=True)
        pictures, missing = plots.draw(sweep, analyses, out)
        note = tensorboard.write(analyses, pictures, out / "tensorboard")
        report = Report(
            sweep=sweep,
            analyses=analyses,
            recommendations=found,
            crossovers=crossovers(analyses),
            others=_others(sweep, analyses),
            notes=[
                *sweep.notes,
                *scaling.doubts(sweep.runs),
                *_limits(sweep, analyses),
                *missing,
                *([note] if note else []),
            ],
            files=[*(out / name for name in ("report.md", "sweep.csv", "sweep.json")), *pictures],
        )
        text = json.dumps(report.as_json(), indent=2, ensure_ascii=False)
        contents = (report.markdown, table.to_csv(table.rows(sweep)), f"{text}\n")
        for file, content in zip(report.files, contents, strict=False):  # the pictures are there
            with atomic_write(file) as opened:
                opened.write(content.encode("utf-8", "replace"))
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error}") from error
    return report


def _refuse_links(out: Path, folders: Sequence[Path]) -> None:
    """Refuse links by which the author of a folder could have files elsewhere written or deleted."""
    here = Path(os.path.abspath(out))
    # The default place lies in a folder that may be anybody's; another one is the command line's word.
    root = next((folder for folder in folders if here == Path(os.path.abspath(folder)) / "report"), None)
    refuse_links(out, "the report's folder", root)


def _others(sweep: SweepResults, analyses: Sequence[Analysis]) -> list[str]:
    """What can be said of runs that differ in something else than batch size alone."""
    runs = sweep.runs
    if not any(run.samples_per_sec or run.status == "finished" for run in runs):
        reasons = Counter(run.reason for run in runs).most_common(1)
        return [f"No run finished, so there is nothing to recommend. Most often: {reasons[0][0]}."]
    if len(runs) == 1:
        rate = runs[0].samples_per_sec
        speed = f": {table.short(rate)} samples/s at batch size {runs[0].batch_size:,}" if rate else ""
        return [f"One run only{speed}. Several batch sizes are needed for a recommendation."]
    if any(len(a.group.sizes) > 1 for a in analyses):
        return []
    found = [*compare_options(sweep), *repeats(sweep)]
    return found or ["One measured run only: nothing to compare it with."]


def _limits(sweep: SweepResults, analyses: Sequence[Analysis]) -> list[str]:
    """Which conclusions the runs do not allow."""
    notes = []
    if len(sweep.runs) > 1 and not sweep.varied:
        notes.append("nothing varied but the repetition")
    elif len(sweep.runs) > 1 and BATCH_SIZE not in sweep.varied:
        notes.append("no batch size is recommended: data.batch_size was the same in all runs")
    for analysis in analyses:
        group, sizes = analysis.group, len(analysis.group.sizes)
        if BATCH_SIZE in sweep.varied and sizes == 1:
            notes.append(f"{group.label}: one batch size was measured, so none is recommended")
        if sizes == 2:
            notes.append(f"{group.label}: two batch sizes are too few for a fit, so nothing is said beyond them")
        if analysis.fit and analysis.trusted is None:
            off = f"{100 * (analysis.error or 0):.0f} %"
            notes.append(f"{group.label}: the fit misses sizes that are left out of it by {off}, so it is not used")
        if unsteady := [f"{size:,}" for size, runs in group.sizes.items() if any(map(_unsteady, runs))]:
            notes.append(
                f"{group.label}: the rate at {', '.join(unsteady)} is not firm: its steps' 10th and 90th percentiles lie "
                f"more than {_UNSTEADY} times apart, as when other programs take turns on the device; seed=0,1,2 repeats "
                "every run, and medians are taken"
            )
        if any(len(same_samples(group, size)) < sizes for size in group.sizes) and any(r.metrics for r in group.runs):
            notes.append(f"{group.label}: metrics are not compared between sizes that saw unlike numbers of samples")
    without = [run.name for run in sweep.runs if run.status == "finished" and not run.samples_per_sec]
    if without:
        notes.append(f"finished without a throughput summary: {', '.join(without)}")
    return notes


def _unsteady(run: Run) -> bool:
    low, high = run.samples_per_sec_p10, run.samples_per_sec_p90
    return bool(low and high and high > _UNSTEADY * low)


def _known(facts: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if value is not None}
