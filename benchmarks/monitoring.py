"""What callbacks cost: without any, with these callbacks, in train.py, and with Lightning's own monitors.

    python benchmarks/monitoring.py
    python benchmarks/monitoring.py --device cuda

SimpleCNN has steps that are long enough for a ratio; a linear layer has steps so short that the microseconds of the
callbacks show. The variants take turns in one process. A separate callback times a turn, from the start of one batch to
that of another some hundred steps later, with everything that is written meanwhile. Lightning's monitor logs every step,
as ours does. The processor time is that of all threads: other processes hardly change it, and it counts a writer thread.
"""

import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import lightning
import torch
from harness import arguments, compare_variants, rows, write_result, zoo_task
from lightning.pytorch.callbacks import Callback, DeviceStatsMonitor
from lightning.pytorch.callbacks import ThroughputMonitor as LightningThroughputMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn

from batchscope.callbacks import (
    DeviceMonitor,
    NoiseScaleMonitor,
    ProgressBar,
    StopOnNonFinite,
    ThroughputMonitor,
    TrainCurves,
)
from batchscope.data.loader import Loader, TensorBatches
from batchscope.data.order import DeterministicBatchSampler
from batchscope.hardware.microbenchmarks import clock
from batchscope.options.compose import check_command_line
from batchscope.training.build import build_all, build_callbacks
from batchscope.training.quiet import quiet_libraries

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
    return zoo_task("cnn"), Loader(TensorBatches(data), order, device)


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


def turn(
    make: Callable, steps: int, device: str, used: Callable[[], list[Callback]] | None, logs: bool
) -> dict[str, float]:
    """A turn with these callbacks and, if it logs, TensorBoard and CSV; with None all that train.py has."""
    outside, accelerator = Clock(steps), "cpu" if device == "cpu" else "gpu"
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if used is None:
            trainer = default_trainer(folder, accelerator, [outside])
        else:
            callbacks = [*used(), outside]
            trainer = lightning.Trainer(
                accelerator=accelerator, devices=1, max_epochs=1, callbacks=callbacks, log_every_n_steps=1,
                logger=[TensorBoardLogger(folder), CSVLogger(folder)] if logs else False,
                enable_progress_bar=any(isinstance(each, ProgressBar) for each in callbacks),
                enable_model_summary=False, enable_checkpointing=False,
            )  # fmt: skip
        trainer.fit(*make(steps, device=trainer.strategy.root_device))
    return outside.found


def bare_loop(make: Callable, steps: int, device: str) -> dict[str, float]:
    """A turn with the same model and loader, and without a framework."""
    task, loader = make(steps, device=torch.device(device, 0) if device == "cuda" else CPU)
    model = task.model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    outside = Clock(steps)
    for number, (x, y) in enumerate(loader):
        outside.on_train_batch_start(None, None, None, number)
        if number == steps:
            break
        loss = nn.functional.cross_entropy(model(x.to(memory_format=torch.channels_last)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
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
    "StopOnNonFinite": (lambda: [StopOnNonFinite()], False),
    "NoiseScaleMonitor": (lambda: [NoiseScaleMonitor()], False),
}


def compared(make: Callable, steps: int, rounds: int, device: str, loops: bool) -> tuple[str, Any]:
    """The table of all variants on one model; with `loops` also of a bare loop and of train.py."""
    variants: dict[str, Callable] = {name: partial(turn, make, steps, device, *how) for name, how in VARIANTS.items()}
    if loops:
        variants |= {"bare loop": partial(bare_loop, make, steps, device)}
        variants |= {"train.py": partial(turn, make, steps, device, None, True)}
    found = compare_variants(variants, rounds, warm_up=1 if rounds > 1 else 0)
    lines = []
    for name in variants:
        added = (f"{1e6 * found.difference(name, 'off', key):+,.0f} µs" for key in ("seconds", "processor"))
        lines.append([name, f"{1e3 * found.median(name):.3f} ms", found.ratio(name, "off"), *added])
        lines[-1] += [found.ratio(name, "bare loop")] if loops else []
    head = ["callbacks", "median step", "it ÷ off (middle half)", "it − off, wall", "it − off, processor time"]
    return rows([*head, *(["it ÷ bare loop"] if loops else [])], lines), found.rounds


def main() -> None:
    args = arguments(__doc__, rounds=9, device=True).parse_args()
    args.rounds = 1 if args.smallest else args.rounds
    quiet_libraries()
    few, many = (WARM_UP + 2, WARM_UP + 4) if args.smallest else (120, 2020)
    cases = {"one linear layer, batch 8": (linear, many, False)}
    for batch in (8,) if args.smallest else (128,) if args.device == "cpu" else (64, 4096):
        cases[f"SimpleCNN, batch {batch:,}"] = (partial(cnn, batch=batch), few, True)
    found = {title: compared(make, n, args.rounds, args.device, loops) for title, (make, n, loops) in cases.items()}
    text = "\n\n".join(f"**{title}**\n\n{table}" for title, (table, _) in found.items())
    write_result("monitoring", text, {title: data for title, (_, data) in found.items()}, args)


if __name__ == "__main__":
    main()
