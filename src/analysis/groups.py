"""Find what varied between runs, and divide the runs into groups that differ in batch size alone."""

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
from .noise import PROCESSES_SD, SEPARATE_RUNS_SD, Rates, mean_load
from .run import BATCH_SIZE, HARDWARE, LEARNING_RATE, OWN_RATE, PARAMETERS, SEED, Run
from .windows import window_table

# Options that people change together with the batch size. The rule by which the learning rate follows it is none of them.
_SCALES_ALONG = re.compile(rf"optimizer\.(?!lr_scaling)|trainer\.(max|limit)_|{OWN_RATE}$")
_NEEDS_NAME = ("auto", "none", "default", "DEFAULT", "warn")  # values that say nothing without the name of their option


@dataclass(frozen=True)
class Group:
    """Runs that differ in batch size and seed only, and in what was scaled along with the batch size."""

    label_names: Mapping[str, str]  # the settings in its label, with their short names
    runs: list[Run]  # all runs of the group, failed ones too
    number: int = 0  # among the groups of a report
    report_runs: Sequence[Run] = field(default=(), repr=False)  # all runs of the report

    @cached_property
    def label(self) -> str:
        """The name of the group in texts and plots: `cnn`, `cnn · cpu`."""
        return label(self.runs[0], self.label_names)

    @cached_property
    def sizes(self) -> dict[int, list[Run]]:
        """The measured or tested runs of every batch size, smallest size first."""
        sizes: dict[int, list[Run]] = {}
        runs = (run for run in self.runs if RATE in run.values or run.metrics)
        for run in sorted(runs, key=lambda run: run.batch_size or 0):
            sizes.setdefault(run.batch_size or 0, []).append(run)
        return sizes

    @cached_property
    def rates(self) -> Rates:
        """The rates of the sizes: from the windows of their runs, and from the records of runs without windows."""
        return compared_rates(self.timed, at_equal_load=True)

    @cached_property
    def timed(self) -> dict[int, list[Run]]:
        """The runs that tell the speed of a batch size, for every size with a known rate.

        Of runs with the same speed, a sweep of trainings visits one: that run tells the speed of all.
        """
        timed = {}
        for size, size_runs in self.sizes.items():
            visited: list[Run] = []
            if not (runs := [run for run in size_runs if RATE in run.values]):
                continue
            if not any(run.in_passes for run in runs):
                settings, sweeps = {run.speed_setting for run in runs}, {run.folder.resolve().parent for run in runs}
                sweep_runs = (run for run in self.report_runs if run.folder.resolve().parent in sweeps)
                visited = [run for run in sweep_runs if run.in_passes and run.speed_setting in settings]
            timed[size] = visited or runs
        return timed

    @cached_property
    def without_rate(self) -> dict[int, str]:
        """The reason for each size of which no run was measured, smallest size first."""
        ordered = sorted(self.runs, key=lambda run: run.batch_size or 0)
        reasons = {run.batch_size: run.reason or "no rate was measured" for run in ordered if run.batch_size}
        return {size: reason for size, reason in reasons.items() if size not in self.timed}


def compared_rates(settings: Mapping[int, Sequence[Run]], at_equal_load: bool = False) -> Rates:
    """Return the rates of settings for a comparison, `at_equal_load` if the settings do not affect the load (see Rates)."""
    return Rates(window_table(settings), SEPARATE_RUNS_SD, PROCESSES_SD, at_equal_load)


def loads_by_setting(rates: Rates) -> dict[int, float]:
    """Return the share of the processor that other programs took beside each setting; shares below REPORTED_LOAD are left out."""
    loads = {int(str(setting)): mean_load(windows) for setting, windows in rates.windows.groupby("setting")}
    return {setting: load for setting, load in loads.items() if load is not None}


