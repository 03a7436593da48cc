"""A built-in cause: what the step does, what limits it, and how that is checked without batchscope; and its builders.

A case is checked in one or both of two ways, in the process in which the verdict was given:

- an ablation: the same step with one size changed takes a stated fraction of the time. A step without its sleep is short;
  a step of tiny layers takes as long with four times the samples; large activations cost less when an update takes them
  in pieces that the cache holds.
- a roof: FLOPs or bytes on paper, divided by the time of the step, reach a stated part of the rate of a plain
  `torch.mm` or `copy_` that takes turns with the step.

A case with several expected kinds is a mixed one, for which "unclear" is a right answer.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from zoo_steps import zoo_batch, zoo_task

from .modules import (
    Apply,
    Halves,
    Logs,
    ManyParameters,
    Plain,
    Samples,
    SlowCallback,
    Tables,
    Waiting,
    linears,
    same,
    sgd,
    slow_collate,
)

Parts = tuple[Any, Any, dict[str, Any]]  # module, loader, the Trainer's options
MI = 2**20


@dataclass(frozen=True)
class Ablation:
    """The step with changed sizes takes between `least` and `most` of the time of the step."""

    what: str
    sizes: Mapping[str, Any]
    most: float
    least: float = 0.0


@dataclass(frozen=True)
class Case:
    """A cause that is built in."""

    expected: tuple[str, ...]
    why: str
    make: Callable[..., Parts]
    ablation: Ablation | None = None
    flops: float | None = None  # of a step, on paper
    bytes: float | None = None  # of a step, on paper: what must pass between the processor and its main memory
    halves: tuple[str, str] | None = None  # sizes of `make` that are set so that both take the same time
    sizes: Mapping[str, Any] = field(default_factory=dict)


def module(network: Callable[[], nn.Module], *shape: int, optimizer: Callable = sgd, kind: type = Plain) -> Parts:
    return kind(network(), optimizer), same(torch.randn(*shape)), {}


def step_of(network: Callable[[], nn.Module], shape: tuple[int, ...]) -> Callable[..., Parts]:
    """`batch` replaces the first dimension of the input."""

    def make(batch: int = shape[0], **options: Any) -> Parts:
        return module(network, batch, *shape[1:], **options)

    return make


def activations(function: Callable, mib: int, *sample: int) -> Callable[..., Parts]:
    """A function of `mib` MiB of activations; with `pieces` an update takes them in so many batches."""

    def make(pieces: int = 1) -> Parts:
        samples = mib * MI // 4 // math.prod(sample) // pieces
        return Plain(Apply(function)), same(torch.randn(samples, *sample)), {"accumulate_grad_batches": pieces}

    return make


def in_the_cache(function: Callable, simple: Callable) -> Callable[..., Parts]:
    """A function of 1 MiB of positive activations; with `simplified` another function of them."""

    def make(simplified: bool = False) -> Parts:
        return Plain(Apply(simple if simplified else function)), same(torch.rand(256, 1024) + 0.5), {}

    return make


def cholesky(size: int = 768) -> Parts:
    root = torch.randn(size, size)
    return Plain(Apply(torch.linalg.cholesky)), same(root @ root.t() + size * torch.eye(size)), {}


IN_PIECES = Ablation("the same samples an update, in 32 batches that the cache holds", {"pieces": 32}, most=0.75)


def adam(part: float = 1.0, **options: Any) -> Parts:
    network = Tables(6, int(20_000 * part), 512)  # 61 M weights
    return Plain(network, partial(torch.optim.Adam, lr=1e-4, **options)), same(torch.arange(8)), {}


def adam_case(bytes_a_weight: int, **options: Any) -> Case:
    why = f"{bytes_a_weight} bytes a weight pass through memory for about 15 FLOPs: zeroed gradient, then Adam's passes"
    smaller = Ablation("a tenth of the weights", {"part": 0.1}, most=0.35)
    return Case(("memory",), why, partial(adam, **options), smaller, bytes=61.4e6 * bytes_a_weight)


def gather(rows: int = MI, lookups: int = 200_000) -> Parts:
    return Plain(Tables(1, rows, 128, sparse=True)), same(torch.randint(rows, (lookups,))), {}


def before_step(work: Callable[[Any], Any]) -> Callable[..., Parts]:
    """A small network, and `work(times, batch)` in its training step."""

    def make(times: float) -> Parts:
        return Plain(linears(32, 32, 8), before=partial(work, times)), same(torch.randn(16, 32)), {}

    return make


def with_samples(work: Callable, features: int = 256, batch: int = 32, **loader: Any) -> Callable[..., Parts]:
    def make(times: float) -> Parts:
        data = Samples(features, partial(work, times))
        return Plain(linears(features, 64, 8)), DataLoader(data, batch_size=batch, **loader), {}

    return make


def collating(times: int) -> Parts:
    data = DataLoader(Samples(256, torch.clone), batch_size=64, collate_fn=partial(slow_collate, times))
    return Plain(linears(256, 64, 8)), data, {}


def many_parameters(number: int = 300) -> Parts:
    made = Plain(ManyParameters(number, 16), partial(torch.optim.Adam, lr=1e-4, foreach=False))
    return made, same(torch.randn(8, 32)), {}


def logging(scalars: int) -> Parts:
    made = Logs(linears(32, 32, 8))
    made.scalars = scalars
    return made, same(torch.randn(16, 32)), {"logger": True, "log_every_n_steps": 1}


def calling_back(times: int) -> Parts:
    return Plain(linears(32, 32, 8)), same(torch.randn(16, 32)), {"callbacks": [SlowCallback(times)]}


def halves(input: float = 0, **times: int) -> Parts:
    return Plain(Halves(**times)), Waiting(torch.randn(4, 8), input) if input else same(torch.randn(4, 8)), {}


def zoo(model: str, batch: int, *options: str) -> Parts:
    return zoo_task(model, *options), same(zoo_batch(model, batch)), {}


def zoo_case(expected: tuple[str, ...], why: str, model: str, batch: int, *options: str, **checks: Any) -> Case:
    def make(samples: int = batch) -> Parts:
        return zoo(model, samples, *options)

    return Case(expected, why, make, **checks)


def wider(batch: int) -> Ablation:
    return Ablation(f"four times the samples ({batch}) cost little more", {"batch": batch}, most=2.0)


def mixed(first: str, second: str) -> Case:
    why = f"{first} and {second} are set to half of the step each"
    without = Ablation(f"without the {first}", {first: 0}, most=0.7, least=0.3)
    return Case((first, second), why, halves, without, halves=(first, second))
