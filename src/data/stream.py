"""StreamDataModule: data that do not fit in memory, read from files one after the other (shards)."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from ..errors import UserError
from ..files import why
from ..options.types import NonNegativeInt
from .base import STAGE_SPLITS, DataModule, Split
from .loader import rank_and_world_size
from .stream_loader import StreamLoader, StreamOrder

_HASHED = 64 * 2**10  # bytes at the beginning and at the end of a shard that the fingerprint covers


class StreamDataModule(DataModule):
    """A dataset in shards: files that are read from their beginning to their end.

    A subclass sets `kind` and `name`, gives `spec`, lists the files in `shards`, reads raw samples from one in `read`,
    and makes `(x, y)` of a raw sample in `decode`. Only `decode` should take time: every rank and every worker reads all
    raw samples, and decodes its own.

    The order of an epoch depends on (seed, epoch) alone, for any number of workers and ranks: the shards are shuffled,
    then the raw samples in a buffer.

    Args:
        shuffle_buffer: raw samples that the order is shuffled among; each worker keeps so many in memory. 0 shuffles the
            shards alone.
        **kwargs: as DataModule.
    """

    randomised: ClassVar[bool] = False  # whether decode draws random numbers, which are then seeded for each sample

    def __init__(self, shuffle_buffer: NonNegativeInt = 1_000, **kwargs: Any):
        super().__init__(**kwargs)
        self.shuffle_buffer = shuffle_buffer
        self._shards: dict[Split, list[Path]] = {}

    def shards(self, split: Split) -> Sequence[Path]:
        """The files of a split, in any order."""
        raise NotImplementedError

    def read(self, shard: Path) -> Iterable[Any]:
        """The raw samples of a shard, in the order in which they are stored. A raw sample is not changed afterwards."""
        raise NotImplementedError

    def decode(self, raw: Any) -> Any:
        """A raw sample as `(x, y)`: tensors, numpy arrays or numbers."""
        raise NotImplementedError

    @override
    def num_samples(self, split: Split) -> int | None:
        """None: the samples are counted while they are read. A subclass that knows their number returns it."""
        return None

    @override
    def setup(self, stage: str) -> None:
        for split in STAGE_SPLITS.get(stage, ()):
            if split not in self._shards:
                self._shards[split] = self._checked(split)

    @property
    @override
    def fingerprint(self) -> str:
        """A hash of the names and sizes of the shards, and of the first and the last 64 KiB of each."""
        digest = hashlib.blake2b(digest_size=8)
        for split in STAGE_SPLITS["fit"]:
            for shard in self._shards[split]:
                size = shard.stat().st_size
                digest.update(str((split, shard.name, size)).encode())
                with shard.open("rb") as file:
                    digest.update(file.read(_HASHED))
                    file.seek(max(0, size - _HASHED))
                    digest.update(file.read(_HASHED))
        return digest.hexdigest()

    @override
    def train_dataloader(self) -> StreamLoader:
        """Batches shuffled by (seed, epoch), also a short last one."""
        self.check_batch(self._min_samples)
        return self._loader("train", self.batch_size, shuffle=True)

    @override
    def val_dataloader(self) -> StreamLoader:
        return self._loader("val", self._eval_batch_size(self.spec.input_shape), shuffle=False)

    @override
    def test_dataloader(self) -> StreamLoader:
        return self._loader("test", self._eval_batch_size(self.spec.input_shape), shuffle=False)

    def _loader(self, split: Split, batch_size: int, shuffle: bool) -> StreamLoader:
        rank, world_size = rank_and_world_size()
        order = StreamOrder(
            split=split,
            shards=self._shards[split],
            batch_size=batch_size,
            shuffle=shuffle,
            seed=self.seed,
            buffer=self.shuffle_buffer if shuffle else 0,
            start=self._start if shuffle else (0, 0),
            min_samples=self._min_samples if shuffle else 1,
            num_samples=self.num_samples(split),
            rank=rank,
            world_size=world_size,
        )
        return StreamLoader(self.for_workers(), order, self.num_workers, self._device)

    def _checked(self, split: Split) -> list[Path]:
        """The shards in an order that depends on their names alone; UserError if one is missing or empty."""
        shards = sorted(Path(shard) for shard in self.shards(split))
        if not shards:
            raise UserError(f"data: {self.name} has no shards for its {split} split")
        for shard in shards:
            try:
                size = shard.stat().st_size
            except OSError as error:
                raise UserError(f"data: shard {shard} of {self.name} cannot be read: {why(error)}") from error
            if not shard.is_file() or not os.access(shard, os.R_OK) or not size:
                wrong = "is empty" if shard.is_file() and not size else "is not a file that can be read"
                raise UserError(f"data: shard {shard} of {self.name} {wrong}")
        return shards
