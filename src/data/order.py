"""DeterministicBatchSampler: the samples of each batch, on any number of ranks, as a function of (seed, epoch)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed
from torch import Tensor
from torch.utils.data import Sampler


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank, and the number of ranks."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def epoch_seed(*numbers: int) -> int:
    """Mix (seed, epoch, …) into a seed of 32 bits: torch's generator ignores the higher bits of a seed."""
    return int(numpy.random.SeedSequence(numbers).generate_state(1)[0])


@dataclass(eq=False)
class DeterministicBatchSampler(Sampler[Any]):
    """The sample indices of each batch of an epoch.

    The order comes from a private generator seeded with (seed, epoch), so that a resumed run continues it. The global
    batch of a step is the same for any number of ranks; each rank takes an equal part of it. Nothing is padded and no
    sample is served twice. There are at least as many samples as ranks.

    A resumed run starts at `start`: the batches before it are not served again, but count in the length of that epoch.
    """

    num_samples: int  # of the dataset
    batch_size: int  # of one rank
    shuffle: bool  # whether the order is random; otherwise samples keep the stored order
    seed: int = 0  # of the order
    start: tuple[int, int] = (0, 0)  # (epoch, number of its batches that are done)
    min_samples: int = 1  # the smallest batch of a rank; a smaller remainder joins the last full batch
    device: torch.device | None = None  # of the index tensors; None: indices are lists, which a worker reads faster

    def __post_init__(self) -> None:
        self.epoch = self.start[0]
        self.sampler = self  # Lightning calls set_epoch on this attribute

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch. Lightning calls this with the number of epochs done."""
        self.epoch = epoch

    def order(self) -> Tensor:
        """Return the indices of all samples `(N,)` in this epoch's order."""
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed(epoch_seed(self.seed, self.epoch))
        return torch.randperm(self.num_samples, generator=generator)

    def first_sample(self, batch: int) -> int:
        """Return the position of this rank's first sample of a batch in the epoch's order."""
        return self._rank_batch(batch).start

    def weight(self, batch: int) -> float:
        """Return the weight of this rank's mean in the mean over ranks: 1, unless the last batch is uneven."""
        return len(self._rank_batch(batch)) * rank_and_world_size()[1] / len(self._global_batch(batch))

    def _global_batch(self, batch: int) -> range:
        """Return the positions of the samples of a batch, over all ranks, in the order."""
        size = self.batch_size * rank_and_world_size()[1]
        return range(batch * size, self.num_samples if batch == len(self) - 1 else (batch + 1) * size)

    def _rank_batch(self, batch: int) -> range:
        """Return this rank's part of a global batch. If it is uneven, the first ranks take one sample more."""
        rank, world_size = rank_and_world_size()
        global_batch = self._global_batch(batch)
        size, remainder = divmod(len(global_batch), world_size)
        start = global_batch.start + rank * size + min(rank, remainder)
        return range(start, start + size + (rank < remainder))

    def __iter__(self) -> Iterator[Any]:
        """Yield the key `(epoch, indices)` of each remaining batch of this rank."""
        order = self.order() if self.device is None else self.order().to(self.device)
        first_batch = self.start[1] if self.epoch == self.start[0] else 0
        for batch in range(first_batch, len(self)):
            positions = self._rank_batch(batch)
            indices = order[positions.start : positions.stop]
            yield self.epoch, indices.tolist() if self.device is None else indices

    def __len__(self) -> int:
        world_size = rank_and_world_size()[1]
        full_batches, remainder = divmod(self.num_samples, self.batch_size * world_size)
        return full_batches + (1 if remainder >= world_size * self.min_samples or not full_batches else 0)
