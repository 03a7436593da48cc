"""What groups show that differ in something else than the batch size: devices, `compile`, other options.

Two groups that differ in the device alone, or in `compile` alone, are compared at the batch sizes that ran in both. A
sentence is as strong as the 98 % interval of the ratio that it is about (noise.py).
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from ..records.formatting import option_value
from ..records.rates import RATE
from .answer import decide
from .groups import Group, SweepResults, label, rates_of
from .noise import STATED, Ratio
from .quality import quality_of
from .run import BATCH_SIZE, HARDWARE, SEED, Run
from .text import and_, busy_line, times_as_fast

# Settings that follow from the number of devices, or do not matter beside it.
_ALONG = ("trainer.devices", "trainer.num_nodes", SEED, "trainer.strategy", "trainer", "threads")


def crossovers(sweep: SweepResults) -> list[str]:
    """The answer in one line for each two groups that differ in the device or in `compile` alone, and share a batch size."""
    kinds, names = ({str(group.runs[0].settings.get(key)) for group in sweep.groups} for key in HARDWARE[:2])
    named_by = [key for key in (*HARDWARE, "compile") if key != "device" or len(kinds) == len(names)]
    found = []
    for one, two in itertools.combinations(sweep.groups, 2):
        first, second = one.runs[0].settings, two.runs[0].settings
        differing = {key for key in sweep.group_keys if first.get(key) != second.get(key)}
        is_one_thing = differing <= {*HARDWARE} or differing == {"compile"}
        key = next((key for key in named_by if key in differing), None)
        sizes = [size for size in one.sizes if size in two.sizes]
        if not (is_one_thing and key and sizes):
            continue
        rates = rates_of({2 * n + m: (one, two)[m].sizes[size] for n, size in enumerate(sizes) for m in (0, 1)})
        if rates.busy is None:
            base = label(one.runs[0], [other for other in sweep.group_keys if other not in (*HARDWARE, *differing)])
            ratios = {size: rates.ratio(2 * n + 1, 2 * n, STATED) for n, size in enumerate(sizes)}
            found.append(f"{base}: {_compared(_name(key, first.get(key)), _name(key, second.get(key)), ratios)}.")
    return found


def _compared(first: str, second: str, ratios: Mapping[int, Ratio]) -> str:
    """Which of two is faster at which sizes, of which `ratios` has the rate of the second over that of the first."""
    shown = [size for size, ratio in ratios.items() if ratio.differs]
    if shown and ratios[shown[-1]].high < 1:  # `second` is what is faster at the largest of these sizes
        first, second, ratios = second, first, {size: ratio.inverse for size, ratio in ratios.items()}
    faster = [size for size in shown if ratios[size].low > 1]
    slower = [size for size in shown if size not in faster]
    if not shown:
        return f"no difference between {first} and {second} is shown at any size that ran on both ({_range(ratios)})"
    best = max(faster, key=lambda size: ratios[size].value)
    words = times_as_fast(ratios[best])
    most = f", {words} at {best:,}" if words != "faster" else ""
    if not slower:
        at = and_(faster) if len(faster) < len(ratios) else f"every size that ran on both ({_range(faster)})"
        return f"{second} is faster than {first} at {at}{most}"
    if max(slower) < min(faster):
        between = f"from a batch size between {max(slower):,} and {min(faster):,} on"
        return f"{second} is faster than {first} {between}{most}"
    return f"{first} is faster at {and_(slower)}, {second} at {and_(faster)}"


def _range(sizes: Collection[int]) -> str:
    return f"{min(sizes):,} to {max(sizes):,}" if len(sizes) > 1 else f"{min(sizes):,}"


def _name(key: str, value: object) -> str:
    if key == "compile":
        return f"compile={option_value(value or False)}"
    return f"{value} threads" if key == "threads" else str(value)


def scaling_efficiencies(runs: Sequence[Run]) -> dict[int, float]:
    """By the number of each run on several devices: its rate over that of as many single devices.

    A single device has the same batch size, and differs in nothing else. A run without such a run is left out.
    """
    single: dict[str, list[Run]] = {}
    for run in runs:
        if RATE in run.values and run.processes == 1:
            single.setdefault(_alike(run), []).append(run)
    several = (run for run in runs if run.processes > 1 and RATE in run.values and _alike(run) in single)
    return {
        run.number: rates_of({0: single[_alike(run)], 1: [run]}).ratio(1, 0).value / run.processes for run in several
    }


def _alike(run: Run) -> str:
    return repr(sorted((key, repr(value)) for key, value in run.settings.items() if key not in _ALONG))


def compare_settings(sweep: SweepResults, metrics: Sequence[str]) -> list[str]:
    """What the groups of a sweep have to say about each other, of which each ran at one batch size."""
    if "data" in sweep.factors:
        return ["The runs are on different data: their rates and metrics are not compared."]
    names = [name_of(group, sweep) for group in sweep.groups]
    runs = {number: group.runs for number, group in enumerate(sweep.groups)}
    quality = next((found for key in metrics if (found := quality_of(runs, key))), None)
    best = [quality.best_words(dict(enumerate(names)), at="with")] if quality else []
    return [*_fastest(sweep.groups, names), *best]


def name_of(group: Group, sweep: SweepResults) -> str:
    """The label of a group at one batch size, with this size where others ran at another one."""
    size = group.runs[0].batch_size
    return f"{group.label} · batch size {size:,}" if BATCH_SIZE in sweep.factors and size else group.label


def _fastest(groups: Sequence[Group], names: Sequence[str]) -> Iterator[str]:
    measured = {n: runs for n, group in enumerate(groups) if (runs := [r for r in group.runs if RATE in r.values])}
    if len(measured) < 2:
        return
    rates = rates_of(measured)
    decision = decide(rates)
    if rates.busy is not None:
        yield busy_line(rates.busy, "setting is called faster", "repeat the sweep")
    elif decision is None:
        yield "No rate is known well enough to be compared: the runs measured too few steps."
    else:
        best = decision.best
        ratios = {number: rates.ratio(best, number, STATED) for number in measured if number != best}
        second = min(ratios, key=lambda number: ratios[number].value)
        if decision.fastest is not None:
            words = times_as_fast(ratios[second])
            yield f"{names[best]} is the fastest: {words} {'than' if words == 'faster' else 'as'} {names[second]}."
            return
        alike = sorted([best, *(number for number, ratio in ratios.items() if ratio.low <= 1)])
        slower = and_([names[number] for number in ratios if number not in alike])
        line = f"No difference in speed is shown between {and_([names[number] for number in alike])}"
        yield f"{line}; slower than {names[best]}: {slower}." if slower else f"{line}."
