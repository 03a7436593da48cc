"""Loader: the batches of one rank from torch's DataLoader, copied to a GPU one step ahead.

A batch is the result of `__getitems__` for a key `(epoch, indices)`, in the training process or in a worker. Two
classes implement it: `TensorBatches`, for tensors in memory, and `SampleBatches`, for any torch Dataset.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from ..errors import UserError
from .collate import Collate, make_batch
from .order import DeterministicBatchSampler, epoch_seed
from .spec import DataSpec
from .workers import check_sendable, data_error, raise_user_errors, seeded, share_memory, start_worker


@dataclass(eq=False)
class TensorBatches(Dataset):
    """Batches of tensors in memory, each with one indexing operation a tensor."""

    tensors: tuple[Tensor, ...]  # of equal length N, all on one device
    pinned: bool = False  # whether batches are made in page-locked memory, to be copied to a GPU

    def __getitems__(self, key: tuple[int, Tensor]) -> list[Tensor]:
        """Return the samples at the indices of a key `(epoch, indices)`."""
        return [self._select(tensor, key[1]) for tensor in self.tensors]

    def _select(self, tensor: Tensor, indices: Tensor) -> Tensor:
        if not self.pinned:
            return tensor.index_select(0, indices)
        pinned = torch.empty(len(indices), *tensor.shape[1:], dtype=tensor.dtype, pin_memory=True)
        return torch.index_select(tensor, 0, indices, out=pinned)


@dataclass(eq=False)
class SampleBatches(Dataset):
    """The batches of a Dataset, checked against its DataSpec."""

    samples: Any  # a torch Dataset
    spec: DataSpec
    source: str  # the name of the dataset in errors
    seed: int | None = None  # for the random numbers that the samples draw; None: random generators are not seeded
    collate_fn: Collate | None = None  # replaces the default collation of a list of samples
    same_in_every_epoch: bool = False  # whether a sample draws the same random numbers in every epoch

    def __getitems__(self, key: tuple[int, list[int]]) -> Any:
        """Return the batch of a key `(epoch, indices)`, or the UserError that its samples raise."""
        epoch, indices = key
        try:
            samples = self._load_samples(epoch, indices)
            batch = make_batch(samples, [*map(self._sample_name, indices)], self.spec, self.collate_fn)
            return share_memory(batch) if get_worker_info() else batch
        except UserError as error:
            return error

    def sample(self, epoch: int, index: int) -> Any:
        """Return one sample; UserError with its number if it cannot be loaded."""
        try:
            if self.seed is None:
                return self.samples[index]
            with seeded(epoch_seed(self.seed, 0 if self.same_in_every_epoch else epoch, index)):
                return self.samples[index]
        except Exception as error:
            raise data_error(f"sample {self._sample_name(index)} cannot be loaded", error) from error

    def _load_samples(self, epoch: int, indices: list[int]) -> list[Any]:
        getitems = getattr(self.samples, "__getitems__", None)
        if getitems is None or self.seed is not None:
            return [self.sample(epoch, index) for index in indices]
        try:
            return getitems(indices)
        except Exception as error:
            for index in indices:  # the error names the sample at fault
                self.sample(epoch, index)
            raise data_error(f"the samples from {self._sample_name(indices[0])} on cannot be loaded", error) from error

    def _sample_name(self, index: int) -> str:
        return f"number {index} of {self.source}"


@dataclass(eq=False)
class SeededBatches(Dataset):
    """Batches of several splits, each loaded under the same seed."""

    splits: Mapping[str, SampleBatches]
    seed: int

    def __getitems__(self, key: tuple[str, list[int]]) -> Any:
        """Return the batch of a key `(split, indices)`, as in the first epoch."""
        split, indices = key
        with seeded(self.seed):
            return self.splits[split].__getitems__((0, indices))


def load_isolated(splits: Mapping[str, SampleBatches], keys: Iterable, seed: int, num_workers: int) -> Iterator[Any]:
    """Yield the batch of each key `(split, indices)`, loaded under this seed. No random state of this process changes.

    If workers load samples, a temporary worker loads these batches. A dataset that opens a file at its first sample
    must not do so in this process: workers that are forked later would inherit the open file and share its position,
    and an open file cannot be pickled to workers that are not forked. Tensors in memory need no worker.
    """
    in_memory = all(isinstance(batches.samples, TensorDataset) for batches in splits.values())
    return raise_user_errors(_build_loader(SeededBatches(splits, seed), keys, 0 if in_memory else min(1, num_workers)))


class Loader:
    """The batches of one rank, in the order of a batch sampler, on the device that trains.

    Workers stay for all epochs and end with the training process; tensors in memory need none. `wait_context` encloses
    the wait for a copy, so that it can be measured. The function `timesteps` returns the time steps of a batch before
    it is copied; the attribute `timesteps` holds those of the last batch that was yielded, None if they are unknown.
    `seed` seeds the random numbers in the workers.
    """

    def __init__(
        self,
        batches: TensorBatches | SampleBatches,
        order: DeterministicBatchSampler,
        device: torch.device,
        num_workers: int = 0,
        wait_context: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        timesteps: Callable[[Any], int | None] = lambda batch: None,
        seed: int = 0,
    ):
        self.timesteps: int | None = None
        self.num_workers = num_workers
        self._count_timesteps = timesteps
        self.device = device
        self.wait_context = wait_context
        source_device = batches.tensors[0].device if isinstance(batches, TensorBatches) else None
        self.batch_sampler = replace(order, device=source_device)
        self._copies_to_gpu = device.type == "cuda" and (source_device is None or source_device.type == "cpu")
        self._copy_stream: torch.cuda.Stream | None = None
        if isinstance(batches, TensorBatches):
            batches = replace(batches, pinned=self._copies_to_gpu)
        pin_memory = self._copies_to_gpu and source_device is None
        self._pins_batches = pin_memory and not num_workers  # else torch's thread pins, which refuses GPU tensors
        options = {"persistent_workers": num_workers > 0, "pin_memory": pin_memory and num_workers > 0}
        self._loader = _build_loader(batches, self.batch_sampler, num_workers, seed, **options)
        # If torch's iterator and its queues were garbage in one cycle, the queues would close before it tells the
        # workers to end, and it would wait 5 s for each. With this reference, the iterator is freed before its queues.
        weakref.finalize(self, _release, self._loader)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        if self._copies_to_gpu:
            yield from self._prefetch()
            return
        for batch in raise_user_errors(self._loader):
            self.timesteps = self._count_timesteps(batch)
            yield batch

    def _prefetch(self) -> Iterator[Any]:
        """Yield each batch on the GPU while the next one is copied from pinned memory on a separate stream.

        The training stream waits for the copy on the device; the host never waits. `record_stream` keeps the memory
        until the training stream is done with it. torch's allocator keeps pinned memory until the copy from it has
        ended. CUDA events recorded at the start and the end of `wait_context` enclose the training stream's wait.
        """
        # One stream for all epochs, because torch's allocator keeps a memory pool per stream.
        stream = self._copy_stream = self._copy_stream or torch.cuda.Stream(self.device)
        pending: list[tuple[Any, Any, int | None]] = []
        for batch in raise_user_errors(self._loader):
            with torch.cuda.stream(stream):
                copy = tree_map_only(Tensor, self._copy_to_device, batch)
                pending.append((copy, stream.record_event(), self._count_timesteps(batch)))
            if len(pending) > 1:
                yield self._wait_for_copy(*pending.pop(0))
        for last_batch in pending:
            yield self._wait_for_copy(*last_batch)

    def _copy_to_device(self, tensor: Tensor) -> Tensor:
        if self._pins_batches and tensor.device.type == "cpu":  # a dataset may return tensors in GPU memory
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _wait_for_copy(self, copy: Any, copy_event: Any, timesteps: int | None) -> Any:
        training_stream = torch.cuda.current_stream(self.device)
        with self.wait_context():
            training_stream.wait_event(copy_event)
        for tensor in tree_leaves(copy):
            if isinstance(tensor, Tensor):
                tensor.record_stream(training_stream)
        self.timesteps = timesteps
        return copy


def _build_loader(batches: Dataset, keys: Iterable[Any], num_workers: int, seed: int = 0, **options: Any) -> DataLoader:
    """Return a DataLoader that seeds its workers from a private generator, and draws nothing from the global one."""
    options |= {"collate_fn": _identity, "worker_init_fn": start_worker}
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(batches, batch_sampler=keys, num_workers=num_workers, generator=generator, **options)
    check_sendable(loader)
    return loader


def _release(loader: DataLoader) -> None:
    """Drop the finalizer's reference, which is the last one to the DataLoader."""


def _identity(batch: Any) -> Any:
    return batch
