"""What varied between runs, and the groups of runs that differ in batch size alone."""

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd

from ..errors import printable
from ..records.formatting import count, option_value
from ..records.rates import RATE
from ..records.values import at
from .noise import BETWEEN_CPU, PROCESSES_CPU, Rates
from .run import BATCH_SIZE, CHOICES, HARDWARE, LEARNING_RATE, OWN_RATE, SEED, Run
from .windows import windows_of

# What people change together with the batch size. The rule by which the learning rate follows it is no such value.
_SCALES_ALONG = re.compile(rf"optimizer\.(?!lr_scaling)|trainer\.(max|limit)_|{OWN_RATE}$")
_SAYS_NOTHING = ("auto", "none")  # without the name of its option


@dataclass(frozen=True)
class Group:
    """Runs that differ in batch size and seed only, and in what was scaled along with the batch size."""

    label: str  # short: `cnn`, `cnn · cpu`
    runs: list[Run]  # all of them, failed ones too
    number: int = 0  # among the groups of a report
    beside: Sequence[Run] = field(default=(), repr=False)  # all runs of the report

    @property
    def device(self) -> str:
        """The device that trained: `cpu`, `gpu` or `mps`; empty if no record says it."""
        return next((run.device for run in self.runs if run.device), "")

    @cached_property
    def sizes(self) -> dict[int, list[Run]]:
        """The measured runs of every batch size, smallest first."""
        found: dict[int, list[Run]] = {}
        for run in sorted((r for r in self.runs if RATE in r.values), key=lambda r: r.batch_size or 0):
            found.setdefault(run.batch_size or 0, []).append(run)
        return found

    def medians(self, name: str) -> dict[int, float]:
        """The median of a number (see `Run.values`) over repeated runs, at every size at which it is known.

        MFU is that of the rate in `rates`: by the share of the peak that a sample a second takes.
        """
        known = {size: [run.values for run in runs if name in run.values] for size, runs in self.sizes.items()}
        if name == "mfu":
            return {
                size: self.rates.rate(size) * statistics.median(values[name] / values[RATE] for values in of_size)
                for size, of_size in known.items()
                if of_size
            }
        return {
            size: statistics.median(values[name] for values in of_size) for size, of_size in known.items() if of_size
        }

    @cached_property
    def rates(self) -> Rates:
        """The rates of the sizes: from the windows of their runs, and from the records of runs without windows.

        A sweep of trainings visits one run of those with the same speed: it tells the rate of the others.
        """
        return rates_of({size: self._timed(runs) for size, runs in self.sizes.items()}, at_equal_load=True)

    def _timed(self, runs: list[Run]) -> list[Run]:
        """The runs that tell the rate of some: these, or those with the same speed that were visited in their place."""
        if any(run.in_passes for run in runs):
            return runs
        settings = {run.speed_setting for run in runs}
        sweeps = {run.folder.resolve().parent for run in runs}
        beside = (run for run in self.beside if run.folder.resolve().parent in sweeps)
        visited = [run for run in beside if run.in_passes and run.speed_setting in settings]
        return visited or runs

    @cached_property
    def without_rate(self) -> dict[int, str]:
        """The sizes of which no run was measured, and why; smallest first."""
        ordered = sorted((run for run in self.runs if run.batch_size), key=lambda run: run.batch_size or 0)
        return {
            run.batch_size: run.reason or "no rate was measured"
            for run in ordered
            if run.batch_size and run.batch_size not in self.sizes
        }

    @cached_property
    def asked(self) -> list[int]:
        """The sizes that some run was asked for. A batch that is larger than the training set holds fewer samples."""
        return [size for size, runs in self.sizes.items() if any(run.asked in (None, size) for run in runs)]

    @property
    def largest_possible(self) -> int | None:
        """The largest batch of one device that its shard of the training set can fill; None if unknown."""
        shards = [-(-run.train_samples // run.processes) for run in self.runs if run.train_samples]
        return min(shards, default=None)

    @property
    def out_of_memory(self) -> int | None:
        """The smallest batch size that ran out of memory, among those that no run could train with."""
        sizes = [r.batch_size for r in self.runs if r.status == "out_of_memory" and r.batch_size]
        return min((size for size in sizes if size not in self.sizes), default=None)


def rates_of(
    settings: Mapping[int, Sequence[Run]],
    between: float | None = BETWEEN_CPU,
    processes: float = PROCESSES_CPU,
    at_equal_load: bool = False,
) -> Rates:
    """The rates of some settings that are compared with each other.

    `between` and `processes` are what separate runs, and processes that share passes, differ by on a CPU, and
    `at_equal_load` is for settings that have no part in what others get of the processor (see Rates).
    """
    on_cpu = any(run.device == "cpu" for runs in settings.values() for run in runs)
    return Rates(windows_of(settings), between if on_cpu else None, processes if on_cpu else 0.0, at_equal_load)


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
    values = pd.DataFrame([{key: _identity(value) for key, value in run.settings.items()} for run in runs])
    values = values.fillna({key: _identity(None) for key in values if key not in HARDWARE})  # what is not set is null
    dividing = values.copy()
    if LEARNING_RATE in values:  # of runs to a target, each size has its own best one
        dividing.loc[["target" in run.record for run in runs], LEARNING_RATE] = ""
    group_keys = [key for key in _factors(dividing) if key not in (BATCH_SIZE, SEED)]
    along = _scaled_along(dividing, group_keys)
    group_keys = [key for key in group_keys if key not in along]
    found: dict[tuple[str, ...], list[Run]] = {}
    for run, row in zip(runs, dividing[group_keys].fillna("").to_numpy().tolist(), strict=True):
        found.setdefault(tuple(row), []).append(run)
    groups = [Group(_label_of(members[0], group_keys), members, n, runs) for n, members in enumerate(found.values())]
    return SweepResults(runs, _factors(values), group_keys, groups, [*notes, *_doubts(runs)])


def _label_of(run: Run, group_keys: Sequence[str]) -> str:
    """The label of a run's group; of runs to a target, which have several learning rates, it names none."""
    return label(run, [key for key in group_keys if key != LEARNING_RATE or "target" not in run.record])


def _identity(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def label(run: Run, keys: Iterable[str]) -> str:
    """The model and the settings `keys` of a run in few words: `cnn · gpu · lr 0.1`."""
    named = [_setting(key, run.settings[key]) for key in keys if key != "model" and key in run.settings]
    return printable(" · ".join([run.model, *named]))  # a font has no lone surrogate


def _setting(key: str, value: Any) -> str:
    """A word speaks for itself, but for a few; a number needs the last name of its option."""
    if key == "threads":
        return count(value, "thread")
    if isinstance(value, str) and value not in _SAYS_NOTHING:
        return value
    return f"{key.rpartition('.')[2]} {option_value(value)}"


def _parent(key: str) -> str | None:
    """The choice that a setting belongs to. Two models have different options, and that difference says nothing."""
    if key in ("device_name", "threads"):
        return "device"
    group, dot, _ = key.partition(".")
    return group if dot and group in CHOICES else None


def _factors(values: pd.DataFrame) -> list[str]:
    """Settings with several values among the runs that share the choice they belong to; batch size comes last."""
    factors = []
    for key in values:
        within = values[parent] if (parent := _parent(str(key))) in values else pd.Series("", values.index)
        if values[key].groupby(within.fillna("")).nunique().max() > 1:
            factors.append(str(key))
    first = [key for key in ("model", "data", *HARDWARE) if key in factors]
    rest = [key for key in factors if key not in (*first, BATCH_SIZE, SEED)]
    return [*first, *rest, *(key for key in (BATCH_SIZE, SEED) if key in factors)]


def _scaled_along(values: pd.DataFrame, group_keys: list[str]) -> list[str]:
    """Settings, such as the learning rate, that have one value at each batch size: they do not divide groups."""
    candidates = [key for key in group_keys if _SCALES_ALONG.match(key)]
    if not candidates or BATCH_SIZE not in values or values[BATCH_SIZE].nunique() < 2:
        return []
    rest = [key for key in group_keys if key not in candidates]
    each = values.fillna("").groupby([*rest, BATCH_SIZE])[candidates].nunique().max()
    return [key for key in candidates if each[key] == 1]


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
    held = {(run.asked, run.batch_size) for run in runs if run.asked and run.batch_size and run.batch_size < run.asked}
    notes += [f"a batch of {asked:,} is larger than the training set: it held {size:,}" for asked, size in sorted(held)]
    return notes
