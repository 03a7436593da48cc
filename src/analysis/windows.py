"""The windows of runs as a table: how long a sample took in each, and what other programs took of the processor meanwhile."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..records.rates import RATE
from ..records.step_times import StepTimes
from ..records.values import table
from .run import Run

COLUMNS = ("setting", "run", "pass_", "log_s", "taken", "disturbed")


def windows_of(settings: Mapping[int, Sequence[Run]]) -> pd.DataFrame:
    """The windows of the runs of each setting, in the order in which they were measured.

    A setting without windows has the median rate of its records as the only one: nothing is known of its spread.
    Columns: `setting`; `run`, a number; `pass_`, which windows of several runs share that were measured side by side, None
    elsewhere; `log_s`, the log of time ÷ samples; `taken`, the share of the processor that others
    took; `disturbed`, whether that was too much.
    """
    runs = [(setting, run) for setting, members in settings.items() for run in members]
    rows = [(setting, number, *row) for number, (setting, run) in enumerate(runs) for row in _rows(run)]
    measured = {row[0] for row in rows}
    for setting in (setting for setting in settings if setting not in measured):
        rates = [run.values[RATE] for run in settings[setting] if RATE in run.values]
        if rates:
            rows.append((setting, len(runs) + len(rows), None, -math.log(statistics.median(rates)), 0.0, False))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _rows(run: Run) -> Iterable[tuple[Any, ...]]:
    times, samples = run.steps, run.samples_a_step or run.global_batch_size  # the latter of a run that has failed
    if not isinstance(times, StepTimes) or not samples:
        return
    taken = np.nan_to_num(np.clip(times.others_share, 0, 1))
    rerun = table(run.record.get("rerun"))  # of a run that is one of many short ones, A B A B …
    session = str(rerun.get("of") or run.folder.resolve().parent)
    for number, seconds in enumerate(times.means()):
        of_pass = rerun.get("pair", int(times.pass_[number]))  # of the whole run, or of each window
        shared = isinstance(of_pass, int) and of_pass >= 0
        if 0 < seconds < np.inf:
            yield (
                f"{session}#{of_pass}" if shared else None,
                float(np.log(seconds / samples)),
                float(taken[number]),
                bool(times.disturbed[number] == 1),
            )
