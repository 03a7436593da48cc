"""DeterministicBatchSampler: which samples a batch holds, on any number of ranks, as a function of (seed, epoch) alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed
from torch import Tensor
from torch.utils.data import Sampler


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank, and the number of ranks."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def epoch_seed(*numbers: int) -> int:
    """A seed from (seed, epoch, …), mixed into 32 bits: torch's generator ignores the higher bits of a seed."""
    return int(numpy.random.SeedSequence(numbers).generate_state(1)[0])


@dataclass(eq=False)
class DeterministicBatchSampler(Sampler[Any]):
    """The sample indices of each batch of an epoch.

    The order comes from a private generator seeded with (seed, epoch), so that a resumed run continues it. The global
    batch of a step is the same for any number of ranks; each rank takes an equal part of it. Nothing is padded and no
    sample is served twice. There are at least as many samples as ranks.

    A resumed run starts at `start`: the first batches of that epoch are not served again, but count in its length.
    """

    num_samples: int  # of the whole set
    batch_size: int  # of one rank
    shuffle: bool  # whether the order is random; otherwise it is the stored one
    seed: int = 0  # of the order
    start: tuple[int, int] = (0, 0)  # (epoch, batches of it that are done)
    min_samples: int = 1  # the smallest batch of a rank; a smaller remainder joins the last full batch
    device: torch.device | None = None  # of the indices; None: they are lists, which a worker reads faster

    def __post_init__(self) -> None:
        self.epoch = self.start[0]
        self.sampler = self  # Lightning calls set_epoch on this attribute

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this with the number of epochs done."""
        self.epoch = epoch

    def order(self) -> Tensor:
        """The indices of all samples `(N,)` in this epoch's order."""
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed(epoch_seed(self.seed, self.epoch))
        return torch.randperm(self.num_samples, generator=generator)

    def first_sample(self, batch: int) -> int:
        """The position in the epoch's order of this rank's first sample of a batch."""
        return self._share(batch).start

    def weight(self, batch: int) -> float:
        """The weight of this rank's mean in the mean of all ranks: 1, unless the last batch does not divide evenly."""
        return len(self._share(batch)) * rank_and_world_size()[1] / len(self._global_batch(batch))

    def _global_batch(self, batch: int) -> range:
        """The positions in the order that a batch of all ranks takes."""
        size = self.batch_size * rank_and_world_size()[1]
        return range(batch * size, self.num_samples if batch == len(self) - 1 else (batch + 1) * size)

    def _share(self, batch: int) -> range:
        """The positions of them that this rank takes; the first ranks take one more where it does not divide evenly."""
        rank, world_size = rank_and_world_size()
        whole = self._global_batch(batch)
        share, rest = divmod(len(whole), world_size)
        first = whole.start + rank * share + min(rank, rest)
        return range(first, first + share + (rank < rest))

    def __iter__(self) -> Iterator[Any]:
        """The key `(epoch, indices)` of each batch of this rank that is still to be served."""
        order = self.order() if self.device is None else self.order().to(self.device)
        first = self.start[1] if self.epoch == self.start[0] else 0
        for batch in range(first, len(self)):
            share = self._share(batch)
            indices = order[share.start : share.stop]
            yield self.epoch, indices.tolist() if self.device is None else indices

    def __len__(self) -> int:
        world_size = rank_and_world_size()[1]
        full, rest = divmod(self.num_samples, self.batch_size * world_size)
        return full + (1 if rest >= world_size * self.min_samples or not full else 0)
