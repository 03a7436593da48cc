"""Advice on a bottleneck: one change by options that exist, are not set already, and are not known to hurt here.

A run by this project's own options is advised in those options. Any other Lightning project is advised in arguments of
its `Trainer` and its `DataLoader`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ..records.formatting import option_value

_BATCH_FACTOR = 4  # between the present batch and the suggested one
_TF32 = 'torch.set_float32_matmul_precision("high")'
# How a change is written: in this project's options, and in another project's calls. None: it does not exist there.
_WRITTEN: dict[str, tuple[str | None, str | None]] = {
    "accelerator": ("trainer.accelerator", "Trainer"),
    "accumulate_grad_batches": ("trainer.accumulate_grad_batches", "Trainer"),
    "devices": ("trainer.devices", "Trainer"),
    "precision": ("trainer.precision", "Trainer"),
    "batch_size": ("data.batch_size", "DataLoader"),
    "num_workers": ("data.num_workers", "DataLoader"),
    "pin_memory": (None, "DataLoader"),
    "pipeline": ("data.pipeline", None),
    "backend": ("model.backend", None),
    "channels_last": ("channels_last", None),
    "keep_freed_memory": ("keep_freed_memory", None),
    "experiment": ("experiment", None),
    "callbacks": (None, "Trainer"),
}


@dataclass(frozen=True)
class Setting:
    """What a run has set, and what its machine offers. None stands for what is unknown, or has no effect in the run."""

    device: str = "cpu"  # torch's type: `cpu`, `cuda`, `mps`
    batch_size: int | None = None  # of one device
    precision: str = "32-true"
    num_workers: int | None = None  # of the training set's DataLoader, where it has one
    pin_memory: bool | None = None  # of the same
    is_stream: bool = False  # whether an IterableDataset fills it: each worker would read the whole
    cores: int | None = None  # that the process may use
    accumulate_grad_batches: int = 1
    devices: int = 1  # that train together
    devices_here: int = 1  # of this kind, in this machine
    accelerators: tuple[str, ...] = ()  # what `trainer.accelerator` could be instead: `gpu`, `mps`
    train_samples: int | None = None
    faster_precision: str | None = None  # one at which this device was measured to be faster
    preparing: str | None = None  # the module's hook that prepares the batch and takes most of the wait for data
    own: bool = True  # whether the options below exist
    pipeline: str | None = None  # `data.pipeline`
    backend: str | None = None  # `model.backend`
    channels_last: bool | None = None
    keep_freed_memory: bool | None = None
    experiment: str | None = None  # `diagnose` in a run of a diagnosis
    optimizer_traffic: bool = False  # whether most of the step's traffic with memory is the optimizer's
    tf32_is_faster: bool = False  # whether the step's products are in float32, and were measured to be faster in TF32

    @property
    def batch_limit(self) -> int | None:
        """The largest batch of one device that the training set fills."""
        return None if self.train_samples is None else -(-self.train_samples // self.devices)


@dataclass(frozen=True)
class _Change:
    effect: str
    options: dict[str, Any] = field(default_factory=dict)  # name in `_WRITTEN` → value
    code: str = ""  # in place of options


class _Code(str):
    """An argument's value that is shown as it is written."""

    __repr__ = str.__str__


# What to do where no change is known to help: in this project, and in another one.
_FINDS_OUT = (
    _Change("tries the changes that may help, one at a time", {"experiment": "diagnose"}),
    _Change("shows the operations and modules that take the time", {"callbacks": _Code("[OperationProfiler()]")}),
)


class Advice(NamedTuple):
    """A change, as it is written, and what it does."""

    change: str
    effect: str


def advise(kind: str, setting: Setting) -> Advice | None:
    """The change that is most likely to help against a bottleneck; where none is known, how to find one.

    Args:
        kind: of the bottleneck.
        setting: of the run.
    """
    if kind == "input" and setting.preparing:  # no option of a loader makes it faster
        change = f"move the work of {setting.preparing} into the dataset"
        return Advice(change, "where the loader's workers do it while the model trains")
    if kind not in _RULES:
        return None
    known = filter(None, (rule(setting) for rule in _RULES[kind]))
    found = next((each for each in (*known, *_FINDS_OUT) if _applies(each, setting)), None)
    return Advice(_written(found, setting), found.effect) if found else None


def _applies(change: _Change, setting: Setting) -> bool:
    """Whether every option exists in this project, and one at least differs from what is set."""
    exists = all(_WRITTEN[name][0 if setting.own else 1] for name in change.options)
    differs = any(getattr(setting, name, None) != value for name, value in change.options.items())
    return bool(change.code) or (exists and differs)


def _written(change: _Change, setting: Setting) -> str:
    """`data.batch_size=512`, or `DataLoader(batch_size=512)`."""
    if change.code:
        return change.code
    if setting.own:
        words = ((_WRITTEN[name][0], value) for name, value in change.options.items())
        return " ".join(f"{option}={option_value(value)}" for option, value in words)
    calls: dict[str | None, list[str]] = {}
    for name, value in change.options.items():
        calls.setdefault(_WRITTEN[name][1], []).append(f"{name}={value!r}")
    return " with ".join(f"{call}({', '.join(arguments)})" for call, arguments in calls.items())


def _from_memory(setting: Setting) -> _Change | None:
    if setting.pipeline == "workers":
        return _Change("takes each batch from tensors in memory at once", {"pipeline": "memory"})
    return None


