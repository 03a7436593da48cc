"""The runs below some folders: their records, what varied between them, and the groups that only batch size divides."""

import json
import math
import os
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import is_set_aside
from ..options.tree import flatten
from ..records.rates import MEAN_RATE, RATE
from ..records.read import FILE, read
from ..records.upgrade import SCHEMA

PARTS = ("data_wait", "transfer", "forward", "backward", "optimizer", "other")
BATCH_SIZE, SEED = "data.batch_size", "seed"
HARDWARE = ("device", "device_name", "threads")  # settings that come from the machine, not from the config

# What changes neither what is computed nor where: how a run is watched, where it reads and writes.
_WATCHING = ("run_dir", "callbacks", "logger", "test", "optimized_metric", "search")
_PLACES = re.compile(r"data\.(seed|root)$|trainer\.(accelerator|enable_\w+|log_every_n_steps|default_root_dir|logger)$")
_CHOICES = ("model", "data", "optimizer")
_SCALES_ALONG = re.compile(r"optimizer\.|trainer\.(max|limit)_")  # what people change together with the batch size
_ABSURD = 1e12  # no count, time or rate of a run is as large, and none that counts is as small as its inverse
_DEVICE_NAMES = {"cuda": "gpu"}  # as trainer.accelerator calls it


@dataclass(frozen=True)
class Run:
    """One record; what it does not hold is None, and never 0.

    Attributes:
        name: its folder, from the one that was asked for: `3`, or `2026-01-01_12-00-00/3`.
        folder: where the run left everything.
        record: its run.json.
    """

    name: str
    folder: Path
    record: dict[str, Any] = field(repr=False)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What was chosen, by dotted name: the config without folders and watching, the choices, the hardware."""
        config, choices, hardware = (_table(self.record.get(key)) for key in ("config", "choices", "hardware"))
        run_dir = config.get("run_dir")
        flat: dict[str, Any] = {}
        for group in _CHOICES:
            target = str(_table(config.get(group)).get("_target_", "")).rpartition(".")[2]
            if choices.get(group) or target:
                flat[group] = str(choices.get(group) or target)
        if flat.get("model") == "torchvision":
            flat["model"] = str(_table(config.get("model")).get("name", "torchvision"))
        flat |= self._hardware(hardware)
        for key, value in flatten({k: v for k, v in config.items() if k not in _WATCHING}):
            derived = isinstance(value, str) and run_dir and str(run_dir) in value
            if not derived and not _PLACES.match(key) and not key.endswith("_target_"):
                flat[key] = value
        return flat

    @staticmethod
    def _hardware(hardware: dict[str, Any]) -> dict[str, Any]:
        device = hardware.get("device")
        found = {"device": _DEVICE_NAMES.get(str(device), device), "device_name": hardware.get("device_name")}
        if device == "cpu":
            found["threads"] = hardware.get("torch_threads")
        return {key: value for key, value in found.items() if isinstance(value, str | int) and value}

    @property
    def status(self) -> str:
        """As the record says."""
        return str(self.record.get("status", "unknown"))

    @property
    def reason(self) -> str:
        """One line on why the run did not finish; empty if it did."""
        if self.status == "finished":
            return ""
        if self.status == "out_of_memory":
            return "out of memory"
        if self.status == "planned":
            return "not run"
        if self.status == "running":
            return "still running, or killed"
        return " ".join(str(self.record.get("error") or self.status).split())

    @property
    def device(self) -> str:
        """`cpu`, `gpu` or `mps`; empty if the record does not say."""
        return str(self.settings.get("device", ""))

    @property
    def throughput(self) -> dict[str, Any]:
        """The record's summary of what steps cost; empty if there is none."""
        return _table(self.record.get("throughput"))

    @cached_property
    def batch_size(self) -> int | None:
        """Samples of a whole batch of one device: what it held, or was to hold where nothing was measured."""
        known = (self.throughput.get("batch_size"), self.record.get("batch_size"), self.settings.get(BATCH_SIZE))
        sizes = (size for size in map(number, known) if size is not None and size >= 1)
        return next(map(round, sizes), None)

    @property
    def train_samples(self) -> int | None:
        """Of the whole training set; None where the run did not come as far as loading it."""
        found = _positive(_table(self.record.get("dataset")).get("train_samples"))
        return None if found is None else max(1, round(found))

    @property
    def processes(self) -> int:
        """That train as one, a device each."""
        return round(_positive(self.record.get("processes", self.throughput.get("processes"))) or 1)

    @property
    def global_batch_size(self) -> int | None:
        """Samples of a whole batch of all devices."""
        if self.batch_size is None:
            return None
        return min(self.batch_size * self.processes, self.train_samples or math.inf)

    @cached_property
    def batch_ms(self) -> float | None:
        """Median time of a batch; a step's, divided among the batches that it accumulates."""
        return self._per_batch("step_ms_median")

    @property
    def samples_per_sec(self) -> float | None:
        """The run's rate, of all devices together: a whole batch over the median step; None without a batch size."""
        return None if self.batch_size is None else _positive(self.throughput.get(RATE))

    @property
    def samples_per_sec_mean(self) -> float | None:
        """All samples over all of their time; a few slow steps lower it, and it is compared with nothing."""
        return _positive(self.throughput.get(MEAN_RATE))

    @property
    def samples_per_sec_p10(self) -> float | None:
        """What nine of ten steps exceed."""
        return self._rate_at("step_ms_p90")

    @property
    def samples_per_sec_p90(self) -> float | None:
        """What one of ten steps exceeds."""
        return self._rate_at("step_ms_p10")

    @property
    def step_ms_median(self) -> float | None:
        """Median time of a step with a whole batch."""
        return _positive(self.throughput.get("step_ms_median"))

    @property
    def process_step_ms(self) -> tuple[float, float] | None:
        """Mean time of a step in the fastest and in the slowest of several processes."""
        fastest, slowest = (_positive(self.throughput.get(f"{which}_step_ms")) for which in ("fastest", "slowest"))
        return None if self.processes == 1 or fastest is None or slowest is None else (fastest, slowest)

    @property
    def parts_ms(self) -> dict[str, float]:
        """Mean time of every part of a step; empty unless all are known."""
        parts = {part: number(_table(self.throughput.get("parts_ms")).get(part)) for part in PARTS}
        known = {part: ms for part, ms in parts.items() if ms is not None and ms >= 0}
        return known if len(known) == len(PARTS) and sum(known.values()) > 0 else {}

    @property
    def busy_pct(self) -> float | None:
        """How busy the device was: its multiprocessors where that is known, else its utilisation."""
        activity = number(self.throughput.get("sm_activity_pct"))
        return number(self.throughput.get("utilization_pct")) if activity is None else activity

    @property
    def mfu(self) -> float | None:
        """Fraction of the measured peak."""
        return number(self.throughput.get("mfu"))

    @property
    def memory_peak_gib(self) -> float | None:
        """Of the device that trained; on a CPU that of the process."""
        return _positive(self.throughput.get("memory_peak_gib"))

    @property
    def memory_total_gib(self) -> float | None:
        """What the device has, where the record says so; CPU and MPS share the machine's memory."""
        hardware = _table(self.record.get("hardware"))
        of_machine = hardware.get("memory_gib") if self.device in ("cpu", "mps") else None
        return _positive(hardware.get("device_memory_gib", of_machine))

    @property
    def joules_per_sample(self) -> float | None:
        """Energy, where the device measures it."""
        return _positive(self.throughput.get("joules_per_sample"))

    @property
    def learning_rate(self) -> float | None:
        """The one trained with, as scaled to the batch size."""
        return _positive(self.record.get("learning_rate"))

    @property
    def seconds(self) -> float | None:
        """From the run's start to its end."""
        return _positive(self.record.get("seconds"))

    @property
    def samples_seen(self) -> float | None:
        """All that the run was trained on, repetitions included."""
        steps = _positive(self.record.get("steps"))
        return None if steps is None else self.samples_after(steps)

    def samples_after(self, steps: float) -> float | None:
        """How many samples so many steps were trained on; the last step of an epoch may hold fewer."""
        if self.global_batch_size is None:
            return None
        per_step = self.global_batch_size * self.accumulated
        if self.train_samples is None:
            return steps * per_step
        epochs, rest = divmod(steps, -(-self.train_samples // per_step))
        return epochs * self.train_samples + rest * per_step

    @property
    def accumulated(self) -> float:
        """Batches of a step."""
        return _positive(self.settings.get("trainer.accumulate_grad_batches")) or 1

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The finished run's; of another they are not its last word."""
        if self.status != "finished":
            return {}
        found = {str(key): number(value) for key, value in _table(self.record.get("metrics")).items()}
        return {key: value for key, value in found.items() if value is not None}

    def _per_batch(self, key: str) -> float | None:
        ms = _positive(self.throughput.get(key))
        return None if ms is None else ms / self.accumulated

    def _rate_at(self, key: str) -> float | None:
        """The rate that a step of another duration than the median one has."""
        ms, median = _positive(self.throughput.get(key)), self.step_ms_median
        return None if ms is None or median is None or not self.samples_per_sec else self.samples_per_sec * median / ms


@dataclass(frozen=True)
class Group:
    """Runs that differ in batch size and seed only (and in what was scaled along).

    Attributes:
        label: short: `cnn`, `cnn · cpu`.
        base: the label without the hardware; groups that share it are one model on several devices.
        runs: all of them, failed ones too.
    """

    label: str
    base: str
    runs: list[Run]

    @property
    def device(self) -> str:
        """What trained: `cpu`, `gpu` or `mps`."""
        return self.runs[0].device

    @cached_property
    def sizes(self) -> dict[int, list[Run]]:
        """The measured runs of every batch size, smallest first."""
        found: dict[int, list[Run]] = {}
        for run in sorted((r for r in self.runs if r.samples_per_sec), key=lambda r: r.batch_size or 0):
            found.setdefault(run.batch_size or 0, []).append(run)
        return found

    def medians(self, of: Callable[[Run], float | None]) -> dict[int, float]:
        """The median over repeated runs at every size at which it is known."""
        known = {size: [v for v in map(of, runs) if v is not None] for size, runs in self.sizes.items()}
        return {size: statistics.median(values) for size, values in known.items() if values}

    @cached_property
    def rates(self) -> dict[int, float]:
        """Samples/s by batch size."""
        return self.medians(lambda run: run.samples_per_sec)

    @property
    def largest_possible(self) -> int | None:
        """The batch of one device that holds its share of the whole training set; None if not known."""
        shares = [-(-run.train_samples // run.processes) for run in self.runs if run.train_samples]
        return min(shares, default=None)

    @property
    def out_of_memory(self) -> int | None:
        """The smallest batch size that did not fit, and that no other run fitted."""
        sizes = [r.batch_size for r in self.runs if r.status == "out_of_memory" and r.batch_size]
        return min((size for size in sizes if size not in self.sizes), default=None)


@dataclass(frozen=True)
class SweepResults:
    """Everything that was found.

    Attributes:
        runs: in the order of their folders.
        varied: the settings that differ, by dotted name.
        groups: by what varied besides batch size and seed.
        notes: what could not be read or compared, one line each.
    """

    runs: list[Run]
    varied: list[str]
    groups: list[Group]
    notes: list[str]


def find(folders: Iterable[Path]) -> SweepResults:
    """Read all runs in and below some folders.

    Raises:
        UserError: if there is not one readable record.
    """
    folders = [Path(folder) for folder in folders]
    runs: dict[Path, Run] = {}
    notes: list[str] = []
    for folder in folders:
        if not folder.is_dir():
            notes.append(f"{folder}: no such folder")
            continue
        for run_dir in _run_dirs(folder, notes):
            name = _name(run_dir, folder, len(folders) > 1)
            record = _read(run_dir, name, notes)
            if record is not None:
                runs.setdefault(run_dir.resolve(), Run(name, run_dir, record))
    if not runs:
        why = f" ({notes[0]}{'; …' if len(notes) > 1 else ''})" if notes else ""
        raise UserError(f"no runs in {', '.join(map(str, folders)) or 'nothing'}{why}")
    return sweep_of(list(runs.values()), notes)


def sweep_of(runs: list[Run], notes: Sequence[str] = ()) -> SweepResults:
    """Runs compared with each other."""
    varied = _varied(runs)
    dividing = [key for key in varied if key not in (BATCH_SIZE, SEED)]
    dividing = [key for key in dividing if key not in _scaled_along(runs, dividing)]
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(_identity(run, dividing), []).append(run)
    base = [key for key in dividing if key not in HARDWARE]
    groups = [Group(label(members[0], dividing), label(members[0], base), members) for members in found.values()]
    return SweepResults(runs, varied, groups, [*notes, *_doubts(runs)])


def label(run: Run, keys: Iterable[str]) -> str:
    """The model and what else sets a run apart, as few words as it takes."""
    words = [str(run.settings.get("model", "model"))]
    words += [setting(key, run.settings[key]) for key in keys if key != "model" and key in run.settings]
    return " · ".join(words)


def setting(key: str, value: Any) -> str:
    """A setting in words: a name that speaks for itself, or the option's last name and its value."""
    if isinstance(value, str):
        return value
    name = key.rpartition(".")[2]
    if key == "threads":
        return f"{plain(value)} thread{'' if value == 1 else 's'}"
    return f"{name} {plain(value)}"


def plain(value: Any) -> str:
    """A value as on the command line."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(map(plain, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def number(value: Any) -> float | None:
    """A number that can have been measured, or None."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _ABSURD
    return float(value) if usable else None


def _positive(value: Any) -> float | None:
    found = number(value)
    return found if found and found > 1 / _ABSURD else None


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# --- reading ----------------------------------------------------------------------------------------------------------


def _run_dirs(folder: Path, notes: list[str]) -> list[Path]:
    """The folders that hold a record, in the order of their numbers; a numbered one without any is a note."""
    found, empty = [], []
    for path, children, files in os.walk(folder):
        # Launchers keep their jobs in hidden folders, and sweeps set earlier tries aside.
        children[:] = [child for child in children if not child.startswith(".") and not is_set_aside(child)]
        if FILE in files:
            found.append(Path(path))
            children.clear()
        elif Path(path).name.isdigit() and not children:
            empty.append(Path(path))
    notes += [f"{_name(path, folder, False)}: no {FILE} in it, so it never began" for path in sorted(empty, key=_order)]
    return sorted(found, key=_order)


def _order(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.parts]


def _name(run_dir: Path, folder: Path, several: bool) -> str:
    inside = run_dir.relative_to(folder)
    if inside == Path("."):
        return run_dir.resolve().name
    return str(Path(folder.resolve().name) / inside if several else inside)


def _read(run_dir: Path, name: str, notes: list[str]) -> dict[str, Any] | None:
    try:
        record = read(run_dir)
    except UserError as error:
        notes.append(f"{name}: {str(error).partition(': ')[2] or error}")
        return None
    if record.get("schema") != SCHEMA:
        notes.append(f"{name}: a record of schema {record.get('schema')!r}, and this version reads {SCHEMA}; left out")
    elif not isinstance(record.get("config"), dict):
        notes.append(f"{name}: a record without a config; left out")
    else:
        return record
    return None


# --- comparing --------------------------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _identity(run: Run, keys: Iterable[str]) -> str:
    return _text([run.settings.get(key) for key in keys])


def _parent(key: str) -> str | None:
    """The choice of which a setting is a detail: another model has other options, and that they differ says nothing."""
    if key in ("device_name", "threads"):
        return "device"
    group, dot, _ = key.partition(".")
    return group if dot and group in _CHOICES else None


def _varied(runs: list[Run]) -> list[str]:
    """Settings with several values among the runs that share the choice they belong to; batch size comes last."""
    seen: dict[str, dict[str, set[str]]] = {}
    for run in runs:
        for key, value in run.settings.items():
            parent = _parent(key)
            within = _text(run.settings.get(parent)) if parent else ""
            seen.setdefault(key, {}).setdefault(within, set()).add(_text(value))
    varied = [key for key, values in seen.items() if any(len(found) > 1 for found in values.values())]
    first = [key for key in ("model", "data", *HARDWARE) if key in varied]
    rest = [key for key in varied if key not in (*first, BATCH_SIZE, SEED)]
    return [*first, *rest, *(key for key in (BATCH_SIZE, SEED) if key in varied)]


def _scaled_along(runs: list[Run], dividing: list[str]) -> set[str]:
    """Numbers such as the learning rate that have one value at every batch size: they divide no group."""
    candidates = [key for key in dividing if _SCALES_ALONG.match(key)]
    rest = [key for key in dividing if key not in candidates]
    along = set()
    for key in candidates:
        values: dict[tuple[str, str], set[str]] = {}
        for run in runs:
            values.setdefault((_identity(run, rest), _identity(run, [BATCH_SIZE])), set()).add(_identity(run, [key]))
        sizes = len({size for _, size in values})
        if sizes > 1 and all(len(found) == 1 for found in values.values()):
            along.add(key)
    return along


def _doubts(runs: list[Run]) -> list[str]:
    """What makes runs less comparable than their settings say."""
    notes = []
    # A run that was stopped before it began has no versions.
    versions = {str(found) for run in runs if (found := _table(run.record.get("versions")).get("torch"))}
    if len(versions) > 1:
        notes.append(f"runs of several versions of torch are compared: {', '.join(sorted(versions))}")
    data: dict[str, set[str]] = {}
    for run in runs:
        name = _table(run.record.get("dataset")).get("name")
        if name:
            data.setdefault(str(run.settings.get("data")), set()).add(str(name))
    for choice, names in data.items():
        if len(names) > 1:
            notes.append(f"data={choice} was not the same data in every run: {', '.join(sorted(names))}")
    for run in runs:
        asked = number(run.settings.get(BATCH_SIZE))
        if run.batch_size and asked and run.batch_size < asked:
            notes.append(f"{run.name}: asked for batches of {asked:,.0f}, and they held {run.batch_size:,}")
    return notes
