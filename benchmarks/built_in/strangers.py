"""Built-in causes as strangers' projects have them: hooks, callbacks, tokenizers, large vocabularies, steps that change."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from .case import Ablation, Case, Parts, activations, step_of
from .modules import MANY, Apply, Plain, Tables, linears, python_loop, same, sgd, sleep

NOTHING = Ablation("without it", {"times": 0}, most=0.5)


class Prepares(Plain):
    """Works on the batch in a hook around the copy."""

    def __init__(self, network: nn.Module, work: Callable[[], object], before: bool = False):
        super().__init__(network)
        self.work, self.early = work, before

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.early:
            self.work()
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not self.early:
            self.work()
        return batch


def prepares(work: Callable[[float], object], before: bool = False) -> Callable[..., Parts]:
    def make(times: float) -> Parts:
        return Prepares(linears(32, 32, 8), partial(work, times), before), same(torch.randn(16, 32)), {}

    return make


class Average(Callback):
    """An exponential moving average of the weights, at the end of every batch."""

    weights: list[Tensor] | None = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        with torch.no_grad():
            now = list(pl_module.parameters())
            if self.weights is None:
                self.weights = [each.clone() for each in now]
            torch._foreach_lerp_(self.weights, now, 0.01)


class Copies(Callback):
    """Keeps a copy of the module after every batch."""

    kept: object = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self.kept = copy.deepcopy(pl_module.network)


def called_back(callback: type[Callback], rows: int, width: int) -> Callable[..., Parts]:
    """A step that looks up a few rows of a table, with sparse gradients, and a callback that passes over all of it."""

    def make(times: int = 1) -> Parts:
        options = {"callbacks": [callback()] if times else []}
        return Plain(Tables(1, rows, width, sparse=True)), same(torch.arange(8)), options

    return make


class Sentences(Dataset):
    """Splits words into pieces in Python, as a tokenizer does."""

    def __init__(self, times: int):
        self.text = "the quick brown fox jumps over the lazy dog " * times
        self.pieces = {text: number for number, text in enumerate(("th", "qu", "br", "fox", "ju", "ov", "la", "do"))}

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, index: int) -> Tensor:
        ids = [self.pieces.get(word[at : at + 2], 8) for word in self.text.split() for at in range(0, len(word), 2)]
        return torch.tensor((ids + [0] * 64)[:64])


class Classifies(LightningModule):
    """A classifier over a large vocabulary."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.layer, self.classes = nn.Linear(width, classes), classes

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.layer(batch), torch.arange(len(batch)) % self.classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.parameters())


def vocabulary(width: int = 8, batch: int = 256, classes: int = 50_000) -> Parts:
    return Classifies(width, classes), same(torch.randn(batch, width)), {}


