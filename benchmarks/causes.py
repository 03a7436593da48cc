"""Bottlenecks that are built in on purpose, and the verdict on a run of each.

    python benchmarks/causes.py --list
    python benchmarks/causes.py
    python benchmarks/causes.py --only "60 tiny layers"
    python benchmarks/causes.py --device cuda

Each case is a plain LightningModule (or a model of the zoo) with a plain Trainer and ThroughputMonitor, in its own process; the
first case of each number of threads calibrates. The same process then checks the cause without batchscope: it changes one size,
and the step time must change by the factor that the cause implies. Without its sleep a step is short, tiny layers take as long
for four times the samples, and products take twice as long for twice the samples. If the verdict is to run again because of
other programs, the case runs again, up to three times in all. Tensors of memory-bound cases are larger than the caches, so
these cases take minutes where the caches hold hundreds of MiB. A case whose check fails on a machine is marked, because it may
have another cause there; it counts all the same. A slow rank is one of two processes under DDP; its verdict is the rank and
its part.
"""

import argparse
import contextlib
import math
import os
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial, reduce
from itertools import chain, pairwise
from typing import Any

import lightning
import torch
from harness import (
    arguments,
    bare_trainer,
    compare_variants,
    in_a_process,
    in_two_ranks,
    rows,
    write_result,
    zoo_batch,
    zoo_task,
)
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from batchscope import ThroughputMonitor
from batchscope.hardware.devices import cache_bytes
from batchscope.hardware.microbenchmarks import synchronized_time

MI, MANY = 2**20, 1_000_000  # MANY batches: a run ends by its steps or its time
DEVICE = "cpu"  # of this process
PATIENCE_S, RUN_S, TURN_S = 600, 10.0, 1.5  # of a process; of the run with the verdict; of a turn of a check
RUN_AGAIN, MOST_RUNS = "run again", 3  # of a verdict beside other programs; of a case with such a verdict
CACHE_MIB = (cache_bytes(torch.device("cpu")) or 0) / MI
LARGE_MIB = max(64, round(1.5 * CACHE_MIB))  # of a tensor that no cache holds
SLOWER = LARGE_MIB / 64  # factor of the steps with such tensors, against caches of 40 MiB
ROWS = max(MI, 8192 * round(CACHE_MIB))  # of 512 bytes, of a table four times as large as the caches
WIDTH = math.isqrt(LARGE_MIB * MI // 16)  # of four layers whose weights are as large together
FULL, SMALLEST = (100, 3), (12, 1)  # steps of the run with the verdict, rounds of the check
Parts = tuple[Any, Any, dict[str, Any]]  # module, loader, the Trainer's options
sgd = partial(torch.optim.SGD, lr=1e-4)


class Case:
    """A cause: its kind, why, and what builds its step; with `changed` sizes the step takes `min_ratio` to `max_ratio` times as long."""

    def __init__(
        self,
        expected: str,
        why: str,
        make: Callable[..., Parts],
        max_ratio: float = 0.5,
        min_ratio: float = 0.0,
        ranks: int = 1,
        **changed: Any,
    ):
        self.expected, self.why, self.make, self.ranks = expected, why, make, ranks
        self.max_ratio, self.min_ratio, self.changed = max_ratio, min_ratio, changed


class Plain(lightning.LightningModule):
    """A network whose loss is the mean of its output; `before` runs in each training step."""

    def __init__(self, network: nn.Module, optimizer: Callable = sgd, before: Callable[[], object] | None = None):
        super().__init__()
        self.network, self.make_optimizer, self.before = network, optimizer, before

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.before is not None:
            self.before()
        return self.network(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters())


class Endless(Dataset):
    def __init__(self, get: Callable[[int], Any]):
        self.get = get

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, index: int) -> Any:
        return self.get(index)


