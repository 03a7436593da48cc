"""TensorDataModule: a dataset that fits in memory. A subclass defines a `spec` and loads the tensors."""

import hashlib
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset
from typing_extensions import override

from ..errors import UserError
from ..options.types import PositiveInt, Purpose
from .base import STAGE_SPLITS, DataModule, Split
from .collate import cast_field, check_batch
from .loader import SampleBatches, TensorBatches


class TensorDataModule(DataModule):
    """A dataset that fits in memory, served in whole batches of tensors.

    A subclass sets `kind` and `name`, defines `spec`, and returns a split from `load`: a tensor for each field.

    Args:
        pipeline: `memory` indexes tensors in host memory, pinned and prefetched for a GPU; `device` keeps the dataset
            on the accelerator; `workers` loads single samples, in `num_workers` processes. With `memory` and a
            `collate_fn`, the training process loads single samples.
        **kwargs: as DataModule.
    """

    def __init__(
        self, pipeline: Annotated[Literal["memory", "device", "workers"], Purpose.SPEED] = "memory", **kwargs: Any
    ):
        super().__init__(**kwargs)
        self.pipeline = pipeline

    def load(self, split: Split) -> tuple[Tensor, ...] | Tensor:
        """Return the inputs `x: (N, …)` and the targets `y: (N, …)` of a split, ready for training.

        If the target is the input, return `x` or `(x,)`; of several inputs, each in the order of the spec's fields. If
        lengths vary, integers `lengths: (N,)` follow, which several inputs and a `collate_fn` do not need.
        """
        raise NotImplementedError

    @override
    def dataset(self, split: Split) -> Dataset:
        loaded = self.load(split)
        tensors = (loaded,) if isinstance(loaded, Tensor) else loaded
        if self.collate_fn is None and (fault := check_batch(tensors, self.spec)):
            raise UserError(f"data: {self.name}'s {split} split is not what the spec says: {fault}")
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise UserError(f"data: {self.name} has more than tensors, which a DataModule serves and it does not")
        fields = [cast_field(tensor, field, self.spec) for field, tensor in zip(self.spec.read, tensors, strict=False)]
        return TensorDataset(*fields, *tensors[len(fields) :])

    def tensors(self, split: Split) -> tuple[Tensor, ...]:
        """Return the loaded tensors of a split."""
        return self._datasets[split].tensors

    @property
    @override
    def fingerprint(self) -> str:
        """A hash of the training and validation tensors: runs with equal fingerprints saw the same data."""
        digest = hashlib.blake2b(digest_size=8)
        for split in STAGE_SPLITS["fit"]:
            for tensor in self.tensors(split):
                digest.update(str((split, tensor.dtype, tuple(tensor.shape))).encode())
                digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @property
    @override
    def _num_processes(self) -> int:
        return self.num_workers if self.pipeline == "workers" else 0

    @override
    def _split_batches(self, split: Split) -> TensorBatches | SampleBatches:
        if self.pipeline == "device" and self.collate_fn is not None:
            raise UserError("data.pipeline: got device, and a collate_fn takes single samples: write memory or workers")
        if self.pipeline == "workers" or self.collate_fn is not None:
            return self._sample_batches(split)
        if self.pipeline == "device":
            self._datasets[split] = TensorDataset(*(tensor.to(self._device) for tensor in self.tensors(split)))
        return TensorBatches(self.tensors(split))


class GeneratedDataModule(TensorDataModule):
    """A dataset that is generated, with any number of samples.

    Args:
        num_train, num_val, num_test: how many samples are generated; memory is the limit.
        **kwargs: as TensorDataModule.
    """

    def __init__(
        self,
        num_train: PositiveInt = 50_000,
        num_val: PositiveInt = 2_000,
        num_test: PositiveInt = 10_000,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.sizes = {"train": num_train, "val": num_val, "test": num_test}
