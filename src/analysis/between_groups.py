"""Compare groups of runs that differ in something else than the batch size: devices, `compile`, other options.

Two groups that differ in one thing alone are compared at the batch sizes that ran in both. A sentence is as strong as
its intervals, which hold together with 95 % confidence (noise.py).
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ..records.rates import RATE, load_words
from .groups import SweepResults, compared_rates, label, setting_text, short_names, with_size
from .noise import Ratio, ratio_text, simultaneous
from .quality import Quality, first_quality, why_none
from .run import BATCH_SIZE, HARDWARE, Run
from .selection import select
from .text import and_

_DEVICES = "trainer.devices"  # on a CPU it also changes the threads of a process
_OTHER_WORK = ("model", "data")  # a sample of another model or dataset is other work: rates are not compared


def crossovers(sweep: SweepResults) -> list[str]:
    """Return a line for each two groups that share a batch size and differ in one thing alone, which may change the speed.

    The list is empty where each group ran at one batch size: `compare_settings` compares these.
    """
    if all(len(group.sizes) < 2 for group in sweep.groups):
        return []
    lines = []
    for pair in itertools.combinations(sweep.groups, 2):
        settings_a, settings_b = (group.runs[0].settings for group in pair)
        differing = [key for key in sweep.group_keys if settings_a.get(key) != settings_b.get(key)]
        # Devices of one kind are called by their own names.
        key = next((key for key in ("device_name", _DEVICES, *differing) if key in differing), "")
        linked_keys = HARDWARE if key in HARDWARE else (key, "threads") if key == _DEVICES else (key,)
        sizes = [size for size in pair[0].timed if size in pair[1].timed]
        if not sizes or not key or key in _OTHER_WORK or {*differing} - {*linked_keys}:
            continue
        if not sweep.runs[0].is_of_speed(key):
            continue
        rates = compared_rates(
            {2 * n + m: group.timed[size] for n, size in enumerate(sizes) for m, group in enumerate(pair)}
        )
        shared = {factor: name for factor, name in pair[0].label_names.items() if factor not in linked_keys}
        confidence = simultaneous(2 * len(sizes))  # of both ends
        ratios = {size: rates.ratio(2 * n + 1, 2 * n, confidence) for n, size in enumerate(sizes)}
        name = short_names(sweep.group_keys)[key]
        a, b = (setting_text(key, settings.get(key), name) for settings in (settings_a, settings_b))
        lines.append(f"{label(pair[0].runs[0], shared)}: {_ratio_words(a, b, ratios)}.")
    return lines


def _ratio_words(a: str, b: str, ratios: Mapping[int, Ratio]) -> str:
    """Say what the rate of b ÷ that of a is at each size (`ratios`), and from which size on one of both is faster."""
    texts = {size: f"{ratio_text(ratio.value)} ({ratio.span})".removesuffix(" ()") for size, ratio in ratios.items()}
    words = f"{b} ÷ {a} in samples/s is {', '.join(f'{text} at {size:,}' for size, text in texts.items())}"
    winners = [b if ratio.low > 1 else a if ratio.high < 1 else "" for ratio in ratios.values()]
    last_wins = [*itertools.takewhile(winners[-1].__eq__, reversed(winners))]
    size = f"{[*ratios][-len(last_wins)]:,}"
    where = f"at {size}" if len(ratios) == 1 else f"from {size} on"
    return f"{words}; {winners[-1]} is faster {where}" if winners[-1] else words


def compare_settings(sweep: SweepResults, metrics: Sequence[str], margin: float | None = None) -> list[str]:
    """Return sentences on the groups of a sweep, each of which ran at one batch size: the best metric, then the fastest group.

    `metrics` are the metrics of quality, the most telling one first; `margin` is that of `find_quality`.
    """
    if "data" in sweep.factors:
        return ["The runs are on different data: their rates and metrics are not compared."]
    names = group_names(sweep, sweep.group_keys)
    quality = _quality_of_groups(sweep, metrics, margin)
    best = [quality.best_words(dict(enumerate(names)), at="with")] if quality else []
    speed_keys = [key for key in sweep.group_keys if sweep.runs[0].is_of_speed(key)]
    if not best and len({run.speed_setting for run in sweep.runs}) == 1:
        why = why_none(metrics, "settings") if metrics else "No metric is known"
        return [f"The settings differ in nothing that changes the time of a step. {why}."]
    return [*best, *(_fastest(sweep, speed_keys) if speed_keys or not best else ())]


def best_setting(sweep: SweepResults, metrics: Sequence[str]) -> dict[str, Any] | None:
    """Return for programs the settings of the group with the best metric; None where that is not known."""
    quality = None if "data" in sweep.factors else _quality_of_groups(sweep, metrics)
    if quality is None:
        return None
    best = sweep.groups[quality.best].runs[0]
    keys = [*sweep.group_keys, *(key for key in sweep.factors if key == BATCH_SIZE)]
    settings = {key: best.settings.get(key) for key in keys}
    return {"metric": quality.metric.key, "value": quality.values[quality.best], "settings": settings}


def best_of_sizes(sweep: SweepResults, metrics: Sequence[str], margin: float | None = None) -> list[str]:
    """Return a sentence on the best metric of groups of several sizes; empty if what tells the groups apart changes the speed."""
    if "data" in sweep.factors or any(sweep.runs[0].is_of_speed(key) for key in sweep.group_keys):
        return []
    cells = [(group, size, runs) for group in sweep.groups for size, runs in group.sizes.items()]
    names = {number: with_size(group.label, size) for number, (group, size, _) in enumerate(cells)}
    quality = first_quality({number: runs for number, (*_, runs) in enumerate(cells)}, metrics, margin)
    return [quality.best_words(names, at="with")] if quality else []


def _quality_of_groups(sweep: SweepResults, metrics: Sequence[str], margin: float | None = None) -> Quality | None:
    """Return the first of the metrics that several groups have, by the number of the group."""
    return first_quality({number: group.runs for number, group in enumerate(sweep.groups)}, metrics, margin)


def group_names(sweep: SweepResults, factors: Sequence[str]) -> list[str]:
    """Return a name for each group that ran at one batch size: its settings of the factors, and its size if sizes differ."""
    names = []
    for group in sweep.groups:
        words = label(group.runs[0], {key: name for key, name in group.label_names.items() if key in factors})
        names.append(with_size(words, group.runs[0].batch_size if BATCH_SIZE in sweep.factors else None))
    return names


def rate_ratios_to_first(sweep: SweepResults) -> dict[int, Ratio]:
    """Return the rate of each measured group ÷ the rate of group 0, by the group's number; empty unless group 0 was measured.

    Groups of the same speed have the same ratio. The lower ends of all intervals hold together with 95 % confidence.
    """
    classes = _speed_classes(sweep)
    representative = {number: numbers[0] for numbers, _ in classes for number in numbers}
    if 0 not in representative or len(classes) < 2 or "data" in sweep.factors:
        return {}
    rates, confidence = compared_rates({numbers[0]: runs for numbers, runs in classes}), simultaneous(len(classes) - 1)
    return {number: rates.ratio(first, 0, confidence) for number, first in representative.items() if number}


def _speed_classes(sweep: SweepResults) -> list[tuple[list[int], list[Run]]]:
    """Return the numbers and the runs of the measured groups that agree in all settings that change the speed."""
    classes: dict[str, tuple[list[int], list[Run]]] = {}
    for number, group in enumerate(sweep.groups):
        if measured := [run for run in group.runs if RATE in run.values]:
            numbers, runs = classes.setdefault(measured[0].speed_setting, ([], []))
            numbers.append(number)
            runs.extend(measured)
    return [*classes.values()]


def _fastest(sweep: SweepResults, factors: Sequence[str]) -> list[str]:
    """Say which setting of the factors that change the speed is the fastest, and how much faster it is than the next one."""
    measured, names = {numbers[0]: runs for numbers, runs in _speed_classes(sweep)}, group_names(sweep, factors)
    if len(measured) < 2:
        return []
    rates = compared_rates(measured)
    selection = select(rates)
    if selection is None or len(selection.shares) < 2:
        return ["No rate is known well enough to be compared: the runs measured too few steps."]
    best, confidence = selection.best, simultaneous(len(selection.shares) - 1)
    ratios = {number: rates.ratio(best, number, confidence) for number in selection.shares if number != best}
    second = min(ratios, key=lambda number: ratios[number].value)
    ratio, beside = ratios[second], f" beside {load_words(rates.load)}" if rates.load is not None else ""
    is_sure = all(ratio.low > 1 for ratio in ratios.values())
    words = f"is the fastest{'' if is_sure else ' by estimate'}{beside}"
    span = f" ({ratio.span})" if ratio.span else ""
    alike = [names[number] for number, ratio in ratios.items() if number != second and ratio.low <= 1]
    fastest = f"{names[best]} {words}: {ratio.value:.2f}{span} times as fast as {names[second]}."
    return [fastest, *([f"{and_(alike)} may be as fast."] if alike else [])]
