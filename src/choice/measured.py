"""What runs have measured of one training on one device: a step's time and its operations, by batch size."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..analysis.read import find
from ..analysis.run import Run
from ..errors import UserError
from ..records.operations import StepOperations, read_operations
from ..records.values import at, number, positive, table
from .catalogue import known_device
from .device import Device
from .memory import CountedMemory
from .seconds import Interval

_GIB = 2**30
_PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp64")


@dataclass(frozen=True)
class Measured:
    """Runs of one training on one device, that differ in the batch size alone. Times are those of a batch."""

    title: str
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
    groups = [group for group in find([folder]).groups if group.sizes]
    if not groups:
        raise UserError(f"{folder}: no run in it has measured its steps")
    if len({group.base for group in groups}) > 1:
        names = ", ".join(group.label for group in groups)
        raise UserError(f"{folder}: has {len(groups)} trainings ({names}); give the folder of one")
    return [_of_group(folder, [run for runs in group.sizes.values() for run in runs]) for group in groups]


def _of_group(folder: Path, runs: Sequence[Run]) -> Measured:
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
    if len(by_size) == 1 and len({run.folder for run in runs}) and not (folder / "run.json").is_file():
        raise UserError(f"{folder}: has one batch size, {next(iter(by_size)):,}; choose needs two at least")
    first, step = kept[0]
    steps = {size: _of_batch(each[0][1]) for size, each in by_size.items()}
    return Measured(
        title=" · ".join(filter(None, (first.model, first.dataset))),
        device=_device(first, step),
        precision=step.precision,
        train_samples=first.train_samples or 0,
        seconds={size: _seconds([run for run, _ in each]) for size, each in by_size.items()},
        steps=steps,
        waiting={size: statistics.median(_waiting(run) for run, _ in each) for size, each in by_size.items()},
        memory=_memory({size: each[0][0] for size, each in by_size.items()}, steps),
    )


def _of_batch(step: StepOperations) -> StepOperations:
    """The operations of one batch, where a step has several."""
    if step.batches == 1:
        return step
    rows = [replace(row, calls=row.calls / step.batches) for row in step.rows]
    shared = {"flops", "bytes", "cold_bytes", "padding_flops", "page_faults", "seconds"}
    rows = [replace(row, **{name: getattr(row, name) / step.batches for name in shared}) for row in rows]
    return replace(step, rows=rows, batches=1.0)


def _seconds(runs: Sequence[Run]) -> Interval:
    """The median step of a batch, between the ends of the runs' own intervals."""
    lows, middles, highs = [], [], []
    for run in runs:
        median = run.values["batch_ms"] / 1e3
        ends = at(run.record, "throughput.step_ms_interval")
        low, high = (positive(end) for end in ends) if isinstance(ends, list) and len(ends) == 2 else (None, None)
        middles.append(median)
        lows.append(min(median, low / 1e3 / run.accumulated) if low else median)
        highs.append(max(median, high / 1e3 / run.accumulated) if high else median)
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
    name = step.device_name or step.device
    if step.threads:
        name += f", {step.threads} thread{'s' if step.threads > 1 else ''}"
    peaks = {key: positive(value) for key, value in table(step.calibration.get("matmul_flops_per_sec")).items()}
    bandwidth = number(step.calibration.get("memory_bytes_per_sec")) or number(
        step.calibration.get("copy_bytes_per_sec")
    )
    return Device(
        name=name,
        kind=step.device,
        memory_bytes=(run.memory_total_gib or 0.0) * _GIB,
        bytes_per_sec=bandwidth or 0.0,
        flops_per_sec={key: value for key, value in peaks.items() if key in _PRECISIONS and value},
    )


def _memory(runs: Mapping[int, Run], steps: Mapping[int, StepOperations]) -> CountedMemory:
    """What was counted, or an estimate from what exists and from the traffic of the forward pass."""
    fixed, by_size, guessed = 0.0, {}, {}
    for size, run in runs.items():
        parts = {key: number(value) or 0.0 for key, value in table(at(run.record, "memory.parts_bytes")).items()}
        fixed = max(fixed, sum(parts.get(key, 0.0) for key in ("parameters", "gradients", "optimizer")))
        if "activations" in parts:
            by_size[size] = parts["activations"] + parts.get("rest", 0.0)
        guessed[size] = 0.5 * sum(row.bytes for row in steps[size].rows if row.part == "forward")
    return CountedMemory(fixed, by_size or guessed, bool(by_size))
