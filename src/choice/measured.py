"""What runs have measured: a training, on each device that it ran on, its steps and operations by batch size.

Runs are of one training where everything is alike that may change the time of a step, but the batch size and the device.

A time is that of the rates of analysis, with the interval that a report gives it: by the noise of its windows, what separate
runs differ by, and what other programs may have lowered the rate by.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from ..analysis.groups import rates_of, setting_words
from ..analysis.noise import BETWEEN, Rates
from ..analysis.run import BATCH_SIZE, HARDWARE, Run
from ..errors import UserError, printable
from ..hardware.datasheet import Datasheet, datasheet
from ..records.formatting import count
from ..records.operations import read_operations
from ..records.rates import RATE, why_no_rate
from ..records.read import read, run_dirs
from ..records.values import at, limited, number, positive, table
from .interval import Interval, converted
from .scale import NUMBERS
from .step import Measured, Source

_MEDIAN, _STEPS = 0.95, 0.8  # confidence of a record's interval of the median; the share of steps from p10 to p90


@dataclass(frozen=True)
class Training:
    """One training, as it was measured on each device that is here."""

    title: str  # `cnn · mnist`
    epochs: int | None  # that the runs were to train; None where they do not agree
    train_samples: int
    limit: int | float | None  # of the batches of an epoch: `trainer.overfit_batches`, else `limit_train_batches`
    precision: str  # as Lightning takes it
    sources: Sequence[Source]
    doubts: Sequence[str] = ()  # why not to trust the answer
    is_counted: bool = True  # whether the FLOPs of all its operations are known

    def batches(self, batch_size: int) -> int:
        """The batches of an epoch at a batch size."""
        return max(1, limited(math.ceil(self.train_samples / batch_size), self.limit))

    def steps(self, batch_size: int) -> float:
        """The batches of an epoch, of which a short last one counts by its samples."""
        return min(self.batches(batch_size), self.train_samples / batch_size)

    @property
    def subject(self) -> str:
        """`cnn · mnist · A CPU, 2 threads · 32-true`: what was measured, and where."""
        return " · ".join([self.title, *(source.device.names[0] for source in self.sources), self.precision])


@dataclass(frozen=True)
class _Run:
    run: Run
    samples: int  # of an epoch
    options: Mapping[str, Any]  # that make a step another one, by dotted name
    measured: Measured  # by the record alone; of the mean step, what it waits
    slowest: float  # the mean step over the median one


def read_training(folders: Iterable[Path]) -> tuple[Training, list[str]]:
    """The training that the runs in and below some folders have measured, and a line for each reason to leave runs out.

    Raises:
        UserError: if the runs are of several trainings, or none was measured at two batch sizes on one device.
    """
    measured, reasons = _measured(folders)
    known: dict[str, list[Any]] = {}  # the different values of each option, which may be lists
    for run in measured:
        for key, value in run.options.items():
            if value is not None and value not in known.setdefault(key, []):
                known[key].append(value)
    if several := [key for key, values in known.items() if len(values) > 1]:
        raise UserError(
            f"choose: the runs are of several trainings, which differ in {', '.join(several)}; name those of one"
        )
    sources = _sources(measured, reasons)
    left_out = [printable(f"{', '.join(map(str, paths))}: {reason}") for reason, paths in reasons.items()]
    if not sources:
        where = ", ".join(map(str, folders))
        raise UserError(f"choose: {'; '.join(left_out) or f'no runs in {where}'}")
    return _training(measured, sources), left_out


def read_trainings(folders: Iterable[Path]) -> list[Training]:
    """Each training that runs in and below some folders have measured at two batch sizes or more on one device."""
    measured, reasons = _measured(folders)
    groups = _grouped(measured, lambda run: str(sorted(run.options.items()))).values()
    return [_training(runs, sources) for runs in groups if (sources := _sources(runs, reasons))]


def _measured(folders: Iterable[Path]) -> tuple[list[_Run], dict[str, list[Path]]]:
    """The runs in and below some folders that can be read, and the reasons why others cannot."""
    measured: list[_Run] = []
    reasons: dict[str, list[Path]] = {}
    for path in dict.fromkeys(path for folder in folders for path in run_dirs(folder)):
        try:
            measured.append(_read(path))
        except UserError as error:
            reasons.setdefault(str(error).removeprefix(f"{path}: "), []).append(path)
    return measured, reasons


def _sources(measured: Iterable[_Run], reasons: dict[str, list[Path]]) -> list[Source]:
    """Each device on which runs of a training have measured two sizes or more; runs with one are added to the reasons."""
    sources = []
    for runs in _grouped(measured, _device).values():
        sizes = _grouped(runs, lambda run: run.measured.step.batch_size)
        if len(sizes) > 1:
            sources.append(_source(dict(sorted(sizes.items()))))
            continue
        reason = f"one batch size, {min(sizes):,}, and choose needs two at least"
        reasons.setdefault(reason, []).extend(run.run.folder for run in runs)
    return _told_apart(sources)


def _device(run: _Run) -> tuple[Any, ...]:
    step = run.measured.step
    return step.device, step.device_name, step.threads, run.run.settings.get("cores")


def _told_apart(sources: Sequence[Source]) -> list[Source]:
    """Sources whose devices have labels of their own: `cpu-2` for the second that would be called `cpu`."""
    found, number = [], Counter[str]()
    for source in sources:
        label = source.device.short[0]
        number[label] += 1
        short = (*([f"{label}-{number[label]}"] if number[label] > 1 else []), *source.device.short)
        found.append(replace(source, device=replace(source.device, short=short)))
    return found


def _grouped(runs: Iterable[_Run], key: Callable[[_Run], Any]) -> dict[Any, list[_Run]]:
    found: dict[Any, list[_Run]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run)
    return found


def _read(path: Path) -> _Run:
    """Read a run. Raises UserError for one that has measured no step of one device, or left no operations."""
    record = read(path)
    run = Run(path.name, path, record)
    middle = run.values.get("step_ms_median")
    if not middle:
        why = run.reason or why_no_rate(record) if record.get("status") else "its record does not say why"
        raise UserError(f"measured no step: {why}")
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
    mean = run.values.get("step_ms", middle)
    waiting = positive(at(record, "throughput.parts_ms.data_wait")) or 0.0
    per_batch = step.batch_size / (run.values[RATE] * middle)  # seconds, of a ms of the median step
    rows = [replace(row, **{name: getattr(row, name) / step.batches for name in NUMBERS}) for row in step.rows]
    measured = Measured(
        _recorded(record, middle) * per_batch,
        waiting * per_batch,
        _memory(record),
        replace(step, rows=rows, batches=1.0),
        is_peak="measured_bytes" in table(record.get("memory")),
    )
    options = _options(run) | {"trainer.precision": step.precision}  # a CPU computes 16-mixed in bfloat16
    return _Run(run, run.train_samples, options, measured, slowest=max(1.0, mean / middle))


def _recorded(record: Mapping[str, Any], middle: float) -> Interval:
    """A step in ms by its record alone, for want of windows: the median's interval, else that of single steps."""
    ends, confidence = at(record, "throughput.step_ms_interval"), _MEDIAN
    if not isinstance(ends, list) or len(ends) != 2:
        ends, confidence = [at(record, f"throughput.step_ms_{name}") for name in ("p10", "p90")], _STEPS
    low, high = (positive(end) or middle for end in ends)
    return converted(low, middle, high, confidence, BETWEEN)


