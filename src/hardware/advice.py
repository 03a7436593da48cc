"""Advice on a bottleneck: one change by options that exist, are not set already, and are not known to hurt here.

A run by this project's own options is advised in those options. Any other Lightning project is advised in arguments of
its `Trainer` and its `DataLoader`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..records.formatting import option_value

_BATCH_FACTOR = 4  # between the present batch and the suggested one
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

    @property
    def batch_limit(self) -> int | None:
        """The largest batch of one device that the training set fills."""
        return None if self.train_samples is None else -(-self.train_samples // self.devices)


@dataclass(frozen=True)
class _Change:
    options: dict[str, Any]  # name in `_WRITTEN` → value
    effect: str


class _Code(str):
    """An argument's value that is shown as it is written."""

    __repr__ = str.__str__


# What to do where no change is known to help: in this project, and in another one.
_FINDS_OUT = (
    _Change({"experiment": "diagnose"}, "tries the changes that may help, one at a time"),
    _Change({"callbacks": _Code("[OperationProfiler()]")}, "shows the operations and modules that take the time"),
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
    rule = _RULES.get(kind)
    if rule is None:
        return None
    found = next((one for one in (*rule(setting), *_FINDS_OUT) if _applies(one, setting)), None)
    return Advice(_written(found, setting), found.effect) if found else None


def _applies(change: _Change, setting: Setting) -> bool:
    """Whether every option exists in this project, and one at least differs from what is set."""
    exists = all(_WRITTEN[name][0 if setting.own else 1] for name in change.options)
    return exists and any(getattr(setting, name, None) != value for name, value in change.options.items())


def _written(change: _Change, setting: Setting) -> str:
    """`data.batch_size=512`, or `DataLoader(batch_size=512)`."""
    if setting.own:
        words = ((_WRITTEN[name][0], value) for name, value in change.options.items())
        return " ".join(f"{option}={option_value(value)}" for option, value in words)
    calls: dict[str | None, list[str]] = {}
    for name, value in change.options.items():
        calls.setdefault(_WRITTEN[name][1], []).append(f"{name}={value!r}")
    return " with ".join(f"{call}({', '.join(arguments)})" for call, arguments in calls.items())


def _input(setting: Setting) -> Iterator[_Change]:
    if setting.pipeline == "workers":
        yield _Change({"pipeline": "memory"}, "takes each batch from tensors in memory at once")
    elif setting.pipeline == "memory" and setting.device != "cpu":
        yield _Change({"pipeline": "device"}, "keeps the whole set on the device")
    if setting.pipeline in (None, "workers") and (more := _more_workers(setting)):
        pinned = {"pin_memory": True} if setting.device == "cuda" and setting.pin_memory is False else {}
        yield _Change({"num_workers": more, **pinned}, "prepares more batches at the same time")
    if setting.pipeline in ("memory", "device"):
        yield from _larger_batch(setting, "needs fewer requests for the same samples")


def _more_workers(setting: Setting) -> int | None:
    """A larger number of workers; None where there is none. Without free cores they take time from the training."""
    now, cores = setting.num_workers, setting.cores
    if now is None or cores == 1 or (cores is None and now):
        return None
    more = 1 if setting.is_stream else min(max(2, 2 * now), cores or 2)
    return more if more > now else None


def _transfer(setting: Setting) -> Iterator[_Change]:
    if setting.device == "cpu":
        return
    if setting.pipeline in ("memory", "workers"):
        yield _Change({"pipeline": "device"}, "keeps the whole set on the device")
    if setting.pipeline == "workers":
        yield _Change({"pipeline": "memory"}, "copies each batch one step ahead")
    if setting.device == "cuda" and setting.pin_memory is False:
        yield _Change({"pin_memory": True}, "copies batches from page-locked memory")


def _host(setting: Setting) -> Iterator[_Change]:
    yield from _fused(setting)
    batch, accumulated = setting.batch_size, setting.accumulate_grad_batches
    whole = (batch or 0) * accumulated
    if accumulated > 1 and batch and (setting.batch_limit is None or whole <= setting.batch_limit):
        options = {"batch_size": whole, "accumulate_grad_batches": 1}
        yield _Change(options, "computes the same update with fewer operations")
        return
    larger = list(_larger_batch(setting, "launches as many operations for more samples"))
    yield from larger
    if not larger and setting.device != "cpu" and setting.devices == 1:
        yield _Change({"accelerator": "cpu"}, "may be as fast for operations of this size")


def _memory(setting: Setting) -> Iterator[_Change]:
    if setting.optimizer_traffic:  # the optimizer reads and writes as many bytes at any batch size and precision
        yield from _larger_batch(setting, "moves the optimizer's bytes less often for the same samples")
        yield from _accelerator(setting, "has more bandwidth")
        return
    if setting.device == "cpu" and setting.keep_freed_memory is False:
        yield _Change({"keep_freed_memory": True}, "spares the page faults of memory that is freed and taken again")
    yield from _channels_last(setting)
    yield from _precision(setting, "moves fewer bytes")
    yield from _accelerator(setting, "has more bandwidth")


def _elementwise(setting: Setting) -> Iterator[_Change]:
    yield from _fused(setting)
    yield from _accelerator(setting, "computes faster")


def _fused(setting: Setting) -> Iterator[_Change]:
    if setting.backend == "reference":
        yield _Change({"backend": "fused"}, "runs a whole sequence in one call")


def _compute(setting: Setting) -> Iterator[_Change]:
    yield from _fused(setting)
    yield from _channels_last(setting)
    yield from _precision(setting, "was measured to compute faster here")
    yield from _accelerator(setting, "computes faster")
    if setting.device == "cuda" and setting.devices_here > setting.devices:
        yield _Change({"devices": setting.devices_here}, "divides the arithmetic")


def _communication(setting: Setting) -> Iterator[_Change]:
    yield from _larger_batch(setting, "exchanges gradients less often for the same samples")
    more = 2 * setting.accumulate_grad_batches
    samples = (setting.batch_size or 1) * setting.devices * more
    if setting.train_samples is None or samples <= setting.train_samples:
        yield _Change({"accumulate_grad_batches": more}, "exchanges gradients half as often")


def _unclear(setting: Setting) -> Iterator[_Change]:
    yield from ()


def _larger_batch(setting: Setting, effect: str) -> Iterator[_Change]:
    if setting.batch_size is not None:
        larger = _BATCH_FACTOR * setting.batch_size
        larger = larger if setting.batch_limit is None else min(larger, setting.batch_limit)
        if larger > setting.batch_size:
            yield _Change({"batch_size": larger}, effect)


def _channels_last(setting: Setting) -> Iterator[_Change]:
    if setting.device in ("cpu", "cuda") and setting.channels_last is False:
        yield _Change({"channels_last": True}, "is the faster layout for convolutions")


def _precision(setting: Setting, effect: str) -> Iterator[_Change]:
    if setting.faster_precision is not None:
        yield _Change({"precision": setting.faster_precision}, effect)


def _accelerator(setting: Setting, effect: str) -> Iterator[_Change]:
    better = [one for one in setting.accelerators if one != "cpu"] if setting.device == "cpu" else []
    for accelerator in better[:1]:
        yield _Change({"accelerator": accelerator}, effect)


_RULES: dict[str, Callable[[Setting], Iterator[_Change]]] = {
    "input": _input,
    "transfer": _transfer,
    "host": _host,
    "memory": _memory,
    "compute": _compute,
    "elementwise": _elementwise,
    "communication": _communication,
    "unclear": _unclear,
}
