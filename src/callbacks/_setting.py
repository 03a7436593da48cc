"""The Setting of a run, for the advice: read from its options, or from the Trainer and DataLoader of any other project."""

import contextlib
from collections.abc import Mapping
from typing import Any, cast

import psutil
from lightning import LightningModule, Trainer
from lightning.fabric.utilities.data import sized_len
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from .._lightning import callbacks_of
from .._system import affinity
from ..hardware.advice import Setting
from ..hardware.devices import available
from ..hardware.processor import root_of_run, usable_cores
from ..options.tree import TARGET
from ..records.values import at
from ._training_program import program_config


def read_setting(trainer: Trainer, batch_size: int) -> Setting:
    """Return the Setting of a trainer's run, given the samples of a batch; 0 where they are unknown."""
    device = trainer.strategy.root_device.type
    config = program_config(trainer.lightning_module)
    common: dict[str, Any] = {
        "device": device,
        "batch_size": batch_size or None,
        "cores": max(1, int(usable_cores() / _count_sharing_ranks(trainer))),
        "devices": trainer.world_size,
        "has_gpu": device == "cpu" and trainer.world_size == 1 and len(available()) > 1,
        "profiled": any(type(callback).__name__ == "OperationProfiler" for callback in callbacks_of(trainer)),
    }
    return Setting(**(common | (_read_options(config, trainer) if config else _read_loader(trainer))))


def _count_sharing_ranks(trainer: Trainer) -> float:
    """Return how many ranks share this rank's cores: all of the machine, unless each rank is bound to its own cores."""
    with contextlib.suppress(psutil.Error, AttributeError):  # the launcher has ended; macOS has no affinity
        if len(affinity()) < len(psutil.Process(root_of_run()).cpu_affinity()):
            return 1
    return trainer.world_size / trainer.num_nodes


def read_title(module: LightningModule) -> str:
    """Return what is trained: the module's `title`, if that is a text, the title of our program (`cnn · mnist`), or the class."""
    title = getattr(module, "title", None)
    return title if isinstance(title, str) else getattr(module, "batchscope_title", type(module).__name__)


def _read_options(config: Mapping[str, Any], trainer: Trainer) -> dict[str, Any]:
    """Return the fields of Setting that come from this project's options."""
    data, model = config["data"], config["model"]
    pipeline, size = data.get("pipeline"), data.get("batch_size")  # a batch may have another number of samples
    has_convolutions = any(
        isinstance(submodule, nn.Conv2d | nn.ConvTranspose2d) for submodule in trainer.lightning_module.modules()
    )
    sampler = getattr(trainer.train_dataloader, "batch_sampler", None)
    loader_samples = _read_loader(trainer).get("train_samples")
    if getattr(cast(Any, trainer).datamodule, "collate_fn", None) is not None:
        pipeline = "samples"  # a `collate_fn` joins single samples in any pipeline
    has_workers = data.get("pipeline") in (None, "workers") and not _is_stream(trainer.train_dataloader)
    return {
        "own": True,
        "batch_size": size if isinstance(size, int) else None,
        "pipeline": pipeline,
        "num_workers": data.get("num_workers") if has_workers else None,
        "backend": model.get("backend"),
        "channels_last": config.get("channels_last") if has_convolutions else None,
        "train_samples": getattr(sampler, "num_samples", loader_samples),
        "diagnosed": str(at(config, f"search.{TARGET}")).endswith(".Diagnosis"),
    }


def count_epoch_samples(trainer: Trainer) -> int | None:
    """Return the samples that all ranks take from a DataLoader in an epoch; a sampler may take fewer or more than the dataset has.

    Samples that `drop_last` leaves out count, since their number depends on the batch size. Return None where the number is
    unknown: for any other loader, and where the dataset or a sampler makes the batches, because a length then counts batches.
    """
    loader = trainer.train_dataloader
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return None
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):  # Lightning's wraps another sampler
        return sized_len(sampler.dataset)
    is_partial = trainer.world_size > 1 or _is_stream(loader)  # the sampler may cover an unknown part of the dataset
    return sized_len(loader.dataset if is_partial else sampler)


def _is_stream(loader: object) -> bool:
    """Whether a loader reads a stream, which each worker would read as a whole."""
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def _read_loader(trainer: Trainer) -> dict[str, Any]:
    """Return the fields of Setting that a DataLoader has; any other iterable, or several loaders, has none."""
    loader = trainer.train_dataloader
    if not isinstance(loader, DataLoader):
        return {"own": False, "batch_size": None}
    return {
        "own": False,
        "batch_size": loader.batch_size,  # None where its sampler, or its dataset, makes the batches
        "num_workers": None if _is_stream(loader) else loader.num_workers,
        "pin_memory": loader.pin_memory,
        "train_samples": count_epoch_samples(trainer),
    }