def _memory(record: Mapping[str, Any]) -> float:
    """Bytes that were counted; NaN without a count."""
    parts = {key: positive(value) or 0.0 for key, value in table(at(record, "memory.parts_bytes")).items()}
    return sum(parts.values()) if "saved" in parts else math.nan


def _options(run: Run) -> dict[str, Any]:
    """What makes a step another one, by dotted name."""
    alike = {key: value for key, value in run.settings.items() if run.is_of_speed(key)}
    apart = (BATCH_SIZE, "trainer.devices", *HARDWARE)  # one device: `1`, or `[1]` of several GPUs
    return {key: value for key, value in alike.items() if key not in apart} | {"data": run.dataset}


def device_here(kind: str, name: str, threads: str = "", memory_gib: float = 0.0) -> Datasheet:
    """A device that measures: its datasheet, or its name and memory alone."""
    names, short = (printable(name or kind) + threads,), (printable(kind),)
    known = datasheet(name) if kind == "cuda" else None
    return known or Datasheet(names, short, memory_gib, 0.0, {}, {}, kind)


def _source(sizes: Mapping[int, Sequence[_Run]]) -> Source:
    """What the runs on one device have measured, by batch size."""
    first = next(iter(sizes.values()))[0]
    step, hardware = first.measured.step, table(first.run.record.get("hardware"))
    memory = hardware.get("device_memory_gib") or (None if step.device == "cuda" else hardware.get("memory_gib"))
    threads, cores = f", {count(step.threads, 'thread')}" if step.threads else "", first.run.settings.get("cores")
    if threads and cores not in (None, step.threads):
        threads += f" on {setting_words('cores', cores)}"
    rates = rates_of({size: [run.run for run in runs] for size, runs in sizes.items()}, at_equal_load=True)
    return Source(
        device_here(step.device, step.device_name, threads, positive(memory) or 0.0),
        {size: _pooled(runs, rates, size) for size, runs in sizes.items()},
        rates.load,
        first.options.get("data.pipeline") == "device",
    )


