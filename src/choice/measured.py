"""A training as runs have measured it: on each device, its steps and operations by batch size.

Runs belong to one training if they agree in every setting that may change the time of a step, except batch size and device.

A time follows from analysis's rates, with the interval of a report: it covers the noise of windows, the difference between
separate runs, and the slowdown by other programs.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from ..analysis.groups import compared_rates, setting_text
from ..analysis.noise import SEPARATE_RUNS_SD, Rates
from ..analysis.run import BATCH_SIZE, HARDWARE, Run
from ..errors import UserError, printable
from ..hardware.datasheet import Datasheet, datasheet
from ..records.formatting import count
from ..records.operations import read_operations
from ..records.rates import RATE, why_no_rate
from ..records.read import read, run_dirs
from ..records.values import at, limited, number, positive, table
from .interval import Interval, convert_interval
from .scale import NUMERIC_FIELDS
from .step import Measured, Source

_MEDIAN_CONFIDENCE, _STEPS_SHARE = 0.95, 0.8  # of the interval of the median in a record; of steps from p10 to p90


@dataclass(frozen=True)
class Training:
    """A training as it was measured on each device that is here."""

    title: str  # `cnn · mnist`
    epochs: int | None  # that the runs were to train; None if the runs do not agree
    train_samples: int
    limit_train_batches: int | float | None  # `trainer.overfit_batches`, else the option of this name
    precision: str  # as Lightning spells it
    sources: Sequence[Source]
    doubts: Sequence[str] = ()  # why not to trust the answer
    has_all_flops: bool = True  # whether the FLOPs of all its operations are known

    def batches(self, batch_size: int) -> int:
        """Return the batches of an epoch at a batch size."""
        return max(1, limited(math.ceil(self.train_samples / batch_size), self.limit_train_batches))

    def steps(self, batch_size: int) -> float:
        """Return the batches of an epoch; a short last batch counts as the share of a batch that it has."""
        return min(self.batches(batch_size), self.train_samples / batch_size)

    @property
    def subject(self) -> str:
        """The training, its devices and its precision, as a plot's title: `cnn · mnist · A CPU, 2 threads · 32-true`."""
        return " · ".join([self.title, *(source.device.names[0] for source in self.sources), self.precision])


@dataclass(frozen=True)
class _MeasuredRun:
    run: Run
    epoch_samples: int
    options: Mapping[str, Any]  # that may change the time of a step, by dotted name
    measured: Measured  # from the record alone; its wait for data is that of the mean step
    mean_to_median: float  # the mean step time ÷ the median one, at least 1


def read_training(folders: Iterable[Path]) -> tuple[Training, list[str]]:
    """Read the runs in and below some folders: return their training, and a line for each reason to leave runs out.

    Raises:
        UserError: if the runs belong to several trainings, or no device was measured at two batch sizes.
    """
    measured, reasons = _read_runs(folders)
    values_by_option: dict[str, list[Any]] = {}  # distinct values of each option; a list, since they may be unhashable
    for run in measured:
        for key, value in run.options.items():
            if value is not None and value not in values_by_option.setdefault(key, []):
                values_by_option[key].append(value)
    if differing := [key for key, values in values_by_option.items() if len(values) > 1]:
        raise UserError(
            f"choose: the runs are of several trainings, which differ in {', '.join(differing)}; name the runs of one"
        )
    sources = _make_sources(measured, reasons)
    left_out = [printable(f"{', '.join(map(str, paths))}: {reason}") for reason, paths in reasons.items()]
    if not sources:
        searched = ", ".join(map(str, folders))
        raise UserError(f"choose: {'; '.join(left_out) or f'no runs in {searched}'}")
    return _make_training(measured, sources), left_out


def read_trainings(folders: Iterable[Path]) -> list[Training]:
    """Return each training that runs in and below some folders have measured at two or more batch sizes on a device."""
    measured, reasons = _read_runs(folders)
    groups = _group_by(measured, lambda run: str(sorted(run.options.items()))).values()
    return [_make_training(runs, sources) for runs in groups if (sources := _make_sources(runs, reasons))]


def _read_runs(folders: Iterable[Path]) -> tuple[list[_MeasuredRun], dict[str, list[Path]]]:
    """Read the runs in and below some folders: return the readable ones, and the folders of the others by reason."""
    measured: list[_MeasuredRun] = []
    reasons: dict[str, list[Path]] = {}
    for path in dict.fromkeys(path for folder in folders for path in run_dirs(folder)):
        try:
            measured.append(_read_run(path))
        except UserError as error:
            reasons.setdefault(str(error).removeprefix(f"{path}: "), []).append(path)
    return measured, reasons


def _make_sources(measured: Iterable[_MeasuredRun], reasons: dict[str, list[Path]]) -> list[Source]:
    """Return each device on which runs of a training have measured two sizes or more; add the other runs to `reasons`."""
    sources = []
    for runs in _group_by(measured, _device_key).values():
        sizes = _group_by(runs, lambda run: run.measured.step.batch_size)
        if len(sizes) > 1:
            sources.append(_make_source(dict(sorted(sizes.items()))))
            continue
        reason = f"one batch size, {min(sizes):,}, and choose needs two at least"
        reasons.setdefault(reason, []).extend(run.run.folder for run in runs)
    return _with_unique_labels(sources)


