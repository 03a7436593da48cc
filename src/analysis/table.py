"""The runs of a report as one DataFrame, with a row for each run: CSV, JSON, and the columns that people compare."""

import csv
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from ..errors import printable
from ..records.formatting import option_value, percent, significant
from ..records.metrics import RUN_METRICS, best_first, metric
from ..records.rates import RATE
from .groups import Group, SweepResults, rates_of
from .run import BATCH_SIZE, Run

LOW, HIGH = f"{RATE}_low", f"{RATE}_high"
BUSY = ("processor_time_pct", "utilization_pct")  # of a CPU, of an accelerator
_FACTS = ("run", "group", "tags", "status", "reason", "seconds")
_LONGEST = 90  # characters of a reason
_SHOWN = ("batch_size", "global_batch_size", RATE, "mfu", *BUSY, "sm_activity_pct", "memory_peak_gib")
_SHOWN += ("step_ms_median", "scaling_efficiency", "communication_share", "joules_per_sample", "compile_seconds")


def run_table(sweep: SweepResults, efficiencies: dict[str, float]) -> pd.DataFrame:
    """All that is known of each run; the columns are those of `sweep.csv`, and an unknown value is NaN.

    The rate of a run is that of its windows, as in the answer (noise.py); low and high are its 90 % interval. A run
    without windows has the rate of its record, and no interval.

    Args:
        sweep: the runs.
        efficiencies: the scaling efficiency of runs on several devices, by the name of the run.
    """
    rates = {id(run): rate for group in sweep.groups for run, rate in _rates(group)}
    labels = {id(run): group.label for group in sweep.groups for run in group.runs}
    rows: list[dict[str, Any]] = []
    for run in sweep.runs:
        rows.append(
            {key: run.settings.get(key) for key in sweep.varied}
            | run.values
            | rates.get(id(run), {})
            | {"run": run.name, "group": labels[id(run)], "tags": " ".join(run.tags) or None, "status": run.status}
            | {"reason": run.reason or None, "scaling_efficiency": efficiencies.get(run.name)}
        )
    settings = [key for key in sweep.varied if key != BATCH_SIZE]
    metrics = [name for stage in ("test/", "val/", "") for name in _of_stage(stage, sweep.runs)]
    measured = [name for name in RUN_METRICS if name != "seconds"]
    columns = dict.fromkeys([*_FACTS[:3], *settings, *measured, *metrics, "seconds", "status", "reason"])
    frame = pd.DataFrame(rows, columns=list(columns), dtype=object)
    return frame.dropna(axis="columns", how="all")


def _rates(group: Group) -> list[tuple[Run, dict[str, float]]]:
    """The rate of each run, the ends of its interval where it is known, and the MFU of this rate."""
    rates = rates_of(dict(enumerate([run] for run in group.runs)))
    found = []
    for number, run in enumerate(group.runs):
        if number in rates.settings:
            rate, reach = rates.rate(number), rates.reach(number)
            ends = {LOW: rate / (1 + reach), HIGH: rate * (1 + reach)} if math.isfinite(reach) else {}
            mfu = {"mfu": run.values["mfu"] * rate / run.values[RATE]} if "mfu" in run.values else {}
            found.append((run, {RATE: rate, **ends, **mfu}))
    return found


def to_csv(frame: pd.DataFrame) -> str:
    """`sweep.csv`: all numbers in full; an unknown value is an empty cell."""
    return str(frame.to_csv(index=False, lineterminator="\n", quoting=csv.QUOTE_MINIMAL))


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """A dict for each run, without the values that are not known."""
    return [{str(k): v for k, v in row.items() if _known(v)} for row in frame.to_dict("records")]


def _known(value: Any) -> bool:
    return not (value is None or (isinstance(value, float) and math.isnan(value)))


def shown_metrics(sweep: SweepResults) -> list[str]:
    """The metrics of quality: of the test, or of the validation where no run was tested.

    Losses are shown only if a run has nothing else.
    """
    for stage in ("test/", "val/"):
        found = _of_stage(stage, sweep.runs)
        telling = [name for name in found if metric(name).higher_is_better is not False]
        evaluated = [run for run in sweep.runs if any(name in run.metrics for name in found)]
        if evaluated:
            enough = all(any(name in run.metrics for name in telling) for run in evaluated)
            return telling if enough else [*telling, *(name for name in found if name not in telling)]
    return []


def _of_stage(stage: str, runs: Sequence[Run]) -> list[str]:
    return best_first(name for run in runs for name in run.metrics if name.startswith(stage))


def shown(sweep: SweepResults, frame: pd.DataFrame) -> pd.DataFrame:
    """The columns that people compare, as text, under their headings; an unknown value is empty."""
    varied = [key for key in sweep.varied if key != BATCH_SIZE]
    if "device" in varied:  # the name says more
        varied.remove("device")
        varied = ["device_name", *(key for key in varied if key != "device_name")]
    scaled = any(run.settings.get("optimizer.lr_scaling", "none") != "none" for run in sweep.runs)
    names = [*_SHOWN, *(["learning_rate"] if scaled else []), *shown_metrics(sweep), "seconds"]
    found: dict[str, list[str]] = {"run": list(map(str, frame["run"]))}
    found["tags"] = [str(tags) if _known(tags) else "" for tags in frame.get("tags", [])]
    for key in varied:
        found[key.rpartition(".")[2]] = [option_value(run.settings.get(key, "")) for run in sweep.runs]
    for name in dict.fromkeys(names):
        if name in frame:
            declared = metric(name)
            found[declared.heading or name] = [declared.cell(v) if _known(v) else "" for v in frame[name]]
        if name == RATE and HIGH in frame:
            found["±"] = [
                reach_text(h / r - 1) if _known(h) else "" for h, r in zip(frame[HIGH], frame[RATE], strict=True)
            ]
    reasons = [
        textwrap.shorten(str(r), _LONGEST, placeholder=" …") if _known(r) else "" for r in frame.get("reason", [])
    ]
    found["why not finished"] = reasons
    return pd.DataFrame({heading: cells for heading, cells in found.items() if any(cells)}).map(printable)


def reach_text(reach: float) -> str:
    """How far an interval reaches, as a part of the rate: `4 %`; empty where the rate is hardly known."""
    return f"{significant(100 * reach)} %" if reach < 0.01 else percent(reach) if reach < 1 else ""


def to_markdown(cells: pd.DataFrame) -> str:
    """A table of texts as Markdown; columns of numbers stand on the right."""
    right = ["---:" if is_number_column(cells[heading]) else "---" for heading in cells]
    lines = [list(map(str, cells.columns)), right, *cells.to_numpy().tolist()]
    escaped = ([" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped) + "\n"


def is_number_column(cells: Iterable[str]) -> bool:
    """Whether the cells are numbers or empty."""
    return all(not cell or cell[0] in "0123456789.-−" for cell in cells)
