"""Advice on a bottleneck: one change by options that exist, are not set already, and are not known to hurt here.

A run by this project's own options is advised in those options. Any other Lightning project is advised in arguments of
its `Trainer` and its `DataLoader`.
"""

from collections.abc import Callable
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
    "global_batch_size": ("global_batch_size", None),
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
    global_batch_size: int | None = None  # which decides how many batches are accumulated
    experiment: str | None = None  # `diagnose` in a run of a diagnosis
    optimizer_traffic: bool = False  # whether most of the step's traffic with memory is the optimizer's
    tf32_is_faster: bool = False  # whether the step's products are in float32, and were measured to be faster in TF32

    @property
    def batch_limit(self) -> int | None:
        """The largest batch of one device that the training set fills."""
        return None if self.train_samples is None else -(-self.train_samples // self.devices)


class _Code(str):
    """An argument's value that is shown as it is written."""

    __repr__ = str.__str__


class Advice(NamedTuple):
    """A change, as it is written, and what it does."""

    change: str
    effect: str


Options = dict[str, Any]  # name in `_WRITTEN` → value
_Change = Callable[[Setting], Options | str | bool | None]


def advise(kind: str, setting: Setting) -> Advice | None:
    """The change that is most likely to help against a bottleneck; where none is known, how to find one.

    Args:
        kind: of the bottleneck.
        setting: of the run.
    """
    for kinds, effect, change in _RULES:
        if kind in kinds.split() and (found := change(setting)):
            if isinstance(found, str):
                return Advice(found, effect)
            if isinstance(found, dict) and _applies(found, setting):
                return Advice(_written(found, setting), effect)
    return None


def _applies(options: Options, setting: Setting) -> bool:
    """Whether every option exists in this project, and one at least differs from what is set."""
    exists = all(_WRITTEN[name][0 if setting.own else 1] for name in options)
    return exists and any(getattr(setting, name, None) != value for name, value in options.items())


def _written(options: Options, setting: Setting) -> str:
    """`data.batch_size=512`, or `DataLoader(batch_size=512)`."""
    if setting.own:
        return " ".join(f"{_WRITTEN[name][0]}={option_value(value)}" for name, value in options.items())
    calls: dict[str | None, list[str]] = {}
    for name, value in options.items():
        calls.setdefault(_WRITTEN[name][1], []).append(f"{name}={value!r}")
    return " with ".join(f"{call}({', '.join(arguments)})" for call, arguments in calls.items())


def _more_workers(setting: Setting) -> Options | None:
    """Without free cores they take time from the training; of a stream each worker would read the whole."""
    now, cores = setting.num_workers, setting.cores
    if now is None or cores == 1 or (cores is None and now) or setting.pipeline not in (None, "workers"):
        return None
    more = 1 if setting.is_stream else min(max(2, 2 * now), cores or 2)
    return {"num_workers": more, **(_pinned(setting) or {})} if more > now else None


def _pinned(setting: Setting) -> Options | None:
    return {"pin_memory": True} if setting.device == "cuda" and setting.pin_memory is False else None


def _one_batch(setting: Setting) -> Options | None:
    """The samples of an update at once, where they are accumulated."""
    batch = (setting.batch_size or 0) * setting.accumulate_grad_batches
    is_divided = batch and setting.accumulate_grad_batches > 1
    fits = setting.batch_limit is None or batch <= setting.batch_limit
    if not is_divided or not fits:
        return None
    return {"batch_size": batch} if setting.global_batch_size else {"batch_size": batch, "accumulate_grad_batches": 1}


def _larger_batch(setting: Setting) -> Options | None:
    if setting.batch_size is None:
        return None
    larger = _BATCH_FACTOR * setting.batch_size
    larger = larger if setting.batch_limit is None else min(larger, setting.batch_limit)
    if setting.global_batch_size:
        share = setting.batch_size * setting.accumulate_grad_batches
        larger = next(size for size in range(min(larger, share), 0, -1) if share % size == 0)
    return {"batch_size": larger} if larger > setting.batch_size else None


def _precision(setting: Setting) -> Options | None:
    return {"precision": setting.faster_precision} if setting.faster_precision else None


def _accumulate(setting: Setting) -> Options | None:
    more = 2 * setting.accumulate_grad_batches
    samples = (setting.batch_size or 1) * setting.devices * more
    fits = setting.train_samples is None or samples <= setting.train_samples
    if setting.global_batch_size:
        return {"global_batch_size": 2 * setting.global_batch_size} if fits else None
    return {"accumulate_grad_batches": more} if fits else None


def _accelerator(setting: Setting) -> Options | None:
    better = [each for each in setting.accelerators if each != "cpu"] if setting.device == "cpu" else []
    return {"accelerator": better[0]} if better else None


_ALL = "input transfer communication host memory compute elementwise unclear"
# The bottlenecks; what the change does to them; the change itself, or nothing where the setting does not call for it. The
# first rule of a bottleneck that applies is the advice.
_RULES: tuple[tuple[str, str, _Change], ...] = (
    (
        "input",
        "where the loader's workers do it while the model trains",  # no option of a loader makes it faster
        lambda s: s.preparing and f"move the work of {s.preparing} into the dataset",
    ),
    (
        "input",
        "takes each batch from tensors in memory at once",
        lambda s: s.pipeline == "workers" and {"pipeline": "memory"},
    ),
    (
        "input transfer",
        "keeps the whole set on the device",
        lambda s: s.pipeline in ("memory", "workers") and s.device != "cpu" and {"pipeline": "device"},
    ),
    ("input", "prepares more batches at the same time", _more_workers),
    ("transfer", "copies batches from page-locked memory", _pinned),
    (
        "host compute elementwise",
        "runs a whole sequence in one call",
        lambda s: s.backend == "reference" and {"backend": "fused"},
    ),
    ("host", "computes the same update with fewer operations", _one_batch),
    ("host", "launches as many operations for more samples", _larger_batch),
    ("communication", "exchanges gradients less often for the same samples", _larger_batch),
    ("communication", "exchanges gradients half as often", _accumulate),
    (
        "host",
        "may be as fast for operations of this size",
        lambda s: s.device != "cpu" and s.devices == 1 and {"accelerator": "cpu"},
    ),
    (
        "memory",
        "moves the optimizer's bytes less often for the same samples",  # they are as many at any batch size
        lambda s: s.optimizer_traffic and _larger_batch(s),
    ),
    (
        "memory",
        "spares the page faults of memory that is freed and taken again",
        lambda s: s.device == "cpu" and s.keep_freed_memory is False and {"keep_freed_memory": True},
    ),
    (
        "memory compute",
        "is the faster layout for convolutions",
        lambda s: s.device in ("cpu", "cuda") and s.channels_last is False and {"channels_last": True},
    ),
    (
        "compute",
        "computes matrix products in TF32, which was measured to be faster here",  # weights and sums stay in float32
        lambda s: s.tf32_is_faster and 'torch.set_float32_matmul_precision("high")',
    ),
    ("memory", "moves fewer bytes", lambda s: not s.optimizer_traffic and _precision(s)),  # whose bytes stay in float32
    ("compute", "was measured to compute faster here", _precision),
    ("memory", "has more bandwidth", _accelerator),
    ("compute elementwise", "computes faster", _accelerator),
    (
        "compute",
        "divides the arithmetic",
        lambda s: s.device == "cuda" and s.devices_here > s.devices and {"devices": s.devices_here},
    ),
    (_ALL, "tries the changes that may help, one at a time", lambda s: {"experiment": "diagnose"}),
    (
        _ALL,
        "shows the operations and modules that take the time",
        lambda s: {"callbacks": _Code("[OperationProfiler()]")},
    ),
)
