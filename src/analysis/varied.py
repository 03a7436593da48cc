"""Sweeps over another option than the batch size."""

import statistics

from ..records.formatting import significant
from ..records.metrics import metric
from ..records.rates import RATE
from .groups import SweepResults, label
from .recommend import ratio
from .run import BATCH_SIZE, SEED, Run
from .table import shown_metrics


def compare_options(sweep: SweepResults) -> list[str]:
    """A line on the fastest and a line on the best option, for runs that do not differ in batch size alone."""
    if "data" in sweep.varied:
        return ["The runs are on different data: there is nothing to compare."]
    lines = []
    keys = [key for key in sweep.varied if key != SEED]
    rates = _medians(sweep.runs, keys, RATE)
    if len(rates) > 1:
        best, worst = max(rates, key=rates.__getitem__), min(rates, key=rates.__getitem__)
        faster = ratio(rates[best], rates[worst])
        lines.append(f"Fastest: {best}, {significant(rates[best])} samples/s, {faster} than {worst}.")
    comparable = (found for found in map(metric, shown_metrics(sweep)) if found.higher_is_better is not None)
    for declared in list(comparable)[:1]:
        reached = _medians(sweep.runs, keys, declared.key)
        if len(reached) > 1:
            best = (max if declared.higher_is_better else min)(reached, key=reached.__getitem__)
            lines.append(f"Best {declared.key}: {best}, {declared.text(reached[best])}.")
    return lines


def _medians(runs: list[Run], keys: list[str], name: str) -> dict[str, float]:
    """The median of a number over the runs that share the settings `keys`, by these settings in words."""
    values: dict[str, list[float]] = {}
    for run in runs:
        if name in run.values:
            words = label(run, [key for key in keys if key != BATCH_SIZE])
            if BATCH_SIZE in keys and run.batch_size:
                words += f" · batch size {run.batch_size:,}"
            values.setdefault(words, []).append(run.values[name])
    return {words: statistics.median(found) for words, found in values.items()}
