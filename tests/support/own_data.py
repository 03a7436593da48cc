"""Datasets as a user writes them: in shards, as a torch Dataset, as dicts, of different lengths, and a plain one."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader, Dataset, get_worker_info

from batchscope.data.dataset import DatasetModule
from batchscope.data.spec import DataSpec
from batchscope.data.stream import StreamDataModule
from batchscope.options.types import Purpose

SIZES = {"train": (20, 16, 24, 16), "val": (10, 6), "test": (12,)}  # samples of each shard: 76, 16 and 12


def nothing() -> None:
    """A class of the tests is built as any class: the command line names it, or the folder of configs."""


TRUST: tuple[str, int, Callable[[], None]] = ("batchscope.options.nodes.check_node", 1, nothing)


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


class KilledWorker(Shards):
    """A worker that the system kills, as it does when memory runs out."""

    def decode(self, raw: Any) -> Any:
        if get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().decode(raw)


class Images(Dataset):
    """8×8 images in four classes, each made from its number."""

    def __init__(self, size: int, seed: int, noisy: bool = False):
        self.size, self.seed, self.noisy = size, seed, noisy

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        y = index % 4
        x = numpy.random.default_rng((self.seed, index)).normal(y, 1, (1, 8, 8)).astype("float32")
        return (x + numpy.random.normal() * self.noisy).astype("float32"), y


class MapStyle(DatasetModule):
    """The images as a torch Dataset; with `noisy`, each has random noise in every epoch."""

    kind = "image"
    name = "own-dataset"
    randomised = True

    def __init__(self, noisy: bool = True, **kwargs: Any):
        super().__init__(**kwargs)
        self.noisy = noisy

    @property
    def spec(self) -> DataSpec:
        return DataSpec("image", (1, 8, 8), "class", 4)

    def dataset(self, split: str) -> Dataset:
        return Images(sum(SIZES[split]), self.split_seed(split), self.noisy)


class Dicts(MapStyle):
    """The images as dicts."""

    name = "own-dicts"

    @property
    def spec(self) -> DataSpec:
        return DataSpec("image", (1, 8, 8), "class", 4, fields=("picture", "answer"))

    def dataset(self, split: str) -> Any:
        pairs = [super(Dicts, self).dataset(split)[i] for i in range(sum(SIZES[split]))]
        return [{"number": number, "picture": x, "answer": y} for number, (x, y) in enumerate(pairs)]


class Lengths(DatasetModule):
    """Sequences of 3 to 9 steps. The answer is the sign of the last step, or of every step."""

    kind = "sequence"
    name = "own-lengths"

    def __init__(self, every_step: bool = False, fields: bool = False, **kwargs: Any):
        super().__init__(**kwargs)
        self.every_step = every_step
        self.fields = fields

    @property
    def spec(self) -> DataSpec:
        target = "class_per_step" if self.every_step else "class"
        fields = ("x", "y") if self.fields else None
        return DataSpec("sequence", (9, 2), target, 2, fields=fields, variable_length=True)

    def dataset(self, split: str) -> Any:
        random = numpy.random.default_rng(self.split_seed(split))
        samples = []
        for _ in range(sum(SIZES[split])):
            x = random.normal(size=(random.integers(3, 10), 2)).astype("float32")
            y = (x[:, 0] > 0).astype("int64") if self.every_step else int(x[-1, 0] > 0)
            samples.append({"x": x, "y": y} if self.fields else (x, y))
        return samples


class Plain(LightningDataModule):
    """A LightningDataModule of somebody who has not heard of this project, with a `spec` added."""

    def __init__(self, batch_size: int = 8):
        super().__init__()
        self.batch_size = batch_size
        self.spec = DataSpec("image", (1, 8, 8), "class", 4)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Images(76, 0), self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Images(16, 1), self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(Images(12, 2), self.batch_size)


class NoSpec(Plain):
    """One without a spec."""

    def __init__(self, batch_size: int = 8):
        super().__init__(batch_size)
        del self.spec


def write_config(folder: Path, name: str = "Shards", inherits: str | None = "_stream", **options: Any) -> Path:
    """A folder for `--config-dir` with `data=own`: a class of this module and its options."""
    lines = [f"defaults: [/{inherits}@_here_, _self_]"] if inherits else ["batch_size: 8"]
    lines = [*lines, f"_target_: tests.support.own_data.{name}"]
    file = folder / "conf" / "data" / "own.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join([*lines, *(f"{key}: {value}" for key, value in options.items())]) + "\n")
    return folder / "conf"
