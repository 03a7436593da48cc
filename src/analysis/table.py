"""The runs and the batch sizes of a report as DataFrames: numbers for programs, and texts for people.

The rate and the MFU of a run or a size are those of the answer: from the windows of runs (noise.py), or from the record
where a run has no windows. Low and high are the ends of the rate's 90 % interval. The typical step time follows from the rate.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from ..errors import cut, printable
from ..records.formatting import option_value, significant
from ..records.metrics import RUN_METRICS, best_first, metric
from ..records.rates import RATE
from ..records.step_parts import PARTS
from .answer import Answer
from .between_groups import group_names, rate_ratios_to_first
from .groups import SweepResults, compared_rates, short_names
from .noise import Rates, Ratio, ratio_text
from .quality import metric_interval, seed_means
from .run import BATCH_SIZE, Run
from .text import HARDLY, KNOWN, VAGUE, is_number_column, mean_and_deviation, reach_text

LOW, HIGH, STEP_MS = f"{RATE}_low", f"{RATE}_high", "step_ms_typical"
BUSY = ("processor_time_pct", "utilization_pct")  # of a CPU, of an accelerator
PART_MS = tuple(f"{part}_ms_mean" for part in PARTS)
_LONGEST = 90  # characters of a reason
_MARKED = (RATE, STEP_MS, "mfu")  # columns with the relative interval of the rate
_BATCH_SIZES = ("batch_size", "global_batch_size")
_TO_TARGET = ("time_to_target_s", "samples_to_target")
_SHOWN = (STEP_MS, "mfu", *BUSY, "memory_peak_gib", "joules_per_sample", "learning_rate", "seconds")
_MEANINGS = {
    "±": "90 % interval in this sweep",
    "MFU": "model FLOPs utilization of measured peak",
    "busy": "time in which a kernel ran",
    "÷ first": "rate ÷ that of the first setting, with lower ends that all hold with 95 % confidence",
}


def run_table(sweep: SweepResults) -> pd.DataFrame:
    """Return all that is known of each run, a row each in the order of the sweep; an unknown value is NaN."""
    rows: dict[int, dict[str, Any]] = {}  # by the number of the run
    for group in sweep.groups:
        rates = compared_rates(dict(enumerate([run] for run in group.runs)), at_equal_load=True)
        for number, run in enumerate(group.runs):
            row: dict[str, Any] = {key: run.settings.get(key) for key in sweep.factors} | run.values
            if number in rates.settings:  # the rate of a run, and what follows from it
                row[RATE], (row[LOW], row[HIGH]) = rates.rate(number), _interval_ends(rates, number)
                row |= {STEP_MS: 1e3 * run.samples_a_step / row[RATE]} if run.samples_a_step else {}
                if {"mfu", RATE} <= run.values.keys():
                    row["mfu"] = row[RATE] * (run.values["mfu"] / run.values[RATE])
            rows[run.number] = row | {"run": run.name, "group": group.label, "status": run.status}
            rows[run.number] |= {"bottleneck": run.bottleneck or None, "reason": run.reason or None}
    settings = [key for key in sweep.factors if key != BATCH_SIZE]
    metrics = [name for stage in ("test/", "val/", "") for name in _stage_metrics(stage, sweep.runs)]
    measured = [name for name in RUN_METRICS if name != "seconds"]
    columns = dict.fromkeys(
        ["run", "group", *settings, *measured, "bottleneck", *metrics, "seconds", "status", "reason"]
    )
    frame = pd.DataFrame([rows[run.number] for run in sweep.runs], columns=list(columns), dtype=object)
    return frame.dropna(axis="columns", how="all")


def _interval_ends(rates: Rates, setting: int) -> tuple[float, float]:
    """Return both ends of the 90 % interval of a rate; NaN where the interval is so wide that it says nothing."""
    rate, reach = rates.rate(setting), rates.reach(setting)
    return (rate / (1 + reach), rate * (1 + reach)) if reach < HARDLY else (math.nan, math.nan)


def quality_metrics(sweep: SweepResults) -> list[str]:
    """Return the metrics of the test, or of the validation where no run was tested, the most telling one first.

    Settings at one batch size each are chosen by the validation: of these its metrics come first, where there are any.
    """
    validated, tested = (_stage_metrics(stage, sweep.runs) for stage in ("val/", "test/"))
    is_by_validation = len(sweep.groups) > 1 and not any(len(group.sizes) > 1 for group in sweep.groups)
    return [*validated, *tested] if is_by_validation else tested or validated


def shown_metrics(sweep: SweepResults) -> list[str]:
    """Return the quality metrics that have a column: losses have one only where no metric is better if it is higher."""
    names = quality_metrics(sweep)
    has_accuracy = any(metric(name).higher_is_better for name in names)
    return [name for name in names if metric(name).higher_is_better is not False or not has_accuracy]


def _stage_metrics(stage: str, runs: Sequence[Run]) -> list[str]:
    return best_first(name for run in runs for name in run.metrics if name.startswith(stage))


def scaled_rates(runs: Sequence[Run]) -> dict[int, float]:
    """Return the learning rates by the runs' numbers; empty where all are equal, or all are those that were asked for."""
    rates = {run.number: run.values["learning_rate"] for run in runs if "learning_rate" in run.values}
    asked = {run.number: run.asked_rate or 0.0 for run in runs}
    is_scaled = any(not math.isclose(rate, asked[number]) for number, rate in rates.items())
    return rates if is_scaled and len(set(rates.values())) > 1 else {}


