"""What varied between runs, and the groups of runs that differ in batch size alone."""

import json
import re
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..errors import is_text, printable
from ..options.tree import TARGET
from ..records.formatting import count, option_value
from ..records.rates import RATE
from ..records.values import at, positive
from .noise import BETWEEN, PROCESSES, Rates, load_of
from .run import BATCH_SIZE, HARDWARE, LEARNING_RATE, OWN_RATE, PARAMETERS, SEED, Run
from .windows import windows_of

# What people change together with the batch size. The rule by which the learning rate follows it is no such value.
_SCALES_ALONG = re.compile(rf"optimizer\.(?!lr_scaling)|trainer\.(max|limit)_|{OWN_RATE}$")
_SAYS_NOTHING = ("auto", "none", "default", "DEFAULT", "warn")  # without the name of its option


@dataclass(frozen=True)
class Group:
    """Runs that differ in batch size and seed only, and in what was scaled along with the batch size."""

    named: Mapping[str, str]  # the settings in its label, with their short names
    runs: list[Run]  # all of them, failed ones too
    number: int = 0  # among the groups of a report
    beside: Sequence[Run] = field(default=(), repr=False)  # all runs of the report

    @cached_property
    def label(self) -> str:
        """Its name wherever it is named: `cnn`, `cnn · cpu`."""
        return label(self.runs[0], self.named)

    @cached_property
    def sizes(self) -> dict[int, list[Run]]:
        """The measured or tested runs of every batch size, smallest first."""
        sizes: dict[int, list[Run]] = {}
        for run in sorted((r for r in self.runs if RATE in r.values or r.metrics), key=lambda r: r.batch_size or 0):
            sizes.setdefault(run.batch_size or 0, []).append(run)
        return sizes

    @cached_property
    def rates(self) -> Rates:
        """The rates of the sizes: from the windows of their runs, and from the records of runs without windows."""
        return rates_of(self.timed, at_equal_load=True)

    @cached_property
    def timed(self) -> dict[int, list[Run]]:
        """The runs that tell the speed of every batch size of which it is known.

        A sweep of trainings visits one run of those with the same speed: it tells the speed of the others.
        """
        timed = {}
        for size, every in self.sizes.items():
            visited: list[Run] = []
            if not (runs := [run for run in every if RATE in run.values]):
                continue
            if not any(run.in_passes for run in runs):
                settings, sweeps = {run.speed_setting for run in runs}, {run.folder.resolve().parent for run in runs}
                beside = (run for run in self.beside if run.folder.resolve().parent in sweeps)
                visited = [run for run in beside if run.in_passes and run.speed_setting in settings]
            timed[size] = visited or runs
        return timed

    @cached_property
    def without_rate(self) -> dict[int, str]:
        """The sizes of which no run was measured, and why; smallest first."""
        ordered = sorted(self.runs, key=lambda run: run.batch_size or 0)
        sizes = {run.batch_size: run.reason or "no rate was measured" for run in ordered if run.batch_size}
        return {size: why for size, why in sizes.items() if size not in self.timed}


def rates_of(settings: Mapping[int, Sequence[Run]], at_equal_load: bool = False) -> Rates:
    """The rates of some settings that are compared with each other, `at_equal_load` if they have no part in it (see Rates)."""
    return Rates(windows_of(settings), BETWEEN, PROCESSES, at_equal_load)


def loads_of(rates: Rates) -> dict[int, float]:
    """The share of the processor that other programs took beside each setting, where it is worth a word."""
    loads = {int(str(setting)): load_of(windows) for setting, windows in rates.windows.groupby("setting")}
    return {setting: load for setting, load in loads.items() if load is not None}


@dataclass(frozen=True)
class SweepResults:
    """Runs compared with each other."""

    runs: list[Run]  # in the order of their folders
    factors: list[str]  # the settings that differ, by dotted name
    group_keys: list[str]  # the factors that divide the groups
    groups: list[Group]  # by what varied besides batch size and seed
    notes: list[str]  # what could not be read or compared, one line each


def group_runs(runs: list[Run], notes: Sequence[str] = ()) -> SweepResults:
    """What varied between the runs, and their groups."""
    rows = [{key: json.dumps(value, sort_keys=True, default=str) for key, value in r.settings.items()} for r in runs]
    facts = (*HARDWARE, PARAMETERS)  # by which a run that does not say them is not told apart
    unset = dict.fromkeys((key for row in rows for key in row if key not in facts), "null")
    rows = [unset | row for row in rows]
    of_target = [run.is_to_target for run in runs]  # of these, each size has its own best learning rate
    dividing = [row | ({LEARNING_RATE: ""} if own else {}) for row, own in zip(rows, of_target, strict=True)]
    keys = [key for key in _factors(dividing) if key not in (BATCH_SIZE, SEED)]
    along = [key for key in keys if _SCALES_ALONG.match(key)] if _varies(dividing, BATCH_SIZE) else []
    rest = [key for key in keys if key not in along]
    keys = [key for key in keys if key in rest or _varies(dividing, key, [*rest, BATCH_SIZE])]
    others = [key for key in keys if key != PARAMETERS]  # which may tell networks apart
    keys = keys if _varies(dividing, PARAMETERS, others) else others
    members: dict[str, tuple[dict[str, str], list[Run]]] = {}  # with the settings that divide them
    for run, own in zip(runs, of_target, strict=True):
        of_run = {key: name for key, name in short_names(keys).items() if not own or key != LEARNING_RATE}
        members.setdefault(run.signature(of_run.__contains__), (of_run, []))[1].append(run)
    for _, of_group in members.values():
        _share_size(of_group)
    telling = _telling([of_group[0] for _, of_group in members.values()], [of_run for of_run, _ in members.values()])
    groups = [Group(telling[n], of_group, n, runs) for n, (_, of_group) in enumerate(members.values())]
    return SweepResults(runs, _factors(rows), keys, groups, [*notes, *_doubts(runs)])


