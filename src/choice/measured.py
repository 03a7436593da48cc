"""What runs have measured: each training, on each device that it ran on, its steps and operations by batch size.

Runs belong to one training where everything is alike that makes a step what it is: model, data, optimizer, precision.
Seeds, folders, learning rates and the length of the training may differ.

A time is that of the rates of analysis, with the interval that a report gives it: by the noise of its windows, what separate
runs differ by, and what other programs may have lowered the rate by.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ..analysis.groups import rates_of
from ..analysis.noise import BETWEEN_CPU, Rates
from ..analysis.run import Run
from ..errors import UserError, printable
from ..hardware.datasheet import Datasheet, datasheet
from ..options.tree import flatten
from ..records.formatting import option_value
from ..records.operations import StepOperations, read_operations
from ..records.rates import RATE
from ..records.read import read, run_dirs
from ..records.values import at, positive, table
from .interval import Interval, converted
from .step import Measured, Source

_MOST_EPOCHS = 10**6
_MEDIAN, _STEPS = 0.95, 0.8  # confidence of a record's interval of the median; the share of steps from p10 to p90
_SECTIONS = ("model", "data")  # of the configuration, whose options make a step another one
_ALSO = ("optimizer._target_", "trainer.precision", "trainer.accumulate_grad_batches", "global_batch_size")
_ALSO += ("channels_last", "compile")
_NOT = ("data.batch_size", "data.seed", "data.root", "data.offline")


@dataclass(frozen=True)
class Training:
    """One training, as it was measured on each device that is here."""

    title: str  # `cnn · mnist`, with the options that tell it from the others
    epochs: int | None  # that the runs were to train; None where they do not agree
    train_samples: int
    precision: str  # as Lightning takes it
    sources: Sequence[Source]
    doubts: Sequence[str] = ()  # why not to trust the answer


@dataclass(frozen=True)
class _Run:
    path: Path
    record: Run
    options: Mapping[str, Any]  # that make a step another one, by dotted name
    measured: Measured  # by the record alone
    slowest: float  # the mean step over the median one
    samples: int  # of an epoch
    epochs: int  # that it was to train; 0: unknown
    memory_gib: float  # of the device; 0: unknown

    @property
    def step(self) -> StepOperations:
        return self.measured.step


def read_trainings(folders: Iterable[Path]) -> tuple[list[Training], list[str]]:
    """Every training that the runs in and below some folders have measured, and a line for each reason to leave runs out.

    Raises:
        UserError: if no training was measured at two batch sizes on one device.
    """
    found: list[_Run] = []
    reasons: dict[str, list[Path]] = {}
    for path in dict.fromkeys(path for folder in folders for path in run_dirs(folder)):
        try:
            found.append(_read(path))
        except UserError as error:
            reasons.setdefault(str(error).removeprefix(f"{path}: "), []).append(path)
    trainings = []
    for own in _grouped(found, lambda run: json.dumps(run.options)):
        devices = _grouped(own, lambda run: (run.step.device, run.step.device_name, run.step.threads))
        for runs in devices:
            if len(sizes := {run.step.batch_size for run in runs}) == 1:
                reason = f"one batch size, {min(sizes):,}, and choose needs two at least"
                reasons.setdefault(reason, []).extend(run.path for run in runs)
        if sources := [source for runs in devices if len((source := _source(runs)).sizes) > 1]:
            trainings.append(_training(own, sources, _different(own[0].options, [run.options for run in found])))
    left_out = [printable(f"{', '.join(map(str, paths))}: {reason}") for reason, paths in reasons.items()]
    if not trainings:
        where = ", ".join(map(str, folders))
        raise UserError(f"choose: {'; '.join(left_out) or f'no runs in {where}'}")
    return trainings, left_out


def _grouped(runs: Iterable[_Run], key: Callable[[_Run], Any]) -> list[list[_Run]]:
    found: dict[Any, list[_Run]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run)
    return list(found.values())


def _read(path: Path) -> _Run:
    """Read a run. Raises UserError for one that has measured no step of one device, or left no operations."""
    record = read(path)

    def known(name: str) -> float | None:
        return positive(at(record, name))

    middle, samples = known("throughput.step_ms_median"), known("dataset.train_samples")
    if not middle:
        why = record.get("error") or record.get("status") or "its record does not say why"
        raise UserError(f"measured no step: {str(why).replace('_', ' ')}")
    if (known("processes") or 1) > 1:
        raise UserError("was trained on several devices, and choose compares single ones")
    if not samples:
        raise UserError("does not say how many samples an epoch has; give the data num_samples")
    step = read_operations(path)
    if step is None or not step.rows:
        raise UserError(
            "has no operations.json: its step cannot be recorded (compiled, sharded, record_operations=false)"
        )
    run = Run(path.name, path, record)
    if RATE not in run.values:
        raise UserError("does not say how many samples a step has")
    mean = known("throughput.step_ms") or middle
    waiting = (known("throughput.parts_ms.data_wait") or 0.0) * min(1.0, middle / mean)  # a few slow steps raise a mean
    per_batch = 1e-3 / step.batches
    counted, moving = _memory(record, step)
    measured = Measured(
        seconds=_recorded(record, middle, step.device) * per_batch,
        waiting=waiting * per_batch,
        counted=counted,
        moving=moving,
        step=_of_batch(step),
    )
    shared = None if step.device == "cuda" else known("hardware.memory_gib")
    return _Run(
        path,
        run,
        _options(record),
        measured,
        slowest=max(1.0, mean / middle),
        samples=round(samples),
        epochs=min(round(known("config.trainer.max_epochs") or 0), _MOST_EPOCHS),
        memory_gib=known("hardware.device_memory_gib") or shared or 0.0,
    )


def _recorded(record: Mapping[str, Any], middle: float, device: str) -> Interval:
    """A step in ms by its record alone, for want of windows: the median's interval, else that of single steps."""
    ends, confidence = at(record, "throughput.step_ms_interval"), _MEDIAN
    if not isinstance(ends, list) or len(ends) != 2:
        ends, confidence = [at(record, f"throughput.step_ms_{name}") for name in ("p10", "p90")], _STEPS
    low, high = (positive(end) or middle for end in ends)
    return converted(low, middle, high, confidence, BETWEEN_CPU if device == "cpu" else 0.0)


