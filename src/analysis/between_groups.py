"""What groups show that differ in something else than the batch size: devices, `compile`, other options.

Two groups that differ in one thing alone are compared at the batch sizes that ran in both. A sentence is as strong as
its intervals, which hold together with 95 % confidence (noise.py).
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ..records.rates import RATE, load_words
from .groups import SweepResults, label, rates_of, setting_words, short_names, with_size
from .noise import Ratio, ratio_text, simultaneous
from .quality import Quality, quality_of, why_none
from .run import BATCH_SIZE, HARDWARE, Run
from .selection import select
from .text import and_

_DEVICES = "trainer.devices"  # of a CPU they share its threads
_OTHER_WORK = ("model", "data")  # whose samples are other work: their rates are not compared


def crossovers(sweep: SweepResults) -> list[str]:
    """A line for each two groups that share a batch size and differ in one thing alone, which may change the speed.

    None where each group ran at one batch size: these are compared by `compare_settings`.
    """
    if all(len(group.sizes) < 2 for group in sweep.groups):
        return []
    found = []
    for one, two in itertools.combinations(sweep.groups, 2):
        first, second = one.runs[0].settings, two.runs[0].settings
        differing = [key for key in sweep.group_keys if first.get(key) != second.get(key)]
        # Devices of one kind are named by their own names.
        key = next((key for key in ("device_name", _DEVICES, *differing) if key in differing), "")
        of_thing = HARDWARE if key in HARDWARE else (key, "threads") if key == _DEVICES else (key,)
        sizes = [size for size in one.timed if size in two.timed]
        if not sizes or not key or key in _OTHER_WORK or {*differing} - {*of_thing}:
            continue
        if not sweep.runs[0].is_of_speed(key):
            continue
        rates = rates_of({2 * n + m: (one, two)[m].timed[size] for n, size in enumerate(sizes) for m in (0, 1)})
        base = label(one.runs[0], {other: name for other, name in one.named.items() if other not in of_thing})
        confidence = simultaneous(2 * len(sizes))  # of both ends
        ratios = {size: rates.ratio(2 * n + 1, 2 * n, confidence) for n, size in enumerate(sizes)}
        name = short_names(sweep.group_keys)[key]
        a, b = (setting_words(key, settings.get(key), name) for settings in (first, second))
        found.append(f"{base}: {_compared(a, b, ratios)}.")
    return found


def _compared(first: str, second: str, ratios: Mapping[int, Ratio]) -> str:
    """The rate of the second over that of the first, of which `ratios` has each size, and from which size on one is faster."""
    known = {size: f"{ratio_text(ratio.value)} ({ratio.span})".removesuffix(" ()") for size, ratio in ratios.items()}
    words = f"{second} ÷ {first} in samples/s is {', '.join(f'{text} at {size:,}' for size, text in known.items())}"
    winners = [second if ratio.low > 1 else first if ratio.high < 1 else "" for ratio in ratios.values()]
    alike = [*itertools.takewhile(winners[-1].__eq__, reversed(winners))]
    size = f"{[*ratios][-len(alike)]:,}"
    where = f"at {size}" if len(ratios) == 1 else f"from {size} on"
    return f"{words}; {winners[-1]} is faster {where}" if winners[-1] else words


def compare_settings(sweep: SweepResults, metrics: Sequence[str], margin: float | None = None) -> list[str]:
    """What the groups of a sweep have to say about each other, of which each ran at one batch size: the best metric first.

    `metrics` are those of quality, the most telling one first, and `margin` is as in quality.py.
    """
    if "data" in sweep.factors:
        return ["The runs are on different data: their rates and metrics are not compared."]
    names = names_of(sweep, sweep.group_keys)
    quality = _quality_of_groups(sweep, metrics, margin)
    best = [quality.best_words(dict(enumerate(names)), at="with")] if quality else []
    of_speed = [key for key in sweep.group_keys if sweep.runs[0].is_of_speed(key)]
    if not best and len({run.speed_setting for run in sweep.runs}) == 1:
        why = why_none(metrics, "settings") if metrics else "No metric is known"
        return [f"The settings differ in nothing that changes the time of a step. {why}."]
    return [*best, *(_fastest(sweep, of_speed) if of_speed or not best else ())]


def best_setting(sweep: SweepResults, metrics: Sequence[str]) -> dict[str, Any] | None:
    """Which group has the best metric, for programs; None where that is not known."""
    quality = None if "data" in sweep.factors else _quality_of_groups(sweep, metrics)
    if quality is None:
        return None
    best = sweep.groups[quality.best].runs[0]
    keys = [*sweep.group_keys, *(key for key in sweep.factors if key == BATCH_SIZE)]
    settings = {key: best.settings.get(key) for key in keys}
    return {"metric": quality.metric.key, "value": quality.values[quality.best], "settings": settings}


def best_of_sizes(sweep: SweepResults, metrics: Sequence[str], margin: float | None = None) -> list[str]:
    """The best metric of groups of several sizes that differ in nothing that changes the speed, such as the learning rate."""
    if "data" in sweep.factors or any(sweep.runs[0].is_of_speed(key) for key in sweep.group_keys):
        return []
    cells = [(group, size, runs) for group in sweep.groups for size, runs in group.sizes.items()]
    names = {number: with_size(group.label, size) for number, (group, size, _) in enumerate(cells)}
    runs_of = {number: runs for number, (*_, runs) in enumerate(cells)}
    quality = next((found for key in metrics if (found := quality_of(runs_of, key, margin))), None)
    return [quality.best_words(names, at="with")] if quality else []


def _quality_of_groups(sweep: SweepResults, metrics: Sequence[str], margin: float | None = None) -> Quality | None:
    """The first of some metrics that groups have, by their numbers."""
    runs = {number: group.runs for number, group in enumerate(sweep.groups)}
    return next((found for key in metrics if (found := quality_of(runs, key, margin))), None)


def names_of(sweep: SweepResults, factors: Sequence[str]) -> list[str]:
    """The label of each group at one batch size, of its settings by some factors, and its batch size if these differ."""
    names = []
    for group in sweep.groups:
        words = label(group.runs[0], {key: name for key, name in group.named.items() if key in factors})
        names.append(with_size(words, group.runs[0].batch_size if BATCH_SIZE in sweep.factors else None))
    return names


def ratios_to_first(sweep: SweepResults) -> dict[int, Ratio]:
    """The rate of each measured group ÷ that of the first one, by the group's number; empty unless that one was measured.

    Groups of the same speed have the same ratio. The lower ends of all intervals hold together with 95 % confidence.
    """
    measured = _by_speed(sweep)
    first = {number: numbers[0] for numbers, _ in measured for number in numbers}
    if 0 not in first or len(measured) < 2 or "data" in sweep.factors:
        return {}
    rates, confidence = rates_of({numbers[0]: runs for numbers, runs in measured}), simultaneous(len(measured) - 1)
    return {number: rates.ratio(first[number], 0, confidence) for number in first if number}


def _by_speed(sweep: SweepResults) -> list[tuple[list[int], list[Run]]]:
    """The measured groups with each setting of what changes the speed, by their numbers, and their runs."""
    measured: dict[str, tuple[list[int], list[Run]]] = {}
    for number, group in enumerate(sweep.groups):
        if runs := [run for run in group.runs if RATE in run.values]:
            numbers, of_speed = measured.setdefault(runs[0].speed_setting, ([], []))
            numbers.append(number)
            of_speed.extend(runs)
    return [*measured.values()]


def _fastest(sweep: SweepResults, factors: Sequence[str]) -> list[str]:
    """The fastest setting of the factors that change the speed, and how much faster it is than the next one."""
    measured, names = {numbers[0]: runs for numbers, runs in _by_speed(sweep)}, names_of(sweep, factors)
    if len(measured) < 2:
        return []
    rates = rates_of(measured)
    selection = select(rates)
    if selection is None or len(selection.shares) < 2:
        return ["No rate is known well enough to be compared: the runs measured too few steps."]
    best, confidence = selection.best, simultaneous(len(selection.shares) - 1)
    ratios = {number: rates.ratio(best, number, confidence) for number in selection.shares if number != best}
    second = min(ratios, key=lambda number: ratios[number].value)
    ratio, beside = ratios[second], f" beside {load_words(rates.load)}" if rates.load is not None else ""
    is_sure = all(each.low > 1 for each in ratios.values())
    words = f"is the fastest{'' if is_sure else ' by estimate'}{beside}"
    span = f" ({ratio.span})" if ratio.span else ""
    alike = [names[number] for number, ratio in ratios.items() if number != second and ratio.low <= 1]
    fastest = f"{names[best]} {words}: {ratio.value:.2f}{span} times as fast as {names[second]}."
    return [fastest, *([f"{and_(alike)} may be as fast."] if alike else [])]
