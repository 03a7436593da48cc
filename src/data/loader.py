"""From a set of tensors to batches, in an order that is a function of (seed, epoch) alone.

`DeterministicBatchSampler` says which samples make a batch; `TensorLoader` fetches a batch with one indexing operation a tensor;
`prefetch_to_device` sends the next batch to a GPU while the current one is trained on.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import numpy
import torch
import torch.distributed
from torch import Tensor
from torch.utils.data import Sampler

Tensors = tuple[Tensor, ...]


class DeterministicBatchSampler(Sampler[list[int]]):
    """The samples of each batch of an epoch, as a batch sampler.

    The order comes from a private generator seeded with (seed, epoch), so it depends on nothing that a run does, and
    a resumed run continues it. Under distributed training a step's global batch is the same whatever the number of
    processes, each of which takes an equal share of it; nothing is padded, and no sample is seen twice. Where there are
    fewer samples than processes, some have an empty batch.

    Args:
        num_samples: of the whole set.
        batch_size: of one process.
        shuffle: whether the order differs by epoch; otherwise it is the stored one.
        seed: of the order.
        begin: the epoch that a resumed run begins in, and how many of its batches have been trained: they are not
            served again, but count in its length.
        min_samples: of one process's part of a batch. A rest too small for it joins the last full batch.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        shuffle: bool,
        seed: int = 0,
        begin: tuple[int, int] = (0, 0),
        min_samples: int = 1,
    ):
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.begin = begin
        self.min_samples = min_samples
        self.epoch = begin[0]
        self.sampler = self  # where Lightning looks for the object whose set_epoch it calls

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning with the number of epochs done."""
        self.epoch = epoch

    def order(self) -> Tensor:
        """The indices of all samples `(N,)` in this epoch's order."""
        if not self.shuffle:
            return torch.arange(self.num_samples)
        # Mixed into 32 bits, because torch's generator ignores all higher bits of its seed.
        mixed = int(numpy.random.SeedSequence((self.seed, self.epoch)).generate_state(1)[0])
        return torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(mixed))

    def shares(self, order: Tensor) -> Iterator[Tensor]:
        """This process's part of every batch of an order that is still to be served."""
        first = self.begin[1] if self.epoch == self.begin[0] else 0
        for batch in range(first, len(self)):
            yield self._share(order, batch)

    def samples(self, batch: int) -> list[int]:
        """The indices of the samples that this process finds in a batch of the present epoch."""
        return self._share(self.order(), batch).tolist()

    def weight(self, batch: int) -> float:
        """What this process's mean over its part of a batch counts for when the processes' means are averaged: its
        samples over those of an equal share. 1 but for a last batch that does not divide."""
        rank, world = rank_and_world()
        whole = self._span(batch)
        share, rest = divmod(len(whole), world)
        return (share + (rank < rest)) * world / len(whole)

    def _span(self, batch: int) -> range:
        """Where in the order a batch of all processes lies."""
        step = self.batch_size * rank_and_world()[1]
        return range(batch * step, self.num_samples if batch == len(self) - 1 else (batch + 1) * step)

    def _share(self, order: Tensor, batch: int) -> Tensor:
        rank, world = rank_and_world()
        span = self._span(batch)
        return order[span.start : span.stop].tensor_split(world)[rank]

    def __iter__(self) -> Iterator[list[int]]:
        for samples in self.shares(self.order()):
            yield samples.tolist()

    def __len__(self) -> int:
        world = rank_and_world()[1]
        full, rest = divmod(self.num_samples, self.batch_size * world)
        return full + (1 if rest >= world * self.min_samples or not full else 0)


class TensorLoader:
    """Batches of tensors that lie in memory (the host's or the accelerator's): one indexing operation a tensor.

    Args:
        tensors: of equal length N, all on one device.
        batches: which samples make a batch.
        device: where the batches are needed; when that is a GPU and the tensors are not there, batches go through
            pinned memory and are copied one step ahead.
        waiting: gives the context in which the training stream waits for a copy, for who measures it.
    """

    def __init__(
        self,
        tensors: Tensors,
        batches: DeterministicBatchSampler,
        device: torch.device,
        waiting: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    ):
        self.tensors = tensors
        self.batch_sampler = batches
        self.device = device
        self.waiting = waiting
        self._stream: torch.cuda.Stream | None = None
        self.pinned = device.type == "cuda" and tensors[0].device.type == "cpu"

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Tensors]:
        if not self.pinned:
            return self._batches()
        if self._stream is None:  # one for all epochs: torch's allocator keeps the memory of each stream apart
            self._stream = torch.cuda.Stream(self.device)
        return prefetch_to_device(self._batches(), self.device, self._stream, self.waiting)

    def _batches(self) -> Iterator[Tensors]:
        order = self.batch_sampler.order().to(self.tensors[0].device)
        for samples in self.batch_sampler.shares(order):
            yield tuple(self._take(tensor, samples) for tensor in self.tensors)

    def _take(self, tensor: Tensor, samples: Tensor) -> Tensor:
        if not self.pinned:
            return tensor.index_select(0, samples)
        pinned = torch.empty(len(samples), *tensor.shape[1:], dtype=tensor.dtype, pin_memory=True)
        return torch.index_select(tensor, 0, samples, out=pinned)


def prefetch_to_device(
    batches: Iterable[Tensors],
    device: torch.device,
    stream: torch.cuda.Stream,
    waiting: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
) -> Iterator[Tensors]:
    """Yield each batch on the GPU, the next one's copy already under way on a stream of its own.

    The training stream waits for the copy on the device, never the host; `record_stream` keeps the memory from being
    used again before the training stream is done with it. Pinned memory is kept by torch's allocator until the copy
    out of it has ended.

    Args:
        batches: of pinned tensors.
        device: the GPU.
        stream: of the copies, on that GPU.
        waiting: gives the context in which the training stream waits: an event recorded at its beginning and one at its
            end have the wait between them.
    """

    def send(batch: Tensors) -> tuple[Tensors, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            sent = tuple(tensor.to(device, non_blocking=True) for tensor in batch)
            return sent, stream.record_event()

    def take(sent: Tensors, copied: torch.cuda.Event) -> Tensors:
        training = torch.cuda.current_stream(device)
        with waiting():
            training.wait_event(copied)
        for tensor in sent:
            tensor.record_stream(training)
        return sent

    ahead = None
    for batch in batches:
        following = send(batch)
        if ahead is not None:
            yield take(*ahead)
        ahead = following
    if ahead is not None:
        yield take(*ahead)


def rank_and_world() -> tuple[int, int]:
    """This process's number, and how many there are."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
