"""Advice on a bottleneck: one change of an option that exists, is not set already, and is not known to hurt here.

A run by this project's own options is advised in those options. Any other Lightning project is advised in arguments of
its `Trainer` and its `DataLoader`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..records.formatting import option_value

_BATCH_FACTOR = 4  # between the present batch and the suggested one


@dataclass(frozen=True)
class Setting:
    """What a run has set, and what its machine offers. None stands for what is unknown, or has no effect in the run."""

    device: str = "cpu"  # torch's type: `cpu`, `cuda`, `mps`
    batch_size: int | None = None  # of one device; None where another option decides it
    num_workers: int | None = None  # of the training set's DataLoader, where more could share its work
    pin_memory: bool | None = None  # of the same
    cores: int = 1  # that each rank may use
    devices: int = 1  # that train together
    has_gpu: bool = False  # whether `trainer.accelerator` could be `gpu`, and is not
    train_samples: int | None = None
    faster_precision: str | None = None  # one at which this device was measured to be faster
    own: bool = True  # whether this project's options exist
    pipeline: str | None = None  # `data.pipeline`; this and what follows is None in any other project
    backend: str | None = None  # `model.backend`
    channels_last: bool | None = None
    diagnosed: bool = False  # whether it is a run of `experiment=diagnose`
    profiled: bool = False  # whether OperationProfiler shows the operations already, or cannot


def advise(kind: str, setting: Setting) -> tuple[str, str] | None:
    """The change that is most likely to help against a kind of bottleneck, as it is written, and what it does.

    Where none is known, how to find one.
    """
    if change := change_for(kind, setting):
        return change
    if setting.own:
        finds = "experiment=diagnose", "tries the changes that may help, one at a time"
        return None if setting.diagnosed else finds
    change = "Trainer(callbacks=[ThroughputMonitor(), OperationProfiler()])"
    finds = change, "shows the operations and modules that take the time"
    is_wait = kind in ("input", "transfer", "communication")  # which no table of operations shows
    return finds if not (setting.profiled or is_wait or setting.device == "mps") else None


def change_for(kind: str, setting: Setting) -> tuple[str, str] | None:
    """As `advise`, and None where no change is known."""
    return next(((change, effect) for kinds, change, effect in _changes(setting) if kind in kinds.split()), None)


def _changes(s: Setting) -> Iterator[tuple[str, str, str]]:
    """The bottlenecks, the change, and what it does to them, as the setting calls for it; the likeliest to help first."""

    def written(option: str, value: str | int) -> str:
        owner, _, name = option.partition(".")
        call = {"data": "DataLoader", "trainer": "Trainer"}[owner]
        return f"{option}={option_value(value)}" if s.own else f"{call}({name}={value!r})"

    if s.pipeline == "workers":
        yield "input", "data.pipeline=memory", "takes each batch from tensors in memory at once"
    if s.pipeline in ("memory", "workers") and s.device != "cpu":
        yield "input transfer", "data.pipeline=device", "keeps the whole set on the device"
    if s.num_workers is not None:
        workers = min(max(2, 2 * s.num_workers), s.cores)  # without free cores they take time from the training
        if workers > max(1, s.num_workers):
            yield "input", written("data.num_workers", workers), "prepares more batches at the same time"
    if s.device == "cuda" and s.pin_memory is False:
        yield "transfer", "DataLoader(pin_memory=True)", "copies batches from page-locked memory"
    if s.backend == "reference":
        yield "host compute elementwise", "model.backend=fused", "runs a whole sequence in one call"
    if s.batch_size and (s.train_samples is None or _BATCH_FACTOR * s.batch_size * s.devices <= s.train_samples):
        larger = written("data.batch_size", _BATCH_FACTOR * s.batch_size)
        yield "host", larger, "launches as many operations for more samples, if it fits in memory"
        yield "communication", larger, "exchanges gradients less often for the same samples, if it fits in memory"
    if s.device in ("cpu", "cuda") and s.channels_last is False:
        yield "memory compute", "channels_last=true", "is the faster layout for convolutions"
    if s.faster_precision:
        precision = written("trainer.precision", s.faster_precision)
        yield "compute", precision, "was measured to compute faster here"
        yield "memory", precision, "moves fewer bytes"
    if s.has_gpu:
        yield (
            "memory compute elementwise",
            written("trainer.accelerator", "gpu"),
            "computes faster, with more bandwidth",
        )