def _pooled(runs: Sequence[_Run], rates: Rates, batch_size: int) -> Measured:
    """One batch size from several runs: the time of a batch by its rate, and the largest count of its memory."""
    singles, reach = [run.measured for run in runs], rates.reach(batch_size)
    waiting = [of_run.waiting for of_run in singles]
    if math.isfinite(reach):
        middle = batch_size / rates.rate(batch_size)
        seconds = Interval(middle / (1 + reach), middle, middle * (1 + reach))
    else:  # by the records, for want of windows that tell how well the rate is known
        lows, middles, highs = zip(*(of_run.seconds.ends() for of_run in singles), strict=True)
        taken = min(float(rates.windows.loc[rates.windows["setting"] == batch_size, "taken"].mean()), 0.9)
        left = 1 - taken  # of the processor: a step may be shorter or longer by as much
        middle = median(middles)
        # The mean counts towards the high end: slow steps are a part of a training, and the median leaves them out.
        most = max(max(highs) / left, middle * max(run.slowest for run in runs))
        seconds = Interval(min(lows) * left, middle, most)
        waiting = [run.measured.waiting / run.slowest for run in runs]  # as the middle: slow steps raise a mean
    return Measured(
        seconds,
        median(waiting),
        max(of_run.counted for of_run in singles),
        singles[0].step,
        all(of_run.is_peak for of_run in singles),
    )


def _epochs(record: Mapping[str, Any]) -> int | None:
    """The epochs that a run was to train; None where another length may have ended it before, or nobody knows."""
    trainer = table(at(record, "config.trainer"))
    length, trained = positive(trainer.get("max_epochs")) or 0, number(record.get("epochs")) or 0
    has_another = positive(trainer.get("max_steps")) or trainer.get("max_time")
    asked = record.get("asked_epochs", 0 if has_another and trained < length else length)
    return round(positive(asked) or 0) or None


def _training(runs: Sequence[_Run], sources: Sequence[Source]) -> Training:
    first, options = runs[0], runs[0].options
    asked = {_epochs(run.run.record) for run in runs}
    doubts = []
    if options.get("data.pipeline") in (None, "workers") and options.get("data.num_workers") != 0:  # or nobody knows
        doubts.append(
            "Where workers load the samples, they hide how long they take: a faster device may wait for them."
        )
    if any(math.isnan(run.measured.counted) for run in runs):
        doubts.append("Not every run has counted its memory, so whether a batch fits is not known.")
    if options.get("data.pipeline") == "device" and not all(run.measured.is_peak for run in runs):
        doubts.append("data.pipeline=device keeps the set in the memory of a card as well, and it is not counted.")
    reasons = [str(at(run.run.record, "throughput.missing.flops_per_sec")) for run in runs]
    if uncounted := next((why for why in reasons if why.startswith("the FLOPs of ")), ""):
        as_if = "cards are predicted as if it only moved its bytes, and may take far longer."
        doubts.append(f"The {printable(uncounted).removeprefix('the ')}: {as_if}")
    epochs = asked.pop() if len(asked) == 1 else None
    title = printable(f"{first.run.model} · {options['data']}")
    trainers = [table(at(run.run.record, "config.trainer")) for run in runs]
    limits = [trainer.get("overfit_batches") or trainer.get("limit_train_batches") for trainer in trainers]
    of_type = {
        f"{type(limit).__name__} {limit}" for limit in limits if isinstance(limit, int | float | None)
    }  # 1 is not 1.0
    limit = limits[0] if len(of_type) == 1 and isinstance(limits[0], int | float) else None
    if len(of_type) > 1:
        doubts.append("The runs differ in trainer.limit_train_batches, and whole epochs are assumed.")
    precision = first.measured.step.precision
    return Training(title, epochs, first.samples, limit, precision, sources, doubts, not uncounted)