@dataclass(frozen=True)
class SweepResults:
    """Runs that are compared with each other."""

    runs: list[Run]  # in the order of their folders
    factors: list[str]  # the settings that differ, by dotted name
    group_keys: list[str]  # the factors that divide the groups
    groups: list[Group]  # divided by what varied besides batch size and seed
    notes: list[str]  # what could not be read or compared, one line each


def group_runs(runs: list[Run], notes: Sequence[str] = ()) -> SweepResults:
    """Find what varied between the runs, and divide them into groups."""
    rows = [{key: json.dumps(value, sort_keys=True, default=str) for key, value in r.settings.items()} for r in runs]
    recorded = (*HARDWARE, PARAMETERS)  # a record without such a key agrees with every other record in it
    unset = dict.fromkeys((key for row in rows for key in row if key not in recorded), "null")
    rows = [unset | row for row in rows]
    # Of runs to a target, each size has its own best learning rate: it divides no groups.
    dividing = [row | {LEARNING_RATE: ""} if run.is_to_target else row for row, run in zip(rows, runs, strict=True)]
    keys = [key for key in _factors(dividing) if key not in (BATCH_SIZE, SEED)]
    scaled = [key for key in keys if _SCALES_ALONG.match(key)] if _varies(dividing, BATCH_SIZE) else []
    fixed = [key for key in keys if key not in scaled]
    keys = [key for key in keys if key in fixed or _varies(dividing, key, [*fixed, BATCH_SIZE])]
    options = [key for key in keys if key != PARAMETERS]
    keys = keys if _varies(dividing, PARAMETERS, options) else options  # the parameters may tell networks apart
    members: dict[str, tuple[dict[str, str], list[Run]]] = {}  # for each group the settings that divide it, and runs
    for run in runs:
        names = {key: name for key, name in short_names(keys).items() if not run.is_to_target or key != LEARNING_RATE}
        members.setdefault(run.signature(names.__contains__), (names, []))[1].append(run)
    for _, group in members.values():
        _share_size(group)
    label_names = _label_names([group[0] for _, group in members.values()], [names for names, _ in members.values()])
    groups = [Group(label_names[n], group, n, runs) for n, (_, group) in enumerate(members.values())]
    return SweepResults(runs, _factors(rows), keys, groups, [*notes, *_comparability_notes(runs)])


def _share_size(runs: Sequence[Run]) -> None:
    """Give one size, the median, to the runs of a group whose batches vary and that were asked for no size.

    Runs without a seed in their records, as of a script, are left alone: they may differ in what no record has, so in batches.
    """
    varying = [run for run in runs if run.varies and run.asked is None and SEED in run.settings]
    means = [run.batch_size for run in varying if run.batch_size]
    for run in varying if means else []:
        vars(run)["batch_size"] = statistics.median_low(means)  # in place of the cached one


def _label_names(runs: Sequence[Run], group_names: list[dict[str, str]]) -> list[dict[str, str]]:
    """Choose for each group the settings of its label, from a run of each and the names of the settings that divide it.

    A value that more than half of the groups have is in no label, unless two labels would then be the same. So where each
    group has one change, the change is its label.
    """
    values = [{key: run.settings.get(key) for key in names} for run, names in zip(runs, group_names, strict=True)]
    columns = {key: [row[key] for row in values if key in row] for key in set().union(*values)}
    rare = [
        {key: name for key, name in names.items() if 2 * columns[key].count(row[key]) <= len(runs)}
        for row, names in zip(values, group_names, strict=True)
    ]
    return rare if len({*map(label, runs, rare)}) == len(runs) else group_names


def label(run: Run, label_names: Mapping[str, str]) -> str:
    """Return the model and the named settings of a run, by their short names: `cnn · gpu · lr 0.1`."""
    names = {key: name for key, name in label_names.items() if key != "model" and key in run.settings}
    words = [setting_text(key, run.settings[key], name) for key, name in names.items()]
    return printable(" · ".join([run.model, *words]))  # a font has no lone surrogate


