"""Run: the record of a run, with its settings and its numbers by name."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError, cut, is_text, printable
from ..options.purpose import NON_FACTOR_PURPOSES, OWN_RATE, changes_speed, purpose_of
from ..options.tree import TARGET, flatten
from ..records.correct import read_correct
from ..records.metrics import staged
from ..records.rates import MEAN_RATE, RATE
from ..records.step_parts import PARTS
from ..records.step_times import StepTimes, read_step_times
from ..records.values import at, number, positive, table

BATCH_SIZE, SEED, LEARNING_RATE = "data.batch_size", "seed", "optimizer.lr"
TEST_ACCURACY = "test/acc"
CHOICES = ("model", "data", "task", "optimizer")  # groups of the configuration, as settings
HARDWARE = ("device", "device_name", "threads", "cores")  # settings that come from the machine, not from the config
OUT_OF_MEMORY = "out of memory"  # the reason of a run
PARAMETERS = "model.parameters"  # a key of the record, and a setting of the runs of a script

_REDUNDANT = ("trainer.accelerator", "run_dir")  # the hardware's device and the folder of the record say the same
_OUR_CALLBACK = re.compile(rf"callbacks\.\w+\.{TARGET}=batchscope\.")  # the callback's other options say what matters
# The precision that Lightning means by a short word.
PRECISIONS = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true", "None": "32-true"}
_REASONS = {
    "finished": "",
    "out_of_memory": OUT_OF_MEMORY,
    "planned": "not run",
    "running": "still running, or killed",
}
_TIMES = (MEAN_RATE, "step_ms", "step_ms_median", "memory_peak_gib", "joules_per_sample")
_LONGEST = 24  # characters of a bottleneck's kind: a record may hold any text
_SHARES = ("mfu", "utilization_pct", "processor_time_pct")  # numbers of the throughput that may be 0
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """The record of a run. A value that the record does not hold is None or left out, and never 0."""

    name: str  # the folder of the run, relative to the folder that was searched: `3`, or `2026-01-01_12-00-00/3`
    folder: Path
    record: dict[str, Any] = field(repr=False)
    number: int = 0  # among the runs of a report

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings by dotted name: the choices, the hardware, and the config without folders and what only observes."""
        config, choices, hardware = (table(self.record.get(key)) for key in ("config", "choices", "hardware"))
        flat: dict[str, Any] = {}
        for group in CHOICES:
            flat[group] = str(choices.get(group) or str(at(config, f"{group}._target_") or "").rpartition(".")[2])
        if flat["model"] == "torchvision":
            flat["model"] = str(at(config, "model.name") or "torchvision")
        device = hardware.get("device")
        flat |= {"device": "gpu" if device == "cuda" else device, "device_name": hardware.get("device_name")}
        cpu_settings = {"threads": hardware.get("torch_threads"), "cores": hardware.get("cpu_cores")}
        flat |= cpu_settings if device == "cpu" else {}
        flat = {key: value for key, value in flat.items() if isinstance(value, str | int | float) and value}
        for key, value in flatten(config):
            is_redundant = key in _REDUNDANT or (key == "data.seed" and value == config.get(SEED))
            is_skipped = is_redundant or _OUR_CALLBACK.match(f"{key}={value}")
            if not is_skipped and purpose_of(key, config) not in NON_FACTOR_PURPOSES:
                flat[key] = value
        if "trainer.precision" in flat:
            precision = PRECISIONS.get(str(flat["trainer.precision"]), flat["trainer.precision"])
            on_cpu = "cpu" in (device, at(config, "trainer.accelerator"))
            flat["trainer.precision"] = "bf16-mixed" if on_cpu and precision == "16-mixed" else precision
        parameters = positive(at(self.record, PARAMETERS)) if "script" in config else None
        flat |= {PARAMETERS: round(parameters)} if parameters else {}  # all fits of a script have the same arguments
        return {key: _one_line(value) if isinstance(value, str) else value for key, value in flat.items()}

    def signature(self, counts: Callable[[str], bool]) -> str:
        """Return the settings whose key `counts`, as a text that is the same for the same training; null counts as unset."""
        settings = {key: value for key, value in self.settings.items() if value is not None and counts(key)}
        return json.dumps(settings, sort_keys=True, default=str)

    def is_of_speed(self, key: str) -> bool:
        """Whether a setting may change the time of a step."""
        return changes_speed(key, table(self.record.get("config")))

    @cached_property
    def speed_setting(self) -> str:
        """The settings that may change the time of a step, as a text: runs with the same text have the same speed."""
        return self.signature(self.is_of_speed)

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
    def precision(self) -> str:
        """The precision of the Trainer: `32-true`; empty if the record does not say."""
        return str(self.settings.get("trainer.precision") or at(self.record, "throughput.precision") or "")

    @property
    def status(self) -> str:
        """The status that the record has."""
        return str(self.record.get("status", "unknown"))

    @property
    def reason(self) -> str:
        """One line on why the run did not finish; empty if it did."""
        return _REASONS.get(self.status, " ".join(str(self.record.get("error") or self.status).split()))

    @property
    def bottleneck(self) -> str:
        """The kind of the bottleneck: `memory`, `probably host`, `unclear`; empty if the record does not say."""
        bottleneck = table(at(self.record, "throughput.bottleneck"))
        probably = "probably " if bottleneck.get("certainty") == "probable" else ""
        return cut(_one_line(f"{probably}{bottleneck['kind']}"), _LONGEST) if is_text(bottleneck.get("kind")) else ""

    @cached_property
    def batch_size(self) -> int | None:
        """The samples of a full batch of one device: as measured, or as asked for if that is not known or varies."""
        mean, lowered = (_size(at(self.record, path)) for path in ("throughput.batch_size", "batch_size"))
        sizes = (lowered, self.asked, mean) if self.varies else (mean, lowered, self.asked)
        return next(filter(None, sizes), None)

    @property
    def varies(self) -> bool:
        """Whether batches have many sizes by design: then the measured size is a mean, which differs from seed to seed."""
        return at(self.record, "throughput.batch_size_varies") is True

    @property
    def _mean_batch_size(self) -> int | None:
        """The mean size of this run's batches where their sizes vary, else `batch_size`."""
        return (_size(at(self.record, "throughput.batch_size")) if self.varies else None) or self.batch_size

    @property
    def asked(self) -> int | None:
        """The batch size that was asked for; None if it is not known."""
        return _size(self.settings.get(BATCH_SIZE))

    @property
    def is_to_target(self) -> bool:
        """Whether the run trains until a metric reaches a target; the record has the target once training has ended."""
        return "target" in self.record or at(self.record, "config.target") is not None

    @property
    def overrides(self) -> list[str]:
        """The options of the run's command line."""
        overrides = self.record.get("overrides")
        return [" ".join(str(override).split()) for override in overrides] if isinstance(overrides, list) else []

    @property
    def asked_rate(self) -> float | None:
        """The learning rate that an option asks for; None where no option does."""
        module_rates = (value for key, value in self.settings.items() if re.fullmatch(OWN_RATE, key))
        return positive(self.settings.get(LEARNING_RATE, next(module_rates, None)))

    def share(self, option: str) -> float | None:
        """Return the option `enough` or `margin` of the run's sweep; None if the record does not say."""
        share = positive(at(self.record, f"config.{option}"))
        return share if share and share <= 1 else None

    @property
    def train_samples(self) -> int | None:
        """The size of the training set; None if the run ended before it was loaded."""
        samples = positive(at(self.record, "dataset.train_samples"))
        return None if samples is None else max(1, round(samples))

    @property
    def processes(self) -> int:
        """The number of processes that train together, with one device each."""
        return max(1, round(positive(self.record.get("processes", at(self.record, "throughput.processes"))) or 1))

    @property
    def global_batch_size(self) -> int | None:
        """The samples of a full update over all devices; the last update of an epoch may have fewer."""
        if self._mean_batch_size is None:
            return None
        batches = positive(self.settings.get("trainer.accumulate_grad_batches")) or 1
        # An earlier option gave the samples of an update.
        update = positive(self.settings.get("global_batch_size")) or self._mean_batch_size * self.processes * batches
        return round(min(update, self.train_samples or math.inf))

    def samples_after(self, steps: float) -> float | None:
        """Return the number of samples that so many steps train on."""
        per_step = self.global_batch_size
        if per_step is None:
            return None
        if self.train_samples is None:
            return steps * per_step
        epochs, rest = divmod(steps, -(-self.train_samples // per_step))
        return epochs * self.train_samples + rest * per_step

    @property
    def samples_a_step(self) -> float | None:
        """The samples of a full step of all devices; None unless the time of a step is known."""
        rate, median = self.values.get(RATE), self.values.get("step_ms_median")
        return rate * median / 1e3 if rate and median else None

    @cached_property
    def steps(self) -> StepTimes | str | None:
        """The times of the single steps; None if the run has no such file, the error as a line if it cannot be read."""
        return _read(read_step_times, self.folder)

    @property
    def in_passes(self) -> bool:
        """Whether a sweep has visited the run in passes."""
        return isinstance(self.steps, StepTimes) and bool((self.steps.pass_ >= 0).any())

    @cached_property
    def correct(self) -> NDArray[np.bool_] | str | None:
        """Which test samples the run answered right, (N,); None if there is no such file, the error as a line if it cannot be read."""
        samples, accuracy = positive(at(self.record, "evaluated.test")), self.metrics.get(TEST_ACCURACY)
        if not samples or accuracy is None:
            return None
        return _read(read_correct, self.folder, round(samples), accuracy)

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The metrics of a finished run; empty for other runs, and for a run that ended once its speed was known: not final."""
        if self.status != "finished" or at(self.record, "throughput.ended"):
            return {}
        recorded = table(self.record.get("metrics")).items()
        logged = {_one_line(staged(str(key))): number(value) for key, value in recorded}
        return {key: value for key, value in logged.items() if value is not None}

    @cached_property
    def values(self) -> dict[str, float]:
        """The numbers of the run by the names of `RUN_METRICS`, and its metrics; unknown numbers are left out."""
        throughput, size, update = table(self.record.get("throughput")), self.batch_size, self.global_batch_size
        numbers = {name: positive(throughput.get(name)) for name in _TIMES}
        numbers |= {name: number(throughput.get(name)) for name in _SHARES}
        numbers |= {name: positive(self.record.get(name)) for name in ("learning_rate", "seconds", "time_to_target_s")}
        steps = positive(at(self.record, "target.steps"))
        numbers |= {
            RATE: positive(throughput.get(RATE)) if size else None,
            "batch_size": size,
            "processes": self.processes if self.processes > 1 else None,
            "global_batch_size": update if update != self._mean_batch_size else None,
            "samples_to_target": self.samples_after(steps) if steps and numbers["time_to_target_s"] else None,
        }
        parts = {f"{part}_ms_mean": number(at(throughput, f"parts_ms.{part}")) for part in PARTS}
        if all(ms is not None and ms >= 0 for ms in parts.values()) and any(parts.values()):
            numbers |= parts
        return self.metrics | {name: value for name, value in numbers.items() if value is not None}


def _size(value: Any) -> int | None:
    """Return the value as a batch size; None if it is none."""
    size = number(value)
    return round(size) if size and size >= 1 else None


def _read(read: Callable[..., T], *arguments: Any) -> T | str:
    """Return what a file beside the record holds, or the error as a line where it cannot be read."""
    try:
        return read(*arguments)
    except UserError as error:
        return str(error)


def _one_line(text: str) -> str:
    """Return the text as one line that a terminal, a table of Markdown and a font can show."""
    return " ".join(printable(text).split())
