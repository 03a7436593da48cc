"""Advice on a bottleneck: one change of an option that exists, is not set already, and is not known to hurt here.

A run by this project's own options is advised in those options. Any other Lightning project is advised in arguments of
its `Trainer` and its `DataLoader`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..records.formatting import option_value

_BATCH_FACTOR = 4  # between the present batch and the suggested one


@dataclass(frozen=True)
class Setting:
    """What a run has set, and what its machine offers. None stands for what is unknown, or has no effect in the run."""

    device: str = "cpu"  # torch's type: `cpu`, `cuda`, `mps`
    batch_size: int | None = None  # of one device; None where another option decides it
    num_workers: int | None = None  # of the training set's DataLoader, where it has one
    pin_memory: bool | None = None  # of the same
    is_stream: bool = False  # whether an IterableDataset fills it: each worker would read the whole
    cores: int | None = None  # that the process may use
    accumulate_grad_batches: int | None = 1  # None where another option decides it
    devices: int = 1  # that train together
    devices_here: int = 1  # of this kind, in this machine
    accelerators: tuple[str, ...] = ()  # what `trainer.accelerator` could be instead: `gpu`, `mps`
    train_samples: int | None = None
    faster_precision: str | None = None  # one at which this device was measured to be faster
    own: bool = True  # whether this project's options exist
    pipeline: str | None = None  # `data.pipeline`
    backend: str | None = None  # `model.backend`
    channels_last: bool | None = None
    experiment: str | None = None  # `diagnose` in a run of a diagnosis
    tf32_is_faster: bool = False  # whether the step's products are in float32, and were measured to be faster in TF32


class Advice(NamedTuple):
    """A change, as it is written, and what it does."""

    change: str
    effect: str


# How a change of an option is written: in this project's options, and in another project's calls. None: it has none there.
_WRITTEN: dict[str, tuple[str | None, str | None]] = {
    "accelerator": ("trainer.accelerator={}", "Trainer(accelerator='{}')"),
    "accumulate": ("trainer.accumulate_grad_batches={}", "Trainer(accumulate_grad_batches={})"),
    "batch": ("data.batch_size={}", "DataLoader(batch_size={})"),
    "backend": ("model.backend={}", None),
    "channels_last": ("channels_last={}", None),
    "devices": ("trainer.devices={}", "Trainer(devices={})"),
    "experiment": ("experiment={}", None),
    "pin": (None, "DataLoader(pin_memory={})"),
    "pipeline": ("data.pipeline={}", None),
    "precision": ("trainer.precision={}", "Trainer(precision='{}')"),
    "profile": (None, "Trainer(callbacks=[ThroughputMonitor(), OperationProfiler()])"),
    "tf32": ('torch.set_float32_matmul_precision("high")',) * 2,
    "workers": ("data.num_workers={}", "DataLoader(num_workers={})"),
}
_ALL = "input transfer communication host memory compute elementwise unclear"
# The bottlenecks, the change, and what it does to them. The first change of a bottleneck that has a value is the advice.
_RULES = (
    ("input", "pipeline to memory", "takes each batch from tensors in memory at once"),
    ("input transfer", "pipeline to device", "keeps the whole set on the device"),
    ("input", "workers", "prepares more batches at the same time"),
    ("transfer", "pin", "copies batches from page-locked memory"),
    ("host compute elementwise", "backend", "runs a whole sequence in one call"),
    ("host", "batch", "launches as many operations for more samples"),
    ("communication", "batch", "exchanges gradients less often for the same samples"),
    ("communication", "accumulate", "exchanges gradients half as often"),
    ("host", "accelerator to cpu", "may be as fast for operations of this size"),
    ("memory compute", "channels_last", "is the faster layout for convolutions"),
    ("compute", "tf32", "computes matrix products in TF32, which was measured to be faster here"),
    ("memory", "precision", "moves fewer bytes"),
    ("compute", "precision", "was measured to compute faster here"),
    ("memory", "accelerator", "has more bandwidth"),
    ("compute elementwise", "accelerator", "computes faster"),
    ("compute", "devices", "divides the arithmetic"),
    (_ALL, "experiment", "tries the changes that may help, one at a time"),
    (_ALL, "profile", "shows the operations and modules that take the time"),
)


def advise(kind: str, setting: Setting) -> Advice | None:
    """The change that is most likely to help against a kind of bottleneck; where none is known, how to find one."""
    values = _values(setting)
    for kinds, change, effect in _RULES:
        written = _WRITTEN[change.partition(" ")[0]][0 if setting.own else 1]
        if written and kind in kinds.split() and (value := values[change]):
            return Advice(written.format(option_value(value) if setting.own else value), effect)
    return None


def _values(s: Setting) -> dict[str, Any]:
    """The new value of each change; False or None where the setting does not call for it."""
    on_cpu = s.device == "cpu"
    return {
        "accelerator": on_cpu and next(iter(s.accelerators), None),
        "accelerator to cpu": not on_cpu and s.devices == 1 and "cpu",
        "accumulate": _accumulate(s),
        "backend": s.backend == "reference" and "fused",
        "batch": _larger_batch(s),
        "channels_last": s.device in ("cpu", "cuda") and s.channels_last is False,
        "devices": s.device == "cuda" and s.devices_here > s.devices and s.devices_here,
        "experiment": s.experiment != "diagnose" and "diagnose",
        "pin": s.device == "cuda" and s.pin_memory is False,
        "pipeline to device": s.pipeline in ("memory", "workers") and not on_cpu and "device",
        "pipeline to memory": s.pipeline == "workers" and "memory",
        "precision": s.faster_precision,
        "profile": True,
        "tf32": s.tf32_is_faster,  # the weights and the sums stay in float32
        "workers": _more_workers(s),
    }


def _more_workers(setting: Setting) -> int | None:
    """Without free cores they take time from the training; of a stream each worker would read the whole."""
    now, cores = setting.num_workers, setting.cores
    if now is None or cores == 1 or (cores is None and now) or setting.pipeline not in (None, "workers"):
        return None
    more = 1 if setting.is_stream else min(max(2, 2 * now), cores or 2)
    return more if more > now else None


def _larger_batch(setting: Setting) -> int | None:
    """No larger than what the training set gives one device."""
    if setting.batch_size is None:
        return None
    most = float("inf") if setting.train_samples is None else -(-setting.train_samples // setting.devices)
    larger = int(min(_BATCH_FACTOR * setting.batch_size, most))
    return larger if larger > setting.batch_size else None


def _accumulate(setting: Setting) -> int | None:
    if setting.accumulate_grad_batches is None:
        return None
    more = 2 * setting.accumulate_grad_batches
    samples = (setting.batch_size or 1) * setting.devices * more
    return more if setting.train_samples is None or samples <= setting.train_samples else None
