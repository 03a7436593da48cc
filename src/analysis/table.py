"""The runs of a report as DataFrames: all numbers for CSV, and texts for people.

A run has a row, with the rate and the MFU as in the answer: from its windows (noise.py). Low and high are the ends of the
90 % interval. The time of a step is that of the same rate. A run without windows has the rate of its record.
"""

import math
import textwrap
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..errors import printable
from ..records.formatting import option_value, significant
from ..records.metrics import FRACTION, RUN_METRICS, best_first, metric
from ..records.rates import RATE
from .between_groups import name_of, scaling_efficiencies
from .groups import Group, SweepResults, rates_of
from .run import BATCH_SIZE, Run
from .target import Arrivals
from .text import is_number_column, mean_and_deviation, reach_text

if TYPE_CHECKING:
    from .answer import Answer

LOW, HIGH, STEP_MS = f"{RATE}_low", f"{RATE}_high", "step_ms_typical"
BUSY = ("processor_time_pct", "utilization_pct")  # of a CPU, of an accelerator
_LONGEST = 90  # characters of a reason
_SHOWN = ("batch_size", "global_batch_size", RATE, STEP_MS, "mfu", *BUSY, "memory_peak_gib")
_TO_TARGET = ("noise_scale", "samples_to_target", "time_to_target_s")
_SHOWN += ("scaling_efficiency", "communication_share", "joules_per_sample", "compile_seconds")


def run_table(sweep: SweepResults) -> pd.DataFrame:
    """All that is known of each run, in the order of the sweep; an unknown value is NaN."""
    efficiencies = scaling_efficiencies(sweep.runs)
    rows: dict[int, dict[str, Any]] = {}  # by the number of the run
    for group in sweep.groups:
        rates = rates_of(dict(enumerate([run] for run in group.runs)))
        for number, run in enumerate(group.runs):
            known = number in rates.settings
            rows[run.number] = {
                **{key: run.settings.get(key) for key in sweep.factors},
                **run.values,
                **(_of_rate(run, rates.rate(number), rates.reach(number)) if known else {}),
                "run": run.name,
                "group": group.label,
                "status": run.status,
                "reason": run.reason or None,
                "scaling_efficiency": efficiencies.get(run.number),
            }
    settings = [key for key in sweep.factors if key != BATCH_SIZE]
    metrics = [name for stage in ("test/", "val/", "") for name in _of_stage(stage, sweep.runs)]
    measured = [name for name in RUN_METRICS if name != "seconds"]
    columns = dict.fromkeys(["run", "group", *settings, *measured, *metrics, "seconds", "status", "reason"])
    frame = pd.DataFrame([rows[run.number] for run in sweep.runs], columns=list(columns), dtype=object)
    return frame.dropna(axis="columns", how="all")


def _of_rate(run: Run, rate: float, reach: float) -> dict[str, float]:
    """The rate of a run and what follows from it."""
    found = {RATE: rate} | ({LOW: rate / (1 + reach), HIGH: rate * (1 + reach)} if math.isfinite(reach) else {})
    found |= {STEP_MS: 1e3 * run.samples_a_step / rate} if run.samples_a_step else {}
    return found | ({"mfu": run.values["mfu"] * rate / run.values[RATE]} if "mfu" in run.values else {})


def shown_metrics(sweep: SweepResults) -> list[str]:
    """The metrics of quality: of the test, or of the validation where no run was tested; losses if there is nothing else."""
    for stage in ("test/", "val/"):
        if found := _of_stage(stage, sweep.runs):
            return [name for name in found if metric(name).higher_is_better is not False] or found
    return []


def _of_stage(stage: str, runs: Sequence[Run]) -> list[str]:
    return best_first(name for run in runs for name in run.metrics if name.startswith(stage))


