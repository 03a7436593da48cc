"""Advice on a bottleneck: the change of one option that exists, is not set already, and is not known to hurt here.

A run by this project's options gets advice in those options. Any other Lightning project gets advice in arguments of
its `Trainer` and its `DataLoader`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..records.formatting import option_value

_BATCH_FACTOR = 4  # suggested batch size ÷ present one


@dataclass(frozen=True)
class Setting:
    """The options of a run, and what its machine offers. None stands for unknown, or for an option without effect in the run."""

    device: str = "cpu"  # torch's type: `cpu`, `cuda`, `mps`
    batch_size: int | None = None  # of one device; None if another option decides it
    num_workers: int | None = None  # of the training set's DataLoader; None if more workers could not share its work
    pin_memory: bool | None = None  # of the training set's DataLoader
    cores: int = 1  # usable by each rank
    devices: int = 1  # that train together
    has_gpu: bool = False  # whether the run could use a GPU, and does not
    train_samples: int | None = None
    faster_precision: str | None = None  # at which this device was measured to be faster
    own: bool = True  # whether the run takes this project's options
    pipeline: str | None = None  # `data.pipeline`; None in any other project, as backend and channels_last
    backend: str | None = None  # `model.backend`
    channels_last: bool | None = None
    diagnosed: bool = False  # whether the run belongs to `experiment=diagnose`
    profiled: bool = False  # whether OperationProfiler already shows the operations, or cannot


def advise(kind: str, setting: Setting) -> tuple[str, str] | None:
    """Return the likeliest remedy for a kind of bottleneck, as the user writes it, and its effect; else how to find one."""
    if change := change_for(kind, setting):
        return change
    if setting.own:
        diagnosis = "experiment=diagnose", "tries the changes that may help, one at a time"
        return None if setting.diagnosed else diagnosis
    change = "Trainer(callbacks=[ThroughputMonitor(), OperationProfiler()])"
    profiling = change, "shows the operations and modules that take the time"
    is_wait = kind in ("input", "transfer", "communication")  # no table of operations shows a wait
    return profiling if not (setting.profiled or is_wait or setting.device == "mps") else None


def change_for(kind: str, setting: Setting) -> tuple[str, str] | None:
    """Return the change and its effect as `advise` does; None if no change is known."""
    return next(((change, effect) for kinds, change, effect in _changes(setting) if kind in kinds.split()), None)


def _changes(s: Setting) -> Iterator[tuple[str, str, str]]:
    """Yield the kinds of bottleneck, a change, and its effect, for each change that the setting allows; the most helpful first."""

    def write_option(option: str, value: str | int) -> str:
        owner, _, argument = option.partition(".")
        call = {"data": "DataLoader", "trainer": "Trainer"}[owner]
        return f"{option}={option_value(value)}" if s.own else f"{call}({argument}={value!r})"

    if s.pipeline == "workers":
        yield "input", "data.pipeline=memory", "takes each batch from tensors in memory at once"
    if s.pipeline in ("memory", "workers") and s.device != "cpu":
        yield "input transfer", "data.pipeline=device", "keeps the whole set on the device"
    if s.num_workers is not None:
        workers = min(max(2, 2 * s.num_workers), s.cores)  # more workers than cores take time from the training
        if workers > max(1, s.num_workers):
            yield "input", write_option("data.num_workers", workers), "prepares more batches at the same time"
    if s.device == "cuda" and s.pin_memory is False:
        yield "transfer", "DataLoader(pin_memory=True)", "copies batches from page-locked memory"
    if s.backend == "reference":
        yield "host compute elementwise", "model.backend=fused", "runs a whole sequence in one call"
    if s.batch_size and (s.train_samples is None or _BATCH_FACTOR * s.batch_size * s.devices <= s.train_samples):
        larger_batch = write_option("data.batch_size", _BATCH_FACTOR * s.batch_size)
        yield "host", larger_batch, "launches as many operations for more samples, if it fits in memory"
        yield "communication", larger_batch, "exchanges gradients less often for the same samples, if it fits in memory"
    if s.device in ("cpu", "cuda") and s.channels_last is False:
        yield "memory compute", "channels_last=true", "is the faster layout for convolutions"
    if s.faster_precision:
        precision = write_option("trainer.precision", s.faster_precision)
        yield "compute", precision, "was measured to compute faster here"
        yield "memory", precision, "moves fewer bytes"
    if s.has_gpu:
        gpu = write_option("trainer.accelerator", "gpu")
        yield "memory compute elementwise", gpu, "computes faster, with more bandwidth"
