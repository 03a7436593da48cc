"""A row a run: as Markdown and as text for people, as CSV and JSON with everything in full."""

import csv
import io
from collections.abc import Callable, Sequence
from typing import Any

from . import scaling
from .runs import BATCH_SIZE, PARTS, Group, Run, SweepResults, plain

Row = dict[str, Any]
_TEST = ("test/acc", "test/loss")
_VALIDATION = ("val/acc", "val/loss")


def rows(sweep: SweepResults) -> list[Row]:
    """Everything known of every run, by the names of `sweep.csv`; unknown values are left out."""
    groups = {id(run): group for group in sweep.groups for run in group.runs}
    reached = scaling.efficiencies(sweep.runs)
    return [_row(run, groups[id(run)], sweep.varied, reached.get(run.name)) for run in sweep.runs]


def _row(run: Run, group: Group, varied: Sequence[str], efficiency: float | None) -> Row:
    row: Row = {"run": run.name, "group": group.label}
    row |= {key: run.settings.get(key) for key in varied if key != BATCH_SIZE}
    row |= {
        "batch_size": run.batch_size,
        **_of_processes(run),
        "samples_per_sec": run.samples_per_sec,
        "samples_per_sec_p10": run.samples_per_sec_p10,
        "samples_per_sec_p90": run.samples_per_sec_p90,
        "samples_per_sec_mean": run.samples_per_sec_mean,
        "step_ms_median": run.step_ms_median,
        **{f"{part}_ms_mean": ms for part, ms in run.parts_ms.items()},
        "scaling_efficiency": efficiency,
        "communication_share": scaling.communication_share(run),
        "busy_pct": run.busy_pct,
        "mfu": run.mfu,
        "memory_peak_gib": run.memory_peak_gib,
        "joules_per_sample": run.joules_per_sample,
        "learning_rate": run.learning_rate,
        **{name: run.metrics.get(name) for name in (*_TEST, *_VALIDATION)},
        "seconds": run.seconds,
        "status": run.status,
        "reason": run.reason or None,
    }
    return {key: value for key, value in row.items() if value is not None}


def _of_processes(run: Run) -> Row:
    """What only a run of several processes has."""
    if run.processes == 1:
        return {}
    fastest, slowest = run.process_step_ms or (None, None)
    found = {"processes": run.processes, "global_batch_size": run.global_batch_size}
    return found | {"fastest_step_ms_mean": fastest, "slowest_step_ms_mean": slowest}


def names(table: Sequence[Row]) -> list[str]:
    """The columns of some rows, in the order in which a row has them, wherever each first turns up."""
    found: list[str] = []
    for row in table:
        at = 0
        for key in row:
            if key in found:
                at = found.index(key) + 1
            else:
                found.insert(at, key)
                at += 1
    return found


