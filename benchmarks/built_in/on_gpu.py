"""The built-in causes for a GPU: large enough that launches cost little, or so small that nothing else costs anything.

The batches of what the device computes lie on the device already. Causes of the host and of the input do not depend on the
device, and are those of `process.py`, with larger ablations.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .case import MI, Ablation, Case, Parts, same
from .modules import Apply, FusedLSTM, Plain, Tables, chain, linears
from .process import HOST, INPUT

HOST_NAMES = (
    "60 tiny layers",
    "RNN, 100 steps",
    "sleep in training_step",
    "Python loop in training_step",
    "100 .item() a step",
)
INPUT_NAMES = ("dataset that sleeps", "heavy transform")


def gpu_cases(device: str = "cuda", small: bool = False) -> dict[str, Case]:
    """The cases by name; `small` makes them small enough for any machine."""
    shrink = 64 if small else 1
    found = (
        _compute(device, shrink) | _memory(device, shrink) | {"large batches from pageable memory": _transfer(shrink)}
    )
    found |= {name: HOST[name] for name in HOST_NAMES} | {name: INPUT[name] for name in INPUT_NAMES}
    return {f"gpu: {name}": case for name, case in found.items()}


def on(device: str, network: Callable[[], nn.Module], shape: tuple[int, ...], **options: Any) -> Callable[..., Parts]:
    """A step on a batch that lies on the device; `batch` replaces the first dimension."""

    def make(batch: int = shape[0]) -> Parts:
        return Plain(network()), same(torch.randn(batch, *shape[1:], device=device)), options

    return make


def _compute(device: str, shrink: int) -> dict[str, Case]:
    width, batch = 4096 // shrink, 8192 // shrink
    flops = 8 * 2.0 * batch * width**2
    products = on(device, lambda: linears(*[width] * 4, act=None, bias=False), (batch, width))
    half = on(device, lambda: linears(*[width] * 4, act=None, bias=False), (batch, width), precision="bf16-mixed")
    less = Ablation("a quarter of the samples", {"batch": max(1, batch // 4)}, most=0.4)
    hidden, samples = 1024 // shrink, 512 // shrink
    return {
        "large products": Case(
            ("compute",), "three 4096×4096 layers at batch 8192: 2.2 TFLOP on 0.7 GB", products, less, flops=flops
        ),
        "large products, bf16-mixed": Case(
            ("compute",), "the same on tensor cores: still 1,000 FLOPs a byte", half, less
        ),
        "LSTM, hidden 1024": Case(
            ("compute",),
            "cuDNN's LSTM at batch 512: each step is a product of (512×1024)·(1024×4096)",
            on(device, lambda: FusedLSTM(hidden), (samples, 64, hidden)),
            less,
        ),
    }


def _memory(device: str, shrink: int) -> dict[str, Case]:
    rows, size = 2**20 // shrink, 4.0 * 1024 * 2**20 / shrink  # bytes of one tensor: 4 GiB
    # × scale, then 4 × (times, plus, relu): each reads and writes a tensor forward, and backward at least as much.
    activations = Case(
        ("memory",),
        "twelve elementwise operations on 4 GiB, a FLOP for every 8 bytes",
        on(device, lambda: Apply(chain), (rows, 1024)),
        Ablation("a quarter of the samples", {"batch": rows // 4}, most=0.35),
        bytes=2 * 13 * 2 * size,
    )
    adam = Case(
        ("memory",),
        "Adam passes over 400 M weights of which a step reads a few rows",
        partial(_adam, device, 800_000 // shrink),
        Ablation("a quarter of the weights", {"part": 0.25}, most=0.4),
    )
    return {"activations of 4 GiB": activations, "Adam, 400 M weights": adam}


def _adam(device: str, rows: int, part: float = 1.0) -> Parts:
    optimizer = partial(torch.optim.Adam, lr=1e-4, fused=True)
    return Plain(Tables(1, int(rows * part), 512), optimizer), same(torch.arange(8, device=device)), {}


class _Mean(nn.Module):
    """A learned scale of the mean: next to no arithmetic for many bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean() * self.scale


def _transfer(shrink: int) -> Case:
    def make(mib: int = 256 // shrink) -> Parts:
        return Plain(_Mean()), same(torch.randn(mib * MI // 4)), {}

    why = "256 MiB a step come from pageable memory, and are read once"
    return dataclasses.replace(
        Case(("transfer",), why, make),
        ablation=Ablation("an eighth of the bytes", {"mib": max(1, 32 // shrink)}, most=0.3),
    )
