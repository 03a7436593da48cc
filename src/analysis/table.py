"""A row for each run: as Markdown for people, as CSV and JSON with all numbers in full; text_table.py has the terminal's."""

import csv
import io
import textwrap
from collections.abc import Sequence
from typing import Any

from ..records.formatting import option_value
from ..records.metrics import RUN_METRICS, best_first, metric
from ..records.step_parts import PARTS, SHORT_NAMES
from . import scaling
from .groups import SweepResults
from .run import BATCH_SIZE, Run

Row = dict[str, Any]
_Column = tuple[str, list[str]]  # a heading and the cells of all runs


def rows(sweep: SweepResults) -> list[Row]:
    """All that is known of each run, by the names of `sweep.csv` and in their order; unknown values are left out."""
    labels = {id(run): group.label for group in sweep.groups for run in group.runs}
    reached = scaling.efficiencies(sweep.runs)
    columns, table = _names(sweep), []
    for run in sweep.runs:
        facts: Row = {**run.settings, **run.values, "scaling_efficiency": reached.get(run.name), "run": run.name}
        facts |= {"tags": " ".join(run.tags) or None}
        facts |= {"group": labels[id(run)], "status": run.status, "reason": run.reason or None}
        table.append({name: facts[name] for name in columns if facts.get(name) is not None})
    return table


def _names(sweep: SweepResults) -> list[str]:
    """All columns of `sweep.csv`."""
    settings = [key for key in sweep.varied if key != BATCH_SIZE]
    metrics = [name for stage in ("test/", "val/", "") for name in _of_stage(stage, sweep.runs)]
    measured = [name for name in RUN_METRICS if name != "seconds"]
    return list(dict.fromkeys(["run", "group", "tags", *settings, *measured, *metrics, "seconds", "status", "reason"]))


def to_csv(sweep: SweepResults) -> str:
    """All columns that have a value; an unknown value is an empty cell."""
    table, text = rows(sweep), io.StringIO()
    filled = [name for name in _names(sweep) if any(name in row for row in table)]
    writer = csv.DictWriter(text, filled, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def to_markdown(sweep: SweepResults) -> str:
    """The columns that people compare; columns without values are left out."""
    header, lines = cells(sweep)
    right = [is_number_column(column) for column in zip(*lines, strict=True)]
    lines = [header, [("---:" if is_right else "---") for is_right in right], *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


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


def cells(sweep: SweepResults) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the table for people."""
    kept = [(heading, column) for heading, column in _columns(sweep) if any(column)]
    return [heading for heading, _ in kept], [list(line) for line in zip(*(column for _, column in kept), strict=True)]


def _columns(sweep: SweepResults) -> list[_Column]:
    table, varied = rows(sweep), [key for key in sweep.varied if key != BATCH_SIZE]
    if "device" in varied:  # which says less, but enough
        varied = [key for key in varied if key != "device_name"]
    scaled = any(run.settings.get("optimizer.lr_scaling", "none") != "none" for run in sweep.runs)
    measured = ["scaling_efficiency", "communication_share", "processor_time_pct", "utilization_pct", "sm_activity_pct"]
    measured += ["throttled_pct", "mfu", "memory_peak_gib", "joules_per_sample", "compile_seconds"]
    measured += [*(["learning_rate"] if scaled else []), *shown_metrics(sweep), "seconds"]
    return [
        ("run", [row["run"] for row in table]),
        ("tags", [row.get("tags", "") for row in table]),
        *((key.rpartition(".")[2], [_setting(run, key) for run in sweep.runs]) for key in varied),
        *(_numbers(table, name) for name in ("batch_size", "global_batch_size", "samples_per_sec")),
        _spread(table),
        _numbers(table, "samples_per_sec_fit"),
        _numbers(table, "step_ms_median"),
        _ranges(table, "fastest–slowest mean ms", "fastest_step_ms_mean", "slowest_step_ms_mean"),
        (f"mean {'/'.join(SHORT_NAMES)} %", [_shares(row) for row in table]),
        *(_numbers(table, name) for name in measured),
        ("why not finished", [textwrap.shorten(row.get("reason", ""), 90, placeholder=" …") for row in table]),
    ]


def _spread(table: Sequence[Row]) -> _Column:
    """The interval of the rate; where no run has one, the spread of its steps."""
    if any("samples_per_sec_low" in row for row in table):
        return "± %", [_reach(row) for row in table]
    return _ranges(table, "p10–p90", "samples_per_sec_p10", "samples_per_sec_p90")


def _reach(row: Row) -> str:
    """How far the interval of the rate reaches, in percent of the rate."""
    rate, low, high = (row.get(f"samples_per_sec{end}") for end in ("", "_low", "_high"))
    return f"{100 * max(high / rate - 1, 1 - low / rate):.1f}" if rate and low and high else ""


def _setting(run: Run, key: str) -> str:
    return option_value(run.settings[key]) if key in run.settings else ""


def _numbers(table: Sequence[Row], name: str) -> _Column:
    declared = metric(name)
    return declared.heading or name, [declared.cell(row[name]) if name in row else "" for row in table]


def _ranges(table: Sequence[Row], heading: str, low: str, high: str) -> _Column:
    ends = [[metric(name).text(row[name]) for name in (low, high) if name in row] for row in table]
    return heading, ["–".join(pair) for pair in ends]


def _shares(row: Row) -> str:
    parts = [row.get(f"{part}_ms_mean", 0.0) for part in PARTS]
    return "/".join(f"{100 * ms / sum(parts):.0f}" for ms in parts) if sum(parts) else ""


def is_number_column(cells: Sequence[str]) -> bool:
    """Whether the cells are numbers or empty."""
    return all(not cell or cell[0] in "0123456789.-−" for cell in cells)
