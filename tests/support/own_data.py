"""Datasets as a user writes them: a torch Dataset, different lengths, several inputs, any LightningDataModule."""

import os
from pathlib import Path
from typing import Any

import numpy
from lightning import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from batchscope.data.base import DataModule
from batchscope.data.spec import DataSpec
from batchscope.errors import UserError

SIZES = {"train": 76, "val": 16, "test": 12}


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


class MapStyle(DataModule):
    """The images as a torch Dataset, each with random noise in every epoch."""

    kind, name, randomised = "image", "own-dataset", True
    spec = DataSpec("image", (1, 8, 8), "class", 4)

    def dataset(self, split: str) -> Dataset:
        return Images(SIZES[split], self.split_seed(split), noisy=True)


class Lengths(DataModule):
    """Sequences of 3 to 9 steps. The answer is the sign of the last step, or of every step."""

    kind, name = "sequence", "own-lengths"

    def __init__(self, every_step: bool = False, **kwargs: Any):
        super().__init__(**kwargs)
        self.every_step = every_step

    @property
    def spec(self) -> DataSpec:
        target = "class_per_step" if self.every_step else "class"
        return DataSpec("sequence", (9, 2), target, 2, variable_length=True)

    def dataset(self, split: str) -> Any:
        random = numpy.random.default_rng(self.split_seed(split))
        samples = []
        for _ in range(SIZES[split]):
            x = random.normal(size=(random.integers(3, 10), 2)).astype("float32")
            samples.append((x, (x[:, 0] > 0).astype("int64") if self.every_step else int(x[-1, 0] > 0)))
        return samples


class Tokens(DataModule):
    """Sentences of 3 to 9 tokens as dicts, with a mask and a field that no model reads. Is the first token large?"""

    kind, name = "sequence", "own-tokens"
    spec = DataSpec("sequence", (9,), "class", 2, fields=("input_ids", "attention_mask", "label"), variable_length=True)

    def dataset(self, split: str) -> Any:
        random = numpy.random.default_rng(self.split_seed(split))
        sentences = [random.integers(1, 20, random.integers(3, 10)) for _ in range(SIZES[split])]
        fields = [(ids, numpy.ones(len(ids), bool), int(ids[0] > 9)) for ids in sentences]
        return [{"number": n, **dict(zip(self.spec.fields, own, strict=True))} for n, own in enumerate(fields)]


class MaskedMean(nn.Module):
    """The mean of the embeddings that a mask leaves, with dropout."""

    accepts = ("sequence",)

    def __init__(self, spec: DataSpec, width: int = 8):
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(width, spec.num_outputs))

    def forward(self, attention_mask: Tensor, input_ids: Tensor, scale: float = 1.0) -> Tensor:
        mask = attention_mask[..., None].float()
        return self.head((self.embedding(input_ids) * mask).sum(1) / mask.sum(1) * scale)


class Plain(LightningDataModule):
    """A LightningDataModule of somebody who has not heard of this project, with a `spec` added."""

    spec = MapStyle.spec

    def __init__(self, batch_size: int = 8):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(Images(76, 0), self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Images(16, 1), self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(Images(12, 2), self.batch_size)


class Apart(Plain):
    """One whose loader has workers, which are others in every epoch."""

    def __init__(self, batch_size: int = 8, num_workers: int = 2):
        super().__init__(batch_size)
        self.num_workers = num_workers

    def train_dataloader(self) -> Any:
        return DataLoader(Images(76, 0), self.batch_size, num_workers=self.num_workers)


class Prepared(Plain):
    """One that makes a file, by the numbers of the processes that have made it; or cannot."""

    def __init__(self, file: str, fails: bool = False, batch_size: int = 8):
        super().__init__(batch_size)
        self.file, self.fails = Path(file), fails

    def prepare_data(self) -> None:
        if self.fails:
            raise UserError("data: nothing to download")
        with self.file.open("a") as file:
            file.write(os.environ["RANK"])

    def setup(self, stage: str) -> None:
        self.file.read_text()


class Sharded(Plain):
    """One of which each rank has a part, and speaks of that alone."""

    rank = property(lambda self: int(os.environ["RANK"]))
    fingerprint = property(lambda self: f"of rank {self.rank}")

    def num_samples(self, split: str) -> int:
        return 40 - 4 * self.rank

    def train_dataloader(self) -> Any:
        return DataLoader(Images(40, self.rank), self.batch_size)


class Stateful(Plain):
    """One whose loader knows where it is: torchdata's, of a dataset or of a stream, which may have no length."""

    def __init__(self, batch_size: int = 8, num_workers: int = 0, stream: bool = False, sized: bool = True):
        super().__init__(batch_size)
        self.num_workers, self.stream, self.sized = num_workers, stream, sized

    def train_dataloader(self) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        data = Stream(self.sized) if self.stream else Images(76, 0)
        return StatefulDataLoader(data, self.batch_size, shuffle=not self.stream, num_workers=self.num_workers)


class Stream(IterableDataset):
    """The images in another order in every epoch."""

    def __init__(self, sized: bool) -> None:
        self.epoch, self.done, self.sized = 0, 0, sized

    def __len__(self) -> int:
        if not self.sized:
            raise TypeError("a stream without a length")
        return 76

    def __iter__(self) -> Any:
        order = numpy.random.default_rng(self.epoch).permutation(76)
        while self.done < len(order):
            self.done += 1
            yield Images(76, 0)[order[self.done - 1]]
        self.epoch, self.done = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.done = state["epoch"], state["done"]


def write_config(folder: Path, name: str, *options: str) -> Path:
    """A folder for `--config-dir` with `data=own`, a class of this module and its options, and `model=masked_mean`."""
    base = "defaults: [/_data@_here_, _self_]" if issubclass(globals()[name], DataModule) else "batch_size: 8"
    for file, lines in {"data/own": [base, name, *options], "model/masked_mean": ["", "MaskedMean"]}.items():
        path = folder / "conf" / f"{file}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join([lines[0], f"_target_: {__name__}.{lines[1]}", *lines[2:]]))
    return folder / "conf"
