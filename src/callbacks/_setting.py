"""What a run has set, for the advice: from its options, or from the Trainer and the DataLoader of any other project."""

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
from ._own import own_config


def setting_of(trainer: Trainer, batch_size: int) -> Setting:
    """What a trainer's run has set, of batches of so many samples; 0 where nobody knows how many."""
    device = trainer.strategy.root_device.type
    config = own_config(trainer.lightning_module)
    common: dict[str, Any] = {
        "device": device,
        "batch_size": batch_size or None,
        "cores": max(1, int(usable_cores() / _sharing(trainer))),
        "devices": trainer.world_size,
        "has_gpu": device == "cpu" and trainer.world_size == 1 and len(available()) > 1,
        "profiled": any(type(callback).__name__ == "OperationProfiler" for callback in callbacks_of(trainer)),
    }
    return Setting(**(common | (_of_options(config, trainer) if config else _of_loader(trainer))))


def _sharing(trainer: Trainer) -> float:
    """How many ranks share the cores that this one may use: those of a machine, unless each is bound to cores of its own."""
    with contextlib.suppress(psutil.Error, AttributeError):  # what has started it has ended; on macOS nobody tells
        if len(affinity()) < len(psutil.Process(root_of_run()).cpu_affinity()):
            return 1
    return trainer.world_size / trainer.num_nodes


def title_of(module: LightningModule) -> str:
    """What is trained: a text that the module has as its `title`, `cnn · mnist` of our program, or the class."""
    own = getattr(module, "title", None)
    return own if isinstance(own, str) else getattr(module, "batchscope_title", type(module).__name__)


def _of_options(config: Mapping[str, Any], trainer: Trainer) -> dict[str, Any]:
    """What only this project's options can set."""
    data, model = config["data"], config["model"]
    pipeline, size = data.get("pipeline"), data.get("batch_size")  # which is not always what a batch holds
    has_convolutions = any(
        isinstance(each, nn.Conv2d | nn.ConvTranspose2d) for each in trainer.lightning_module.modules()
    )
    sampler = getattr(trainer.train_dataloader, "batch_sampler", None)
    of_loader = _of_loader(trainer).get("train_samples")
    if getattr(cast(Any, trainer).datamodule, "collate_fn", None) is not None:
        pipeline = "samples"  # which are joined one by one, whatever the pipeline is called
    has_workers = data.get("pipeline") in (None, "workers") and not _is_stream(trainer.train_dataloader)
    return {
        "own": True,
        "batch_size": size if isinstance(size, int) else None,
        "pipeline": pipeline,
        "num_workers": data.get("num_workers") if has_workers else None,
        "backend": model.get("backend"),
        "channels_last": config.get("channels_last") if has_convolutions else None,
        "train_samples": getattr(sampler, "num_samples", of_loader),
        "diagnosed": str(at(config, f"search.{TARGET}")).endswith(".Diagnosis"),
    }


def samples_of_epoch(trainer: Trainer) -> int | None:
    """The samples that all ranks take from a DataLoader in an epoch: a sampler may take fewer or more than there are.

    Those that `drop_last` leaves out count, since they depend on the batch size. None where nobody knows, as of any other
    loader, and where the dataset or a sampler makes the batches: a length counts those.
    """
    loader = trainer.train_dataloader
    if not isinstance(loader, DataLoader) or loader.batch_size is None:
        return None
    sampler = loader.sampler
    if isinstance(sampler, DistributedSampler):  # Lightning's is over the samples of another sampler
        return sized_len(sampler.dataset)
    takes_part = trainer.world_size > 1 or _is_stream(loader)  # nobody knows which part of the set
    return sized_len(loader.dataset if takes_part else sampler)


def _is_stream(loader: object) -> bool:
    """Whether a loader reads a stream, of which each worker would read the whole."""
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def _of_loader(trainer: Trainer) -> dict[str, Any]:
    """What a DataLoader tells of itself; any other iterable, or several loaders, tell nothing."""
    loader = trainer.train_dataloader
    if not isinstance(loader, DataLoader):
        return {"own": False, "batch_size": None}
    return {
        "own": False,
        "batch_size": loader.batch_size,  # None where its sampler, or its dataset, makes the batches
        "num_workers": None if _is_stream(loader) else loader.num_workers,
        "pin_memory": loader.pin_memory,
        "train_samples": samples_of_epoch(trainer),
    }