class Apply(nn.Module):
    """A learned scale, then a function: the weights are one number, so that only the activations are large."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.scale, self.function = nn.Parameter(torch.ones(())), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale)


class LSTM(nn.LSTM):
    """An LSTM on whole sequences, or on sequences that start with one time step and grow by one in each call."""

    def __init__(self, hidden: int, grows: bool = False):
        super().__init__(hidden, hidden, batch_first=True)
        self.length, self.grows = 0 if grows else MANY, grows

    def forward(self, x: Tensor) -> Tensor:
        self.length += self.grows
        return super().forward(x[:, : self.length])[0]


class Every(Callback):
    def __init__(self, work: Callable[[], object]):
        self.work = work

    def on_train_batch_end(self, *_: Any) -> None:
        self.work()


def python_loop(times: float, value: Any = None) -> Any:
    total = 0
    for number in range(int(times)):
        total += number * number % 7
    return value


def sleep(seconds: float, value: Any = None) -> Any:
    time.sleep(seconds)
    return value


def spectrum(times: int, sample: Tensor) -> Tensor:
    for _ in range(times):
        noisy = sample + 0.01 * torch.randn_like(sample)
        sample = torch.fft.irfft(torch.fft.rfft(noisy), n=len(noisy))
    return sample


def repeated(function: Callable[[Tensor], Tensor], times: int) -> Callable[[Tensor], Tensor]:
    return lambda x: reduce(lambda value, _: function(value), range(times), x)


def linears(*sizes: int, act: type[nn.Module] | None = nn.ReLU) -> nn.Sequential:
    layers = ([nn.Linear(*pair), *([act()] if act else [])] for pair in pairwise(sizes))
    return nn.Sequential(*chain.from_iterable(layers))


def endless(batch: Any, seconds: float = 0.0) -> DataLoader:
    return DataLoader(Endless(lambda _: sleep(seconds, batch)), batch_size=None)


def step_of(network: Callable[[], nn.Module], *shape: int, **options: Any) -> Callable[..., Parts]:
    return lambda batch=shape[0]: (Plain(network()), endless(torch.randn(batch, *shape[1:], device=DEVICE)), options)


def products(width: int, batch: int, **options: Any) -> Callable[..., Parts]:
    return step_of(lambda: linears(*[width] * 4, act=None), batch, width, **options)


def activations(function: Callable, *sample: int) -> Callable[..., Parts]:
    """A function of a tensor that no cache holds; or an update in `pieces` that fit into the cache."""

    def make(pieces: int = 1) -> Parts:
        x = torch.randn(LARGE_MIB * MI // 4 // math.prod(sample) // pieces, *sample, device=DEVICE)
        return Plain(Apply(function)), endless(x), {"accumulate_grad_batches": pieces}

    return make


def instead(function: Callable, *shape: int, cheaper: Callable = torch.relu) -> Callable[..., Parts]:
    return lambda cheap=False: (Plain(Apply(cheaper if cheap else function)), endless(torch.rand(*shape) + 0.5), {})


def table(rows: int, width: int, lookups: int, optimizer: Callable = sgd, sparse: bool = True) -> Parts:
    """Looks up random rows of a table; with dense gradients the optimizer updates all rows."""
    weights = nn.Embedding(rows, width, sparse=sparse, _weight=torch.full((rows, width), 0.1))
    return Plain(weights, optimizer), endless(torch.randint(rows, (lookups,), device=DEVICE)), {}


def adam(rows: int) -> Callable[..., Parts]:
    optimizer = partial(torch.optim.Adam, lr=1e-4, fused=True)
    return lambda part=1.0: table(int(part * rows), 512, 8, optimizer, sparse=False)


def tiny(where: str, work: Callable, times: float) -> Callable[..., Parts]:
    """A tiny step with `work(times)` in its training step, in a hook of the module, or in a callback."""

    def make(times: float = times) -> Parts:
        do = partial(work, times)
        module = Plain(linears(32, 32, 8), before=do if where == "training_step" else None)
        if where.endswith("transfer"):
            setattr(module, where, lambda batch, dataloader_idx: (do(), batch)[1])
        return module, endless(torch.randn(16, 32)), {"callbacks": [Every(do)] if where == "callback" else []}

    return make


def loading(work: Callable, times: float) -> Callable[..., Parts]:
    def make(times: float = times) -> Parts:
        x = torch.randn(1024, 256)
        data = Endless(lambda index: work(times, x[index % 1024]))
        return Plain(linears(256, 64, 8)), DataLoader(data, batch_size=32), {}

    return make


def on_rank_1(make: Callable, work: Callable, times: float) -> Callable[..., Parts]:
    """`make(work, times)()` in two ranks; rank 0 does no work."""

    def of_rank(times: float = times) -> Parts:
        module, loader, options = make(work, times if os.environ["RANK"] == "1" else 0)()
        return module, loader, {**options, "strategy": "ddp", "devices": 2}

    return of_rank


def zoo(model: str, samples: int, *options: str) -> Callable[..., Parts]:
    return lambda samples=samples: (zoo_task(model, *options), endless(zoo_batch(model, samples)), {})


PIECES, NOTHING, FEWER = {"pieces": 32, "max_ratio": 0.75}, {"times": 0}, {"max_ratio": 0.4}
TWICE = {"min_ratio": 1.5, "max_ratio": 3.0}  # for twice the samples
CASES: dict[str, Case] = {
    "square products": Case("compute", "16 GFLOP on 60 MB", products(1024, 1024), **TWICE, batch=2048),
    "convolutions 3×3": Case("compute", "64 → 64 channels on 32×32 images: 288 FLOPs a byte",
        step_of(lambda: nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(3))), 16, 64, 32, 32), **TWICE, batch=32),
    "LSTM, hidden 512": Case("compute", "oneDNN's LSTM at batch 64: products of (64×512)·(512×2048)",
        step_of(lambda: LSTM(512), 64, 32, 512), **TWICE, batch=128),
    "attention, length 2048": Case("compute", "no T×T matrix is kept: 4·T²·width FLOPs, 2.5 times that backward",
        step_of(lambda: Apply(lambda x: F.scaled_dot_product_attention(x, x, x)), 1, 4, 2048, 64), **TWICE, batch=2),
    "zoo: resnet18, batch 32": Case("compute", "0.22 GFLOP a sample, 45 MB of weights", zoo("torchvision", 32), **TWICE, samples=64),
    "special functions in the cache": Case("compute", "tens of instructions a value, and no product",
        instead(repeated(lambda x: torch.lgamma(x).abs() + 0.5, 3), 256, 1024), cheap=True),
    "sequences that grow to 100": Case("compute", "the steps that are recorded first are not those that are measured",
        step_of(lambda: LSTM(256, grows=True), 64, 200, 256), max_ratio=0.8, batch=16),
    "MLP of large weights, batch 4": Case("memory", "each weight is read for 8 FLOPs, in each of three passes",
        step_of(lambda: linears(*[WIDTH] * 5, act=None), 4, WIDTH), max_ratio=1.5, batch=8),
    "elementwise chain": Case("memory", "4 bytes are read and written for a FLOP",
        activations(repeated(lambda x: torch.relu(x * 0.99 + 0.01), 4 if SLOWER < 4 else 1), 1024), **PIECES),
    "batch norm and pooling": Case("memory", "a few FLOPs a value",
        activations(nn.Sequential(nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)), 32, 64, 64), **PIECES),
    "embedding of a large table": Case("memory", "rows at random places",
        lambda rows=ROWS: table(rows, 128, 200_000), max_ratio=0.8, rows=8192),
    "Adam, 61 M weights, fused": Case("memory", "32 bytes a weight for 15 FLOPs", adam(120_000), **FEWER, part=0.1),
    "cumsum across the rows": Case("memory", "each step goes to a row that is 16 KiB further",
        instead(lambda x: x.cumsum(0), LARGE_MIB * 64, 4096, cheaper=lambda x: x.cumsum(1)), max_ratio=0.7, cheap=True),
    "60 tiny layers": Case("host", "120 operations of 8×32 values", step_of(lambda: linears(*[32] * 61), 8, 32), 2.0, batch=32),
    "zoo: lstm_cell, reference, batch 4": Case("host", "the readable cell, unrolled for 28 steps",
        zoo("lstm_cell", 4, "model.backend=reference"), 2.0, samples=16),
    "100 .item() a step": Case("host", "small operations, each followed by a read", step_of(lambda: Apply(repeated(
        lambda x: x.tanh() if x.abs().max().item() > 0 else x, 100)), 4, 16), 2.0, batch=16),
    "sleep in training_step": Case("host", "20 ms without an operation", tiny("training_step", sleep, 0.02), **NOTHING),
    "slow callback": Case("host", "100,000 turns of a Python loop", tiny("callback", python_loop, 1e5), **NOTHING),
    "32 tiny batches an update": Case("host", "three layers on 2 samples, 32 times", lambda pieces=32: (
        Plain(linears(64, 64, 64, 8)), endless(torch.randn(2, 64)), {"accumulate_grad_batches": pieces}), 0.3, pieces=1),
    "dataset that sleeps": Case("input", "1 ms for each of 32 samples", loading(sleep, 0.001), **NOTHING),
    "heavy transform": Case("input", "40 operations for each sample", loading(spectrum, 10), **NOTHING),
    "slow loader on rank 1 of 2": Case("rank 1: input", "1 ms for each of 32 samples, on one rank",
        on_rank_1(loading, sleep, 0.001), **NOTHING, ranks=2),
    "more computing on rank 1 of 2": Case("rank 1: compute", "300,000 turns of a Python loop, on one rank",
        on_rank_1(partial(tiny, "training_step"), python_loop, 3e5), **NOTHING, ranks=2),
    "sleep in on_after_batch_transfer": Case("input", "20 ms", tiny("on_after_batch_transfer", sleep, 0.02), **NOTHING),
}  # fmt: skip
ON_GPU: dict[str, Case] = {
    "large products": Case("compute", "2.2 TFLOP on 0.7 GB", products(4096, 8192), 0.4, batch=2048),
    "large products, bf16-mixed": Case("compute", "on tensor cores", products(4096, 8192, precision="bf16-mixed"), 0.4, batch=2048),
    "LSTM, hidden 1024": Case("compute", "cuDNN's, at batch 512", step_of(lambda: LSTM(1024), 512, 64, 1024), 0.4, batch=128),
    "activations of 4 GiB": Case("memory", "a FLOP for every 8 bytes", step_of(lambda: Apply(repeated(
        lambda x: torch.relu(x * 0.99 + 0.01), 4)), MI, 1024), 0.35, batch=MI // 4),
    "Adam, 400 M weights": Case("memory", "of which a step reads a few rows", adam(800_000), 0.4, part=0.25),
    "large batches from pageable memory": Case("transfer", "256 MiB a step, which are read once", lambda mib=256: (
        Plain(Apply(torch.mean)), endless(torch.randn(mib * MI // 4)), {}), 0.3, mib=32),
} | {name: CASES[name] for name in ("60 tiny layers", "sleep in training_step", "dataset that sleeps", "heavy transform")}  # fmt: skip
ALL = {"cpu": CASES, "cuda": ON_GPU}


class Clock(Callback):
    """The lower quartile of the seconds from the end of an update to the end of the next; a disturbance only lengthens an update."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.step = 0

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step != self.step:
            self.step = trainer.global_step
            self.ends.append(synchronized_time())  # waits for the GPU, which runs behind the host
            is_long = len(self.ends) > 3 and self.ends[-1] - self.ends[0] > TURN_S
            trainer.should_stop |= is_long and trainer.world_size == 1  # ranks stop after the same step

    @property
    def seconds(self) -> float:
        return statistics.quantiles([after - before for before, after in pairwise(self.ends[1:])], n=4)[0]


