"""The windows of runs as a table: the time of a sample in each window, and the share of the processor that others took."""

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


def window_table(settings: Mapping[int, Sequence[Run]]) -> pd.DataFrame:
    """Return the windows of the runs of each setting, in the order in which they were measured.

    A setting without windows has a single row, the median rate of its records: its spread is not known.
    Columns: `setting`; `run`, a number; `pass_`, the same for windows of runs that were measured side by side, or as a pair one
    after the other, None for others; `log_s`, the log of time ÷ samples; `taken`, the share of the processor that other programs
    took; `disturbed`, whether that share was too large.
    """
    runs = [(setting, run) for setting, members in settings.items() for run in members]
    rows = [(setting, number, *row) for number, (setting, run) in enumerate(runs) for row in _rows(run)]
    with_windows = {row[0] for row in rows}
    for setting in (setting for setting in settings if setting not in with_windows):
        rates = [run.values[RATE] for run in settings[setting] if RATE in run.values]
        if rates:
            rows.append((setting, len(runs) + len(rows), None, -math.log(statistics.median(rates)), 0.0, False, None))
    windows = pd.DataFrame(rows, columns=[*COLUMNS, "pair"])
    is_shared = windows.groupby("pass_")["run"].transform("nunique") > 1
    is_pair = windows["pair"].notna() & ~is_shared.groupby(windows["run"]).transform("any")
    windows["pass_"] = windows["pass_"].mask(is_pair, windows.pop("pair"))
    return windows


def _rows(run: Run) -> Iterable[tuple[Any, ...]]:
    times, samples = run.steps, run.samples_a_step or run.global_batch_size  # the latter for a failed run
    if not isinstance(times, StepTimes) or not samples:
        return
    taken = np.nan_to_num(np.clip(times.others_share, 0, 1))
    rerun = table(run.record.get("rerun"))  # set if the run is one of many short ones, A B A B …
    session = str(rerun.get("of") or run.folder.resolve().parent)
    pair = f"{session}#pair {rerun['pair']}" if isinstance(rerun.get("pair"), int) else None
    for number, seconds in enumerate(times.means()):
        if 0 < seconds < np.inf:
            yield (
                f"{session}#{times.pass_[number]}" if times.pass_[number] >= 0 else None,
                float(np.log(seconds / samples)),
                float(taken[number]),
                bool(times.disturbed[number] == 1),
                pair,
            )
