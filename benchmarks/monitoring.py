"""What measuring costs: without callbacks, with these callbacks, in train.py, and with Lightning's own monitors.

    python benchmarks/monitoring.py
    python benchmarks/monitoring.py --device cuda
    python benchmarks/monitoring.py --long          # time and memory after 1,000, 100,000 and 1,000,000 updates

SimpleCNN has steps that are long enough for a ratio; a linear layer has steps so short that the microseconds of the
callbacks show. The variants take turns in one process. A separate callback times a turn, from the start of one batch to
that of another some hundred steps later, with everything that is written meanwhile. Lightning's monitor logs every step,
as ours does. The processor time is that of all threads: other processes hardly change it, and it counts a writer thread.

`--long` trains no network: a timer is marked as Lightning's hooks mark it, every hundred steps the marks become rows of
the table, and the rows curves in TensorBoard and CSV.
"""

import argparse
import itertools
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import lightning
import psutil
import torch
from harness import MNIST, arguments, compare_variants, rows, write_result
from lightning.pytorch.callbacks import Callback, DeviceStatsMonitor
from lightning.pytorch.callbacks import ThroughputMonitor as LightningThroughputMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn

from batchscope import DeviceMonitor, ProgressBar, ThroughputMonitor, TrainCurves
from batchscope.callbacks._cost import cost_of, metrics_of, stalls_among
from batchscope.callbacks._step_monitor import FLUSH_EVERY
from batchscope.callbacks._table import UpdateTable
from batchscope.callbacks._timer import HostClock, StepTimer
from batchscope.callbacks._windows import Windows
from batchscope.callbacks._writer import StepWriter
from batchscope.data.loader import Loader, TensorBatches
from batchscope.data.order import DeterministicBatchSampler
from batchscope.hardware.microbenchmarks import clock
from batchscope.models.cnn import SimpleCNN
from batchscope.options.compose import check_command_line
from batchscope.records.step_parts import StepPart
from batchscope.training.build import build_all, build_callbacks
from batchscope.training.optimizer import Optimizer
from batchscope.training.quiet import quiet_libraries
from batchscope.training.task import Task

WARM_UP = 20  # steps
CPU = torch.device("cpu")
Made = tuple[Any, Loader]  # a module and its loader