def fit(parts: Parts, callback: Callback, steps: int) -> None:
    module, loader, options = parts
    callbacks, limit = [callback, *options.get("callbacks", [])], timedelta(seconds=RUN_S * max(1.0, SLOWER / 2))
    bare_trainer(DEVICE, **options | {"callbacks": callbacks, "max_steps": steps, "max_time": limit}).fit(
        module, loader
    )


def step_seconds(case: Case, **sizes: Any) -> float:
    clock = Clock()
    fit(case.make(**sizes), clock, 12)
    return clock.seconds


def run(name: str, *args: Any) -> dict[str, Any]:
    """Run a case in this process, or in two ranks: its verdict, and the time of the step with changed sizes ÷ without."""
    ranks = (CASES | ON_GPU)[name].ranks
    return run_rank(name, *args) if ranks == 1 else in_two_ranks(run_rank, name, *args)


def run_rank(name: str, device: str, threads: int, smallest: bool) -> dict[str, Any]:
    """Run a case in this rank."""
    global DEVICE
    steps, rounds = SMALLEST if smallest else FULL
    DEVICE = device
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")
    case, monitor = ALL[device][name], ThroughputMonitor(verbose=False, calibrate=not smallest)
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        fit(case.make(), monitor, steps)
        turns = {"step": partial(step_seconds, case), "changed": partial(step_seconds, case, **case.changed)}
        ratio = statistics.median(compare_variants(turns, rounds).ratios("changed", "step"))
    verdict = monitor.summary.get("bottleneck")
    if case.ranks > 1 and (slow := monitor.summary.get("slow_rank")):
        verdict = {**slow, "kind": f"rank {slow['rank']}: {slow['part']}"}
    return {"verdict": verdict, "ratio": ratio}


