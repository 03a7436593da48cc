"""Built-in causes in what the device does: arithmetic, and traffic with main memory."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from .case import (
    IN_PIECES,
    MI,
    Ablation,
    Case,
    activations,
    adam_case,
    cholesky,
    gather,
    in_the_cache,
    step_of,
    zoo_case,
)
from .modules import Attention, FusedLSTM, ManualProducts, chain, convolutions, layout, linears, special

COMPUTE = {
    "square products": Case(
        ("compute",),
        "three 1024×1024 layers at batch 1024: 16 GFLOP on 60 MB",
        step_of(lambda: linears(*[1024] * 4, act=None, bias=False), (1024, 1024)),
        flops=8 * 2 * 1024**3,
    ),
    "convolutions 3×3": Case(
        ("compute",),
        "64 → 64 channels on 32×32 images: 288 FLOPs a byte",
        step_of(lambda: convolutions(64, 3), (16, 64, 32, 32)),
        flops=8 * 2 * 16 * 1024 * 9 * 64**2,
    ),
    "LSTM, hidden 512": Case(
        ("compute",),
        "oneDNN's LSTM at batch 64: products of (64×512)·(512×2048)",
        step_of(lambda: FusedLSTM(512), (64, 32, 512)),
        flops=40 * 32 * 64 * 512**2,
    ),
    "attention, length 2048": Case(
        ("compute",),
        "scaled_dot_product_attention keeps no T×T matrix: 4·T²·width FLOPs forward, 2.5 times that backward",
        step_of(lambda: Attention(256, 4), (1, 2048, 256)),
        flops=3.5 * 4 * 2048**2 * 256 + (3 * 2 * 4 - 2 * 3) * 2048 * 256**2,
    ),
    "MLP of 1 MB, batch 512": Case(
        ("compute",),
        "weights and activations lie in the cache; 0.8 GFLOP a step",
        step_of(lambda: linears(256, 512, 256), (512, 256)),
        flops=5 * 2 * 512 * 256 * 512,
    ),
    "manual optimization, products": Case(
        ("compute",),
        "as square products, in a training_step that optimizes by hand",
        partial(step_of(lambda: linears(*[1024] * 3, act=None, bias=False), (1024, 1024)), kind=ManualProducts),
        flops=5 * 2 * 1024**3,
    ),
    "zoo: cnn of twice the width, batch 256": zoo_case(
        ("compute",),
        "93 MFLOP a sample",
        *("cnn", 256, "model.channels=[64,128]"),
        flops=256 * 93.3e6,
    ),
    "zoo: resnet18, batch 32": zoo_case(
        ("compute",),
        "0.22 GFLOP a sample of 32×32 against 45 MB of weights",
        "torchvision",
        32,
        flops=32 * 0.217e9,
    ),
    "special functions in the cache": Case(
        ("compute",),
        "lgamma of 1 MB, and its derivative: tens of instructions a value, and no product that a FLOP counter knows",
        in_the_cache(special, torch.relu),
        Ablation("relu in their place", {"simplified": True}, most=0.5),
    ),
    "sort in the cache": Case(
        ("compute",),
        "1 MB in order: no product, and nothing that leaves the cache",
        in_the_cache(lambda x: torch.sort(x.flatten())[0], torch.relu),
        Ablation("relu in its place", {"simplified": True}, most=0.5),
    ),
    "Cholesky, 768": Case(
        ("compute",),
        "2 MB that stay in the cache; time grows with the cube of the size, which no FLOP counter knows",
        cholesky,
        Ablation("a third of the size", {"size": 256}, most=0.3),
    ),
}
MEMORY = {
    "matrix × vector, 256 MB": Case(
        ("memory",),
        "a batch of 1 reads each weight for 2 FLOPs; the gradient and SGD pass over 256 MB again",
        step_of(lambda: linears(8192, 8192, act=None, bias=False), (1, 8192)),
        Ablation("four times the FLOPs on the same bytes", {"batch": 4}, most=2.0),
        bytes=5 * 256 * MI,
    ),
    "MLP of 64 MB, batch 4": Case(
        ("memory",),
        "each weight is read for 8 FLOPs, and twice the cache is passed over in each of three passes",
        step_of(lambda: linears(*[2048] * 5, act=None), (4, 2048)),
        Ablation("twice the FLOPs on the same bytes", {"batch": 8}, most=1.5),
        bytes=6 * 64 * MI,
    ),
    "elementwise chain, 64 MB": Case(
        ("memory",),
        "an operation reads and writes 64 MB for 16 M FLOPs",
        activations(chain, 64, 1024),
        IN_PIECES,
        bytes=50 * 64 * MI,
    ),
    "layer norm, 64 MB": Case(
        ("memory",),
        "a few FLOPs a value",
        activations(lambda x: F.layer_norm(x, (1024,)), 64, 1024),
        IN_PIECES,
    ),
    "softmax, 64 MB": Case(
        ("memory",),
        "two passes over values that no cache holds",
        activations(lambda x: torch.softmax(x, -1), 64, 1024),
        IN_PIECES,
    ),
    "transpose, copy, concat": Case(
        ("memory",),
        "no arithmetic at all",
        activations(layout, 64, 4096),
        IN_PIECES,
    ),
    "batch norm and pooling, 64 MB": Case(
        ("memory",),
        "a few FLOPs a value of 128 images of 32×64×64",
        activations(nn.Sequential(nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)), 64, 32, 64, 64),
        IN_PIECES,
    ),
    "embedding, 512 MB": Case(
        ("memory",),
        "rows at random places of a table that no cache holds, with sparse gradients",
        gather,
        Ablation("as many rows of a table of 4 MB", {"rows": 8192}, most=0.8),
    ),
    "Adam, 61 M weights, fused": adam_case(32, fused=True),
    "Adam, 61 M weights, foreach": adam_case(76, foreach=True),
    "Adam, 61 M weights, for-loop": adam_case(76, foreach=False),
}