def shown(sweep: SweepResults, frame: pd.DataFrame) -> pd.DataFrame:
    """The columns that people compare, as text, under their headings; an unknown value is empty."""
    factors = [key for key in sweep.factors if key not in (BATCH_SIZE, "device")]
    if "device" in sweep.factors and "device_name" not in factors:
        factors.insert(0, "device_name")  # it says more
    scaled = any(run.settings.get("optimizer.lr_scaling", "none") != "none" for run in sweep.runs)
    names = [*_SHOWN, *(["learning_rate"] if scaled else []), *shown_metrics(sweep), *_TO_TARGET, "seconds"]
    texts = frame.astype(object).where(frame.notna(), "").astype(str)
    found = {"run": texts["run"].tolist()}
    for key in factors:
        found[key.rpartition(".")[2]] = [option_value(run.settings.get(key, "")) for run in sweep.runs]
    for name in (name for name in names if name in frame):
        declared = metric(name)
        found[declared.heading or name] = [declared.cell(value) if pd.notna(value) else "" for value in frame[name]]
        if name == RATE and HIGH in frame:
            reaches = frame[HIGH] / frame[RATE] - 1
            found["±"] = [reach_text(reach) if pd.notna(reach) else "" for reach in reaches]
    reasons = texts.get("reason", [])
    found["why not finished"] = [textwrap.shorten(reason, _LONGEST, placeholder=" …") for reason in reasons]
    return pd.DataFrame({heading: cells for heading, cells in found.items() if any(cells)}).map(printable)


def to_markdown(cells: pd.DataFrame) -> str:
    """A table of texts as Markdown; columns of numbers stand on the right."""
    right = ["---:" if is_number_column(cells[heading]) else "---" for heading in cells]
    lines = [list(map(str, cells.columns)), right, *cells.to_numpy().tolist()]
    escaped = ([" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped) + "\n"


def summary(
    group: Group, vague: Collection[int], metrics: Sequence[str], answer: "Answer | None" = None
) -> pd.DataFrame:
    """The numbers of a group as text, a row for each measured batch size; the rates of the sizes in `vague` have a `?`."""
    progress, arrivals = (answer.progress, answer.arrivals) if answer else (None, None)
    if arrivals:
        metrics = []  # of runs that ended at the target, or early
    headings = {"mfu": "MFU"} | ({} if group.device == "cpu" else {BUSY[1]: "busy", "memory_peak_gib": "memory GiB"})
    medians, rates = {name: group.medians(name) for name in headings}, group.rates
    rows = []
    for size, runs in (group.sizes or {0: group.runs}).items():
        row = {"samples/s": "", "±": ""}
        if size in rates.settings:
            mark = "?" if size in vague else ""
            row = {"samples/s": significant(rates.rate(size)) + mark, "±": _tight(reach_text(rates.reach(size))) or "?"}
        row |= {heading: _cell(name, medians[name].get(size)) for name, heading in headings.items()}
        for key in metrics:
            values = [run.metrics[key] for run in runs if key in run.metrics]
            row[key] = _tight(mean_and_deviation(key, values)) if values else ""
        if progress and size in progress.updates:
            row |= {
                "efficiency": f"{100 * progress.efficiency(size):.0f}%",
                "goodput": significant(progress.goodput(size)),
            }
        if arrivals and size in arrivals.sizes:
            row |= _to_target(arrivals, size)
        rows.append(row)
    frame = pd.DataFrame(rows, index=list(group.sizes or [0])).fillna("")
    return frame.loc[:, (frame != "").any()]


def _to_target(arrivals: Arrivals, size: int) -> dict[str, str]:
    """Seconds and samples to the target; of a size that has not reached it, how long it was trained at least."""
    if one := arrivals.typical.get(size):
        return {"s to target": significant(one.seconds), "samples": significant(one.samples)}
    return {"s to target": f"> {significant(max(one.after for one in arrivals.sizes[size].values()))}"}


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return ""
    if metric(name).unit == FRACTION:
        return f"{100 * value:.1f}%" if value < 0.0995 else f"{100 * value:.0f}%"
    return f"{value:.0f}%" if name.endswith("_pct") else significant(value)


def _tight(text: str) -> str:
    return text.replace(" %", "%").replace(" ± ", "±")


def settings_table(sweep: SweepResults, metrics: Sequence[str]) -> list[list[str]]:
    """A line for each group of a sweep in which each group ran at one batch size, below the headings."""
    rows = [summary(group, [], metrics).iloc[0].to_dict() for group in sweep.groups]
    names = [{"setting": name_of(group, sweep), "runs": str(len(group.runs))} for group in sweep.groups]
    table = pd.DataFrame([name | row for name, row in zip(names, rows, strict=True) if row]).fillna("")
    return [list(table.columns), *table.to_numpy().tolist()] if len(table) else []
