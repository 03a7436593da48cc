"""What callbacks cost: no callbacks, these callbacks, train.py, and Lightning's own monitors.

    python benchmarks/monitoring.py
    python benchmarks/monitoring.py --device cuda

The steps of SimpleCNN are long enough for a ratio; those of a linear layer are so short that the microseconds of the callbacks
show. The variants take turns in one process. A separate callback times a turn, from the start of a batch to the start of
another some hundred steps later, with all writing in between. Lightning's monitor logs every step, as ThroughputMonitor
does. The processor time covers all threads, also a writer thread; other processes hardly change it.
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

ROUNDS, WARM_UP = 9, 20  # rounds; steps
CPU = torch.device("cpu")
Parts = tuple[Any, Loader]  # a module and its loader


class Linear(lightning.LightningModule):
    """One layer of 8 numbers, batch 8: the shortest possible step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def linear(steps: int, device: torch.device = CPU) -> Parts:
    x = torch.randn(8 * (steps + 1), 8)
    return Linear(), loader((x, x.sum(1, keepdim=True)), 8, device)


def cnn(steps: int, device: torch.device = CPU, batch: int = 128) -> Parts:
    return zoo_task("cnn"), loader(images(batch * (steps + 1)), batch, device)


def loader(data: tuple[Tensor, Tensor], batch: int, device: torch.device) -> Loader:
    return Loader(TensorBatches(data), DeterministicBatchSampler(len(data[0]), batch, True), device)


@cache
def images(number: int) -> tuple[Tensor, Tensor]:
    """Random images `(N, 1, 28, 28)` and classes `(N,)`, which are the same for all turns."""
    return zoo_batch("cnn", number)


class Clock(Callback):
    """Wall and processor seconds a step after the warm-up; waits for the GPU at both ends, because it runs behind the host."""

    def __init__(self, steps: int):
        self.steps = steps

    def on_train_batch_start(self, trainer: lightning.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARM_UP:
            self.started = synchronized_time(), time.process_time()
        elif batch_idx == self.steps:
            ended = synchronized_time(), time.process_time()
            per_step = [(end - start) / (self.steps - WARM_UP) for start, end in zip(self.started, ended, strict=True)]
            self.times = dict(zip(("seconds", "processor"), per_step, strict=True))


def default_trainer(
    folder: str, accelerator: str, extra: Sequence[Callback] = (), precision: Any = "32-true"
) -> lightning.Trainer:
    """A trainer with the callbacks and loggers that train.py has by default; `extra` come after them."""
    (config,) = check_command_line(["callbacks.throughput.calibrate=false"], multirun=False)
    callbacks, flags = build_callbacks(config)
    return lightning.Trainer(
        accelerator=accelerator, devices=1, precision=precision, max_epochs=1, default_root_dir=folder,
        logger=build_loggers(config, Path(folder), "default", "default"),
        callbacks=[*callbacks, *extra], enable_model_summary=False, use_distributed_sampler=False, **flags,
    )  # fmt: skip


def turn(
    make: Callable, steps: int, device: str, make_callbacks: Callable[[], list[Callback]] | None, logs: bool
) -> dict[str, float]:
    """A turn with the callbacks of `make_callbacks` and, if `logs`, TensorBoard and CSV; with None, those of train.py."""
    clock = Clock(steps)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if make_callbacks is None:
            trainer = default_trainer(folder, device, [clock])
        else:
            callbacks = [*make_callbacks(), clock]
            loggers = [TensorBoardLogger(folder), StepFile(folder)] if logs else False
            has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
            options = {"max_epochs": 1, "logger": loggers, "log_every_n_steps": 1, "enable_progress_bar": has_bar}
            trainer = bare_trainer(device, callbacks, **options)
        trainer.fit(*make(steps, device=trainer.strategy.root_device))
    return clock.times


def monitor() -> ThroughputMonitor:
    return ThroughputMonitor(calibrate=False, verbose=False)


def lightning_monitors() -> list[Callback]:
    throughput = LightningThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=10)
    return [throughput, DeviceStatsMonitor(cpu_stats=True)]


def own_callbacks() -> list[Callback]:
    return [DeviceMonitor(), monitor(), TrainCurves(), ProgressBar()]


WHOLE = "train.py"
VARIANTS: dict[
    str, tuple[Callable[[], list[Callback]] | None, bool]
] = {  # the callbacks, and whether TensorBoard and CSV log
    "off": (list, False),
    "off, with loggers": (list, True),
    "ThroughputMonitor, no logger": (lambda: [monitor()], False),
    "ThroughputMonitor, every step to TensorBoard and CSV": (lambda: [monitor()], True),
    "all of ours, every step to TensorBoard and CSV": (own_callbacks, True),
    "Lightning's ThroughputMonitor + DeviceStatsMonitor": (lightning_monitors, True),
    "StopOnNonFinite": (lambda: [StopOnNonFinite()], False),
    WHOLE: (None, True),
}


def compared(make: Callable, steps: int, args: argparse.Namespace) -> tuple[str, Any]:
    """The table of all variants on one model; train.py does not train the linear layer."""
    variants = {name: variant for name, variant in VARIANTS.items() if name != WHOLE or make is not linear}
    turns = {name: partial(turn, make, steps, args.device, *variant) for name, variant in variants.items()}
    comparison = compare_variants(turns, *((1, 0) if args.smallest else (ROUNDS, 1)))
    lines = []
    for name in variants:
        added = (f"{1e6 * comparison.difference(name, 'off', key):+,.0f} µs" for key in ("seconds", "processor"))
        lines.append([name, f"{1e3 * comparison.median(name):.3f} ms", comparison.ratio(name, "off"), *added])
    head = ["callbacks", "median step", "it ÷ off (middle half)", "it − off, wall", "it − off, processor time"]
    return rows(head, lines), comparison.rounds


def main() -> None:
    args = arguments(__doc__, device=True).parse_args()
    quiet_libraries()
    cnn_steps, linear_steps = (WARM_UP + 2, WARM_UP + 4) if args.smallest else (120, 2020)
    cases: dict[str, tuple[Callable, int]] = {"one linear layer, batch 8": (linear, linear_steps)}
    for batch in (8,) if args.smallest else (128,) if args.device == "cpu" else (64, 4096):
        cases[f"SimpleCNN, batch {batch:,}"] = (partial(cnn, batch=batch), cnn_steps)
    results = {title: compared(*case, args) for title, case in cases.items()}
    text = "\n\n".join(f"**{title}**\n\n{table}" for title, (table, _) in results.items())
    write_result("monitoring", text, {title: data for title, (_, data) in results.items()}, args)


if __name__ == "__main__":
    main()