class Linear(lightning.LightningModule):
    """One layer of 8 numbers, batch 8: as short a step as possible."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def linear(steps: int, device: torch.device = CPU) -> Made:
    x = torch.randn(8 * (steps + 1), 8)
    batches = TensorBatches((x, x.sum(1, keepdim=True)))
    return Linear(), Loader(batches, DeterministicBatchSampler(len(x), 8, True), device)


def cnn(steps: int, device: torch.device = CPU, batch: int = 128) -> Made:
    data = images(batch * (steps + 1))
    order = DeterministicBatchSampler(len(data[0]), batch, True)
    return Task(SimpleCNN(MNIST), MNIST, Optimizer()), Loader(TensorBatches(data), order, device)


@cache
def images(number: int) -> tuple[Tensor, Tensor]:
    """So many images `(N, 1, 28, 28)` and classes `(N,)`, the same ones for all turns."""
    return torch.randn(number, 1, 28, 28), torch.randint(0, 10, (number,))


class Clock(Callback):
    """Wall and processor seconds a step after the warm-up; a GPU, which runs behind the host, is waited for at the ends."""

    def __init__(self, steps: int):
        self.steps = steps

    def on_train_batch_start(self, trainer: lightning.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARM_UP:
            self.started = clock(), time.process_time()
        elif batch_idx == self.steps:
            ended = clock(), time.process_time()
            each = [(end - start) / (self.steps - WARM_UP) for start, end in zip(self.started, ended, strict=True)]
            self.found = dict(zip(("seconds", "processor"), each, strict=True))


def with_lightning(
    make: Callable, steps: int, device: str, callbacks: Callable[[], list[Callback]], logs: bool
) -> dict[str, float]:
    """A turn with these callbacks and, if it logs, TensorBoard and CSV."""
    outside, used = Clock(steps), callbacks()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu" if device == "cpu" else "gpu", devices=1, max_epochs=1, callbacks=[*used, outside],
            logger=[TensorBoardLogger(folder), CSVLogger(folder)] if logs else False, log_every_n_steps=1,
            enable_progress_bar=any(isinstance(each, ProgressBar) for each in used),
            enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(*make(steps, device=trainer.strategy.root_device))
    return outside.found


def default_trainer(
    folder: str, accelerator: str, more: Sequence[Callback] = (), precision: Any = "32-true"
) -> lightning.Trainer:
    """A trainer with the callbacks and loggers that train.py has by default; `more` come after them."""
    (config,) = check_command_line(["callbacks.throughput.calibrate=false"], multirun=False, run_dir=folder)
    callbacks, flags = build_callbacks(config)
    return lightning.Trainer(
        accelerator=accelerator, devices=1, precision=precision, max_epochs=1, logger=build_all(config["logger"], "logger"),
        callbacks=[*callbacks, *more], enable_model_summary=False, use_distributed_sampler=False, **flags,
    )  # fmt: skip


def with_defaults(make: Callable, steps: int, device: str) -> dict[str, float]:
    """A turn with all that train.py has."""
    outside = Clock(steps)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = default_trainer(folder, "cpu" if device == "cpu" else "gpu", [outside])
        trainer.fit(*make(steps, device=trainer.strategy.root_device))
    return outside.found


def bare_loop(make: Callable, steps: int, device: str) -> dict[str, float]:
    """A turn with the same model, loader, optimizer and schedule, and without a framework."""
    task, loader = make(steps, device=torch.device(device, 0) if device == "cuda" else CPU)
    model = task.model.to(device, memory_format=torch.channels_last)
    optimizer = task.optimizer_recipe.build(model.parameters())
    schedule = task.optimizer_recipe.build_schedule(optimizer, steps + 1)
    outside = Clock(steps)
    for number, (x, y) in enumerate(loader):
        outside.on_train_batch_start(None, None, None, number)
        if number == steps:
            break
        loss = nn.functional.cross_entropy(model(x.to(memory_format=torch.channels_last)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return outside.found


def monitor() -> ThroughputMonitor:
    return ThroughputMonitor(calibrate=False, verbose=False)


def lightnings_own() -> list[Callback]:
    own = LightningThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=10)
    return [own, DeviceStatsMonitor(cpu_stats=True)]


# name → (callbacks, whether TensorBoard and CSV are there)
VARIANTS = {
    "off": (list, False),
    "off, with loggers": (list, True),
    "ThroughputMonitor, no logger": (lambda: [monitor()], False),
    "ThroughputMonitor, every step to TensorBoard and CSV": (lambda: [monitor()], True),
    "all of ours, every step to TensorBoard and CSV": (
        lambda: [DeviceMonitor(), monitor(), TrainCurves(), ProgressBar()],
        True,
    ),
    "Lightning's ThroughputMonitor + DeviceStatsMonitor": (lightnings_own, True),
}


def compared(make: Callable, steps: int, rounds: int, device: str, loops: bool) -> tuple[str, Any]:
    """The table of all variants on one model; with `loops` also of a bare loop and of train.py."""
    variants: dict[str, Callable] = {
        name: partial(with_lightning, make, steps, device, *how) for name, how in VARIANTS.items()
    }
    if loops:
        variants |= {"bare loop": partial(bare_loop, make, steps, device)}
        variants |= {"train.py": partial(with_defaults, make, steps, device)}
    found = compare_variants(variants, rounds, warm_up=1 if rounds > 1 else 0)
    lines = []
    for name in variants:
        added = (f"{1e6 * found.difference(name, 'off', key):+,.0f} µs" for key in ("seconds", "processor"))
        lines.append([name, f"{1e3 * found.median(name):.3f} ms", found.ratio(name, "off"), *added])
        lines[-1] += [found.ratio(name, "bare loop")] if loops else []
    head = ["callbacks", "median step", "it ÷ off (middle half)", "it − off, wall", "it − off, processor time"]
    return rows([*head, *(["it ÷ bare loop"] if loops else [])], lines), found.rounds


def short(args: argparse.Namespace) -> None:
    """The steps of a linear layer, and those of SimpleCNN."""
    few, many = (WARM_UP + 2, WARM_UP + 4) if args.smallest else (120, 2020)
    cases = {"one linear layer, batch 8": (linear, many, False)}
    for batch in (8,) if args.smallest else (128,) if args.device == "cpu" else (64, 4096):
        cases[f"SimpleCNN, batch {batch:,}"] = (partial(cnn, batch=batch), few, True)
    found = {title: compared(make, n, args.rounds, args.device, loops) for title, (make, n, loops) in cases.items()}
    text = "\n\n".join(f"**{title}**\n\n{table}" for title, (table, _) in found.items())
    write_result("monitoring", text, {title: data for title, (_, data) in found.items()}, args)


class Trainer(SimpleNamespace):
    """A trainer as far as a writer needs one; unlike a SimpleNamespace it can be referred to weakly."""

    __slots__ = ("__weakref__",)
    __hash__ = object.__hash__


class Measurement:
    """What ThroughputMonitor does with the steps of a fit."""

    parts = (StepPart.DATA_WAIT, StepPart.TRANSFER, StepPart.FORWARD, StepPart.BACKWARD, StepPart.OPTIMIZER)

    def __init__(self, folder: str):
        loggers = [CSVLogger(folder, name="csv", version=""), TensorBoardLogger(folder, name="tb", version="")]
        self.windows = Windows(5)
        self.timer, self.table = StepTimer(HostClock()), UpdateTable(5, self.windows)
        self.writer = StepWriter(Trainer(is_global_zero=True, loggers=loggers))

    def step(self, number: int) -> None:
        """One update of 32 samples."""
        timer = self.timer
        if self.windows.is_due(timer.updates):
            with timer.pause():
                self.windows.begin(timer.updates)
        timer.begin_batch()
        for part in self.parts:
            timer.enter(part)
            timer.leave(part)
        timer.current.samples = 32
        timer.end_batch(number)
        if len(timer.finished) >= FLUSH_EVERY:
            with timer.pause():
                batches = [timer.finished.popleft() for _ in range(len(timer.finished))]
                found = self.table.add(batches, timer.clock)
                self.writer.write(metrics_of(found, 1, 1e6, 1e12), always=stalls_among(found, 1.0))


def long(args: argparse.Namespace) -> None:
    """At each number of updates: µs a step since the last one, MiB beyond the start, and seconds for the summary."""
    process, lines, first = psutil.Process(), [], 200
    with tempfile.TemporaryDirectory() as folder:
        fit = Measurement(folder)
        for number in range(1, first + 1):  # what is done once
            fit.step(number)
        rss = process.memory_info().rss
        updates = (300, 500) if args.smallest else (1_000, 100_000, 1_000_000)
        for done, end in itertools.pairwise([first, *updates]):
            began = time.perf_counter()
            for number in range(done + 1, end + 1):
                fit.step(number)
            us = 1e6 * (time.perf_counter() - began) / (end - done)
            grown, began = (process.memory_info().rss - rss) / 2**20, time.perf_counter()
            assert cost_of(fit.table)
            lines.append([f"{end:,}", f"{us:.0f}", f"{grown:.0f}", f"{time.perf_counter() - began:.3f}"])
    head = ["updates", "µs a step, since the row before", "memory grown, MiB", "the summary, s"]
    write_result("long_run", rows(head, lines, words=0), {"rows": lines}, args)


def main() -> None:
    parser = arguments(__doc__, rounds=9, device=True)
    parser.add_argument("--long", action="store_true", help="the cost of a long run instead")
    args = parser.parse_args()
    args.rounds = 1 if args.smallest else args.rounds
    quiet_libraries()
    (long if args.long else short)(args)


if __name__ == "__main__":
    main()