# --- the sizes of a group: one table, from which the terminal, Markdown, the page, JSON and the plots are written -----


def size_table(answer: Answer, metrics: Sequence[str] = ()) -> pd.DataFrame:
    """Return the numbers of a group, a row for each batch size, smallest first; all numbers of a size without a rate are NaN.

    `low` and `high` are the ends of the 90 % interval of the rate, with an allowance for the load of other programs. The typical
    step time follows from the rate. `gain` is the gain over the next smaller size, `gain_reach` how far its interval reaches.
    `share` is the share of the best rate, `loss` and `sure_loss` are those of the metric that decides on candidates (quality.py).
    """
    group = answer.group
    rates = group.rates
    measured = [size for size in group.sizes if size in rates.settings]
    gains = {size: rates.ratio(size, smaller) for smaller, size in itertools.pairwise(measured)}
    samples = {size: next(filter(None, (run.samples_a_step for run in group.sizes[size])), None) for size in measured}
    columns: dict[str, Mapping[int, float]] = {
        "runs": {size: len(runs) for size, runs in group.sizes.items()},
        RATE: {size: rates.rate(size) for size in measured},
        "low": {size: _interval_ends(rates, size)[0] for size in measured},
        "high": {size: _interval_ends(rates, size)[1] for size in measured},
        STEP_MS: {size: 1e3 * number / rates.rate(size) for size, number in samples.items() if number},
        "gain": {size: ratio.value - 1 for size, ratio in gains.items()},
        "gain_reach": {size: ratio.reach for size, ratio in gains.items()},
    }

    def medians(name: str, per: str = "") -> dict[int, float]:
        """Return the median over repeated runs, at every size at which it is known."""
        keys = {name, per} - {""}
        values = {s: [run.values for run in runs if keys <= run.values.keys()] for s, runs in group.timed.items()}
        return {s: statistics.median(v[name] / v.get(per, 1) for v in runs) for s, runs in values.items() if runs}

    # A sample a second takes a known share of the peak: MFU follows from the rate.
    columns["mfu"] = {size: rates.rate(size) * share for size, share in medians("mfu", RATE).items()}
    busy = BUSY[all(run.device != "cpu" for run in group.runs)]
    columns |= {name: medians(name) for name in (busy, "memory_peak_gib", *PART_MS)}
    scaled = scaled_rates(group.runs)
    learning_rates = {size: {scaled.get(run.number) for run in runs} for size, runs in group.sizes.items()}
    columns["learning_rate"] = {size: lr for size, (lr, *more) in learning_rates.items() if lr and not more}
    for key in () if answer.arrivals else metrics:  # runs to a target end at it, or early
        tested = {size: [run for run in runs if key in run.metrics] for size, runs in group.sizes.items()}
        seed_values = {size: seed_means(runs, key) for size, runs in tested.items() if runs}
        columns[key] = {size: statistics.fmean(values) for size, values in seed_values.items()}
        intervals = {size: metric_interval(tested[size], key) for size in seed_values}
        columns[f"{key}_low"] = {size: low for size, (low, _) in intervals.items()}
        columns[f"{key}_high"] = {size: high for size, (_, high) in intervals.items()}
        columns[f"{key}_sd"] = {s: statistics.stdev(values) for s, values in seed_values.items() if len(values) > 1}
    if answer.overall:  # also of an answer by quality or by times to a target
        columns["share"] = {size: share.value for size, share in answer.overall.shares.items()}
        columns["sure_share"] = answer.overall.sure
    if quality := answer.quality:
        columns |= {"loss": {size: quality.loss(size) for size in quality.values}, "sure_loss": quality.sure or {}}
    if arrivals := answer.arrivals:
        typical = arrivals.typical
        not_reached = {
            size: max((arrival.after for arrival in seeds.values() if math.isinf(arrival.seconds)), default=math.nan)
            for size, seeds in arrivals.sizes.items()
        }
        columns["seeds"] = {size: len(seeds) for size, seeds in arrivals.sizes.items()}
        columns["arrived"] = arrivals.arrived
        columns["time_to_target_s"] = {size: arrival.seconds for size, arrival in typical.items()}
        columns["samples_to_target"] = {size: arrival.samples for size, arrival in typical.items()}
        columns["not_reached_after_s"] = not_reached | {size: arrival.after for size, arrival in typical.items()}
    index = pd.Index(sorted({*group.sizes, *group.without_rate}), name="batch_size")
    return pd.DataFrame({name: pd.Series(column, index, dtype=float) for name, column in columns.items()}, index)


