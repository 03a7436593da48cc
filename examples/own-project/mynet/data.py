"""The data: noisy waves of three shapes, in files that are read one after the other (shards).

A dataset of your own replaces `shards`, `read` and `decode`; `prepare_data` is for what has to be made or downloaded.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch

from batchscope.data import DataSpec, StreamDataModule
from batchscope.options.types import Purpose

STEPS = 32
SHAPES = ("sine", "square", "saw")
SHARDS = {"train": 4, "val": 1, "test": 1}  # files of a split
SAMPLES = 400  # of a file


class Waves(StreamDataModule):
    """Which shape does a wave have?

    Args:
        root: the folder of the shards, which are made there if they are missing.
        **kwargs: as StreamDataModule: batch_size, num_workers, seed, shuffle_buffer.
    """

    name = "waves"
    kind = "sequence"

    def __init__(self, root: Annotated[str, Purpose.READ_FROM] = "data/waves", **kwargs: Any):
        super().__init__(**kwargs)
        self.root = Path(root)

    @property
    def spec(self) -> DataSpec:
        """What a model has to know."""
        return DataSpec("sequence", (STEPS, 1), "class", len(SHAPES), classes=SHAPES)

    def num_samples(self, split: str) -> int:
        """Known here; without this method the samples are counted while they are read."""
        return SHARDS[split] * SAMPLES

    def shards(self, split: str) -> Sequence[Path]:
        """The files of a split."""
        return [self.root / f"{split}-{number}.npy" for number in range(SHARDS[split])]

    def read(self, shard: Path) -> Iterator[numpy.ndarray]:
        """The rows of a file: 32 steps and the class. `allow_pickle=False`: a file of data runs no code."""
        yield from numpy.load(shard, allow_pickle=False)

    def decode(self, raw: numpy.ndarray) -> tuple[torch.Tensor, int]:
        """A row as `(x, y)`: `x: (T, 1)`, and the number of the class."""
        return torch.from_numpy(raw[:STEPS, None].copy()), int(raw[STEPS])

    def prepare_data(self) -> None:
        """Make the shards that are missing. One process calls this before any of them reads."""
        self.root.mkdir(parents=True, exist_ok=True)
        for split in SHARDS:
            for number, shard in enumerate(self.shards(split)):
                if not shard.exists():
                    temporary = shard.with_suffix(f".{os.getpid()}")
                    with temporary.open("wb") as file:
                        numpy.save(file, make_shard((list(SHARDS).index(split), number)))
                    temporary.replace(shard)


def make_shard(seed: tuple[int, int]) -> numpy.ndarray:
    """`(SAMPLES, STEPS + 1)`: waves of any frequency and phase, with noise, and their class at the end."""
    random = numpy.random.default_rng(seed)
    labels = random.integers(len(SHAPES), size=SAMPLES)
    turns = random.uniform(1.5, 3.0, (SAMPLES, 1)) * numpy.linspace(0, 1, STEPS) + random.uniform(0, 1, (SAMPLES, 1))
    sine = numpy.sin(2 * numpy.pi * turns)
    waves = numpy.choose(labels[:, None], [sine, numpy.sign(sine), 2 * (turns % 1) - 1])
    noisy = waves + random.normal(0, 0.3, waves.shape)
    return numpy.column_stack([noisy, labels]).astype(numpy.float32)
