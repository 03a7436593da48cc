"""What callbacks cost: without any, with these callbacks, in train.py, and with Lightning's own monitors.

    python benchmarks/monitoring.py
    python benchmarks/monitoring.py --device cuda

SimpleCNN has steps that are long enough for a ratio; a linear layer has steps so short that the microseconds of the
callbacks show. The variants take turns in one process. A separate callback times a turn, from the start of one batch to
that of another some hundred steps later, with everything that is written meanwhile. Lightning's monitor logs every step,
as ours does. The processor time is that of all threads: other processes hardly change it, and it counts a writer thread.
"""

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning
import torch
from harness import arguments, bare_trainer, compare_variants, rows, write_result, zoo_batch, zoo_task
from lightning.pytorch.callbacks import Callback, DeviceStatsMonitor
from lightning.pytorch.callbacks import ThroughputMonitor as LightningThroughputMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

from batchscope import (
    DeviceMonitor,
    ProgressBar,
    StopOnNonFinite,
    ThroughputMonitor,
    TrainCurves,
)
from batchscope.callbacks.step_file import StepFile
from batchscope.data.loader import Loader, TensorBatches
from batchscope.data.order import DeterministicBatchSampler
from batchscope.hardware.microbenchmarks import synchronized_time
from batchscope.options.compose import check_command_line
from batchscope.training.build import build_callbacks, build_loggers
from batchscope.training.quiet import quiet_libraries

ROUNDS, WARM_UP = 9, 20  # the latter in steps
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
    return Linear(), loader((x, x.sum(1, keepdim=True)), 8, device)


def cnn(steps: int, device: torch.device = CPU, batch: int = 128) -> Made:
    return zoo_task("cnn"), loader(images(batch * (steps + 1)), batch, device)


def loader(data: tuple[Tensor, Tensor], batch: int, device: torch.device) -> Loader:
    return Loader(TensorBatches(data), DeterministicBatchSampler(len(data[0]), batch, True), device)


@cache
def images(number: int) -> tuple[Tensor, Tensor]:
    """So many images `(N, 1, 28, 28)` and classes `(N,)`, the same ones for all turns."""
    return zoo_batch("cnn", number)


class Clock(Callback):
    """Wall and processor seconds a step after the warm-up; a GPU, which runs behind the host, is waited for at the ends."""

    def __init__(self, steps: int):
        self.steps = steps

    def on_train_batch_start(self, trainer: lightning.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARM_UP:
            self.started = synchronized_time(), time.process_time()
        elif batch_idx == self.steps:
            ended = synchronized_time(), time.process_time()
            each = [(end - start) / (self.steps - WARM_UP) for start, end in zip(self.started, ended, strict=True)]
            self.found = dict(zip(("seconds", "processor"), each, strict=True))


def default_trainer(
    folder: str, accelerator: str, more: Sequence[Callback] = (), precision: Any = "32-true"
) -> lightning.Trainer:
    """A trainer with the callbacks and loggers that train.py has by default; `more` come after them."""
    (config,) = check_command_line(["callbacks.throughput.calibrate=false"], multirun=False)
    callbacks, flags = build_callbacks(config)
    return lightning.Trainer(
        accelerator=accelerator, devices=1, precision=precision, max_epochs=1, default_root_dir=folder,
        logger=build_loggers(config, Path(folder), "default", "default"),
        callbacks=[*callbacks, *more], enable_model_summary=False, use_distributed_sampler=False, **flags,
    )  # fmt: skip


def turn(
    make: Callable, steps: int, device: str, used: Callable[[], list[Callback]] | None, logs: bool
) -> dict[str, float]:
    """A turn with these callbacks and, if it logs, TensorBoard and CSV; with None all that train.py has."""
    outside = Clock(steps)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if used is None:
            trainer = default_trainer(folder, device, [outside])
        else:
            callbacks = [*used(), outside]
            loggers = [TensorBoardLogger(folder), StepFile(folder)] if logs else False
            has_bar = any(isinstance(each, ProgressBar) for each in callbacks)
            options = {"max_epochs": 1, "logger": loggers, "log_every_n_steps": 1, "enable_progress_bar": has_bar}
            trainer = bare_trainer(device, callbacks, **options)
        trainer.fit(*make(steps, device=trainer.strategy.root_device))
    return outside.found


def monitor() -> ThroughputMonitor:
    return ThroughputMonitor(calibrate=False, verbose=False)


def lightnings_own() -> list[Callback]:
    own = LightningThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=10)
    return [own, DeviceStatsMonitor(cpu_stats=True)]


def ours() -> list[Callback]:
    return [DeviceMonitor(), monitor(), TrainCurves(), ProgressBar()]


WHOLE = "train.py"
VARIANTS: dict[
    str, tuple[Callable[[], list[Callback]] | None, bool]
] = {  # callbacks, and whether TensorBoard and CSV are there
    "off": (list, False),
    "off, with loggers": (list, True),
    "ThroughputMonitor, no logger": (lambda: [monitor()], False),
    "ThroughputMonitor, every step to TensorBoard and CSV": (lambda: [monitor()], True),
    "all of ours, every step to TensorBoard and CSV": (ours, True),
    "Lightning's ThroughputMonitor + DeviceStatsMonitor": (lightnings_own, True),
    "StopOnNonFinite": (lambda: [StopOnNonFinite()], False),
    WHOLE: (None, True),
}


def compared(make: Callable, steps: int, args: argparse.Namespace) -> tuple[str, Any]:
    """The table of all variants on one model; train.py does not train the linear layer."""
    used = {name: how for name, how in VARIANTS.items() if name != WHOLE or make is not linear}
    turns = {name: partial(turn, make, steps, args.device, *how) for name, how in used.items()}
    found = compare_variants(turns, *((1, 0) if args.smallest else (ROUNDS, 1)))
    lines = []
    for name in used:
        added = (f"{1e6 * found.difference(name, 'off', key):+,.0f} µs" for key in ("seconds", "processor"))
        lines.append([name, f"{1e3 * found.median(name):.3f} ms", found.ratio(name, "off"), *added])
    head = ["callbacks", "median step", "it ÷ off (middle half)", "it − off, wall", "it − off, processor time"]
    return rows(head, lines), found.rounds


def main() -> None:
    args = arguments(__doc__, device=True).parse_args()
    quiet_libraries()
    few, many = (WARM_UP + 2, WARM_UP + 4) if args.smallest else (120, 2020)
    cases: dict[str, tuple[Callable, int]] = {"one linear layer, batch 8": (linear, many)}
    for batch in (8,) if args.smallest else (128,) if args.device == "cpu" else (64, 4096):
        cases[f"SimpleCNN, batch {batch:,}"] = (partial(cnn, batch=batch), few)
    found = {title: compared(*case, args) for title, case in cases.items()}
    text = "\n\n".join(f"**{title}**\n\n{table}" for title, (table, _) in found.items())
    write_result("monitoring", text, {title: data for title, (_, data) in found.items()}, args)


if __name__ == "__main__":
    main()
