"""The data: noisy waves of three shapes, as a torch `Dataset`.

A dataset of your own replaces `dataset` and what it returns; `prepare_data` is for what has to be made or downloaded.
"""

import os
from pathlib import Path
from typing import Annotated, Any

import numpy
from torch.utils.data import Dataset

from batchscope.data import DataModule, DataSpec
from batchscope.options.types import Purpose

STEPS = 32
SHAPES = ("sine", "square", "saw")
SIZES = {"train": 1_600, "val": 400, "test": 400}  # waves of a split


class Waves(DataModule):
    """Which shape does a wave have?

    Args:
        root: the folder of the files, which are made there if they are missing.
        **kwargs: as DataModule: batch_size, num_workers, seed, augment.
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

    def dataset(self, split: str) -> Dataset:
        """The samples of a split."""
        return Rows(self.root / f"{split}.npy")

    def prepare_data(self) -> None:
        """Make the files that are missing. One process calls this before any of them reads."""
        self.root.mkdir(parents=True, exist_ok=True)
        for number, split in enumerate(SIZES):
            path = self.root / f"{split}.npy"
            if not path.exists():
                temporary = path.with_suffix(f".{os.getpid()}")
                with temporary.open("wb") as file:
                    numpy.save(file, make_waves(SIZES[split], seed=number))
                temporary.replace(path)


class Rows(Dataset):
    """The rows of a file: 32 steps and the class. The file is mapped and may be larger than memory."""

    def __init__(self, file: Path):
        self.rows = numpy.load(file, mmap_mode="r", allow_pickle=False)  # a file of data runs no code

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[numpy.ndarray, int]:
        """`x: (T, 1)` float32, and the number of the class."""
        row = numpy.array(self.rows[index])
        return row[:STEPS, None], int(row[STEPS])


def make_waves(size: int, seed: int) -> numpy.ndarray:
    """`(size, STEPS + 1)`: waves of any frequency and phase, with noise, and their class at the end."""
    random = numpy.random.default_rng(seed)
    labels = random.integers(len(SHAPES), size=size)
    turns = random.uniform(1.5, 3.0, (size, 1)) * numpy.linspace(0, 1, STEPS) + random.uniform(0, 1, (size, 1))
    sine = numpy.sin(2 * numpy.pi * turns)
    waves = numpy.choose(labels[:, None], [sine, numpy.sign(sine), 2 * (turns % 1) - 1])
    noisy = waves + random.normal(0, 0.3, waves.shape)
    return numpy.column_stack([noisy, labels]).astype(numpy.float32)
