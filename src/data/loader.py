"""Loader: the batches of one rank, by torch's DataLoader; to a GPU they are copied one step ahead.

A batch is one call of `__getitems__` with a key `(epoch, indices)`, in the training process or in a worker. Two classes
answer it: `TensorBatches`, for tensors in memory, and `SampleBatches`, for any torch Dataset.
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
from .collate import Collate, batch_of
from .order import DeterministicBatchSampler, epoch_seed
from .spec import DataSpec
from .workers import check_sendable, data_error, raised, seeded, share, start_worker


@dataclass(eq=False)
class TensorBatches(Dataset):
    """Batches out of tensors, each with one indexing operation a tensor."""

    tensors: tuple[Tensor, ...]  # of equal length N, all on one device
    pinned: bool = False  # whether batches are made in page-locked memory, from which they are copied to a GPU

    def __getitems__(self, key: tuple[int, Tensor]) -> list[Tensor]:
        """The samples at the indices of a key `(epoch, indices)`."""
        return [self._take(tensor, key[1]) for tensor in self.tensors]

    def _take(self, tensor: Tensor, indices: Tensor) -> Tensor:
        if not self.pinned:
            return tensor.index_select(0, indices)
        pinned = torch.empty(len(indices), *tensor.shape[1:], dtype=tensor.dtype, pin_memory=True)
        return torch.index_select(tensor, 0, indices, out=pinned)


@dataclass(eq=False)
class SampleBatches(Dataset):
    """The batches of a Dataset, checked by what its data say of themselves."""

    samples: Any  # a torch Dataset
    spec: DataSpec
    source: str  # what an error calls it
    seed: int | None = None  # of the random numbers that the samples draw; None: they are left as they are
    collate_fn: Collate | None = None  # makes a batch of a list of samples, in place of ours
    same_in_every_epoch: bool = False  # whether these random numbers are

    def __getitems__(self, key: tuple[int, list[int]]) -> Any:
        """The batch of a key `(epoch, indices)`, or the UserError that its samples lead to."""
        epoch, indices = key
        try:
            batch = batch_of(self._load(epoch, indices), [*map(self._name, indices)], self.spec, self.collate_fn)
            return share(batch) if get_worker_info() else batch
        except UserError as error:
            return error

    def sample(self, epoch: int, index: int) -> Any:
        """One sample; UserError with its number if it cannot be loaded."""
        try:
            if self.seed is None:
                return self.samples[index]
            with seeded(epoch_seed(self.seed, 0 if self.same_in_every_epoch else epoch, index)):
                return self.samples[index]
        except Exception as error:
            raise data_error(f"sample {self._name(index)} cannot be loaded", error) from error

    def _load(self, epoch: int, indices: list[int]) -> list[Any]:
        together = getattr(self.samples, "__getitems__", None)
        if together is None or self.seed is not None:
            return [self.sample(epoch, index) for index in indices]
        try:
            return together(indices)
        except Exception as error:
            for index in indices:  # names the sample at fault
                self.sample(epoch, index)
            raise data_error(f"the samples from {self._name(indices[0])} on cannot be loaded", error) from error

    def _name(self, index: int) -> str:
        return f"number {index} of {self.source}"


@dataclass(eq=False)
class SeededBatches(Dataset):
    """Batches of several splits, each loaded under the same seed."""

    splits: Mapping[str, SampleBatches]
    seed: int

    def __getitems__(self, key: tuple[str, list[int]]) -> Any:
        """The samples at the indices of a key `(split, indices)`, as in the first epoch."""
        split, indices = key
        with seeded(self.seed):
            return self.splits[split].__getitems__((0, indices))


def load_apart(splits: Mapping[str, SampleBatches], keys: Iterable[Any], seed: int, num_workers: int) -> Iterator[Any]:
    """The batch of each key `(split, indices)`, loaded under this seed. No random state changes here.

    Where workers load the samples, another one loads these and ends. A file that a dataset opens in this process at its
    first sample, would be open in each worker that is forked later: they would move one position in it. Where workers
    are not forked, it could not be sent to them. Tensors in memory take no worker.
    """
    in_memory = all(isinstance(batches.samples, TensorDataset) for batches in splits.values())
    return raised(_data_loader(SeededBatches(splits, seed), keys, 0 if in_memory else min(1, num_workers)))


class Loader:
    """The batches of one rank, in the order of a batch sampler, on the device where they are needed.

    Processes that load samples stay for all epochs and end with the training process; tensors in memory take none.
    `wait_context` is around the wait for a copy, for whoever measures it. `timesteps` is asked for the time steps of a
    batch before that is copied; the attribute has those of the batch that was given last, None where nobody knows.
    `seed` is that of the random numbers in the workers.
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
        self._timesteps_of = timesteps
        self.device = device
        self.wait_context = wait_context
        stored = batches.tensors[0].device if isinstance(batches, TensorBatches) else None
        self.batch_sampler = replace(order, device=stored)
        self._copies = device.type == "cuda" and (stored is None or stored.type == "cpu")
        self._stream: torch.cuda.Stream | None = None
        if isinstance(batches, TensorBatches):
            batches = replace(batches, pinned=self._copies)
        pins = self._copies and stored is None
        self._pins = pins and not num_workers  # else a thread of torch's does, which takes no tensors in GPU memory
        kept = {"persistent_workers": num_workers > 0, "pin_memory": pins and num_workers > 0}
        self._loader = _data_loader(batches, self.batch_sampler, num_workers, seed, **kept)
        # Garbage in one cycle with torch's iterator, its queues would close before it tells the workers to end, and it
        # would wait 5 s for each. Held here, it is freed after this loader, and the queues after it.
        weakref.finalize(self, _freed, self._loader)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        if self._copies:
            yield from self._prefetched()
            return
        for batch in raised(self._loader):
            self.timesteps = self._timesteps_of(batch)
            yield batch

    def _prefetched(self) -> Iterator[Any]:
        """Yield each pinned batch on the GPU while the next one is copied on a stream of its own.

        The training stream waits for the copy on the device; the host never waits. `record_stream` keeps the memory
        until the training stream is done with it. torch's allocator keeps pinned memory until the copy from it has
        ended. CUDA events recorded at the start and the end of `wait_context` have the training stream's wait between.
        """
        # One for all epochs, because torch's allocator keeps a memory pool per stream.
        stream = self._stream = self._stream or torch.cuda.Stream(self.device)
        ahead: list[tuple[Any, Any, int | None]] = []
        for batch in raised(self._loader):
            with torch.cuda.stream(stream):
                sent = tree_map_only(Tensor, self._sent, batch)
                ahead.append((sent, stream.record_event(), self._timesteps_of(batch)))
            if len(ahead) > 1:
                yield self._received(*ahead.pop(0))
        for last in ahead:
            yield self._received(*last)

    def _sent(self, tensor: Tensor) -> Tensor:
        if self._pins and tensor.device.type == "cpu":  # samples may lie in GPU memory
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _received(self, sent: Any, copied: Any, timesteps: int | None) -> Any:
        training = torch.cuda.current_stream(self.device)
        with self.wait_context():
            training.wait_event(copied)
        for tensor in tree_leaves(sent):
            if isinstance(tensor, Tensor):
                tensor.record_stream(training)
        self.timesteps = timesteps
        return sent


def _data_loader(batches: Dataset, keys: Iterable[Any], num_workers: int, seed: int = 0, **how: Any) -> DataLoader:
    """A DataLoader whose workers are seeded from a private generator, so that the model's draws stay the same."""
    own: dict[str, Any] = {"collate_fn": _as_it_is, "worker_init_fn": start_worker}
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(batches, batch_sampler=keys, num_workers=num_workers, generator=generator, **own, **how)
    check_sendable(loader)
    return loader


def _freed(loader: DataLoader) -> None:
    """Nothing else holds the DataLoader now."""


def _as_it_is(batch: Any) -> Any:
    return batch
