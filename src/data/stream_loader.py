"""From shards to batches, in an order that depends on (seed, epoch) alone; in any number of workers and ranks.

Every worker of every rank reads all raw samples in the same order, and decodes those of its own batches. So all ranks
know where an epoch ends, and none waits for a batch that another one does not have.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ..errors import UserError
from .collate import batch_of, empty_batch
from .loader import epoch_seed
from .workers import data_error, raised, seeded, worker_loader

if TYPE_CHECKING:
    from .stream import StreamDataModule

Raw = tuple[Path, Any]  # a raw sample and the shard that it comes from


@dataclass(eq=False)
class StreamOrder:
    """Which raw samples a batch consists of. Lightning and the training program take it for a batch sampler."""

    split: str
    shards: list[Path]
    batch_size: int  # of one rank
    shuffle: bool  # whether the order differs by epoch; otherwise it is the stored one
    seed: int
    buffer: int  # raw samples that are shuffled at a time
    start: tuple[int, int]  # (epoch, batches of it that are done)
    min_samples: int  # the smallest batch of a rank; a smaller remainder joins the last full batch
    num_samples: int | None  # where it is known before it is counted
    rank: int
    world_size: int
    epoch: torch.Tensor = field(init=False)  # (): shared with the workers
    # Of this rank's batches, where they are not full: the weight, and the position of the first sample.
    odd: dict[int, tuple[float, int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.epoch = torch.tensor(self.start[0])
        self.sampler = self  # Lightning calls set_epoch on this attribute

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this with the number of epochs done."""
        self.epoch.fill_(epoch)

    def weight(self, batch: int) -> float:
        """The weight of this rank's mean in the mean of all ranks: 1, unless a batch does not divide evenly."""
        return self.odd[batch][0] if batch in self.odd else 1.0

    def first_sample(self, batch: int) -> int:
        """The position in the epoch's order of this rank's first sample of a batch."""
        full = (batch * self.world_size + self.rank) * self.batch_size
        return self.odd[batch][1] if batch in self.odd else full

    def __len__(self) -> int:
        if self.num_samples is None:
            raise TypeError("the number of samples is not known")
        size, least = self.batch_size * self.world_size, self.world_size * self.min_samples
        full, rest = divmod(self.num_samples, size)
        return full + (1 if rest >= least or not full else 0)

    def raws(self, reader: "StreamDataModule", epoch: int) -> Iterator[Raw]:
        """All raw samples of an epoch, in its order. Of Random only `random()` is used: its numbers never change."""
        random, shards = Random(epoch_seed(self.seed, epoch)), self.shards
        if self.shuffle:
            shards = sorted(shards, key=lambda _: random.random())
        stored = self._counted(_read(reader, shards), reader.name)
        if self.buffer < 2:
            return stored
        return _shuffled(stored, self.buffer, random)

    def batches(self, raws: Iterator[Raw], name: str) -> Iterator[list[Raw]]:
        """The batches of all ranks together."""
        size, least = self.batch_size * self.world_size, self.world_size * self.min_samples
        batch = list(islice(raws, size))
        if self.shuffle and len(batch) < least:
            needed = f", and a step of each takes {self.min_samples} at least" if self.min_samples > 1 else ""
            ranks = f"{self.world_size} processes{needed}"
            raise UserError(f"trainer.devices: {ranks}, and {name} has {len(batch)} training samples")
        while batch:
            following = list(islice(raws, size))
            if len(following) < least:
                yield batch + following
                return
            yield batch
            batch = following

    def share(self, samples: int) -> range:
        """Which samples of a batch of all ranks are this rank's."""
        share, rest = divmod(samples, self.world_size)
        first = self.rank * share + min(self.rank, rest)
        return range(first, first + share + (self.rank < rest))

    def _counted(self, raws: Iterator[Raw], name: str) -> Iterator[Raw]:
        counted = 0
        for counted, raw in enumerate(raws, start=1):
            if self.num_samples is not None and counted > self.num_samples:
                break
            yield raw
        if self.num_samples is not None and counted != self.num_samples:
            held = f"hold {counted:,}" if counted < self.num_samples else "hold more"
            said = f"num_samples says that {name}'s {self.split} split has {self.num_samples:,} samples"
            raise UserError(f"data: {said}, and its shards {held}")


class StreamLoader:
    """The batches of one rank; they are decoded in `num_workers` processes."""

    def __init__(self, reader: "StreamDataModule", order: StreamOrder, num_workers: int, device: torch.device):
        self.batch_sampler = self.sampler = order
        if num_workers:
            order.epoch.share_memory_()
        batches = _Batches(reader, order)
        self._loader = worker_loader(batches, num_workers, order.seed, device, batch_size=None)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        self.batch_sampler.odd.clear()
        for number, odd, batch in raised(self._loader):
            if odd is not None:
                self.batch_sampler.odd[number] = odd
            yield batch


class _Batches(IterableDataset):
    """What a worker does. It yields `(number of the batch, what StreamOrder.odd has of it, batch)`, or a UserError and then nothing more."""

    def __init__(self, reader: "StreamDataModule", order: StreamOrder):
        self.reader = reader
        self.order = order

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        try:
            yield from self._batches(*((worker.id, worker.num_workers) if worker else (0, 1)))
        except UserError as error:
            yield error

    def _batches(self, worker: int, workers: int) -> Iterator[tuple[int, tuple[float, int] | None, Any]]:
        order, epoch = self.order, int(self.order.epoch)
        first, position = order.start[1] if epoch == order.start[0] else 0, 0
        raws = order.raws(self.reader, epoch)
        for number, batch in enumerate(order.batches(raws, self.reader.name)):
            if number >= first and (number - first) % workers == worker:
                own = order.share(len(batch))
                full = len(batch) == order.batch_size * order.world_size
                odd = None if full else (len(own) * order.world_size / len(batch), position + own.start)
                yield number, odd, self._decoded(batch, own, epoch, position)
            position += len(batch)

    def _decoded(self, batch: list[Raw], own: range, epoch: int, position: int) -> Any:
        """This rank's samples as a batch; a rank without any decodes one for its shapes."""
        samples = [self._decode(*batch[i], epoch, position + i) for i in own or (0,)]
        made = batch_of(samples, [str(batch[i][0]) for i in own or (0,)], self.reader.spec)
        return made if own else empty_batch(made)

    def _decode(self, shard: Path, raw: Any, epoch: int, position: int) -> Any:
        try:
            if not self.reader.randomised:
                return self.reader.decode(raw)
            with seeded(epoch_seed(self.order.seed, epoch, position)):
                return self.reader.decode(raw)
        except Exception as error:
            raise data_error(f"a sample of {shard} cannot be decoded", error) from error


def _read(reader: "StreamDataModule", shards: list[Path]) -> Iterator[Raw]:
    for shard in shards:
        empty = True
        try:
            for raw in reader.read(shard):
                yield shard, raw
                empty = False
        except Exception as error:
            raise data_error(f"shard {shard} of {reader.name} cannot be read", error) from error
        if empty:
            raise UserError(f"data: shard {shard} of {reader.name} holds no sample")


def _shuffled(raws: Iterator[Raw], size: int, random: Random) -> Iterator[Raw]:
    """Each sample takes the place of a random one among `size`, which is served."""
    buffer = list(islice(raws, size))
    for raw in raws:
        place = int(random.random() * len(buffer))
        raw, buffer[place] = buffer[place], raw
        yield raw
    yield from sorted(buffer, key=lambda _: random.random())
