"""Sentences on runs that differ in something else than the batch size: options, seeds, and `compile`.

A sentence is as strong as the interval of the ratio that it is about (noise.py).
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence

from ..records.formatting import count, duration, option_value, percent, significant
from ..records.metrics import FRACTION, metric
from ..records.rates import RATE
from .groups import Group, SweepResults, label, rates_of
from .noise import Rates, Ratio
from .quality import quality_of
from .run import BATCH_SIZE, SEED, Run

KNOWN = 0.1  # a ratio that is known to ± 10 % is a number; of another one the nearer end is said
_MOST_NAMED = 4
_COMPILE = "compile"


def times_as_fast(ratio: Ratio) -> str:
    """How much faster something is that is shown to be faster: `1.88 times as fast`, `at least 1.3 times as fast`."""
    if ratio.reach <= KNOWN:
        return f"{significant(ratio.value)} times as fast"
    factor = math.floor(10 * ratio.low) / 10
    return f"at least {factor:.1f} times as fast" if factor > 1 else "faster"


def busy_words(rates: Rates) -> str:
    """What a busy machine allows to say; empty on a quiet one."""
    if rates.busy is None:
        return ""
    return (
        f"The machine was busy: other programs took {percent(rates.busy)} of the processor. Close them and repeat "
        "the sweep."
    )


def compare_settings(sweep: SweepResults, metrics: Sequence[str]) -> list[str]:
    """What the groups of a sweep have to say about each other, of which each ran at one batch size."""
    if "data" in sweep.varied:
        return ["The runs are on different data: their rates and metrics are not compared."]
    groups = dict(enumerate(sweep.groups))
    names = {number: name_of(group, sweep) for number, group in groups.items()}
    measured = {n: runs for n, group in groups.items() if (runs := [r for r in group.runs if RATE in r.values])}
    lines = [_fastest(measured, names)] if len(measured) > 1 else []
    return [line for line in (*lines, _best({n: g.runs for n, g in groups.items()}, names, metrics)) if line]


def name_of(group: Group, sweep: SweepResults) -> str:
    """The label of a group at one batch size, with this size where others ran at another one."""
    size = group.runs[0].batch_size
    return f"{group.label} · batch size {size:,}" if BATCH_SIZE in sweep.varied and size else group.label


def _fastest(settings: Mapping[int, Sequence[Run]], names: Mapping[int, str]) -> str:
    rates = rates_of(settings)
    known = [number for number in settings if math.isfinite(rates.reach(number))]
    if rates.busy is not None:
        return busy_words(rates)
    if not known:
        return "No rate is known well enough to be compared: the runs measured too few steps."
    best = max(known, key=rates.rate)
    ratios = {number: rates.ratio(best, number) for number in settings if number != best}
    alike = [number for number, ratio in ratios.items() if ratio.low <= 1]
    if not alike:
        second = min(ratios, key=lambda number: ratios[number].value)
        return f"{names[best]} is the fastest: {times_as_fast(ratios[second])} as {names[second]}."
    line = f"No difference in speed is shown between {_and([names[n] for n in sorted([best, *alike])])}"
    slower = [names[number] for number in ratios if number not in alike]
    return f"{line}; slower than {names[best]}: {_and(slower)}." if slower else f"{line}."


def _best(settings: Mapping[int, Sequence[Run]], names: Mapping[int, str], metrics: Sequence[str]) -> str:
    quality = next((found for key in metrics if (found := quality_of(settings, key))), None)
    if quality is None:
        return ""
    value = quality.metric.text(quality.values[quality.best])
    line = f"Best {quality.metric.key}: {value} with {names[quality.best]}"
    if quality.allowed is None:
        return f"{line}; how far it differs by chance is not known."
    alike = [names[number] for number in quality.as_good if number != quality.best]
    return f"{line}; not shown to be worse: {_and(alike)}." if alike else f"{line}."


def seeds_line(group: Group, metrics: Sequence[str]) -> str:
    """The mean and the standard deviation (of a sample, n − 1) of runs that repeat each other; empty for fewer than two."""
    parts = []
    if len(group.sizes) == 1:
        ((size, runs),) = group.sizes.items()
        own = rates_of(dict(enumerate([run] for run in runs)))
        if len(runs) > 1:
            found = [own.rate(number) for number in own.settings]
            parts.append(f"{significant(group.rates.rate(size))} ± {significant(statistics.stdev(found))} samples/s")
    for key in metrics:
        values = [run.metrics[key] for run in group.runs if key in run.metrics]
        if len(values) > 1:
            parts.append(f"{key} {mean_and_deviation(key, values)}")
    if not parts:
        return ""
    seeds = {option_value(run.settings.get(SEED)) for run in group.runs}
    words = count(len(seeds), "seed") if len(seeds) == len(group.runs) else count(len(group.runs), "run")
    return f"{group.label}, {words}, mean ± standard deviation: {'; '.join(parts)}."


def mean_and_deviation(key: str, values: Sequence[float]) -> str:
    """`98.42 ± 0.11 %`; of one value the value alone."""
    if len(values) < 2:
        return metric(key).text(values[0])
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    if metric(key).unit == FRACTION:
        return f"{100 * mean:.2f} ± {100 * deviation:.2f} %"
    return f"{significant(mean)} ± {significant(deviation)}"


def compile_gains(sweep: SweepResults) -> list[str]:
    """A line for each setting and each mode of torch.compile that ran beside a run without it."""
    if _COMPILE not in sweep.varied:
        return []
    keys = [key for key in sweep.varied if key not in (_COMPILE, SEED)]
    settings: dict[str, dict[str, list[Run]]] = {}
    for run in (run for run in sweep.runs if RATE in run.values):
        modes = settings.setdefault(json.dumps([run.settings.get(key) for key in keys], default=str), {})
        modes.setdefault(option_value(run.settings.get(_COMPILE, False)), []).append(run)
    return [
        _gain(mode, runs, modes["false"], keys)
        for modes in settings.values()
        for mode, runs in modes.items()
        if mode != "false" and "false" in modes
    ]


def _gain(mode: str, compiled: list[Run], plain: list[Run], keys: list[str]) -> str:
    rates = rates_of({0: plain, 1: compiled})
    ratio, size = rates.ratio(1, 0), compiled[0].batch_size
    name = label(compiled[0], [key for key in keys if key != BATCH_SIZE])
    seconds = statistics.median(run.values.get("compile_seconds", 0.0) for run in compiled)
    line = f"{name}{f' at batch size {size:,}' if size else ''}: compile={mode}"
    if not ratio.differs or rates.busy is not None:
        return f"{line} is not shown to change the rate; compiling took {duration(seconds)}."
    if ratio.high < 1:
        return f"{line} is slower: without it the run is {times_as_fast(ratio.inverse)}."
    saved = (compiled[0].samples_a_step or 0) * (1 / rates.rate(0) - 1 / rates.rate(1))  # seconds of a step
    took = f"compiling took {duration(seconds)}"
    if ratio.reach <= KNOWN and saved > 0 and seconds:
        took += f", as long as {count(round(seconds / saved), 'step')} save"
    return f"{line} is {times_as_fast(ratio)}; {took}."


def _and(names: Sequence[str]) -> str:
    words = [*names[:_MOST_NAMED], *([f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else [])]
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
