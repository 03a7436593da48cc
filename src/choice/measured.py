"""What runs have measured of one training on one device: a step's time and its operations, by batch size."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..analysis.read import find
from ..analysis.run import Run
from ..errors import UserError, printable
from ..records import read
from ..records.operations import FILE, StepOperations, read_operations
from ..records.rates import RATE
from ..records.values import at, peak, positive, table
from .catalogue import known_device
from .device import Device
from .memory import CountedMemory
from .seconds import Interval

_GIB = 2**30
_LOOP = 8  # calls of one operation for a batch in one module: Python goes through time steps
MOST_EPOCHS = 10**6
_PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp64")
# The settings that make a step another one, beside those of the model.
_OF_A_STEP = ("model", "data", "optimizer", "trainer.precision", "trainer.accumulate_grad_batches", "channels_last")


@dataclass(frozen=True)
class Measured:
    """Runs of one training on one device, that differ in the batch size alone. Times are those of a batch."""

    title: str
    options: Mapping[str, Any]  # the settings that make a step another one
    epochs: int | None  # that the runs were to train; None where they do not agree
    notes: Sequence[str]  # on what was left out, and on what the runs cannot tell
    busy: float | None  # the share of the processor that other programs took while they disturbed all of a run
    device: Device
    precision: str  # as Lightning takes it
    train_samples: int
    seconds: Mapping[int, Interval]  # of a step
    steps: Mapping[int, StepOperations]
    waiting: Mapping[int, float]  # seconds for the next batch
    memory: CountedMemory


def measured(folder: Path) -> list[Measured]:
    """What the runs in a folder have measured, for each device that they ran on.

    Raises:
        UserError: without a usable run, for runs without operations, of several trainings or devices at a time, and for a
            sweep of one batch size.
    """
    sweep = find([folder])
    groups = [group for group in sweep.groups if any(map(_is_measured, group.runs))]
    if not groups:
        raise UserError(f"{folder}: no run in it has measured its steps ({next(_left_out(sweep.runs), '')})")
    if len({group.base for group in groups}) > 1:
        names = ", ".join(group.label for group in groups)
        raise UserError(f"{folder}: has {len(groups)} trainings ({names}); give the folder of one")
    notes = [*sweep.notes, *_left_out(sweep.runs)]
    return [_of_group(folder, list(filter(_is_measured, group.runs)), notes) for group in groups]


def _is_measured(run: Run) -> bool:
    return RATE in run.values and "batch_ms" in run.values


def _left_out(runs: Sequence[Run]) -> Iterator[str]:
    """A line for each reason for which runs have measured no step."""
    reasons: dict[str, list[str]] = {}
    for run in runs:
        if not _is_measured(run):
            size = f" (batch size {run.batch_size:,})" if run.batch_size else ""
            reasons.setdefault(run.reason or "it measured no step", []).append(f"{run.name}{size}")
    yield from (f"left out: {', '.join(names)}: {reason}" for reason, names in reasons.items())


def _of_group(folder: Path, runs: Sequence[Run], notes: Sequence[str]) -> Measured:
    if max(run.processes for run in runs) > 1:
        raise UserError(f"{folder}: was trained on several devices; choose compares single ones")
    known = {run.folder: read_operations(run.folder) for run in runs}
    kept = [(run, step) for run in runs if (step := known[run.folder]) is not None]
    if not kept:
        raise UserError(
            f"{folder}: has no operations.json: it was measured before runs left one, or its step cannot be recorded "
            "(compiled, sharded, record_operations=false); run it again"
        )
    by_size: dict[int, list[tuple[Run, StepOperations]]] = {}
    for run, step in kept:
        by_size.setdefault(run.batch_size or step.batch_size, []).append((run, step))
    if len(by_size) == 1 and not (folder / read.FILE).is_file():
        raise UserError(f"{folder}: has one batch size, {next(iter(by_size)):,}; choose needs two at least")
    first, step = kept[0]
    steps = {size: _of_batch(each[0][1]) for size, each in by_size.items()}
    waiting = {size: statistics.median(_waiting(run) for run, _ in each) for size, each in by_size.items()}
    epochs = [at(run.record, "config.trainer.max_epochs") for run, _ in kept]
    return Measured(
        title=printable(" · ".join(filter(None, (first.model, first.dataset)))),
        options={key: value for key, value in first.settings.items() if key in _OF_A_STEP or key.startswith("model.")},
        epochs=epochs[0] if epochs == epochs[:1] * len(epochs) and _is_count(epochs[0]) else None,
        notes=[*notes, *_doubts(runs, kept)],
        busy=max((_others(run) for run, _ in kept if _is_disturbed(run)), default=None),
        device=_device(first, step),
        precision=step.precision,
        train_samples=first.train_samples or 0,
        seconds={size: _seconds([run for run, _ in each]) for size, each in by_size.items()},
        steps=steps,
        waiting=_undisturbed(waiting),
        memory=_memory({size: each[0][0] for size, each in by_size.items()}, steps),
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_EPOCHS


def _doubts(runs: Sequence[Run], kept: Sequence[tuple[Run, StepOperations]]) -> Iterator[str]:
    """What the runs cannot tell of another device."""
    used = {run.folder for run, _ in kept}
    if without := [run.name for run in runs if run.folder not in used]:
        yield f"left out: {', '.join(without)}: no {FILE}"
    if any(run.settings.get("data.pipeline") == "workers" for run, _ in kept):
        yield (
            "data.pipeline=workers: a step here hides how long the workers take to load a batch; on a faster device it may "
            "wait for them longer than predicted"
        )


def _is_disturbed(run: Run) -> bool:
    """Whether other programs disturbed all that was measured of a run."""
    bad, windows = (positive(at(run.record, f"throughput.{name}")) for name in ("disturbed_windows", "windows"))
    return bool(bad and bad == windows)


def _others(run: Run) -> float:
    return positive(at(run.record, "throughput.others_share")) or 0.0


def _undisturbed(waiting: Mapping[int, float]) -> dict[int, float]:
    """Seconds for the next batch, by batch size, without what other programs added at single sizes.

    A batch takes no longer than a larger one, and no longer a sample than a smaller one.
    """
    known = {size: seconds for size, seconds in waiting.items() if seconds > 0}
    return {
        size: min((each * max(1.0, size / other) for other, each in known.items()), default=0.0) for size in waiting
    }


def _of_batch(step: StepOperations) -> StepOperations:
    """The operations of one batch, where a step has several."""
    if step.batches == 1:
        return step
    rows = [replace(row, calls=row.calls / step.batches) for row in step.rows]
    shared = {"flops", "bytes", "cold_bytes", "seconds"}
    rows = [replace(row, **{name: getattr(row, name) / step.batches for name in shared}) for row in rows]
    return replace(step, rows=rows, batches=1.0)


def _seconds(runs: Sequence[Run]) -> Interval:
    """The median step of a batch, between the ends of the runs' own intervals; a run of few steps has 10 to 90 % of these.

    The mean counts towards the high end: slow steps are a part of a training, and the median leaves them out.
    """
    lows, middles, highs = [], [], []
    for run in runs:
        ends = at(run.record, "throughput.step_ms_interval")
        if not isinstance(ends, list) or len(ends) != 2:
            ends = [at(run.record, f"throughput.step_ms_{name}") for name in ("p10", "p90")]
        known = [positive(each) or math.nan for each in (*ends, run.values.get("step_ms"))]
        low, high, mean = (each / 1e3 / run.accumulated for each in known)
        middles.append(run.values["batch_ms"] / 1e3)
        lows.append(min(middles[-1], low))  # of an unknown end the median
        highs.append(max(middles[-1], high, mean))
    return Interval(min(lows), statistics.median(middles), max(highs))


def _waiting(run: Run) -> float:
    """Seconds for a batch, of a typical step: the parts are means, and a few slow steps raise them."""
    parts, median, mean = run.parts_ms, run.values.get("step_ms_median"), run.values.get("step_ms")
    if not parts or not median or not mean:
        return 0.0
    return parts["data_wait"] / 1e3 / run.accumulated * min(1.0, median / mean)


def _device(run: Run, step: StepOperations) -> Device:
    """The device that measured: its datasheet where there is one, else what was measured of it."""
    stated = known_device(step.device_name) if step.device == "cuda" else None
    if stated is not None:
        return stated
    name = printable(step.device_name or step.device)
    if step.threads:
        name += f", {step.threads} thread{'s' if step.threads > 1 else ''}"
    peaks = {key: peak(value) for key, value in table(step.calibration.get("matmul_flops_per_sec")).items()}
    return Device(
        name=name,
        kind=printable(step.device),
        memory_bytes=(run.memory_total_gib or 0.0) * _GIB,
        bytes_per_sec=peak(step.calibration.get("memory_bytes_per_sec")) or math.inf,  # what is unknown limits nothing
        flops_per_sec={key: value for key, value in peaks.items() if key in _PRECISIONS and value},
    )


def _memory(runs: Mapping[int, Run], steps: Mapping[int, StepOperations]) -> CountedMemory:
    """What was measured, or an estimate from what exists and from the traffic of the forward pass."""
    fixed, by_size, guessed, moving, has_loop = 0.0, {}, {}, {}, False
    for size, run in runs.items():
        parts = {key: positive(value) or 0.0 for key, value in table(at(run.record, "memory.parts_bytes")).items()}
        fixed = max(fixed, sum(parts.get(key, 0.0) for key in ("parameters", "gradients", "optimizer")))
        rows = steps[size].rows
        if "saved" in parts:
            by_size[size] = parts["saved"] + parts.get("rest", 0.0)
            backward = [row for row in rows if row.part == "backward" and row.calls]
            largest = max((row.bytes / row.calls for row in backward), default=0.0)
            has_loop |= any(row.calls >= _LOOP * steps[size].batches for row in backward)
            moving |= {} if "rest" in parts else {size: largest}
        guessed[size] = 0.5 * sum(row.bytes for row in rows if row.part == "forward")
    return CountedMemory(fixed, by_size or guessed, bool(by_size), moving, has_loop)