def _on_device(setting: Setting) -> _Change | None:
    if setting.pipeline in ("memory", "workers") and setting.device != "cpu":
        return _Change("keeps the whole set on the device", {"pipeline": "device"})
    return None


def _more_workers(setting: Setting) -> _Change | None:
    """Without free cores they take time from the training; of a stream each worker would read the whole."""
    now, cores = setting.num_workers, setting.cores
    if now is None or cores == 1 or (cores is None and now) or setting.pipeline not in (None, "workers"):
        return None
    more = 1 if setting.is_stream else min(max(2, 2 * now), cores or 2)
    pinned = {"pin_memory": True} if setting.device == "cuda" and setting.pin_memory is False else {}
    effect = "prepares more batches at the same time"
    return _Change(effect, {"num_workers": more, **pinned}) if more > now else None


def _pinned(setting: Setting) -> _Change | None:
    if setting.device == "cuda" and setting.pin_memory is False:
        return _Change("copies batches from page-locked memory", {"pin_memory": True})
    return None


def _fused(setting: Setting) -> _Change | None:
    if setting.backend == "reference":
        return _Change("runs a whole sequence in one call", {"backend": "fused"})
    return None


def _one_batch(setting: Setting) -> _Change | None:
    """The samples of an update at once, where they are accumulated."""
    whole = (setting.batch_size or 0) * setting.accumulate_grad_batches
    if whole and setting.accumulate_grad_batches > 1 and (setting.batch_limit is None or whole <= setting.batch_limit):
        options = {"batch_size": whole, "accumulate_grad_batches": 1}
        return _Change("computes the same update with fewer operations", options)
    return None


def _larger_batch(effect: str, setting: Setting) -> _Change | None:
    if setting.batch_size is None:
        return None
    larger = _BATCH_FACTOR * setting.batch_size
    larger = larger if setting.batch_limit is None else min(larger, setting.batch_limit)
    return _Change(effect, {"batch_size": larger}) if larger > setting.batch_size else None


def _batch_for_optimizer(setting: Setting) -> _Change | None:
    """The optimizer reads and writes as many bytes at any batch size and precision."""
    effect = "moves the optimizer's bytes less often for the same samples"
    return _larger_batch(effect, setting) if setting.optimizer_traffic else None


def _on_cpu(setting: Setting) -> _Change | None:
    if setting.device != "cpu" and setting.devices == 1:
        return _Change("may be as fast for operations of this size", {"accelerator": "cpu"})
    return None


def _keep_memory(setting: Setting) -> _Change | None:
    if setting.device == "cpu" and setting.keep_freed_memory is False:
        return _Change("spares the page faults of memory that is freed and taken again", {"keep_freed_memory": True})
    return None


def _channels_last(setting: Setting) -> _Change | None:
    if setting.device in ("cpu", "cuda") and setting.channels_last is False:
        return _Change("is the faster layout for convolutions", {"channels_last": True})
    return None


def _tf32(setting: Setting) -> _Change | None:
    """Before another precision: weights, activations and the sums of a product stay in float32."""
    if setting.tf32_is_faster:
        return _Change("computes matrix products in TF32, which was measured to be faster here", code=_TF32)
    return None


def _precision(effect: str, setting: Setting) -> _Change | None:
    if setting.faster_precision is None:
        return None
    return _Change(effect, {"precision": setting.faster_precision})


def _fewer_bytes(setting: Setting) -> _Change | None:
    """Not of the optimizer's bytes, which stay in float32."""
    return None if setting.optimizer_traffic else _precision("moves fewer bytes", setting)


def _accelerator(effect: str, setting: Setting) -> _Change | None:
    better = [each for each in setting.accelerators if each != "cpu"] if setting.device == "cpu" else []
    return _Change(effect, {"accelerator": better[0]}) if better else None


def _all_devices(setting: Setting) -> _Change | None:
    if setting.device == "cuda" and setting.devices_here > setting.devices:
        return _Change("divides the arithmetic", {"devices": setting.devices_here})
    return None


def _accumulate(setting: Setting) -> _Change | None:
    more = 2 * setting.accumulate_grad_batches
    samples = (setting.batch_size or 1) * setting.devices * more
    if setting.train_samples is not None and samples > setting.train_samples:
        return None
    return _Change("exchanges gradients half as often", {"accumulate_grad_batches": more})


_RULES: dict[str, Sequence[Callable[[Setting], _Change | None]]] = {  # the first that applies is the advice
    "input": (_from_memory, _on_device, _more_workers),
    "transfer": (_on_device, _pinned),
    "communication": (partial(_larger_batch, "exchanges gradients less often for the same samples"), _accumulate),
    "host": (_fused, _one_batch, partial(_larger_batch, "launches as many operations for more samples"), _on_cpu),
    "memory": (
        _batch_for_optimizer,
        _keep_memory,
        _channels_last,
        _fewer_bytes,
        partial(_accelerator, "has more bandwidth"),
    ),
    "compute": (
        _fused,
        _channels_last,
        _tf32,
        partial(_precision, "was measured to compute faster here"),
        partial(_accelerator, "computes faster"),
        _all_devices,
    ),
    "elementwise": (_fused, partial(_accelerator, "computes faster")),
    "unclear": (),
}
