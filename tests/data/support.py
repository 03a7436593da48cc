"""Shared by the data tests: any samples as a dataset, a recorder of the batches of a fit, and a file that runs code."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from batchscope.data.base import DataModule
from batchscope.data.datamodule import TensorDataModule
from batchscope.data.spec import DataSpec
from tests.support.third_party_modules import Stranger


class Own(DataModule):
    """Serves any samples from the training process."""

    kind, name = "image", "own"
    spec = DataSpec("image", (1, 8, 8), "class", 4)

    def __init__(self, samples: Any, spec: DataSpec = spec, **kwargs: Any):
        super().__init__(**{"num_workers": 0, **kwargs})
        self.samples, self.spec = samples, spec

    def dataset(self, split: str) -> Any:
        return self.samples() if isinstance(self.samples, Callable) else self.samples


class InMemory(Own, TensorDataModule):
    """Serves any tensors, the same in each split."""

    def load(self, split: str) -> Any:
        return self.samples

    dataset = TensorDataModule.dataset


def numbers(num: int = 50, **options: Any) -> InMemory:
    """Sample i is the numbers 2i and 2i + 1 with the label i, so that a batch says which samples it holds."""
    spec = DataSpec("sequence", (2, 1), "class", num_outputs=1_000)
    return InMemory((torch.arange(2.0 * num).view(num, 2, 1), torch.arange(num)), spec, **options)


class Recorder(Stranger):
    """Trains nothing, and keeps the batches of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: dict[int, list[Any]] = {}
        self.validated: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trained.setdefault(self.current_epoch, []).append(batch)
        return self.layer.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(batch)


def loaded(data: Any, **module: Any) -> Any:
    """Set up the data, in a trainer whose module has the given attributes, if any."""
    if module:
        strategy = SimpleNamespace(root_device=torch.device("cpu"))
        data.trainer = SimpleNamespace(
            lightning_module=SimpleNamespace(**{"modules": list, **module}), strategy=strategy
        )
    data.setup("fit")
    return data


def inputs(data: Any, epoch: int = 0) -> list[Any]:
    """Return the inputs of each training batch of an epoch."""
    train = loaded(data).train_dataloader()
    train.batch_sampler.set_epoch(epoch)
    return [data.spec.parts(batch)[0] for batch in train]


def prepared(data: Any) -> Any:
    """Prepare the data as a run does before it trains."""
    data.check()
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    return data


class Payload:
    """Creates the file `ran` when it is unpickled."""

    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("ran"),))
