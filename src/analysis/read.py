"""Find the runs below folders, and read their records."""

import os
from collections.abc import Collection, Iterable
from pathlib import Path

import pandas as pd

from ..errors import UserError
from ..records.metrics import FRACTION, metric
from ..records.read import read, run_dirs
from ..records.values import at
from .groups import SweepResults, group_runs
from .run import Run
from .table import run_table


def read_sweep(folders: Iterable[str | os.PathLike[str]]) -> SweepResults:
    """Read all runs in and below the folders, and group them for comparison.

    Raises:
        UserError: for a folder that does not exist, or if there is not one readable record.
    """
    paths = [Path(folder) for folder in folders]
    runs: dict[Path, Run] = {}
    notes: list[str] = []
    for folder in paths:
        for run_dir in run_dirs(folder):
            inside = run_dir.relative_to(folder)
            relative_path = Path(folder.resolve().name) / inside if len(paths) > 1 else inside
            name = run_dir.resolve().name if inside == Path(".") else str(relative_path)
            try:
                record = read(run_dir)
            except UserError as error:
                notes.append(f"{name}: {str(error).partition(': ')[2] or error}")
                continue
            if isinstance(record.get("config"), dict):
                runs.setdefault(run_dir.resolve(), Run(name, run_dir, record, len(runs)))
            else:
                notes.append(f"{name}: left out: it has no config")
    if not runs:
        why = f" ({notes[0]}{'; …' if len(notes) > 1 else ''})" if notes else ""
        raise UserError(f"no runs in {', '.join(map(str, paths)) or 'nothing'}{why}")
    _in_fractions(runs.values())
    return group_runs(list(runs.values()), notes)


def _in_fractions(runs: Collection[Run]) -> None:
    """Divide accuracies by 100 that were logged in percent: those of each module class of which a run has one above 1."""
    logged = [(run, str(at(run.record, "model.class")), key) for run in runs for key in run.metrics]
    shares = [(run, module, key) for run, module, key in logged if metric(key).unit == FRACTION]
    in_percent = {(module, key) for run, module, key in shares if run.metrics[key] > 1}
    for run, module, key in shares:
        run.metrics[key] /= 100 if (module, key) in in_percent else 1


def read_runs(folder: str | os.PathLike[str]) -> pd.DataFrame:
    """Return a row for each run in and below a folder, with the columns of `sweep.csv`; an unknown value is NaN.

    Raises:
        UserError: for a folder that does not exist, or without a readable record.
    """
    return run_table(read_sweep([folder])).infer_objects().fillna(float("nan"))
