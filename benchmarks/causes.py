"""Causes that are built in on purpose, and the verdict that a run of each gets.

    python benchmarks/causes.py --list
    python benchmarks/causes.py
    python benchmarks/causes.py --only "60 tiny layers" --threads 2
    python benchmarks/causes.py --device cuda

Each case is a plain LightningModule (or a model of the zoo) with a plain Trainer and ThroughputMonitor, in a process of its
own; all use one calibration for each number of threads. The same process then checks the cause without batchscope. Either
the step with one size changed takes another time, by the factor that the cause gives: without its sleep it is short, and
tiny layers take as long for four times the samples. Or its FLOPs on paper, divided by the time of the step, reach a good
part of the rate of a plain `torch.mm`. A case whose check fails on a machine is marked, because its cause may be another
one there, and counts as the others do. "Unclear" is a right answer for cases with two expected kinds alone.
"""

import dataclasses
import math
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial, reduce
from itertools import chain, pairwise
from typing import Any

import lightning
import torch
from harness import arguments, compare_variants, median, rows, write_result, zoo_batch, zoo_task
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from batchscope.callbacks import ThroughputMonitor
from batchscope.hardware.microbenchmarks import clock

MI, MANY = 2**20, 1_000_000  # MANY batches: a run ends by its steps or its time
DEVICE = "cpu"  # of this process
PATIENCE_S, RUN_S, TURN_S = 600, 10.0, 1.5  # of a process; of the run with the verdict; of a turn of a check
HALF_S = 0.02  # of each half of a mixed step
UNITS = {"memory": 2, "compute": 4, "host": 8, "input": 10}  # what is timed of a half before it is set
LEAST_OF_MM = 0.3  # a cause by FLOPs reaches this part of the rate of torch.mm
SLACK = 0.02  # shares are rounded, and parts of a step are means
IDLE_PEAK = 0.02  # below this part of the peak a step is no arithmetic
FEW = 12  # steps: so short a run is not calibrated
Parts = tuple[Any, Any, dict[str, Any]]  # module, loader, the Trainer's options
Result = dict[str, Any]
sgd = partial(torch.optim.SGD, lr=1e-4)


@dataclass(frozen=True)
class Case:
    """A cause: the kinds that are right, why, and what builds its step."""

    expected: tuple[str, ...]
    why: str
    make: Callable[..., Parts]
    changed: Mapping[str, Any]  # sizes of `make`, with which the step takes `least` to `most` of its time
    most: float
    least: float
    flops: float | None  # of a step, on paper
    sizes: Mapping[str, Any] = field(default_factory=dict)  # of a mixed case, set so that both kinds take the same time


def case(expected: str, why: str, make: Callable[..., Parts], most: float = 0.5, least: float = 0.0,
         flops: float | None = None, **changed: Any) -> Case:  # fmt: skip
    return Case(tuple(expected.split(" or ")), why, make, changed, most, least, flops)


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
    """On whole sequences, or on one time step first and on one more in each call."""

    def __init__(self, hidden: int, grows: bool = False):
        super().__init__(hidden, hidden, batch_first=True)
        self.length, self.grows = 0 if grows else MANY, grows

    def forward(self, x: Tensor) -> Tensor:
        self.length += self.grows
        return super().forward(x[:, : self.length])[0]


class Halves(nn.Module):
    """Kinds of work, each as often as asked, without gradients; then a tiny layer that trains."""

    def __init__(self, memory: int, compute: int, host: int):
        super().__init__()
        self.memory, self.compute, self.host, self.layer = memory, compute, host, nn.Linear(8, 8)
        self.large, self.square = torch.ones(16 * MI), torch.randn(768, 768)  # 64 MiB; 0.9 GFLOP a product

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(self.memory):
                self.large.mul_(1.0)
            for _ in range(self.compute):
                self.square @ self.square
        python_loop(1_000 * self.host)
        return self.layer(x)


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


def same(batch: Any, seconds: float = 0.0) -> DataLoader:
    return DataLoader(Endless(lambda _: sleep(seconds, batch)), batch_size=None)