def judged(name: str, threads: int, args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Run a case in its own process; its result, and whether its verdict and its check are right."""
    case, number = ALL[args.device][name], str(threads)
    environment = {"XDG_CACHE_HOME": folder, "OMP_NUM_THREADS": number, "MKL_NUM_THREADS": number}
    verdict, runs = {"evidence": RUN_AGAIN}, 0
    while runs < MOST_RUNS and RUN_AGAIN in verdict.get("evidence", ""):
        runs += 1
        try:
            result = in_a_process(run, name, args.device, threads, args.smallest, seconds=PATIENCE_S, **environment)
        except (subprocess.SubprocessError, ValueError) as error:  # a case that fails is a result
            result = {"verdict": None, "ratio": math.nan, "error": str(error)}
        verdict = result["verdict"] or {"kind": "no verdict"}
    kind = verdict["kind"].replace("elementwise", "compute")  # both keep the cores busy
    fails = not case.min_ratio <= result["ratio"] <= case.max_ratio
    changed = ", ".join(f"{key}={value}" for key, value in case.changed.items())
    check = f"{changed}: × {result['ratio']:.2f}{' (**fails**)' if fails else ''}"
    words = f"{verdict['kind']} {verdict.get('share') or 0:.0%}, {verdict.get('certainty', '')}{f' (run {runs})' if runs > 1 else ''}"
    evidence = str(result.get("error") or verdict.get("evidence", "")).replace("|", "/")
    row = [name, threads, case.expected, words, "yes" if kind == case.expected else "**no**", evidence, check]
    marks = {"right": kind == case.expected, "fails": fails}
    return {"case": name, "threads": threads, "runs": runs, "row": row, **marks, **result}


def main() -> None:
    parser = arguments(__doc__, device=True)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases to run; results are printed only")
    parser.add_argument("--list", action="store_true", help="only list the cases")
    args = parser.parse_args()
    cases, results = ALL[args.device], []
    if args.list:
        print("\n".join(f"{name}: {case.expected}. {case.why}" for name, case in cases.items()))
        return
    counts = (1, 2) if args.device == "cpu" else (torch.get_num_threads(),)
    if args.smallest:
        args.only, counts = ["sleep in training_step"], (1,)
    with tempfile.TemporaryDirectory() as folder:
        for threads in counts:
            for name in args.only or cases:
                results.append(judged(name, threads, args, folder))
                print(*results[-1]["row"][:5], sep=" | ", flush=True)
    head = ["case", "threads", "expected", "verdict", "right", "evidence", "check of the cause"]
    right = sum(result["right"] for result in results)
    failing = [result["case"] for result in results if result["fails"]]
    text = f"{rows(head, [result.pop('row') for result in results], words=7)}\n\n"
    text += f"{right} of {len(results)} verdicts are right: {right / len(results):.0%}."
    text += f"\n\nChecks that fail here: {', '.join(failing) or 'none'}."
    args.smallest |= bool(args.only)
    write_result("causes", text, {"runs": results}, args)


if __name__ == "__main__":
    main()
