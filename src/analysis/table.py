"""The runs of a report as DataFrames: all numbers for CSV, and texts for people.

A run has a row, with the rate and the MFU as in the answer: from its windows (noise.py). Low and high are the ends of the
90 % interval. The time of a step is that of the same rate. A run without windows has the rate of its record.
"""

import itertools
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..errors import printable
from ..records.formatting import option_value, significant
from ..records.metrics import RUN_METRICS, best_first, metric, staged
from ..records.rates import RATE
from .between_groups import name_of, scaling_efficiencies
from .groups import Group, SweepResults, rates_of
from .run import BATCH_SIZE, Run
from .text import KNOWN, is_number_column, mean_and_deviation, reach_text

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
        rates = rates_of(dict(enumerate([run] for run in group.runs)), at_equal_load=True)
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
    return found | ({"mfu": rate * (run.values["mfu"] / run.values[RATE])} if "mfu" in run.values else {})


def quality_metrics(sweep: SweepResults) -> list[str]:
    """The metrics of the test, or of the validation where no run was tested, the most telling one first.

    Settings at one batch size each are chosen by the validation, so that its metrics come first, where there are any. Before
    them comes a metric that the runs were to optimize.
    """
    validated, tested = (_of_stage(stage, sweep.runs) for stage in ("val/", "test/"))
    is_by_validation = len(sweep.groups) > 1 and not any(len(group.sizes) > 1 for group in sweep.groups)
    known = [*validated, *tested] if is_by_validation else tested or validated
    return list(dict.fromkeys([*_optimized(sweep.runs), *known]))


def shown_metrics(sweep: SweepResults) -> list[str]:
    """Those of them that have a column: losses only where no metric is known to be better the higher it is."""
    found, asked = quality_metrics(sweep), _optimized(sweep.runs)
    has_accuracy = any(metric(name).higher_is_better for name in found)
    return [n for n in found if n in asked or metric(n).higher_is_better is not False or not has_accuracy]


def _optimized(runs: Sequence[Run]) -> list[str]:
    """The metrics that `optimized_metric` names on the command lines of runs; a sweeper that searches has it there."""
    pairs = (word.lstrip("+").partition("=") for run in runs for word in run.words)
    named = {staged(value.strip("'\"")) for option, _, value in pairs if option == "optimized_metric"}
    return [name for name in _of_stage("", runs) if name in named]


def _of_stage(stage: str, runs: Sequence[Run]) -> list[str]:
    return best_first(name for run in runs for name in run.metrics if name.startswith(stage))


def shown(sweep: SweepResults, frame: pd.DataFrame) -> pd.DataFrame:
    """The columns that people compare, as text, under their headings; an unknown value is empty."""
    factors = [key for key in sweep.factors if key not in (BATCH_SIZE, "device")]
    if "device" in sweep.factors and "device_name" not in factors:
        factors.insert(0, "device_name")  # it says more
    rate = ["learning_rate"] if scaled_rates(sweep.runs) else []
    names = [*_SHOWN, *rate, *shown_metrics(sweep), *_TO_TARGET, "seconds"]
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


def scaled_rates(runs: Sequence[Run]) -> dict[int, float]:
    """The learning rates of runs by their numbers; empty where they are one, or those that were asked for."""
    rates = {run.number: run.values["learning_rate"] for run in runs if "learning_rate" in run.values}
    asked = {run.number: run.asked_rate or 0.0 for run in runs}
    is_scaled = any(not math.isclose(rate, asked[run]) for run, rate in rates.items())
    return rates if is_scaled and len(set(rates.values())) > 1 else {}


