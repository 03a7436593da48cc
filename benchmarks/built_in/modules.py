"""Training steps with a known bottleneck, as LightningModules, datasets and callbacks that know nothing of batchscope.

Each network returns a tensor, whose mean is the loss of `Plain`. `cases.py` gives the sizes and the reasons.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

MANY = 1_000_000  # batches: a run ends by its steps or its time
sgd = partial(torch.optim.SGD, lr=1e-4)


class Plain(LightningModule):
    """A network whose loss is the mean of its output; `before` runs in each training step, on the batch."""

    def __init__(self, network: nn.Module, optimizer: Callable = sgd, before: Callable[[Any], object] | None = None):
        super().__init__()
        self.network = network
        self.make_optimizer = optimizer
        self.before = before

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.before is not None:
            self.before(batch)
        return self.network(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


class Logs(Plain):
    """Logs many scalars in each step."""

    scalars = 50

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for number in range(self.scalars):
            self.log(f"scalar_{number}", loss.detach() * number, on_step=True, on_epoch=True)
        return loss


class ManualProducts(Plain):
    """Manual optimization, as a GAN has it."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.network(batch).mean())
        optimizer.step()


class Same(Dataset):
    """One batch, again and again: the loader does nothing."""

    def __init__(self, batch: Any):
        self.batch = batch

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, index: int) -> Any:
        return self.batch


def same(batch: Any) -> DataLoader:
    return DataLoader(Same(batch), batch_size=None)


class Samples(Dataset):
    """Samples of random features, each of which costs `work`."""

    def __init__(self, features: int, work: Callable[[Tensor], Tensor]):
        self.rows, self.work = torch.randn(1024, features), work

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, index: int) -> Tensor:
        return self.work(self.rows[index % len(self.rows)])


def slow_collate(times: int, samples: Sequence[Tensor]) -> Tensor:
    """Joins samples value by value in Python."""
    for _ in range(times):
        values = [[float(value) for value in sample.tolist()] for sample in samples]
    return torch.tensor(values) if times else torch.stack(list(samples))


def sleep(seconds: float, value: Any = None) -> Any:
    time.sleep(seconds)
    return value


def python_loop(times: int, _: Any = None) -> int:
    total = 0
    for number in range(times):
        total += number * number % 7
    return total


def histograms(times: int, _: Any = None) -> None:
    """Statistics in NumPy, of which torch knows nothing."""
    values = numpy.linspace(-3, 3, 100_000)
    for _ in range(times):
        numpy.histogram(numpy.tanh(values), bins=100)


def spectrum(times: int, sample: Tensor) -> Tensor:
    """An augmentation in torch: noise, spectrum and back."""
    for _ in range(times):
        noisy = sample + 0.01 * torch.randn_like(sample)
        sample = torch.fft.irfft(torch.fft.rfft(noisy), n=len(noisy))
    return sample


class SlowCallback(Callback):
    """A stranger's statistics at the end of every batch."""

    def __init__(self, times: int):
        self.times = times

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        python_loop(self.times)


def linears(*sizes: int, act: type[nn.Module] | None = nn.ReLU, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out, bias=bias), *([act()] if act else [])]
    return nn.Sequential(*layers)


def convolutions(channels: int, layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(layers)))


class FusedLSTM(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.lstm = nn.LSTM(hidden, hidden, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Apply(nn.Module):
    """A learned scale, then a function: the weights are one number, so that only the activations are large."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.scale, self.function = nn.Parameter(torch.ones(())), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale)


def chain(x: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.relu(x * 0.99 + 0.01)
    return x


def special(x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.lgamma(x).abs() + 0.5
    return x


def layout(x: Tensor) -> Tensor:
    """Transposes, copies and concatenations of `x: (N, M)`."""
    turned = x.t().contiguous()
    joined = torch.cat([turned, turned], dim=1)
    return joined.t().contiguous()


class Tables(nn.Module):
    """Embedding tables of which a step reads a few rows; with dense gradients the optimizer passes over all of them."""

    def __init__(self, tables: int, rows: int, width: int, sparse: bool = False):
        super().__init__()
        made = (nn.Embedding(rows, width, sparse=sparse, _weight=torch.full((rows, width), 0.1)) for _ in range(tables))
        self.tables = nn.ModuleList(made)

    def forward(self, index: Tensor) -> Tensor:
        return torch.stack([table(index) for table in self.tables]).sum(0)


class UnrolledLSTM(nn.Module):
    """A cell in a Python loop over time."""

    def __init__(self, features: int, hidden: int):
        super().__init__()
        self.cell = nn.LSTMCell(features, hidden)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0]


class UnrolledRNN(nn.Module):
    """An Elman network from two linear layers, in a Python loop over time."""

    def __init__(self, features: int, hidden: int):
        super().__init__()
        self.i2h, self.h2h = nn.Linear(features, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(x.shape[0], self.h2h.in_features)
        for step in x.unbind(1):
            hidden = torch.tanh(self.i2h(step) + self.h2h(hidden))
        return hidden


class Items(nn.Module):
    """Reads a value of each of many small results, and decides by it: no such step runs on meta tensors."""

    def __init__(self, width: int, times: int):
        super().__init__()
        self.layer, self.times = nn.Linear(width, width), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x)
            x = torch.tanh(x) if x.abs().max().item() > 0 else x
        return x


class ManyParameters(nn.Module):
    """Many small parameters, in one operation each."""

    def __init__(self, number: int, size: int):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(size)) for _ in range(number))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.cat(list(self.weights)).mean()


class Halves(nn.Module):
    """Up to three kinds of work, each repeated as often as asked, without gradients; then a tiny layer that trains."""

    def __init__(self, memory: int = 0, compute: int = 0, host: int = 0):
        super().__init__()
        self.times = {"memory": memory, "compute": compute, "host": host}
        self.layer = nn.Linear(8, 8)
        self.large, self.square = torch.ones(16 << 20), torch.randn(768, 768)  # 64 MiB; 0.9 GFLOP a product

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(self.times["memory"]):
                self.large.mul_(1.0)
            for _ in range(self.times["compute"]):
                self.square @ self.square
        python_loop(1_000 * self.times["host"])
        return self.layer(x)


class Waiting:
    """The same batch, after so many milliseconds each time."""

    def __init__(self, batch: Tensor, milliseconds: float):
        self.batch, self.milliseconds = batch, milliseconds

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield sleep(self.milliseconds / 1e3, self.batch)