# --- texts: `?` marks a number whose interval is wider than ± 10 % -----------------------------------------------------


def run_texts(sweep: SweepResults, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of `run_table` that people compare, as texts under their headings; empty for an unknown value."""
    factors = [key for key in sweep.factors if key not in (BATCH_SIZE, "device")]
    if "device" in sweep.factors and "device_name" not in factors:
        factors.insert(0, "device_name")  # the name says more than the kind
    texts, names = {"run": [run.name for run in sweep.runs]}, short_names(["run", *factors])
    for key in factors:
        texts[names[key]] = [option_value(run.settings.get(key, "")) for run in sweep.runs]
    hidden = [] if scaled_rates(sweep.runs) else ["learning_rate"]
    shown = [*_BATCH_SIZES, *shown_metrics(sweep), RATE, *_TO_TARGET, *_SHOWN]
    texts |= _texts(frame, [name for name in shown if name not in hidden], rate_reaches(frame, HIGH))
    texts["limit"] = [run.bottleneck for run in sweep.runs]
    texts["why not finished"] = [cut(run.reason, _LONGEST) for run in sweep.runs]
    return pd.DataFrame({heading: [*map(printable, cells)] for heading, cells in texts.items() if any(cells)})


def size_texts(sizes: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """Return the numbers of `size_table`, and of these metrics, as texts under their headings."""
    reaches = rate_reaches(sizes)
    columns = _texts(sizes, [RATE], reaches)
    for key in [name for name in metrics if name in sizes]:
        means = sizes[[key, f"{key}_sd"]].to_numpy()
        columns[key] = [mean_and_deviation(key, mean, deviation) for mean, deviation in means]
    columns |= _texts(sizes, _TO_TARGET, reaches)
    if times := columns.get(metric("time_to_target_s").heading):
        reasons = [
            f"{arrived:.0f} of {seeds:.0f} seeds" if arrived > 0 else f"not within {significant(s)} s" if s >= 0 else ""
            for arrived, seeds, s in sizes[["arrived", "seeds", "not_reached_after_s"]].to_numpy()
        ]
        columns[metric("time_to_target_s").heading] = [time or why for time, why in zip(times, reasons, strict=True)]
    gains = [f"{gain:+.0%}".replace("+0%", "0%").replace("-0%", "0%") for gain in sizes["gain"]]
    gain_reaches = zip(gains, sizes["gain_reach"], strict=True)
    columns["gain"] = [
        "" if math.isnan(reach) else gain + _mark(reach) if reach < HARDLY else "?" for gain, reach in gain_reaches
    ]
    columns |= _texts(sizes, ["mfu", BUSY[1], "memory_peak_gib", "learning_rate"], reaches)
    cells = pd.DataFrame(columns, sizes.index)
    return cells.loc[:, (cells != "").any()].rename(lambda size: f"{size:,}").rename_axis("batch size")


def _texts(frame: pd.DataFrame, names: Sequence[str], reaches: pd.Series) -> dict[str, list[str]]:
    """Return columns as texts by their headings, and behind the rate how far its interval reaches."""
    columns = {}
    for name in (name for name in names if name in frame):
        declared = metric(name)
        marks = [_mark(reach) if name in _MARKED else "" for reach in reaches]
        cells = zip(frame[name], marks, strict=True)
        columns[declared.heading or name] = [declared.cell(n) + mark if pd.notna(n) else "" for n, mark in cells]
        if name == RATE:
            intervals = zip(frame[RATE], reaches, strict=True)
            columns["±"] = [reach_text(reach) if pd.notna(rate) else "" for rate, reach in intervals]
    return columns


def rate_reaches(numbers: pd.DataFrame, high: str = "high") -> pd.Series:
    """Return how far the interval of each rate reaches, as a fraction of the rate; `high` is the column of the upper ends."""
    return numbers[high] / numbers[RATE] - 1 if high in numbers else pd.Series(math.nan, numbers.index)


def _mark(reach: float) -> str:
    return "" if reach <= KNOWN else "?"


def setting_texts(sweep: SweepResults, tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return a row for each group of a sweep in which each group ran at one batch size; a group without a size has no row."""
    metrics, ratios = shown_metrics(sweep), rate_ratios_to_first(sweep)
    rows = {n: size_texts(sizes, metrics[:2]).to_dict("records") for n, sizes in enumerate(tables)}
    first_rows = {n: records[0] for n, records in rows.items() if records}
    names, runs = group_names(sweep, sweep.group_keys), [str(len(group.runs)) for group in sweep.groups]
    unknown = dict.fromkeys(metrics, "")
    cells = [{"setting": names[n], "runs": runs[n], **unknown, **row} for n, row in first_rows.items()]
    texts = pd.DataFrame(cells).fillna("")
    texts["÷ first"] = [_ratio_cell(ratios.get(n)) for n in first_rows]
    shown = [(column != "").any() and (name != "runs" or (column != "1").any()) for name, column in texts.items()]
    return texts.loc[:, shown]


def _ratio_cell(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    if ratio.low == ratio.high:  # the same speed by its settings
        return ratio_text(ratio.value)
    return f"{ratio_text(ratio.value)} ({ratio.span})" if ratio.span else "?"


def legend(texts: pd.DataFrame) -> str:
    """Say what the headings and the marks mean that are in a table of texts."""
    cells = [cell for cell in texts.to_numpy().ravel() if cell[:1] in ("?", *"0123456789+-")]  # no names
    meanings = {heading: words for heading, words in _MEANINGS.items() if any(heading in str(name) for name in texts)}
    meanings |= {"a±b": "mean and standard deviation of the seeds"} if any("±" in cell for cell in cells) else {}
    meanings |= {"?": VAGUE} if any(cell[1:].endswith("?") for cell in cells) else {}
    meanings |= {"? alone": "not known"} if "?" in cells else {}
    return "; ".join(f"{sign}: {words}" for sign, words in meanings.items())


def to_markdown(cells: pd.DataFrame) -> str:
    """Return a table of texts as Markdown, with columns of numbers on the right."""
    alignment = ["---:" if is_number_column(cells[heading]) else "---" for heading in cells]
    lines = [list(map(str, cells.columns)), alignment, *cells.to_numpy().tolist()]
    escaped = ([" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped) + "\n"