def _device_key(run: _MeasuredRun) -> tuple[Any, ...]:
    step = run.measured.step
    return step.device, step.device_name, step.threads, run.run.settings.get("cores")


def _with_unique_labels(sources: Sequence[Source]) -> list[Source]:
    """Give each source's device a unique label: `cpu-2` for the second `cpu`."""
    labelled, occurrences = [], Counter[str]()
    for source in sources:
        label = source.device.short[0]
        occurrences[label] += 1
        short = (*([f"{label}-{occurrences[label]}"] if occurrences[label] > 1 else []), *source.device.short)
        labelled.append(replace(source, device=replace(source.device, short=short)))
    return labelled


def _group_by(runs: Iterable[_MeasuredRun], key: Callable[[_MeasuredRun], Any]) -> dict[Any, list[_MeasuredRun]]:
    groups: dict[Any, list[_MeasuredRun]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def _read_run(path: Path) -> _MeasuredRun:
    """Read a run. Raise UserError if it has measured no step, trained on several devices, or recorded no operations."""
    record = read(path)
    run = Run(path.name, path, record)
    median_ms = run.values.get("step_ms_median")
    if not median_ms:
        reason = run.reason or why_no_rate(record) if record.get("status") else "its record does not say why"
        raise UserError(f"measured no step: {reason}")
    if run.processes > 1:
        raise UserError("was trained on several devices, and choose compares single ones")
    if run.train_samples is None:
        raise UserError("does not say how many samples an epoch has; give its DataModule num_samples(split)")
    step = read_operations(path)
    if step is None or not step.rows:
        raise UserError(
            "has no operations.json: its step cannot be recorded (compiled, sharded, record_operations=false, or a schedule of accumulation)"
        )
    if RATE not in run.values:
        raise UserError("does not say how many samples a step has")
    mean_ms = run.values.get("step_ms", median_ms)
    data_wait_ms = positive(at(record, "throughput.parts_ms.data_wait")) or 0.0
    batch_s_per_ms = step.batch_size / (run.values[RATE] * median_ms)  # s of a batch ÷ ms of the median step
    rows = [replace(row, **{name: getattr(row, name) / step.batches for name in NUMERIC_FIELDS}) for row in step.rows]
    measured = Measured(
        _recorded_step_ms(record, median_ms) * batch_s_per_ms,
        data_wait_ms * batch_s_per_ms,
        _counted_bytes(record),
        replace(step, rows=rows, batches=1.0),
        is_peak="measured_bytes" in table(record.get("memory")),
    )
    options = _speed_options(run) | {"trainer.precision": step.precision}  # a CPU computes 16-mixed in bfloat16
    return _MeasuredRun(run, run.train_samples, options, measured, mean_to_median=max(1.0, mean_ms / median_ms))


def _recorded_step_ms(record: Mapping[str, Any], median_ms: float) -> Interval:
    """Return the step time in ms by the record alone: with the median's interval, else with that of single steps."""
    ends, confidence = at(record, "throughput.step_ms_interval"), _MEDIAN_CONFIDENCE
    if not isinstance(ends, list) or len(ends) != 2:
        ends, confidence = [at(record, f"throughput.step_ms_{name}") for name in ("p10", "p90")], _STEPS_SHARE
    low, high = (positive(end) or median_ms for end in ends)
    return convert_interval(low, median_ms, high, confidence, SEPARATE_RUNS_SD)


def _counted_bytes(record: Mapping[str, Any]) -> float:
    """Return the bytes that the run has counted; NaN if it has not counted what autograd saves."""
    parts = {key: positive(value) or 0.0 for key, value in table(at(record, "memory.parts_bytes")).items()}
    return sum(parts.values()) if "saved" in parts else math.nan


def _speed_options(run: Run) -> dict[str, Any]:
    """Return the options that may change the time of a step, by dotted name, without batch size and device."""
    speed_settings = {key: value for key, value in run.settings.items() if run.is_of_speed(key)}
    varied = (BATCH_SIZE, "trainer.devices", *HARDWARE)  # one device may be `1`, or `[1]` of several GPUs
    return {key: value for key, value in speed_settings.items() if key not in varied} | {"data": run.dataset}


def device_here(kind: str, name: str, threads: str = "", memory_gib: float = 0.0) -> Datasheet:
    """Return the datasheet of a device that is here; for an unknown one, a datasheet with its name and memory alone."""
    names, short = (printable(name or kind) + threads,), (printable(kind),)
    sheet = datasheet(name) if kind == "cuda" else None
    return sheet or Datasheet(names, short, memory_gib, 0.0, {}, {}, kind)


def _make_source(sizes: Mapping[int, Sequence[_MeasuredRun]]) -> Source:
    """Make the source of one device from its runs by batch size."""
    first_run = next(iter(sizes.values()))[0]
    step, hardware = first_run.measured.step, table(first_run.run.record.get("hardware"))
    memory = hardware.get("device_memory_gib") or (None if step.device == "cuda" else hardware.get("memory_gib"))
    threads, cores = f", {count(step.threads, 'thread')}" if step.threads else "", first_run.run.settings.get("cores")
    if threads and cores not in (None, step.threads):
        threads += f" on {setting_text('cores', cores)}"
    rates = compared_rates({size: [run.run for run in runs] for size, runs in sizes.items()}, at_equal_load=True)
    return Source(
        device_here(step.device, step.device_name, threads, positive(memory) or 0.0),
        {size: _pool_runs(runs, rates, size) for size, runs in sizes.items()},
        rates.load,
        first_run.options.get("data.pipeline") == "device",
    )


def _pool_runs(runs: Sequence[_MeasuredRun], rates: Rates, batch_size: int) -> Measured:
    """Pool the runs at one batch size: the time of a batch follows from the rate, and the memory is the largest count."""
    measurements, rate_error = [run.measured for run in runs], rates.reach(batch_size)
    data_waits = [measured.data_wait_s for measured in measurements]
    if math.isfinite(rate_error):
        middle = batch_size / rates.rate(batch_size)
        seconds = Interval(middle / (1 + rate_error), middle, middle * (1 + rate_error))
    else:  # too few windows for an interval of the rate: by the records
        lows, middles, highs = zip(*(measured.seconds.ends() for measured in measurements), strict=True)
        others_share = min(float(rates.windows.loc[rates.windows["setting"] == batch_size, "taken"].mean()), 0.9)
        left_share = 1 - others_share  # of the processor: a step may be shorter or longer by this factor
        middle = median(middles)
        # The mean counts towards the high end: slow steps are a part of a training, and the median leaves them out.
        high = max(max(highs) / left_share, middle * max(run.mean_to_median for run in runs))
        seconds = Interval(min(lows) * left_share, middle, high)
        data_waits = [run.measured.data_wait_s / run.mean_to_median for run in runs]  # of the median step
    return Measured(
        seconds,
        median(data_waits),
        max(measured.memory_bytes for measured in measurements),
        measurements[0].step,
        all(measured.is_peak for measured in measurements),
    )


def _planned_epochs(record: Mapping[str, Any]) -> int | None:
    """Return the epochs that a run was to train; None if another limit may have ended it before, or they are unknown."""
    trainer = table(at(record, "config.trainer"))
    max_epochs, trained_epochs = positive(trainer.get("max_epochs")) or 0, number(record.get("epochs")) or 0
    has_other_limit = positive(trainer.get("max_steps")) or trainer.get("max_time")
    planned = record.get("asked_epochs", 0 if has_other_limit and trained_epochs < max_epochs else max_epochs)
    return round(positive(planned) or 0) or None


def _make_training(runs: Sequence[_MeasuredRun], sources: Sequence[Source]) -> Training:
    """Make the training of some runs, with the reasons to doubt predictions from them."""
    first_run, options = runs[0], runs[0].options
    planned_epochs = {_planned_epochs(run.run.record) for run in runs}
    doubts = []
    # An unknown option may be one that uses workers.
    if options.get("data.pipeline") in (None, "workers") and options.get("data.num_workers") != 0:
        doubts.append("Workers hide the time in which they load samples: a faster device may wait for them.")
    if any(math.isnan(run.measured.memory_bytes) for run in runs):
        doubts.append("Not every run has counted its memory, so whether a batch fits is not known.")
    if options.get("data.pipeline") == "device" and not all(run.measured.is_peak for run in runs):
        doubts.append("data.pipeline=device also keeps the data set in the memory of a card, which is not counted.")
    reasons = [str(at(run.run.record, "throughput.missing.flops_per_sec")) for run in runs]
    if unknown_flops := next((reason for reason in reasons if reason.startswith("the FLOPs of ")), ""):
        consequence = "cards are predicted as if the operation only moved its bytes, and may take far longer."
        doubts.append(f"The {printable(unknown_flops).removeprefix('the ')}: {consequence}")
    epochs = planned_epochs.pop() if len(planned_epochs) == 1 else None
    title = printable(f"{first_run.run.model} · {options['data']}")
    trainers = [table(at(run.run.record, "config.trainer")) for run in runs]
    limits = [trainer.get("overfit_batches") or trainer.get("limit_train_batches") for trainer in trainers]
    # 1 is a batch, and 1.0 the whole epoch.
    distinct_limits = {f"{type(n).__name__} {n}" for n in limits if isinstance(n, int | float | None)}
    limit = limits[0] if len(distinct_limits) == 1 and isinstance(limits[0], int | float) else None
    if len(distinct_limits) > 1:
        doubts.append("The runs differ in trainer.limit_train_batches, and whole epochs are assumed.")
    precision = first_run.measured.step.precision
    return Training(title, epochs, first_run.epoch_samples, limit, precision, sources, doubts, not unknown_flops)
