"""The runs and the batch sizes of a report as DataFrames: numbers for programs, and texts of them for people.

The rate and the MFU of a run or a size are those of the answer: from the windows of runs (noise.py), or from the record
where a run has none. Low and high are the ends of the 90 % interval of the rate. The time of a step is that of the same
rate.
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
from .between_groups import group_names, ratios_to_first
from .groups import SweepResults, rates_of, short_names
from .noise import Rates, Ratio, ratio_text
from .quality import metric_interval, seed_means
from .run import BATCH_SIZE, Run
from .text import HARDLY, KNOWN, VAGUE, is_number_column, mean_and_deviation, reach_text

LOW, HIGH, STEP_MS = f"{RATE}_low", f"{RATE}_high", "step_ms_typical"
BUSY = ("processor_time_pct", "utilization_pct")  # of a CPU, of an accelerator
PART_MS = tuple(f"{part}_ms_mean" for part in PARTS)
_LONGEST = 90  # characters of a reason
_MARKED = (RATE, STEP_MS, "mfu")  # what is known as well as the rate is
_OF_RUN = ("batch_size", "global_batch_size")
_TO_TARGET = ("time_to_target_s", "samples_to_target")
_SHOWN = (STEP_MS, "mfu", *BUSY, "memory_peak_gib", "joules_per_sample", "learning_rate", "seconds")
_MEANINGS = {
    "±": "90 % interval in this sweep",
    "MFU": "model FLOPs utilization of measured peak",
    "busy": "time in which a kernel ran",
    "÷ first": "rate ÷ that of the first setting, with lower ends that all hold with 95 % confidence",
}


def run_table(sweep: SweepResults) -> pd.DataFrame:
    """All that is known of each run, in the order of the sweep; an unknown value is NaN."""
    rows: dict[int, dict[str, Any]] = {}  # by the number of the run
    for group in sweep.groups:
        rates = rates_of(dict(enumerate([run] for run in group.runs)), at_equal_load=True)
        for number, run in enumerate(group.runs):
            known: dict[str, Any] = {key: run.settings.get(key) for key in sweep.factors} | run.values
            if number in rates.settings:  # the rate of a run, and what follows from it
                known[RATE], (known[LOW], known[HIGH]) = rates.rate(number), _ends(rates, number)
                known |= {STEP_MS: 1e3 * run.samples_a_step / known[RATE]} if run.samples_a_step else {}
                if {"mfu", RATE} <= run.values.keys():
                    known["mfu"] = known[RATE] * (run.values["mfu"] / run.values[RATE])
            rows[run.number] = known | {"run": run.name, "group": group.label, "status": run.status}
            rows[run.number] |= {"bottleneck": run.bottleneck or None, "reason": run.reason or None}
    settings = [key for key in sweep.factors if key != BATCH_SIZE]
    metrics = [name for stage in ("test/", "val/", "") for name in _of_stage(stage, sweep.runs)]
    measured = [name for name in RUN_METRICS if name != "seconds"]
    columns = dict.fromkeys(
        ["run", "group", *settings, *measured, "bottleneck", *metrics, "seconds", "status", "reason"]
    )
    frame = pd.DataFrame([rows[run.number] for run in sweep.runs], columns=list(columns), dtype=object)
    return frame.dropna(axis="columns", how="all")


def _ends(rates: Rates, setting: int) -> tuple[float, float]:
    """Both ends of the 90 % interval of a rate; NaN where it is so wide that it says nothing."""
    rate, reach = rates.rate(setting), rates.reach(setting)
    return (rate / (1 + reach), rate * (1 + reach)) if reach < HARDLY else (math.nan, math.nan)


def quality_metrics(sweep: SweepResults) -> list[str]:
    """The metrics of the test, or of the validation where no run was tested, the most telling one first.

    Settings at one batch size each are chosen by the validation, so that its metrics come first, where there are any.
    """
    validated, tested = (_of_stage(stage, sweep.runs) for stage in ("val/", "test/"))
    is_by_validation = len(sweep.groups) > 1 and not any(len(group.sizes) > 1 for group in sweep.groups)
    return [*validated, *tested] if is_by_validation else tested or validated


def shown_metrics(sweep: SweepResults) -> list[str]:
    """Those of them that have a column: losses only where no metric is known to be better the higher it is."""
    known = quality_metrics(sweep)
    has_accuracy = any(metric(name).higher_is_better for name in known)
    return [n for n in known if metric(n).higher_is_better is not False or not has_accuracy]


def _of_stage(stage: str, runs: Sequence[Run]) -> list[str]:
    return best_first(name for run in runs for name in run.metrics if name.startswith(stage))


def scaled_rates(runs: Sequence[Run]) -> dict[int, float]:
    """The learning rates of runs by their numbers; empty where they are one, or those that were asked for."""
    rates = {run.number: run.values["learning_rate"] for run in runs if "learning_rate" in run.values}
    asked = {run.number: run.asked_rate or 0.0 for run in runs}
    is_scaled = any(not math.isclose(rate, asked[run]) for run, rate in rates.items())
    return rates if is_scaled and len(set(rates.values())) > 1 else {}


# --- the sizes of a group: one table, from which the terminal, Markdown, the page, JSON and the plots are written -----


def size_table(answer: Answer, metrics: Sequence[str] = ()) -> pd.DataFrame:
    """The numbers of a group, a row for each batch size, smallest first; of a size without a rate all are NaN.

    `low` and `high` are the ends of the 90 % interval of the rate, with what other programs may have lowered it by. The typical
    step is that of the rate. `gain` is over the next smaller size, and `gain_reach` how far its interval reaches. `share` is that
    of the best rate, `loss` and `sure_loss` are those of the metric that decides which sizes are candidates (quality.py).
    """
    group = answer.group
    rates = group.rates
    known = [size for size in group.sizes if size in rates.settings]
    gains = {size: rates.ratio(size, smaller) for smaller, size in itertools.pairwise(known)}
    samples = {size: next(filter(None, (run.samples_a_step for run in group.sizes[size])), None) for size in known}
    columns: dict[str, Mapping[int, float]] = {
        "runs": {size: len(runs) for size, runs in group.sizes.items()},
        RATE: {size: rates.rate(size) for size in known},
        "low": {size: _ends(rates, size)[0] for size in known},
        "high": {size: _ends(rates, size)[1] for size in known},
        STEP_MS: {size: 1e3 * number / rates.rate(size) for size, number in samples.items() if number},
        "gain": {size: ratio.value - 1 for size, ratio in gains.items()},
        "gain_reach": {size: ratio.reach for size, ratio in gains.items()},
    }

    def medians(name: str, per: str = "") -> dict[int, float]:
        """Over repeated runs, at every size at which it is known."""
        needs = {name, per} - {""}
        of = {size: [run.values for run in runs if needs <= run.values.keys()] for size, runs in group.timed.items()}
        return {s: statistics.median(v[name] / v.get(per, 1) for v in values) for s, values in of.items() if values}

    # MFU is that of the rate: by the share of the peak that a sample a second takes.
    columns["mfu"] = {size: rates.rate(size) * share for size, share in medians("mfu", RATE).items()}
    busy = BUSY[all(run.device != "cpu" for run in group.runs)]
    columns |= {name: medians(name) for name in (busy, "memory_peak_gib", *PART_MS)}
    scaled = scaled_rates(group.runs)
    of_sizes = {size: {scaled.get(run.number) for run in runs} for size, runs in group.sizes.items()}
    columns["learning_rate"] = {size: rate for size, (rate, *others) in of_sizes.items() if rate and not others}
    for key in () if answer.arrivals else metrics:  # runs to a target end at it, or early
        tested = {size: [run for run in runs if key in run.metrics] for size, runs in group.sizes.items()}
        values = {size: seed_means(runs, key) for size, runs in tested.items() if runs}
        columns[key] = {size: statistics.fmean(of_size) for size, of_size in values.items()}
        ends = {size: metric_interval(tested[size], key) for size in values}
        columns |= {f"{key}_{end}": {size: of[n] for size, of in ends.items()} for n, end in enumerate(("low", "high"))}
        columns[f"{key}_sd"] = {size: statistics.stdev(of_size) for size, of_size in values.items() if len(of_size) > 1}
    if answer.overall:  # also of an answer by quality or by times to a target
        columns["share"] = {size: share.value for size, share in answer.overall.shares.items()}
        columns["sure_share"] = answer.overall.sure
    if quality := answer.quality:
        columns |= {"loss": {size: quality.loss(size) for size in quality.values}, "sure_loss": quality.sure or {}}
    if arrivals := answer.arrivals:
        typical = arrivals.typical
        late = {s: [one.after for one in of.values() if math.isinf(one.seconds)] for s, of in arrivals.sizes.items()}
        after = {size: max(seconds) for size, seconds in late.items() if seconds}
        columns["seeds"] = {size: len(runs) for size, runs in arrivals.sizes.items()}
        columns["arrived"] = arrivals.arrived
        columns["time_to_target_s"] = {size: arrival.seconds for size, arrival in typical.items()}
        columns["samples_to_target"] = {size: arrival.samples for size, arrival in typical.items()}
        columns["not_reached_after_s"] = after | {size: arrival.after for size, arrival in typical.items()}
    index = pd.Index(sorted({*group.sizes, *group.without_rate}), name="batch_size")
    return pd.DataFrame({name: pd.Series(column, index, dtype=float) for name, column in columns.items()}, index)


# --- texts: `?` marks what has an interval wider than ± 10 % -----------------------------------------------------------


def run_texts(sweep: SweepResults, frame: pd.DataFrame) -> pd.DataFrame:
    """The columns of `run_table` that people compare, as texts under their headings; an unknown value is empty."""
    factors = [key for key in sweep.factors if key not in (BATCH_SIZE, "device")]
    if "device" in sweep.factors and "device_name" not in factors:
        factors.insert(0, "device_name")  # it says more
    texts, names = {"run": [run.name for run in sweep.runs]}, short_names(["run", *factors])
    for key in factors:
        texts[names[key]] = [option_value(run.settings.get(key, "")) for run in sweep.runs]
    hidden = [] if scaled_rates(sweep.runs) else ["learning_rate"]
    shown = [*_OF_RUN, *shown_metrics(sweep), RATE, *_TO_TARGET, *_SHOWN]
    texts |= _texts(frame, [name for name in shown if name not in hidden], reach_of(frame, HIGH))
    texts["limit"] = [run.bottleneck for run in sweep.runs]
    texts["why not finished"] = [cut(run.reason, _LONGEST) for run in sweep.runs]
    return pd.DataFrame({heading: [*map(printable, cells)] for heading, cells in texts.items() if any(cells)})


def size_texts(sizes: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """The numbers of `size_table` as texts under their headings, with those of these metrics."""
    reach = reach_of(sizes)
    found = _texts(sizes, [RATE], reach)
    for key in [name for name in metrics if name in sizes]:
        means = sizes[[key, f"{key}_sd"]].to_numpy()
        found[key] = [mean_and_deviation(key, mean, deviation) for mean, deviation in means]
    found |= _texts(sizes, _TO_TARGET, reach)
    if late := found.get(metric("time_to_target_s").heading):
        after = [
            f"{n:.0f} of {of:.0f} seeds" if n > 0 else f"not within {significant(s)} s" if s >= 0 else ""
            for n, of, s in sizes[["arrived", "seeds", "not_reached_after_s"]].to_numpy()
        ]
        found[metric("time_to_target_s").heading] = [text or never for text, never in zip(late, after, strict=True)]
    gains = [f"{gain:+.0%}".replace("+0%", "0%").replace("-0%", "0%") for gain in sizes["gain"]]
    marked = zip(gains, sizes["gain_reach"], strict=True)
    found["gain"] = ["" if math.isnan(reaches) else gain + _mark(reaches) for gain, reaches in marked]
    found |= _texts(sizes, ["mfu", BUSY[1], "memory_peak_gib", "learning_rate"], reach)
    cells = pd.DataFrame(found, sizes.index)
    return cells.loc[:, (cells != "").any()].rename(lambda size: f"{size:,}").rename_axis("batch size")


def _texts(frame: pd.DataFrame, names: Sequence[str], reach: pd.Series) -> dict[str, list[str]]:
    """Columns as texts by their headings, and behind the rate how far its interval reaches."""
    found = {}
    for name in (name for name in names if name in frame):
        of = metric(name)
        marks = [_mark(reaches) if name in _MARKED else "" for reaches in reach]
        cells = zip(frame[name], marks, strict=True)
        found[of.heading or name] = [of.cell(value) + mark if pd.notna(value) else "" for value, mark in cells]
        if name == RATE:
            ends = zip(frame[RATE], reach, strict=True)
            found["±"] = [reach_text(reaches) if pd.notna(value) else "" for value, reaches in ends]
    return found


def reach_of(numbers: pd.DataFrame, high: str = "high") -> pd.Series:
    """How far the interval of each rate reaches, as a part of it, by the column of the upper ends; NaN where that is not known."""
    return numbers[high] / numbers[RATE] - 1 if high in numbers else pd.Series(math.nan, numbers.index)


def _mark(reach: float) -> str:
    return "" if reach <= KNOWN else "?"


def setting_texts(sweep: SweepResults, tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """A row for each group of a sweep in which each ran at one batch size; of a run without a size there is none."""
    metrics, ratios = shown_metrics(sweep), ratios_to_first(sweep)
    of_groups = [size_texts(sizes, metrics[:2]).to_dict("records") for sizes in tables]
    names, runs = group_names(sweep, sweep.group_keys), [str(len(group.runs)) for group in sweep.groups]
    unknown = dict.fromkeys(metrics, "")
    cells = [
        {"setting": names[n], "runs": runs[n], **unknown, **of_sizes[0]}
        for n, of_sizes in enumerate(of_groups)
        if of_sizes
    ]
    texts = pd.DataFrame(cells).fillna("")
    texts["÷ first"] = [_ratio_cell(ratios.get(n)) for n, of_sizes in enumerate(of_groups) if of_sizes]
    return texts.loc[
        :, [(column != "").any() and (name != "runs" or (column != "1").any()) for name, column in texts.items()]
    ]


def _ratio_cell(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    if ratio.low == ratio.high:  # the same speed by its settings
        return ratio_text(ratio.value)
    return f"{ratio_text(ratio.value)} ({ratio.span})" if ratio.span else "?"


def legend(texts: pd.DataFrame) -> str:
    """What the headings and the marks of a table of texts mean: those that are in it."""
    cells = [cell for cell in texts.to_numpy().ravel() if cell[:1] in ("?", *"0123456789+-")]  # no names
    said = {heading: words for heading, words in _MEANINGS.items() if any(heading in str(name) for name in texts)}
    said |= {"a±b": "mean and standard deviation of the seeds"} if any("±" in cell for cell in cells) else {}
    said |= {"?": VAGUE} if any(cell[1:].endswith("?") for cell in cells) else {}
    said |= {"? alone": "not known"} if "?" in cells else {}
    return "; ".join(f"{sign}: {words}" for sign, words in said.items())


def to_markdown(cells: pd.DataFrame) -> str:
    """A table of texts as Markdown; columns of numbers stand on the right."""
    right = ["---:" if is_number_column(cells[heading]) else "---" for heading in cells]
    lines = [list(map(str, cells.columns)), right, *cells.to_numpy().tolist()]
    escaped = ([" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped) + "\n"