def to_csv(table: Sequence[Row]) -> str:
    """Every column; an unknown value is an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, names(table), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def to_markdown(sweep: SweepResults) -> str:
    """The columns that people compare; those that no run has are left out."""
    header, cells = _cells(sweep)
    right = [_is_number_column(column) for column in zip(*cells, strict=True)]
    lines = [header, [("---:" if is_right else "---") for is_right in right], *cells]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def to_text(sweep: SweepResults) -> str:
    """The same, aligned."""
    header, cells = _cells(sweep)
    columns = list(zip(header, *cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [_is_number_column(column[1:]) for column in columns]
    lines = [
        "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, right, strict=True)
        )
        for line in (header, *cells)
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def short(rate: float) -> str:
    """Three digits: `61,200`, `8.43`."""
    if rate >= 100:
        return f"{float(f'{rate:.3g}'):,.0f}"
    return f"{rate:#.3g}".rstrip(".")


def percent(metric: str, value: float) -> str:
    """An accuracy as a percentage, a loss with three digits."""
    return f"{100 * value:.1f} %" if metric.rpartition("/")[2].startswith("acc") else f"{value:.3g}"


def _cells(sweep: SweepResults) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the compact table, without columns that are empty everywhere."""
    columns: list[tuple[str, Callable[[Run], str]]] = [("run", lambda run: run.name)]
    for key in sweep.varied:
        if key != BATCH_SIZE and not (key == "device_name" and "device" in sweep.varied):
            columns.append(
                (key.rpartition(".")[2], lambda run, key=key: plain(run.settings[key]) if key in run.settings else "")
            )
    reached = scaling.efficiencies(sweep.runs)
    scaled = any(run.settings.get("optimizer.lr_scaling", "none") != "none" for run in sweep.runs)
    columns += [
        ("batch size", lambda run: _text(run.batch_size, "{:,}")),
        ("global", lambda run: _text(run.global_batch_size if run.processes > 1 else None, "{:,}")),
        ("samples/s", lambda run: _short(run.samples_per_sec)),
        ("p10–p90", _spread),
        ("median step ms", lambda run: _short(run.step_ms_median)),
        ("fastest–slowest mean ms", lambda run: "–".join(map(short, run.process_step_ms or ()))),
        ("mean wait/copy/fwd/bwd/opt/other %", _shares),
        ("of n× one %", lambda run: _percentage(reached.get(run.name))),
        ("comm %", lambda run: _percentage(scaling.communication_share(run))),
        ("busy %", lambda run: _text(run.busy_pct, "{:.0f}")),
        ("MFU %", lambda run: _percentage(run.mfu, "{:.1f}")),
        ("peak GiB", lambda run: _text(run.memory_peak_gib, "{:.2f}")),
        ("mJ/sample", lambda run: _short(None if run.joules_per_sample is None else 1e3 * run.joules_per_sample)),
        ("scaled lr", lambda run: _text(run.learning_rate if scaled else None, "{:.3g}")),
        *((name, lambda run, name=name: _metric(run, name)) for name in shown_metrics(sweep)),
        ("seconds", lambda run: _text(run.seconds, "{:,.0f}")),
        ("why not finished", lambda run: run.reason if len(run.reason) <= 90 else run.reason[:89] + "…"),
    ]
    filled = [(name, [of(run) for run in sweep.runs]) for name, of in columns]
    kept = [(name, cells) for name, cells in filled if any(cells)]
    return [name for name, _ in kept], [list(line) for line in zip(*(cells for _, cells in kept), strict=True)]


def shown_metrics(sweep: SweepResults) -> list[str]:
    """What tells best how good the runs became: of the test, or of the validation where nothing was tested.

    The accuracy where runs have one; the loss as well only if there are runs without.
    """
    found: list[str] = []
    for accuracy, loss in (_TEST, _VALIDATION):
        having = [run.metrics for run in sweep.runs if accuracy in run.metrics or loss in run.metrics]
        if having and not found:
            found += [accuracy] if any(accuracy in metrics for metrics in having) else []
            found += [loss] if any(accuracy not in metrics for metrics in having) else []
    return found


def _text(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _percentage(share: float | None, form: str = "{:.0f}") -> str:
    return "" if share is None else form.format(100 * share)


def _short(value: float | None) -> str:
    return "" if value is None else short(value)


def _spread(run: Run) -> str:
    low, high = run.samples_per_sec_p10, run.samples_per_sec_p90
    return "" if low is None or high is None else f"{short(low)}–{short(high)}"


def _shares(run: Run) -> str:
    total = sum(run.parts_ms.values())
    return "/".join(f"{100 * run.parts_ms[part] / total:.0f}" for part in PARTS) if total else ""


def _metric(run: Run, name: str) -> str:
    return "" if name not in run.metrics else percent(name, run.metrics[name])


def _is_number_column(cells: Sequence[str]) -> bool:
    return all(not cell or cell[0] in "0123456789.-−" for cell in cells)