class LogsItems(Plain):
    """Reads each of many values from the device, and logs them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.network(batch)
        for number in range(30):
            self.log(f"mean_{number}", out[number].mean().item())
        return out.mean()


class Changes(Plain):
    """After some batches each step does `times` products of 768×768 instead of sleeping."""

    def __init__(self, at: int, times: int, seconds: float):
        super().__init__(linears(8, 8))
        self.at, self.times, self.seconds, self.square = at, times, seconds, torch.randn(768, 768)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for _ in range(self.times if batch_idx >= self.at else 0):
                self.square @ self.square
        if batch_idx < self.at:
            sleep(self.seconds)
        return super().training_step(batch, batch_idx)


class Grows(LightningModule):
    """A recurrent step on sequences that grow from 1 to many time steps."""

    def __init__(self, width: int):
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.lstm(batch[:, : 1 + batch_idx])[0].mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.parameters())


def micro_batches(times: int = 32) -> Parts:
    return Plain(linears(64, 64, 64, 8)), same(torch.randn(2, 64)), {"accumulate_grad_batches": max(times, 1)}


def double(network: Callable[[], nn.Module], *shape: int) -> Callable[..., Parts]:
    def make(half: bool = False) -> Parts:
        dtype = torch.float32 if half else torch.float64
        return Plain(network().to(dtype)), same(torch.randn(*shape, dtype=dtype)), {}

    return make


STRANGE = {
    "sleep in on_after_batch_transfer": Case(
        ("input",), "20 ms before each training step", prepares(sleep), NOTHING, sizes={"times": 0.02}
    ),
    "Python loop in on_before_batch_transfer": Case(
        ("input",), "200,000 turns", prepares(python_loop, before=True), NOTHING, sizes={"times": 200_000}
    ),
    "tokenizer in the dataset": Case(
        ("input",),
        "a Python loop over words for each of 16 samples",
        lambda times: (
            Plain(nn.Sequential(nn.Embedding(16, 32), nn.Flatten(), nn.Linear(2048, 8))),
            DataLoader(Sentences(times), batch_size=16),
            {},
        ),
        NOTHING,
        sizes={"times": 100},
    ),
    "average of 64 M weights in a callback": Case(
        ("memory",),
        "three passes over 256 MB for two FLOPs a weight",
        called_back(Average, 125_000, 512),
        NOTHING,
    ),
    "copy of 64 M weights in a callback": Case(
        ("memory",), "256 MB are copied to fresh memory", called_back(Copies, 125_000, 512), NOTHING
    ),
    "cross entropy, 50,000 classes": Case(
        ("memory", "compute"),
        "values of 51 MB pass several times, each with one exponential, after a product of 8 FLOPs a byte",
        vocabulary,
        Ablation("a tenth of the classes", {"classes": 5000}, most=0.4),
    ),
    "batch norm after a 1×1 convolution, 64 MB": Case(
        ("memory",),
        "two channels into 32, which the norm passes over several times",
        activations(
            nn.Sequential(nn.Conv2d(2, 32, 1), nn.BatchNorm2d(32), nn.ReLU()).requires_grad_(True), 4, 2, 64, 64
        ),
        Ablation("the same samples in 32 batches that the cache holds", {"pieces": 32}, most=0.9),
    ),
    "dropout of half, 64 MB": Case(
        ("memory", "compute"),
        "as many random numbers as values",
        activations(lambda x: F.dropout(x, 0.5), 64, 1024),
        Ablation("the same samples in 32 batches that the cache holds", {"pieces": 32}, most=1.5),
    ),
    "32 tiny batches an update": Case(
        ("host",), "three layers on 2 samples, 32 times", micro_batches, Ablation("one", {"times": 1}, most=0.3)
    ),
    "30 logged .item() a step": Case(
        ("host",),
        "small means, each read and logged",
        lambda logs=True: (
            (LogsItems if logs else Plain)(linears(32, 32, 8)),
            same(torch.randn(32, 32)),
            {"logger": True},
        ),
        Ablation("without them", {"logs": False}, most=0.5),
    ),
    "products in float64": Case(
        ("compute",),
        "as square products, at twice the bits",
        double(lambda: linears(*[1024] * 3, act=None, bias=False), 512, 1024),
        Ablation("in float32", {"half": True}, most=0.8),
    ),
    "gelu, 1 MB": Case(
        ("compute",),
        "an error function for each value, in the cache",
        step_of(lambda: Apply(lambda x: F.gelu(F.gelu(F.gelu(x)))), (256, 1024)),
        Ablation("a quarter of the values", {"batch": 64}, most=0.7),
    ),
    "first 10 steps asleep, then products": Case(
        ("compute",),
        "the steps that are recorded first are not those that are measured",
        lambda times=30: (Changes(10, times, 0.005), same(torch.randn(4, 8)), {}),
        Ablation("without the products", {"times": 0}, most=0.5),
    ),
    "sequences that grow to 100": Case(
        ("compute",),
        "an LSTM of 256 units on one time step first, and on one more in each step",
        lambda batch=64: (Grows(256), same(torch.randn(batch, 200, 256)), {}),
        Ablation("a quarter of the samples", {"batch": 16}, most=0.8),
    ),
}
