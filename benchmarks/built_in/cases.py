"""The built-in causes, by name: each with the reason why it is what it is."""

from functools import partial

import torch
from torch.nn import functional as F

from .case import (
    IN_PIECES,
    MI,
    Ablation,
    Case,
    activations,
    adam_case,
    before_step,
    calling_back,
    collating,
    gather,
    logging,
    many_parameters,
    mixed,
    step_of,
    wider,
    with_samples,
    zoo_case,
)
from .modules import (
    Attention,
    FusedLSTM,
    Items,
    ManualProducts,
    UnrolledLSTM,
    UnrolledRNN,
    chain,
    convolutions,
    layout,
    linears,
    python_loop,
    sleep,
    spectrum,
)

NO_SLEEP = Ablation("without it", {"times": 0}, most=0.3)
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
    "zoo: cnn, batch 512": zoo_case(
        "compute",
        "25 MFLOP a sample",
        "cnn",
        512,
        flops=512 * 24.98e6,
    ),
    "zoo: resnet18, batch 32": zoo_case(
        "compute",
        "0.22 GFLOP a sample of 32×32 against 45 MB of weights",
        "torchvision",
        32,
        flops=32 * 0.222e9,
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
HOST = {
    "60 tiny layers": Case(
        ("host",),
        "120 operations of 8×32 values forward, as many and more backward",
        step_of(lambda: linears(*[32] * 61), (8, 32)),
        wider(32),
    ),
    "LSTMCell, 100 steps": Case(
        ("host",),
        "a Python loop of small operations",
        step_of(lambda: UnrolledLSTM(8, 32), (4, 100, 8)),
        wider(16),
    ),
    "RNN, 100 steps": Case(
        ("host",),
        "a Python loop of small operations",
        step_of(lambda: UnrolledRNN(8, 32), (4, 100, 8)),
        wider(16),
    ),
    "MLP of 1 MB, batch 1": Case(
        ("host",),
        "1.3 MFLOP on weights in the cache: a hundredth of what Lightning's loop takes",
        step_of(lambda: linears(256, 512, 256), (1, 256)),
        wider(4),
    ),
    "sleep in training_step": Case(
        ("host",),
        "20 ms in which no operation runs",
        before_step(sleep),
        NO_SLEEP,
        sizes={"times": 0.02},
    ),
    "Python loop in training_step": Case(
        ("host",),
        "200,000 turns of a Python loop",
        before_step(python_loop),
        NO_SLEEP,
        sizes={"times": 200_000},
    ),
    "100 .item() a step": Case(
        ("host",),
        "small operations, each followed by a read",
        step_of(lambda: Items(16, 100), (4, 16)),
        wider(16),
    ),
    "Adam, 300 small parameters": Case(
        ("host",),
        "about 12 operations for each parameter of 16 values",
        many_parameters,
        Ablation("a tenth of the parameters", {"number": 30}, most=0.5),
    ),
    "logs 50 scalars a step": Case(
        ("host",),
        "Lightning's bookkeeping of logged values",
        logging,
        Ablation("one scalar", {"scalars": 1}, most=0.5),
        sizes={"scalars": 50},
    ),
    "slow callback": Case(
        ("host",),
        "100,000 turns of a Python loop in on_train_batch_end",
        calling_back,
        NO_SLEEP,
        sizes={"times": 100_000},
    ),
    "zoo: mlp, batch 1": zoo_case(
        "host",
        "0.5 M weights (2 MB) lie in the cache; 3 MFLOP",
        "mlp",
        1,
        ablation=Ablation("four times the samples", {"samples": 4}, most=2.0),
    ),
    "zoo: lstm_cell, reference, batch 4": zoo_case(
        "host",
        "the readable cell, unrolled for 28 steps",
        "lstm_cell",
        4,
        "model.backend=reference",
        ablation=Ablation("four times the samples", {"samples": 16}, most=2.0),
    ),
}
INPUT = {
    "dataset that sleeps": Case(
        ("input",),
        "1 ms for each of 32 samples",
        with_samples(sleep),
        NO_SLEEP,
        sizes={"times": 0.001},
    ),
    "one slow worker": Case(
        ("input",),
        "as before, in one worker process",
        with_samples(sleep, num_workers=1),
        NO_SLEEP,
        sizes={"times": 0.001},
    ),
    "heavy transform": Case(
        ("input",),
        "40 operations for each sample, in the training process",
        with_samples(spectrum),
        NO_SLEEP,
        sizes={"times": 10},
    ),
    "slow collate": Case(
        ("input",),
        "each value of a batch becomes a Python number",
        collating,
        NO_SLEEP,
        sizes={"times": 20},
    ),
}
MIXED = {
    "half memory, half compute": mixed("memory", "compute"),
    "half input, half compute": mixed("input", "compute"),
    "half host, half compute": mixed("host", "compute"),
    "half input, half memory": mixed("input", "memory"),
    "dropout, 64 MB": Case(
        ("memory", "compute"),
        "64 MB pass, and 16 M random numbers are drawn, which may take longer",
        activations(lambda x: F.dropout(x, 0.1), 64, 1024),
        Ablation("the same samples in 32 batches that the cache holds", {"pieces": 32}, most=1.5),
    ),
}
CASES: dict[str, Case] = COMPUTE | MEMORY | HOST | INPUT | MIXED
