"""TensorDataModule, the base of every dataset: a subclass gives a `spec` and loads its tensors."""

import hashlib
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, default_collate
from typing_extensions import override

from .._lightning import profiler_of
from ..errors import UserError
from ..options.types import PositiveInt, Purpose
from .base import STAGE_SPLITS, DataModule, Split, wrong_labels
from .loader import DeterministicBatchSampler, TensorLoader, rank_and_world_size
from .workers import worker_loader


class TensorDataModule(DataModule):
    """A dataset that fits in memory, served in whole batches of tensors.

    A subclass sets `kind` and `name`, gives `spec`, and returns a split as `(x, y)` from `load`.

    Args:
        pipeline: `memory` indexes one tensor in host memory, pinned and prefetched for a GPU; `device` keeps the set on
            the accelerator; `workers` is an ordinary per-sample DataLoader.
        **kwargs: as DataModule.
    """

    def __init__(
        self, pipeline: Annotated[Literal["memory", "device", "workers"], Purpose.SPEED] = "memory", **kwargs: Any
    ):
        super().__init__(**kwargs)
        self.pipeline = pipeline
        self._splits: dict[Split, tuple[Tensor, Tensor]] = {}

    def load(self, split: Split) -> tuple[Tensor, Tensor]:
        """The inputs `x: (N, …)` and targets `y: (N,)` or `(N, T)` of a split, ready for training."""
        raise NotImplementedError

    @override
    def setup(self, stage: str) -> None:
        for split in STAGE_SPLITS.get(stage, ()):
            if split not in self._splits:
                x, y = self.load(split)
                self._check_labels(split, y)
                self._splits[split] = (x, y)

    def _check_labels(self, split: Split, y: Tensor) -> None:
        wrong = wrong_labels(self.spec, y)
        if wrong is not None:
            sample, label = int(wrong[0, 0]), int(y[tuple(wrong[0])])
            raise UserError(
                f"data: sample {sample} of {self.name}'s {split} split has the label {label}, and the classes are 0 to "
                f"{self.spec.num_outputs - 1}" + (f" ({len(wrong):,} such labels)" if len(wrong) > 1 else "")
            )

    def tensors(self, split: Split) -> tuple[Tensor, Tensor]:
        """The loaded tensors of a split."""
        return self._splits[split]

    @override
    def num_samples(self, split: Split) -> int:
        return len(self._splits[split][0])

    @property
    @override
    def fingerprint(self) -> str:
        """A hash of the training and validation tensors: runs with equal fingerprints saw the same data."""
        digest = hashlib.blake2b(digest_size=8)
        for split in STAGE_SPLITS["fit"]:
            for tensor in self._splits[split]:
                digest.update(str((split, tensor.dtype, tuple(tensor.shape))).encode())
                digest.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @override
    def train_dataloader(self) -> TensorLoader | DataLoader:
        """Batches shuffled by (seed, epoch), also a short last one; UserError if a rank would get too few samples."""
        samples = self.num_samples("train")
        self._check_enough(samples, rank_and_world_size()[1])
        start, least = self._start, self._min_samples
        return self._loader("train", DeterministicBatchSampler(samples, self.batch_size, True, self.seed, start, least))

    @override
    def val_dataloader(self) -> TensorLoader | DataLoader:
        return self._eval_loader("val")

    @override
    def test_dataloader(self) -> TensorLoader | DataLoader:
        return self._eval_loader("test")

    def _eval_loader(self, split: Split) -> TensorLoader | DataLoader:
        x = self._splits[split][0]
        batch_size = self._eval_batch_size(x.shape[1:], x.element_size())
        return self._loader(split, DeterministicBatchSampler(len(x), batch_size, shuffle=False))

    def _loader(self, split: Split, batches: DeterministicBatchSampler) -> TensorLoader | DataLoader:
        x, y = self._splits[split]
        device = self._device
        if self.pipeline == "workers":
            empty = partial(_collate, empty=[torch.empty_like(tensor[:0]) for tensor in (x, y)])
            dataset = TensorDataset(x, y)
            how = {"batch_sampler": batches, "collate_fn": empty}
            return worker_loader(dataset, self.num_workers, self.seed, device, **how)
        if self.pipeline == "device":
            self._splits[split] = x, y = x.to(device), y.to(device)
        return TensorLoader((x, y), batches, device, self._wait_context)

    def _wait_context(self) -> AbstractContextManager[object]:
        """Have the profiler count the wait for a prefetched batch as transfer, although `next(loader)` contains it."""
        return profiler_of(self.trainer).profile("[TensorLoader].batch_to_device") if self.trainer else nullcontext()


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


def _collate(samples: list[tuple[Tensor, Tensor]], empty: list[Tensor]) -> list[Tensor]:
    return default_collate(samples) if samples else empty  # torch cannot collate the empty batch of a rank