def _options(record: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a step another one, by dotted name."""
    config = table(record.get("config"))
    model = at(record, "choices.model") or str(at(config, "model._target_")).rpartition(".")[2]
    found = {"model": at(config, "model.name") if model == "torchvision" else model, "data": at(record, "dataset.name")}
    found |= {key: value for section in _SECTIONS for key, value in flatten({section: config.get(section)})}
    found |= {key: at(config, key) for key in _ALSO}
    return {key: value for key, value in found.items() if key not in _NOT}


def _different(options: Mapping[str, Any], every: Iterable[Mapping[str, Any]]) -> list[str]:
    """The options that tell a training from others of the same model and data: `model.hidden_size=128`."""
    alike = [other for other in every if all(other[key] == options[key] for key in _SECTIONS)]
    keys = [key for key in options if any(other.get(key) != options[key] for other in alike)]
    return [f"{key}={option_value(options[key])}" for key in keys]


def _memory(record: Mapping[str, Any], step: StepOperations) -> tuple[float, float]:
    """Bytes that were counted, and those that the largest operation of the backward pass moves; NaN without a count."""
    parts = {key: positive(value) or 0.0 for key, value in table(at(record, "memory.parts_bytes")).items()}
    if "saved" not in parts:
        return math.nan, math.nan
    largest = max((row.bytes / row.calls for row in step.rows if row.part == "backward" and row.calls), default=0.0)
    return sum(parts.values()), 0.0 if "rest" in parts else largest


def _of_batch(step: StepOperations) -> StepOperations:
    """The operations of one batch, where a step has several."""
    shared = ("calls", "flops", "bytes", "cold_bytes", "seconds")
    rows = [replace(row, **{name: getattr(row, name) / step.batches for name in shared}) for row in step.rows]
    return replace(step, rows=rows, batches=1.0)


def device_here(kind: str, name: str, threads: str = "", memory_gib: float = 0.0) -> Datasheet:
    """A device that measures: its datasheet, or its name and memory alone."""
    names, short = (printable(name or kind) + threads,), (printable(kind),)
    known = datasheet(name) if kind == "cuda" else None
    return known or Datasheet(names, short, memory_gib, 0.0, {}, {}, kind)


def _source(runs: Sequence[_Run]) -> Source:
    """What the runs on one device have measured."""
    first = runs[0].step
    threads = f", {first.threads} thread{'s' if first.threads > 1 else ''}" if first.threads else ""
    device = device_here(first.device, first.device_name, threads, runs[0].memory_gib)
    ordered = sorted(runs, key=lambda run: run.step.batch_size)
    sizes = {same[0].step.batch_size: same for same in _grouped(ordered, lambda run: run.step.batch_size)}
    rates = rates_of({size: [run.record for run in same] for size, same in sizes.items()})
    return Source(device, {size: _pooled(same, rates, size) for size, same in sizes.items()}, rates.load)


def _pooled(runs: Sequence[_Run], rates: Rates, batch_size: int) -> Measured:
    """One batch size from several runs."""
    each = [run.measured for run in runs]
    seconds, lowered_by = _seconds(each, rates, batch_size)
    # The mean counts towards the high end: slow steps are a part of a training, and the median leaves them out.
    most = max(seconds.high, seconds.middle * max(run.slowest for run in runs))
    return Measured(
        seconds=replace(seconds, high=most),
        waiting=median(one.waiting for one in each),
        counted=max(one.counted for one in each),
        moving=max(one.moving for one in each),
        step=each[0].step,
        lowered_by=lowered_by,
    )


def _seconds(each: Sequence[Measured], rates: Rates, batch_size: int) -> tuple[Interval, float]:
    """The time of a batch by its rate, and by what fraction other programs may have lowered that.

    It is by the records where there are too few windows to tell how well the rate is known.
    """
    reach = rates.reach(batch_size)
    if math.isfinite(reach):
        middle = batch_size / rates.rate(batch_size)
        lowered_by = 1 - (1 + rates.reach(batch_size, others=False)) / (1 + reach)
        return Interval(middle / (1 + reach), middle, middle * (1 + reach)), lowered_by
    lows, middles, highs = zip(*(one.seconds.ends() for one in each), strict=True)
    taken = float(rates.windows.loc[rates.windows["setting"] == batch_size, "taken"].mean())
    lowered_by = float(np.clip(taken, 0, 0.9))
    left = 1 - lowered_by  # of the processor: a step may be shorter or longer by as much
    return Interval(min(lows) * left, median(middles), max(highs) / left), lowered_by


def _training(runs: Sequence[_Run], sources: Sequence[Source], different: Sequence[str]) -> Training:
    first, epochs = runs[0], {run.epochs for run in runs}
    doubts = []
    if first.options.get("data.pipeline") == "workers":
        doubts.append(
            "data.pipeline=workers hides how long the workers take to load a batch: a faster device may wait."
        )
    if any(math.isnan(run.measured.counted) for run in runs):
        doubts.append("Not every run has counted its memory, so whether a batch fits is not known.")
    return Training(
        title=printable(" · ".join([str(first.options["model"]), str(first.options["data"]), *different])),
        epochs=epochs.pop() or None if len(epochs) == 1 else None,
        train_samples=first.samples,
        precision=first.step.precision,
        sources=sources,
        doubts=doubts,
    )