def to_markdown(cells: pd.DataFrame) -> str:
    """A table of texts as Markdown; columns of numbers stand on the right."""
    right = ["---:" if is_number_column(cells[heading]) else "---" for heading in cells]
    lines = [list(map(str, cells.columns)), right, *cells.to_numpy().tolist()]
    escaped = ([" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped) + "\n"


# --- the sizes of a group: one table, from which the terminal, Markdown, the page, JSON and the plots are written -----


def size_table(group: Group, answer: "Answer | None" = None, metrics: Sequence[str] = ()) -> pd.DataFrame:
    """The numbers of a group, a row for each batch size, smallest first; of a size without a rate all are NaN.

    `low` and `high` are the ends of the 90 % interval of the rate, with what other programs may have lowered it by. `gain` is
    over the next smaller size, and `gain_reach` how far its interval reaches. `share` is that of the best rate, `loss` and
    `sure_loss` are those of the metric that decides which sizes are candidates (quality.py).
    """
    rates, known = group.rates, [size for size in group.sizes if size in group.rates.settings]
    frame = pd.DataFrame(index=pd.Index(sorted({*group.sizes, *group.without_rate}), name="batch_size"))
    frame["runs"] = pd.Series({size: len(runs) for size, runs in group.sizes.items()}, dtype=float)
    reach = {size: rates.reach(size) for size in known}
    gains = {size: rates.ratio(size, smaller) for smaller, size in itertools.pairwise(known)}
    columns: dict[str, Mapping[int, float]] = {
        RATE: {size: rates.rate(size) for size in known},
        "low": {size: rates.rate(size) / (1 + reach[size]) for size in known if math.isfinite(reach[size])},
        "high": {size: rates.rate(size) * (1 + reach[size]) for size in known if math.isfinite(reach[size])},
        "gain": {size: ratio.value - 1 for size, ratio in gains.items()},
        "gain_reach": {size: ratio.reach for size, ratio in gains.items()},
    }
    if answer and answer.overall:  # also of an answer by quality or by times to a target
        columns["share"] = {size: share.value for size, share in answer.overall.shares.items()}
        columns["sure_share"] = answer.overall.sure
    if answer and (quality := answer.quality):
        columns |= {"loss": {size: quality.loss(size) for size in quality.values}, "sure_loss": quality.sure or {}}
    columns |= {name: group.medians(name) for name in ("mfu", BUSY[group.device != "cpu"], "memory_peak_gib")}
    columns["learning_rate"] = _rate_of_sizes(group)
    for key in () if answer and answer.arrivals else metrics:  # runs to a target end at it, or early
        values = {size: [run.metrics[key] for run in runs if key in run.metrics] for size, runs in group.sizes.items()}
        columns[key] = {size: statistics.fmean(of_size) for size, of_size in values.items() if of_size}
        columns[f"{key}_sd"] = {size: statistics.stdev(of_size) for size, of_size in values.items() if len(of_size) > 1}
    for name, column in (columns | _of_progress(answer)).items():
        frame[name] = pd.Series(column, dtype=float)
    return frame


def _rate_of_sizes(group: Group) -> dict[int, float]:
    """The learning rate of each size where the sizes have different ones, and each has one."""
    rates = scaled_rates(group.runs)
    of_sizes = {size: {rates.get(run.number) for run in runs} for size, runs in group.sizes.items()}
    found = {size: rate for size, (rate, *others) in of_sizes.items() if rate is not None and not others}
    return found if len(found) == len(of_sizes) and len(set(found.values())) > 1 else {}


def _of_progress(answer: "Answer | None") -> dict[str, Mapping[int, float]]:
    """What the noise scale and the times to a target say of the sizes."""
    found: dict[str, Mapping[int, float]] = {}
    if answer and (progress := answer.progress):
        found["efficiency"] = {size: progress.efficiency(size) for size in progress.updates}
        found["goodput"] = {size: progress.goodput(size) for size in progress.updates}
    if answer and (arrivals := answer.arrivals):
        found["time_to_target_s"] = {size: arrival.seconds for size, arrival in arrivals.typical.items()}
        found["samples_to_target"] = {size: arrival.samples for size, arrival in arrivals.typical.items()}
        missing = arrivals.sizes.keys() - arrivals.typical.keys()
        found["not_reached_after_s"] = {
            size: max(arrival.after for arrival in arrivals.sizes[size].values()) for size in missing
        }
    return found


def size_texts(sizes: pd.DataFrame, device: str = "cpu") -> pd.DataFrame:
    """The numbers of `size_table` as texts under their headings; `?` marks what is not known to ± 10 %."""
    reach, rate = sizes["high"] / sizes[RATE] - 1, sizes[RATE].map(significant, na_action="ignore")
    found = {
        "samples/s": rate + reach.map(_mark),
        "±": reach[rate.notna()].map(lambda value: _tight(reach_text(value)) or "?"),
        "gain": sizes["gain"].map(_gain, na_action="ignore") + sizes["gain_reach"].map(_mark),
        "MFU": sizes["mfu"].map(_share_text, na_action="ignore") + reach.map(_mark),
    }
    if device != "cpu":
        found["busy"] = sizes[BUSY[1]].map("{:.0f}%".format, na_action="ignore")
    found["GiB"] = sizes["memory_peak_gib"].map(significant, na_action="ignore")
    rate = metric("learning_rate")
    found[rate.heading] = sizes["learning_rate"].map(rate.text, na_action="ignore")
    for key in (str(name).removesuffix("_sd") for name in sizes if str(name).endswith("_sd")):
        texts = [
            mean_and_deviation(key, *row) if pd.notna(row[0]) else "" for row in sizes[[key, f"{key}_sd"]].to_numpy()
        ]
        found[key] = pd.Series([_tight(text) for text in texts], sizes.index)
    if "efficiency" in sizes:
        found["efficiency"] = sizes["efficiency"].map(_share_text, na_action="ignore")
        found["goodput"] = sizes["goodput"].map(significant, na_action="ignore")
    if "time_to_target_s" in sizes:
        missed = sizes["not_reached_after_s"].map(lambda value: f"> {significant(value)}", na_action="ignore")
        found["s to target"] = sizes["time_to_target_s"].map(significant, na_action="ignore").fillna(missed)
        found["samples"] = sizes["samples_to_target"].map(significant, na_action="ignore")
    texts = pd.DataFrame(found, sizes.index).astype(object).fillna("")
    return texts.loc[:, (texts != "").any()]


def _mark(reach: float) -> str:
    return "" if reach <= KNOWN else "?"


def _gain(value: float) -> str:
    return f"{100 * value:+.0f}%" if abs(value) >= 0.005 else "0%"


def _share_text(value: float) -> str:
    return f"{100 * value:.1f}%" if value < 0.0995 else f"{100 * value:.0f}%"


def _tight(text: str) -> str:
    return text.replace(" %", "%").replace(" ± ", "±")


def settings_table(sweep: SweepResults, metrics: Sequence[str]) -> list[list[str]]:
    """A line for each group of a sweep in which each group ran at one batch size, below the headings."""
    texts = (size_texts(size_table(group, None, metrics), group.device) for group in sweep.groups)
    rows = [cells.iloc[0].to_dict() if len(cells) else {} for cells in texts]  # of a run without a size there is none
    names = [{"setting": name_of(group, sweep), "runs": str(len(group.runs))} for group in sweep.groups]
    table = pd.DataFrame([name | row for name, row in zip(names, rows, strict=True) if row]).fillna("")
    return [list(table.columns), *table.to_numpy().tolist()] if len(table) else []
