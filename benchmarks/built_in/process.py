"""Built-in causes outside the operations, in the input, and of two kinds at once."""

from torch.nn import functional as F

from .case import (
    Ablation,
    Case,
    activations,
    before_step,
    calling_back,
    collating,
    logging,
    many_parameters,
    mixed,
    step_of,
    wider,
    with_samples,
    zoo_case,
)
from .modules import Items, UnrolledLSTM, UnrolledRNN, histograms, linears, python_loop, sleep, spectrum

NO_SLEEP = Ablation("without it", {"times": 0}, most=0.3)
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
    "NumPy in training_step": Case(
        ("host",),
        "histograms of 100,000 values outside torch",
        before_step(histograms),
        NO_SLEEP,
        sizes={"times": 8},
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
        ("host",),
        "0.5 M weights (2 MB) lie in the cache; 3 MFLOP",
        "mlp",
        1,
        ablation=Ablation("four times the samples", {"samples": 4}, most=2.0),
    ),
    "zoo: lstm_cell, reference, batch 4": zoo_case(
        ("host",),
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
    "zoo: cnn, batch 512": zoo_case(
        ("compute", "memory"),
        "25 MFLOP a sample, and ReLU and pooling of 51 MB of activations, which no cache holds",
        *("cnn", 512),
        flops=512 * 25.0e6,
    ),
    "dropout, 64 MB": Case(
        ("memory", "compute"),
        "64 MB pass, and 16 M random numbers are drawn, which may take longer",
        activations(lambda x: F.dropout(x, 0.1), 64, 1024),
        Ablation("the same samples in 32 batches that the cache holds", {"pieces": 32}, most=1.5),
    ),
}