def with_size(words: str, size: int | None) -> str:
    """Return a label with a batch size, if the size is known: `cnn · batch size 64`."""
    return f"{words} · batch size {size:,}" if size else words


def short_names(options: Collection[str]) -> dict[str, str]:
    """Return the last name of each option, `lr`, or its full name if others end alike; a `_target_` is named by its node: `net`."""
    paths = {option: option.removesuffix(f".{TARGET}") for option in options}
    last = {option: path.rpartition(".")[2] for option, path in paths.items()}
    return {option: name if [*last.values()].count(name) == 1 else paths[option] for option, name in last.items()}


def setting_text(key: str, value: Any, name: str = "") -> str:
    """Return the words for a setting: a telling text alone (`cnn`), any other value behind its name, by default the key (`lr 0.1`)."""
    if key in ("threads", "cores") and isinstance(value, int | float):
        return count(value, key.removesuffix("s"))
    if isinstance(value, str) and value not in _NEEDS_NAME:
        return value
    return f"{name or key} {option_value(value)}"


def _factors(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the settings with several values among runs that agree in the parent choice; batch size and seed come last."""
    keys = dict.fromkeys(key for row in rows for key in row)
    # An option belongs to a choice: that two models have different options says nothing.
    parents = {key: "device" if key in HARDWARE else key.partition(".")[0] for key in keys}
    factors = [key for key in keys if _varies(rows, key, [p for p in [parents[key]] if p in keys and p != key])]
    first, last = ("model", "data", *HARDWARE), (BATCH_SIZE, SEED)
    order = {key: number for number, key in enumerate([*first, None, *last])}
    return sorted(factors, key=lambda key: order.get(key, len(first)))


def _varies(rows: Sequence[Mapping[str, str]], key: str, within: Sequence[str] = ()) -> bool:
    """Whether a setting has several values among rows that agree in the settings `within`."""
    values: dict[tuple[str, ...], set[str]] = {}
    for row in (row for row in rows if key in row):
        values.setdefault(tuple(row.get(fixed, "") for fixed in within), set()).add(row[key])
    return any(len(distinct) > 1 for distinct in values.values())


def _comparability_notes(runs: list[Run]) -> list[str]:
    """Return a note on whatever makes runs less comparable than their settings say."""
    notes = []
    versions = sorted({str(version) for run in runs if (version := at(run.record, "versions.torch"))})
    if len(versions) > 1:
        notes.append(f"the runs used several versions of torch: {', '.join(versions)}")
    for choice in dict.fromkeys(str(run.settings.get("data")) for run in runs):
        names = sorted({run.dataset for run in runs if run.dataset and str(run.settings.get("data")) == choice})
        if len(names) > 1:
            notes.append(f"data={choice} was not the same data in every run: {', '.join(names)}")
    by_signature: dict[str, set[str]] = {}  # the fingerprints of runs with the same settings and seed
    for run in runs:
        if (fingerprint := at(run.record, "dataset.fingerprint")) not in (None, "unknown"):
            by_signature.setdefault(run.signature(lambda key: key != BATCH_SIZE), set()).add(str(fingerprint))
    if any(len(fingerprints) > 1 for fingerprints in by_signature.values()):
        notes.append("runs of one setting and seed had different data: their dataset.fingerprint differs")
    sizes = ((run.asked, positive(run.record.get("batch_size"))) for run in runs)
    lowered = {(asked, round(size)) for asked, size in sizes if asked and size and size < asked}
    notes += [f"a batch of {asked:,} is larger than the training set: it held {n:,}" for asked, n in sorted(lowered)]
    evidences = {run.name: at(run.record, "throughput.slow_rank.evidence") for run in runs}
    slow = [(name, evidence) for name, evidence in evidences.items() if is_text(evidence)]
    if slow:
        where = f"a rank was slow in {len(slow)} of {len(runs)} runs, as in " if len(slow) > 1 else ""
        notes.append(f"{where}{slow[0][0]}: {slow[0][1]}")
    return notes