def of(network: Callable[[], nn.Module], *shape: int, **how: Any) -> Callable[..., Parts]:
    return lambda batch=shape[0]: (Plain(network()), same(torch.randn(batch, *shape[1:], device=DEVICE)), how)


def products(width: int, batch: int, **how: Any) -> Callable[..., Parts]:
    return of(lambda: linears(*[width] * 4, act=None), batch, width, **how)


def activations(function: Callable, mib: int, *sample: int) -> Callable[..., Parts]:
    """A function of so many MiB; an update takes them in so many `pieces`, which the cache holds."""

    def make(pieces: int = 1) -> Parts:
        x = torch.randn(mib * MI // 4 // math.prod(sample) // pieces, *sample, device=DEVICE)
        return Plain(Apply(function)), same(x), {"accumulate_grad_batches": pieces}

    return make


def instead(function: Callable, *shape: int, cheaper: Callable = torch.relu) -> Callable[..., Parts]:
    return lambda cheap=False: (Plain(Apply(cheaper if cheap else function)), same(torch.rand(*shape) + 0.5), {})


def table(rows: int, width: int, lookups: int, optimizer: Callable = sgd, sparse: bool = True, **how: Any) -> Parts:
    """Looks up rows at random places; with dense gradients the optimizer passes over all of them."""
    weights = nn.Embedding(rows, width, sparse=sparse, _weight=torch.full((rows, width), 0.1))
    return Plain(weights, optimizer), same(torch.randint(rows, (lookups,), device=DEVICE)), how


def adam(rows: int, **how: Any) -> Callable[..., Parts]:
    optimizer = partial(torch.optim.Adam, lr=1e-4, **how)
    return lambda part=1.0: table(int(part * rows), 512, 8, optimizer, sparse=False)


def tiny(where: str, work: Callable, times: float) -> Callable[..., Parts]:
    """A tiny step with `work(times)` in its training step, in a hook of the module, or in a callback."""

    def make(times: float = times) -> Parts:
        do = partial(work, times)
        module = Plain(linears(32, 32, 8), before=do if where == "training_step" else None)
        if where.endswith("transfer"):
            setattr(module, where, lambda batch, dataloader_idx: (do(), batch)[1])
        return module, same(torch.randn(16, 32)), {"callbacks": [Every(do)] if where == "callback" else []}

    return make


def loading(work: Callable, times: float, **how: Any) -> Callable[..., Parts]:
    def make(times: float = times) -> Parts:
        x = torch.randn(1024, 256)
        data = Endless(lambda index: work(times, x[index % 1024]))
        return Plain(linears(256, 64, 8)), DataLoader(data, batch_size=32, **how), {}

    return make


def zoo(model: str, samples: int, *options: str) -> Callable[..., Parts]:
    return lambda samples=samples: (zoo_task(model, *options), same(zoo_batch(model, samples)), {})


def halves(memory: int = 0, compute: int = 0, host: int = 0, input: float = 0) -> Parts:
    return Plain(Halves(memory, compute, host)), same(torch.randn(4, 8), input / 1e3), {}


def mixed(first: str, second: str) -> Case:
    made = case(f"{first} or {second}", "each is set to half of the step", halves, 0.7, 0.3, **{first: 0})
    return dataclasses.replace(made, sizes={first: 0, second: 0})


PIECES, NOTHING, FEWER = {"pieces": 32, "most": 0.75}, {"times": 0}, {"most": 0.4}
SQUARE = (4096, 4096)  # a matrix of 64 MB
CASES: dict[str, Case] = {
    "square products": case("compute", "16 GFLOP on 60 MB", products(1024, 1024), flops=8 * 2 * 1024**3),
    "convolutions 3×3": case("compute", "64 → 64 channels on 32×32 images: 288 FLOPs a byte",
        of(lambda: nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(3))), 16, 64, 32, 32),
        flops=8 * 2 * 16 * 1024 * 9 * 64**2),
    "LSTM, hidden 512": case("compute", "oneDNN's LSTM at batch 64: products of (64×512)·(512×2048)",
        of(lambda: LSTM(512), 64, 32, 512), flops=40 * 32 * 64 * 512**2),
    "attention, length 2048": case("compute", "no T×T matrix is kept: 4·T²·width FLOPs, 2.5 times that backward",
        of(lambda: Apply(lambda x: F.scaled_dot_product_attention(x, x, x)), 1, 4, 2048, 64), flops=14 * 2048**2 * 256),
    "zoo: cnn of twice the width, batch 256": case("compute", "93 MFLOP a sample",
        zoo("cnn", 256, "model.channels=[64,128]"), flops=256 * 93.3e6),
    "zoo: resnet18, batch 32": case("compute", "0.22 GFLOP a sample, 45 MB of weights", zoo("torchvision", 32), flops=6.9e9),
    "special functions in the cache": case("compute", "tens of instructions a value, and no product",
        instead(repeated(lambda x: torch.lgamma(x).abs() + 0.5, 3), 256, 1024), cheap=True),
    "sort in the cache": case("compute", "1 MB in order: no product, and nothing leaves the cache",
        instead(lambda x: torch.sort(x.flatten())[0], 256, 1024), cheap=True),
    "sequences that grow to 100": case("compute", "the steps that are recorded first are not those that are measured",
        of(lambda: LSTM(256, grows=True), 64, 200, 256), most=0.8, batch=16),
    "matrix × vector, 256 MB": case("memory", "a batch of 1 reads each weight for 2 FLOPs",
        of(lambda: linears(8192, 8192, act=None), 1, 8192), most=2.0, batch=4),
    "MLP of 64 MB, batch 4": case("memory", "each weight is read for 8 FLOPs, in each of three passes",
        of(lambda: linears(*[2048] * 5, act=None), 4, 2048), most=1.5, batch=8),
    "elementwise chain, 64 MB": case("memory", "64 MB are read and written for 16 M FLOPs",
        activations(repeated(lambda x: torch.relu(x * 0.99 + 0.01), 4), 64, 1024), **PIECES),
    "transpose, copy, concat": case("memory", "no arithmetic at all",
        activations(lambda x: torch.cat([x.t().contiguous()] * 2, dim=1).t().contiguous(), 64, 4096), **PIECES),
    "batch norm and pooling, 64 MB": case("memory", "a few FLOPs a value",
        activations(nn.Sequential(nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)), 64, 32, 64, 64), **PIECES),
    "embedding, 512 MB": case("memory", "rows at random places of a table that no cache holds",
        lambda rows=MI: table(rows, 128, 200_000), most=0.8, rows=8192),
    "Adam, 61 M weights, fused": case("memory", "32 bytes a weight for 15 FLOPs", adam(120_000, fused=True), **FEWER, part=0.1),
    "Adam, 61 M weights, for-loop": case("memory", "76 bytes a weight", adam(120_000, foreach=False), **FEWER, part=0.1),
    "cumsum across the rows, 64 MB": case("memory", "each step goes to a row that is 16 KiB further",
        instead(lambda x: x.cumsum(0), *SQUARE, cheaper=lambda x: x.cumsum(1)), most=0.7, cheap=True),
    "60 tiny layers": case("host", "120 operations of 8×32 values", of(lambda: linears(*[32] * 61), 8, 32), 2.0, batch=32),
    "MLP of 1 MB, batch 1": case("host", "1.3 MFLOP in the cache", of(lambda: linears(256, 512, 256), 1, 256), 2.0, batch=4),
    "zoo: lstm_cell, reference, batch 4": case("host", "the readable cell, unrolled for 28 steps",
        zoo("lstm_cell", 4, "model.backend=reference"), 2.0, samples=16),
    "100 .item() a step": case("host", "small operations, each followed by a read", of(lambda: Apply(repeated(
        lambda x: x.tanh() if x.abs().max().item() > 0 else x, 100)), 4, 16), 2.0, batch=16),
    "sleep in training_step": case("host", "20 ms without an operation", tiny("training_step", sleep, 0.02), **NOTHING),
    "Python loop in training_step": case("host", "200,000 turns", tiny("training_step", python_loop, 2e5), **NOTHING),
    "slow callback": case("host", "100,000 turns of a Python loop", tiny("callback", python_loop, 1e5), **NOTHING),
    "32 tiny batches an update": case("host", "three layers on 2 samples, 32 times", lambda pieces=32: (
        Plain(linears(64, 64, 64, 8)), same(torch.randn(2, 64)), {"accumulate_grad_batches": pieces}), 0.3, pieces=1),
    "dataset that sleeps": case("input", "1 ms for each of 32 samples", loading(sleep, 0.001), **NOTHING),
    "heavy transform": case("input", "40 operations for each sample", loading(spectrum, 10), **NOTHING),
    "sleep in on_after_batch_transfer": case("input", "20 ms", tiny("on_after_batch_transfer", sleep, 0.02), **NOTHING),
    "Python loop in on_before_batch_transfer": case("input", "200,000 turns",
        tiny("on_before_batch_transfer", python_loop, 2e5), **NOTHING),
    "half memory, half compute": mixed("memory", "compute"),
    "half input, half compute": mixed("input", "compute"),
    "half host, half compute": mixed("host", "compute"),
    "zoo: cnn, batch 512": case("compute or memory", "25 MFLOP and 100 KB of activations a sample", zoo("cnn", 512),
        flops=512 * 25.0e6),
}  # fmt: skip
ON_GPU: dict[str, Case] = {
    "large products": case("compute", "2.2 TFLOP on 0.7 GB", products(4096, 8192), 0.4, flops=8 * 2.0 * 8192 * 4096**2, batch=2048),
    "large products, bf16-mixed": case("compute", "on tensor cores", products(4096, 8192, precision="bf16-mixed"), 0.4, batch=2048),
    "LSTM, hidden 1024": case("compute", "cuDNN's, at batch 512", of(lambda: LSTM(1024), 512, 64, 1024), 0.4, batch=128),
    "activations of 4 GiB": case("memory", "a FLOP for every 8 bytes", of(lambda: Apply(repeated(
        lambda x: torch.relu(x * 0.99 + 0.01), 4)), MI, 1024), 0.35, batch=MI // 4),
    "Adam, 400 M weights": case("memory", "of which a step reads a few rows", adam(800_000, fused=True), 0.4, part=0.25),
    "large batches from pageable memory": case("transfer", "256 MiB a step, which are read once", lambda mib=256: (
        Plain(Apply(torch.mean)), same(torch.randn(mib * MI // 4)), {}), 0.3, mib=32),
} | {name: CASES[name] for name in ("60 tiny layers", "sleep in training_step", "dataset that sleeps", "heavy transform")}  # fmt: skip
ALL = {"cpu": CASES, "cuda": ON_GPU}


class Clock(Callback):
    """The lower quartile of the updates, from the end of one to the end of the next: a disturbance makes one longer."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.step = 0

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step != self.step:
            self.step = trainer.global_step
            self.ends.append(clock())  # waits for a GPU, which runs behind the host
            trainer.should_stop |= len(self.ends) > 5 and self.ends[-1] - self.ends[0] > TURN_S

    @property
    def seconds(self) -> float:
        return statistics.quantiles([after - before for before, after in pairwise(self.ends[1:])], n=4)[0]


def fit(parts: Parts, callback: Callback, steps: int) -> None:
    module, loader, options = parts
    options = {"logger": False, **options, "callbacks": [callback, *options.get("callbacks", [])]}
    lightning.Trainer(
        accelerator="cpu" if DEVICE == "cpu" else "gpu", devices=1, max_steps=steps, max_time=timedelta(seconds=RUN_S),
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, use_distributed_sampler=False,
        **options,
    ).fit(module, loader)  # fmt: skip


def step_seconds(one: Case, **sizes: Any) -> float:
    outside = Clock()
    fit(one.make(**{**one.sizes, **sizes}), outside, 12)
    return outside.seconds


def balanced(one: Case) -> Case:
    """A mixed case with its halves set so that each takes HALF_S."""
    nothing, sizes = step_seconds(one) if one.sizes else 0.0, {}
    for half in one.sizes:
        times = UNITS[half] * HALF_S / max(step_seconds(one, **{half: UNITS[half]}) - nothing, 1e-6)
        sizes[half] = times if half == "input" else max(1, round(times))
    return dataclasses.replace(one, sizes=sizes)


def mm_seconds(matrix: Tensor) -> float:
    """Seconds a FLOP of torch.mm, the best of several."""
    marks = [(clock(), torch.mm(matrix, matrix))[0] for _ in range(10)]
    return min(end - start for start, end in pairwise(marks)) / (2 * len(matrix) ** 3)


def check(one: Case, rounds: int) -> dict[str, float]:
    """The step with changed sizes ÷ the step, and its FLOP/s ÷ that of torch.mm; medians over rounds in which all take turns."""
    size = 1024 if DEVICE == "cpu" else 8192
    variants: dict[str, Callable[[], float]] = {"step": partial(step_seconds, one)}
    variants |= {"changed": partial(step_seconds, one, **one.changed)} if one.changed else {}
    variants |= {"torch.mm": partial(mm_seconds, torch.randn(size, size, device=DEVICE))} if one.flops else {}
    found = compare_variants(variants, rounds)
    ratios = {"changed": median(found.ratios("changed", "step"))} if one.changed else {}
    return ratios | ({"torch.mm": one.flops * median(found.ratios("torch.mm", "step"))} if one.flops else {})


def run(name: str, steps: int, rounds: int, device: str, threads: int, folder: str) -> Result:
    """The summary of a case's run, and its check of so many rounds; without a name the calibration, for all cases."""
    global DEVICE
    DEVICE = device
    for number in (1, 2):  # it prints nothing
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    os.chdir(folder)
    os.environ |= {"XDG_CACHE_HOME": folder, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    if not name:
        from batchscope.hardware.measure import load_or_measure, store

        found = load_or_measure(torch.device(device))
        store(dataclasses.replace(found, disturbed=None))  # the same for all cases, also on a machine that others use
        return {"disturbed": found.disturbed}
    one, monitor = balanced(ALL[device][name]), ThroughputMonitor(verbose=False, calibrate=steps > FEW)
    fit(one.make(**one.sizes), monitor, steps)
    return {"summary": monitor.summary, "sizes": dict(one.sizes), "checks": check(one, rounds)}


def in_a_process(name: str, *how: Any) -> Result:
    """What `run` returns in a process of its own; CUDA does not survive a fork."""
    context = multiprocessing.get_context("forkserver" if how[2] == "cpu" else "spawn")
    with ProcessPoolExecutor(1, context) as pool:
        try:
            return pool.submit(run, name, *how).result(PATIENCE_S)
        except Exception as error:  # noqa: BLE001 - a case that fails is a result
            for process in pool._processes.values() if isinstance(error, TimeoutError) else ():
                process.kill()
            return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def contradictions(summary: Mapping[str, Any]) -> list[str]:
    """What in a run's own numbers speaks against its verdict."""
    found, counted = summary.get("bottleneck"), summary.get("step", {})
    if not found or found["kind"] == "unclear":
        return []
    parts = summary["parts_ms"]
    kind, share, shares, step_ms = found["kind"], found["share"], found.get("shares") or {}, sum(parts.values())
    of_part = parts.get({"input": "data_wait"}.get(kind, kind), step_ms) / step_ms
    of_bound = {each: ms / step_ms for each, ms in counted.get("floor_ms", {}).items() if each in ("memory", "compute")}
    said = {
        f"a share of {share}": not 0 <= share <= 1,
        f"{kind} is not the largest of its shares": shares and shares.get(kind, 0.0) < max(shares.values()),
        f"{share:.0%} is not its share": shares and abs(shares.get(kind, 0.0) - share) > SLACK,
        "the shares add up to more than 1": sum(shares.values()) > 1 + SLACK,
        f"the step's {kind} is only {of_part:.0%}": share > of_part + SLACK,
        "compute without arithmetic": kind == "compute" and (summary.get("mfu") or 1) < IDLE_PEAK,
        "memory without traffic": kind == "memory" and counted.get("memory_bytes", 1) == 0,
        "another kind takes longer by its bound": any(s > share + SLACK for k, s in of_bound.items() if k != kind),
    }
    return [words for words, holds in said.items() if holds]


def judge(one: Case, found: Result) -> Result:
    """Add to a run's result whether the verdict is right, what contradicts it, and the checks of the cause in words."""
    summary, words, failed = found.get("summary") or {}, [], False
    verdict = summary.get("bottleneck") or {"kind": "no verdict"}
    kind = verdict["kind"].replace("elementwise", "compute")  # in both the cores are busy with it
    limits = {"changed": (one.least, one.most), "torch.mm": (LEAST_OF_MM, math.inf)}
    for name, ratio in found.get("checks", {}).items():
        holds = limits[name][0] <= ratio <= limits[name][1]
        failed |= not holds
        what = ", ".join(f"{key}={value}" for key, value in one.changed.items()) if name == "changed" else f"of {name}"
        words.append(f"{what}: × {ratio:.2f}{'' if holds else ' (**fails**)'}")
    found |= {"verdict": verdict, "right": kind in one.expected or (kind == "unclear" and len(one.expected) > 1)}
    return found | {"contradicted": contradictions(summary), "fails": failed, "words": "; ".join(words)}


def row(name: str, threads: int, one: Case, found: Result) -> list[object]:
    verdict, against = found["verdict"], found["contradicted"]
    said = f"{verdict['kind']} {verdict.get('share') or 0:.0%}, {verdict.get('certainty', '')}"
    evidence = found.get("error") or str(verdict.get("evidence", "")) + "".join(f" **but {each}**" for each in against)
    cells = [said, "yes" if found["right"] else "**no**", evidence.replace("|", "/"), found["words"]]
    return [name, threads, " or ".join(one.expected), *cells]


def main() -> None:
    parser = arguments(__doc__, rounds=3, device=True)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases to run; results are printed only")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=100, help="of a run, which ends after 10 s at the latest")
    parser.add_argument("--list", action="store_true", help="only list the cases")
    args = parser.parse_args()
    cases = ALL[args.device]
    if args.list:
        print("\n".join(f"{name}: {' or '.join(one.expected)}. {one.why}" for name, one in cases.items()))
        return
    if args.smallest:
        args.only, args.threads, args.steps, args.rounds = ["sleep in training_step"], [1], FEW, 1
    found: dict[tuple[str, int], Result] = {}
    with tempfile.TemporaryDirectory() as folder:
        for threads in args.threads:
            how = (args.rounds, args.device, threads, folder)
            if args.steps > FEW:
                print("calibration:", in_a_process("", 0, *how), flush=True)
            for name in args.only or cases:
                found[name, threads] = judge(cases[name], in_a_process(name, args.steps, *how))
                print(*row(name, threads, cases[name], found[name, threads])[:5], sep=" | ", flush=True)
    head = ["case", "threads", "expected", "verdict", "right", "evidence", "check of the cause"]
    table = rows(head, [row(*key, cases[key[0]], each) for key, each in found.items()], words=7)
    right = sum(each["right"] for each in found.values())
    text = f"{table}\n\n{right} of {len(found)} verdicts are right: {right / len(found):.0%}."
    for key, title in {"contradicted": "Contradicted by their own numbers", "fails": "Checks that fail here"}.items():
        names = [f"{name} ({threads})" for (name, threads), each in found.items() if each[key]]
        text += f"\n\n{title}: {', '.join(names) or 'none'}."
    args.smallest |= bool(args.only)
    write_result("causes", text, {"runs": [{"case": n, "threads": t, **each} for (n, t), each in found.items()]}, args)


if __name__ == "__main__":
    main()