def _share_size(runs: Sequence[Run]) -> None:
    """Give those runs of a group one size, the median, whose batches vary and for which no size was asked.

    Without a seed in their records, as of a script, they may differ in what no record has, and in their batches by that.
    """
    varying = [run for run in runs if run.varies and run.asked is None and SEED in run.settings]
    means = [run.batch_size for run in varying if run.batch_size]
    for run in varying if means else []:
        vars(run)["batch_size"] = statistics.median_low(means)  # in place of the cached one


def _telling(runs: Sequence[Run], named: list[dict[str, str]]) -> list[dict[str, str]]:
    """Of the settings that divide groups, given a run of each, those that its label has.

    A value that more than half of the groups have is in no label, unless two labels were the same without such values. So a
    setting is named by its change where each has one change.
    """
    values = [{key: run.settings.get(key) for key in of_run} for run, of_run in zip(runs, named, strict=True)]
    all_of = {key: [of_run[key] for of_run in values if key in of_run] for key in set().union(*values)}
    few = [
        {key: name for key, name in of_run.items() if 2 * all_of[key].count(own[key]) <= len(runs)}
        for own, of_run in zip(values, named, strict=True)
    ]
    return few if len({*map(label, runs, few)}) == len(runs) else named


def label(run: Run, named: Mapping[str, str]) -> str:
    """The model and those settings of a run, by their short names: `cnn · gpu · lr 0.1`."""
    names = {key: name for key, name in named.items() if key != "model" and key in run.settings}
    words = [setting_words(key, run.settings[key], name) for key, name in names.items()]
    return printable(" · ".join([run.model, *words]))  # a font has no lone surrogate


def with_size(words: str, size: int | None) -> str:
    """A label with a batch size, if it is known: `cnn · batch size 64`."""
    return f"{words} · batch size {size:,}" if size else words


def short_names(options: Collection[str]) -> dict[str, str]:
    """The last name of each option, `lr`; the whole one where others end alike; of a class that of its node: `net`."""
    paths = {option: option.removesuffix(f".{TARGET}") for option in options}
    last = {option: path.rpartition(".")[2] for option, path in paths.items()}
    return {option: name if [*last.values()].count(name) == 1 else paths[option] for option, name in last.items()}


def setting_words(key: str, value: Any, name: str = "") -> str:
    """A word speaks for itself, but for a few; a number needs the name of its option, which may be a short one."""
    if key in ("threads", "cores") and isinstance(value, int | float):
        return count(value, key.removesuffix("s"))
    if isinstance(value, str) and value not in _SAYS_NOTHING:
        return value
    return f"{name or key} {option_value(value)}"


def _factors(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Settings with several values among runs that share the choice they belong to; batch size and seed come last."""
    keys = dict.fromkeys(key for row in rows for key in row)
    # A setting belongs to a choice: what two models have of their own says nothing.
    parents = {key: "device" if key in HARDWARE else key.partition(".")[0] for key in keys}
    factors = [key for key in keys if _varies(rows, key, [of for of in [parents[key]] if of in keys and of != key])]
    first, last = ("model", "data", *HARDWARE), (BATCH_SIZE, SEED)
    order = {key: number for number, key in enumerate([*first, None, *last])}
    return sorted(factors, key=lambda key: order.get(key, len(first)))


def _varies(rows: Sequence[Mapping[str, str]], key: str, within: Sequence[str] = ()) -> bool:
    """Whether a setting has several values among the runs that agree in others."""
    values: dict[tuple[str, ...], set[str]] = {}
    for row in (row for row in rows if key in row):
        values.setdefault(tuple(row.get(other, "") for other in within), set()).add(row[key])
    return any(len(of_some) > 1 for of_some in values.values())


def _doubts(runs: list[Run]) -> list[str]:
    """What makes runs less comparable than their settings say."""
    notes = []
    versions = sorted({str(found) for run in runs if (found := at(run.record, "versions.torch"))})
    if len(versions) > 1:
        notes.append(f"the runs used several versions of torch: {', '.join(versions)}")
    for choice in dict.fromkeys(str(run.settings.get("data")) for run in runs):
        names = sorted({run.dataset for run in runs if run.dataset and str(run.settings.get("data")) == choice})
        if len(names) > 1:
            notes.append(f"data={choice} was not the same data in every run: {', '.join(names)}")
    seen: dict[str, set[str]] = {}  # of runs with the same settings and seed
    for run in runs:
        if (fingerprint := at(run.record, "dataset.fingerprint")) not in (None, "unknown"):
            seen.setdefault(run.signature(lambda key: key != BATCH_SIZE), set()).add(str(fingerprint))
    if any(len(fingerprints) > 1 for fingerprints in seen.values()):
        notes.append("runs of one setting and seed had different data: their dataset.fingerprint differs")
    lowered = ((run.asked, positive(run.record.get("batch_size"))) for run in runs)
    held = {(asked, round(size)) for asked, size in lowered if asked and size and size < asked}
    notes += [f"a batch of {asked:,} is larger than the training set: it held {size:,}" for asked, size in sorted(held)]
    said = {run.name: at(run.record, "throughput.slow_rank.evidence") for run in runs}
    slow = [(name, evidence) for name, evidence in said.items() if is_text(evidence)]
    if slow:
        where = f"a rank was slow in {len(slow)} of {len(runs)} runs, as in " if len(slow) > 1 else ""
        notes.append(f"{where}{slow[0][0]}: {slow[0][1]}")
    return notes
