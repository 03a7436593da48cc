"""Run: one record, with its settings and its numbers by name."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import UserError, printable
from ..options.purpose import CHOOSES_NOTHING, purpose_of
from ..options.tree import flatten
from ..records.rates import FIT_RATE, MEAN_RATE, RATE
from ..records.read import FILE
from ..records.step_parts import PARTS
from ..records.step_times import StepTimes, read_step_times
from ..records.values import at, number, positive, table

BATCH_SIZE, SEED = "data.batch_size", "seed"
CHOICES = ("model", "data", "optimizer")  # groups of the configuration, as settings
HARDWARE = ("device", "device_name", "threads")  # settings that come from the machine, not from the config

_SAID_ELSEWHERE = ("data.seed", "trainer.accelerator")  # as `seed` and as the hardware's device

_DEVICE_NAMES = {"cuda": "gpu"}  # as trainer.accelerator calls it
_REASONS = {
    "finished": "",
    "out_of_memory": "out of memory",
    "planned": "not run",
    "running": "still running, or killed",
}
_PATHS = {  # numbers above 0, by their name and their place in the record
    MEAN_RATE: f"throughput.{MEAN_RATE}",
    FIT_RATE: f"throughput.{FIT_RATE}",
    "step_ms_median": "throughput.step_ms_median",
    "step_ms_p99": "throughput.step_ms_p99",
    "step_ms": "throughput.step_ms",
    "memory_peak_gib": "throughput.memory_peak_gib",
    "memory_reserved_gib": "throughput.memory_reserved_gib",
    "joules_per_sample": "throughput.joules_per_sample",
    "learning_rate": "learning_rate",
    "compile_seconds": "compilation.seconds",
    "seconds": "seconds",
}


@dataclass(frozen=True)
class Run:
    """One record. A value that the record does not hold is None or left out, and never 0."""

    name: str  # the folder of the run, relative to the folder that was searched: `3`, or `2026-01-01_12-00-00/3`
    folder: Path
    record: dict[str, Any] = field(repr=False)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What was chosen, by dotted name: the config without folders and observation, the choices, the hardware."""
        config, choices, hardware = (table(self.record.get(key)) for key in ("config", "choices", "hardware"))
        run_dir = config.get("run_dir")
        flat: dict[str, Any] = {}
        for group in CHOICES:
            target = str(table(config.get(group)).get("_target_", "")).rpartition(".")[2]
            if choices.get(group) or target:
                flat[group] = str(choices.get(group) or target)
        if flat.get("model") == "torchvision":
            flat["model"] = str(table(config.get("model")).get("name", "torchvision"))
        flat |= self._hardware(hardware)
        for key, value in flatten(config):
            derived = isinstance(value, str) and run_dir and str(run_dir) in value
            skipped = derived or key in _SAID_ELSEWHERE or key.endswith("_target_")
            if not skipped and purpose_of(key, config) not in CHOOSES_NOTHING:
                flat[key] = value
        return {key: _one_line(value) if isinstance(value, str) else value for key, value in flat.items()}

    @staticmethod
    def _hardware(hardware: dict[str, Any]) -> dict[str, Any]:
        device = hardware.get("device")
        found = {"device": _DEVICE_NAMES.get(str(device), device), "device_name": hardware.get("device_name")}
        if device == "cpu":
            found["threads"] = hardware.get("torch_threads")
        return {key: value for key, value in found.items() if isinstance(value, str | int) and value}

    @property
    def tags(self) -> list[str]:
        """The words that the run was started with, to find it by."""
        tags = at(self.record, "config.tags")
        return [str(tag) for tag in tags] if isinstance(tags, list) else []

    @property
    def model(self) -> str:
        """The name of the model."""
        return str(self.settings.get("model", "model"))

    @property
    def device(self) -> str:
        """`cpu`, `gpu` or `mps`; empty if the record does not say."""
        return str(self.settings.get("device", ""))

    @property
    def dataset(self) -> str:
        """The name of the data that were used, which can be a stand-in for those asked for; empty if unknown."""
        return str(at(self.record, "dataset.name") or "")

    @property
    def ended(self) -> float:
        """When the run ended, in seconds since 1970; without that, when its record was written."""
        try:
            started = datetime.fromisoformat(str(self.record.get("started"))).timestamp()
            return started + (positive(self.record.get("seconds")) or 0.0)
        except (ValueError, OverflowError):
            return (self.folder / FILE).stat().st_mtime

    @property
    def status(self) -> str:
        """As in the record."""
        return str(self.record.get("status", "unknown"))

    @property
    def reason(self) -> str:
        """One line on why the run did not finish; empty if it did."""
        reported = " ".join(str(self.record.get("error") or self.status).split())
        return _REASONS.get(self.status, reported)

    @cached_property
    def batch_size(self) -> int | None:
        """Samples of a whole batch of one device: what the batch held, or what was asked for if that is unknown."""
        places = (at(self.record, "throughput.batch_size"), self.record.get("batch_size"))
        sizes = (size for size in map(number, (*places, self.settings.get(BATCH_SIZE))) if size and size >= 1)
        return next(map(round, sizes), None)

    @property
    def asked(self) -> int | None:
        """The batch size that was asked for; None if it is not known."""
        found = number(self.settings.get(BATCH_SIZE))
        return round(found) if found and found >= 1 else None

    @property
    def train_samples(self) -> int | None:
        """Size of the training set; None if the run ended before loading it."""
        found = positive(at(self.record, "dataset.train_samples"))
        return None if found is None else max(1, round(found))

    @property
    def processes(self) -> int:
        """Processes that train together, one device each."""
        found = positive(self.record.get("processes", at(self.record, "throughput.processes")))
        return max(1, round(found or 1))

    @property
    def accumulated(self) -> float:
        """Batches of a step."""
        return positive(self.settings.get("trainer.accumulate_grad_batches")) or 1

    @property
    def global_batch_size(self) -> int | None:
        """Samples of a whole batch of all devices."""
        if self.batch_size is None:
            return None
        return round(min(self.batch_size * self.processes, self.train_samples or math.inf))

    def samples_after(self, steps: float) -> float | None:
        """How many samples were trained on after so many steps; the last step of an epoch may hold fewer."""
        if self.global_batch_size is None:
            return None
        per_step = self.global_batch_size * self.accumulated
        if self.train_samples is None:
            return steps * per_step
        epochs, rest = divmod(steps, -(-self.train_samples // per_step))
        return epochs * self.train_samples + rest * per_step

    @property
    def samples_a_step(self) -> float | None:
        """Samples of a whole step of all devices; None unless its time is known."""
        rate, median = self.values.get(RATE), self.values.get("step_ms_median")
        return rate * median / 1e3 if rate and median else None

    @property
    def memory_total_gib(self) -> float | None:
        """Memory of the device; CPU and MPS share that of the machine."""
        of_machine = at(self.record, "hardware.memory_gib") if self.device in ("cpu", "mps") else None
        of_device = at(self.record, "hardware.device_memory_gib")
        return positive(of_machine if of_device is None else of_device)

    @cached_property
    def steps(self) -> StepTimes | str | None:
        """The single steps; None if the run left none, and a line where their file cannot be read."""
        try:
            return read_step_times(self.folder)
        except UserError as error:
            return str(error)

    @cached_property
    def parts_ms(self) -> dict[str, float]:
        """Mean time of each part of a step; empty unless all are known."""
        parts = {part: number(at(self.record, f"throughput.parts_ms.{part}")) for part in PARTS}
        known = {part: ms for part, ms in parts.items() if ms is not None and ms >= 0}
        return known if len(known) == len(PARTS) and sum(known.values()) > 0 else {}

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Metrics of a finished run; in an unfinished run they are not final."""
        if self.status != "finished":
            return {}
        found = {str(key): number(value) for key, value in table(self.record.get("metrics")).items()}
        return {key: value for key, value in found.items() if value is not None}

    @cached_property
    def values(self) -> dict[str, float]:
        """The numbers of the run by the names of `RUN_METRICS`, and its metrics; unknown ones are left out."""
        known = {name: value for name, path in _PATHS.items() if (value := positive(at(self.record, path)))}
        known |= {name: value for name, value in self._derived(known) if value is not None}
        return self.metrics | known | {f"{part}_ms_mean": ms for part, ms in self.parts_ms.items()}

    def _derived(self, known: dict[str, float]) -> Iterator[tuple[str, float | None]]:
        yield "batch_size", self.batch_size
        yield from self._of_processes()
        rate = positive(at(self.record, f"throughput.{RATE}")) if self.batch_size else None
        median, steps = known.get("step_ms_median"), positive(self.record.get("steps"))
        yield RATE, rate
        for name, slow in (("p10", "p90"), ("p90", "p10")):  # a step that is slower than 90 % of them has a low rate
            ms = positive(at(self.record, f"throughput.step_ms_{slow}"))
            yield f"{RATE}_{name}", rate * median / ms if rate and median and ms else None
        yield "batch_ms", median / self.accumulated if median else None
        for name in (
            "utilization_pct",
            "processor_time_pct",
            "sm_activity_pct",
            "throttled_pct",
            "stalls",
            "stall_seconds",
        ):
            yield name, number(at(self.record, f"throughput.{name}"))
        yield "mfu", number(at(self.record, "throughput.mfu"))
        waiting = number(at(self.record, "throughput.communication_ms"))
        step_ms = known.get("step_ms")
        yield "communication_share", waiting / step_ms if waiting is not None and step_ms else None
        yield "samples_seen", self.samples_after(steps) if steps else None

    def _of_processes(self) -> Iterator[tuple[str, float | None]]:
        """What only a run of several processes has."""
        if self.processes == 1:
            return
        yield "processes", self.processes
        yield "global_batch_size", self.global_batch_size
        means = {end: positive(at(self.record, f"throughput.{end}_step_ms")) for end in ("fastest", "slowest")}
        if all(means.values()):
            yield from ((f"{end}_step_ms_mean", ms) for end, ms in means.items())


def _one_line(text: str) -> str:
    """A text that neither a terminal nor a table of Markdown nor a font trips over."""
    return " ".join(printable(text).split())
