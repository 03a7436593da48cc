"""DatasetModule: any torch Dataset whose samples are found by their number."""

import hashlib
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset
from typing_extensions import override

from ..errors import UserError
from .base import STAGE_SPLITS, DataModule, Split
from .collate import batch_of, empty_batch
from .loader import DeterministicBatchSampler, epoch_seed, rank_and_world_size
from .workers import data_error, raised, seeded, worker_loader

_HASHED = 16  # samples of a split that the fingerprint covers


class DatasetModule(DataModule):
    """A dataset of which each sample is loaded by its number, in `num_workers` processes.

    A subclass sets `kind` and `name`, gives `spec`, and returns a split's torch Dataset from `dataset`: `len(…)` samples,
    each `(x, y)` or a dict with the fields of the spec.
    """

    randomised: ClassVar[bool] = False  # whether samples draw random numbers, which are then seeded for each sample

    _sets: dict[Split, Any]

    def dataset(self, split: Split) -> Dataset:
        """The samples of a split."""
        raise NotImplementedError

    @override
    def setup(self, stage: str) -> None:
        self._sets = getattr(self, "_sets", {})
        for split in STAGE_SPLITS.get(stage, ()):
            if split not in self._sets:
                self._sets[split] = self.dataset(split)
                if not self.num_samples(split):
                    raise UserError(f"data: {self.name} has no samples in its {split} split")

    @override
    def num_samples(self, split: Split) -> int:
        return len(self._sets[split])

    @property
    @override
    def fingerprint(self) -> str:
        """A hash of the number of samples, and of 16 samples spread over each split."""
        digest = hashlib.blake2b(digest_size=8)
        for split in STAGE_SPLITS["fit"]:
            samples = self.num_samples(split)
            digest.update(str((split, samples)).encode())
            for index in dict.fromkeys(i * (samples - 1) // (_HASHED - 1) for i in range(_HASHED)):
                for leaf in tree_leaves(_Samples(self, split).sample(0, index)):
                    plain = leaf.detach().cpu().numpy() if isinstance(leaf, torch.Tensor) else numpy.asarray(leaf)
                    digest.update(str((plain.dtype, plain.shape)).encode() + plain.tobytes())
        return digest.hexdigest()

    @override
    def train_dataloader(self) -> "DatasetLoader":
        """Batches shuffled by (seed, epoch), also a short last one."""
        self._check_enough(self.num_samples("train"), rank_and_world_size()[1])
        return self._loader("train", self.batch_size, shuffle=True)

    @override
    def val_dataloader(self) -> "DatasetLoader":
        return self._loader("val", self._eval_batch_size(self.spec.input_shape), shuffle=False)

    @override
    def test_dataloader(self) -> "DatasetLoader":
        return self._loader("test", self._eval_batch_size(self.spec.input_shape), shuffle=False)

    def _loader(self, split: Split, batch_size: int, shuffle: bool) -> "DatasetLoader":
        start, least = (self._start, self._min_samples) if shuffle else ((0, 0), 1)
        order = DeterministicBatchSampler(self.num_samples(split), batch_size, shuffle, self.seed, start, least)
        return DatasetLoader(self, split, order)


class DatasetLoader:
    """The batches of one rank."""

    def __init__(self, data: DatasetModule, split: Split, order: DeterministicBatchSampler):
        self.batch_sampler = order
        how = {"batch_sampler": _Keys(order), "collate_fn": _as_it_is}
        self._loader = worker_loader(_Samples(data, split), data.num_workers, data.seed, data._device, **how)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        return raised(self._loader)


class _Keys:
    """What a worker has to know of a batch: the epoch and the numbers of the samples."""

    def __init__(self, order: DeterministicBatchSampler):
        self.order = order

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        for samples in self.order:
            yield self.order.epoch, samples

    def __len__(self) -> int:
        return len(self.order)


class _Samples(Dataset):
    """What a worker does: the batch of a key, or the UserError that its samples lead to."""

    def __init__(self, data: DatasetModule, split: Split):
        self.data = data.for_workers()
        self.data._sets = {split: data._sets[split]}
        self.split: Split = split

    def __getitems__(self, key: tuple[int, list[int]]) -> Any:
        epoch, samples = key
        try:  # a rank without a sample loads one for its shapes
            sources = [self._name(index) for index in samples or [0]]
            made = batch_of([self.sample(epoch, index) for index in samples or [0]], sources, self.data.spec)
            return made if samples else empty_batch(made)
        except UserError as error:
            return error

    def sample(self, epoch: int, index: int) -> Any:
        """One sample; UserError with its number if it cannot be loaded."""
        samples = self.data._sets[self.split]
        try:
            if not self.data.randomised:
                return samples[index]
            with seeded(epoch_seed(self.data.seed, epoch, index)):
                return samples[index]
        except Exception as error:
            raise data_error(f"sample {self._name(index)} cannot be loaded", error) from error

    def _name(self, index: int) -> str:
        return f"number {index} of {self.data.name}'s {self.split} split"


def _as_it_is(batch: Any) -> Any:
    return batch
