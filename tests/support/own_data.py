"""Datasets as a user writes them: in shards, as a torch Dataset, as dicts, of different lengths, and a plain one."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch

from batchscope.data.spec import DataSpec
from batchscope.data.stream import StreamDataModule
from batchscope.options import packages
from batchscope.options.types import Purpose

SIZES = {"train": (20, 16, 24, 16), "val": (10, 6), "test": (12,)}  # samples of each shard: 76, 16 and 12


def trust() -> None:
    """Let a `_target_` name a class of the tests, as a user's trusted package."""
    packages._installed = lambda: frozenset({"tests"})  # as if by an entry point


# What a process of the program does before it reads its configuration.
TRUST: tuple[str, int, Callable[[], None]] = ("batchscope.options.nodes.role_of", 1, trust)


def write_shards(folder: Path) -> Path:
    """Shards of 8×8 images and labels as .npz files, named after their split."""
    random = numpy.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for split, sizes in SIZES.items():
        for number, size in enumerate(sizes):
            y = random.integers(0, 4, size)
            x = random.normal(y[:, None, None, None], 1, (size, 1, 8, 8)).astype("float32")
            numpy.savez(folder / f"{split}-{number}.npz", x=x, y=y)
    return folder


class Shards(StreamDataModule):
    """8×8 images in four classes, from .npz files."""

    kind = "image"
    name = "own-shards"

    def __init__(self, root: Annotated[str, Purpose.READ_FROM] = "shards", known: bool = False, **kwargs: Any):
        super().__init__(**kwargs)
        self.root = Path(root)
        self.known = known

    @property
    def spec(self) -> DataSpec:
        return DataSpec("image", (1, 8, 8), "class", 4)

    def shards(self, split: str) -> Sequence[Path]:
        return list(self.root.glob(f"{split}-*.npz"))

    def num_samples(self, split: str) -> int | None:
        return sum(SIZES[split]) if self.known else None

    def read(self, shard: Path) -> Iterator[Any]:
        with numpy.load(shard) as arrays:
            yield from zip(arrays["x"], arrays["y"], strict=True)

    def decode(self, raw: Any) -> Any:
        x, y = raw
        return torch.from_numpy(x), int(y)


def write_config(folder: Path, name: str = "Shards", inherits: str = "_stream", **options: Any) -> Path:
    """A folder for `--config-dir` with `data=own`: a class of this module and its options."""
    lines = [f"defaults: [/{inherits}@_here_, _self_]", f"_target_: tests.support.own_data.{name}"]
    file = folder / "conf" / "data" / "own.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join([*lines, *(f"{key}: {value}" for key, value in options.items())]) + "\n")
    return folder / "conf"
