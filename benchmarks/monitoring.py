"""The overhead of measuring: without callbacks, with these callbacks, and with Lightning's own monitors.

    python benchmarks/monitoring.py --cnn-rounds 25 --linear-rounds 9
    python benchmarks/monitoring.py --cnn-rounds 0 --only "all of ours"     # a short look; writes no result

Two models train on the CPU: the SimpleCNN at batch 128, whose steps are long enough for a ratio, and one linear layer,
whose steps are so short that the microseconds of the callbacks show. The variants take turns in one process, in another
order in every round. A separate callback times a turn, from the start of one batch to the start of another some
hundred steps later, with everything that is written meanwhile. Lightning's monitor logs every step, as ours does.

Two clocks: the wall time, and the processor time of the process with all its threads. Other processes lengthen the wall
time of a step and hardly its processor time, so on a machine that is not idle the second is the better figure. It also
counts what a writer thread does beside the training. The last column is the saw-tooth in the curve of the steps, as
ThroughputMonitor writes it, or by the callback where it writes none: see `tooth`.
"""

import argparse
import csv
import itertools
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lightning
import torch
from harness import machine, median, middle_half, write_result
from lightning.pytorch.callbacks import Callback, DeviceStatsMonitor
from lightning.pytorch.callbacks import ThroughputMonitor as LightningThroughputMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn

from batchscope import DeviceMonitor, ProgressBar, ThroughputMonitor, TrainCurves
from batchscope.callbacks._step_monitor import FLUSH_EVERY
from batchscope.data.loader import Loader, TensorBatches
from batchscope.data.order import DeterministicBatchSampler
from batchscope.data.spec import DataSpec
from batchscope.hardware.microbenchmarks import clock
from batchscope.models.cnn import SimpleCNN
from batchscope.options.compose import check_command_line
from batchscope.training.build import build_all, build_callbacks
from batchscope.training.optimizer import Optimizer
from batchscope.training.quiet import quiet_libraries
from batchscope.training.task import Task

WARM_UP = 20
CPU = torch.device("cpu")


class Linear(lightning.LightningModule):
    """One layer of 8 numbers, batch 8: as short a step as possible."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(Callback):
    """Wall and processor seconds a step, and the times at which steps begin, independent of what is measured."""

    def __init__(self, steps: int):
        self.steps = steps
        self.began: list[float] = []

    def on_train_batch_start(self, trainer: lightning.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        # A GPU runs behind the host, and is waited for at the two ends alone.
        self.began.append(clock() if batch_idx in (WARM_UP, self.steps) else time.perf_counter())
        if batch_idx == WARM_UP:
            self.started = self.began[-1], time.process_time()
        elif batch_idx == self.steps:
            ended, steps = (self.began[-1], time.process_time()), self.steps - WARM_UP
            self.per_step = [(end - start) / steps for start, end in zip(self.started, ended, strict=True)]


def tooth(steps: list[float]) -> float:
    """How far a saw-tooth with the period of the writing stands out: the slowest of its phases ÷ the median step.

    A phase is every hundredth step, and its time the median of these. A flat curve has about 1, and more for noise. 0 for fewer than five hundred steps.
    """
    if len(steps) < 5 * FLUSH_EVERY:
        return 0.0
    return max(median(steps[phase::FLUSH_EVERY]) for phase in range(FLUSH_EVERY)) / median(steps)


def curve(folder: str) -> list[float]:
    """The steps in ms that ThroughputMonitor has written to a CSV file; empty if there are none."""
    with next(Path(folder).rglob("metrics.csv")).open(newline="") as file:
        return [float(row["time/step_ms"]) for row in csv.DictReader(file) if row.get("time/step_ms")]


def linear(steps: int, device: torch.device = CPU) -> tuple[lightning.LightningModule, Loader]:
    x = torch.randn(8 * (steps + 1), 8)
    batches = TensorBatches((x, x.sum(1, keepdim=True)))
    return Linear(), Loader(batches, DeterministicBatchSampler(len(x), 8, True), device)


def cnn(steps: int, device: torch.device = CPU, batch: int = 128) -> tuple[Task, Loader]:
    spec = DataSpec("image", (1, 28, 28), "class", 10)
    data = images(batch * (steps + 1))
    order = DeterministicBatchSampler(len(data[0]), batch, True)
    return Task(SimpleCNN(spec), spec, Optimizer()), Loader(TensorBatches(data), order, device)


@cache
def images(number: int) -> tuple[Tensor, Tensor]:
    """So many images `(N, 1, 28, 28)` and classes `(N,)`, the same ones for all turns."""
    return torch.randn(number, 1, 28, 28), torch.randint(0, 10, (number,))


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


def turn(make: Callable, steps: int, callbacks: list[Callback], logs: bool, accelerator: str = "cpu") -> list[float]:
    outside = Clock(steps)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loggers = [TensorBoardLogger(folder), CSVLogger(folder)] if logs else False
        bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        trainer = lightning.Trainer(
            accelerator=accelerator, devices=1, max_epochs=1, logger=loggers, callbacks=[*callbacks, outside],
            log_every_n_steps=1, enable_progress_bar=bar, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(*make(steps, device=trainer.strategy.root_device))
        began = outside.began[WARM_UP:]
        written = (
            curve(folder) if any(isinstance(callback, ThroughputMonitor) for callback in callbacks) and logs else []
        )
    return [*outside.per_step, tooth(written[WARM_UP:] or [end - start for start, end in itertools.pairwise(began)])]


def lightnings_own() -> list[Callback]:
    monitor = LightningThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=10)
    return [monitor, DeviceStatsMonitor(cpu_stats=True)]


def ours() -> list[Callback]:
    return [DeviceMonitor(), ThroughputMonitor(calibrate=False, verbose=False)]


# name → (callbacks, whether TensorBoard and CSV loggers are there)
VARIANTS = {
    "off": (list, False),
    "off, with loggers": (list, True),
    "ThroughputMonitor, no logger": (lambda: [ThroughputMonitor(calibrate=False, verbose=False)], False),
    "ThroughputMonitor, every step to TensorBoard and CSV": (lambda: ours()[1:], True),
    "all of ours, every step to TensorBoard and CSV": (lambda: [*ours(), TrainCurves(), ProgressBar()], True),
    "Lightning's ThroughputMonitor + DeviceStatsMonitor": (lightnings_own, True),
}


LONG = list(VARIANTS)[-2:]  # the variants that train the longer steps, too


def compare(make: Callable, names: list[str], steps: int, rounds: int) -> dict[str, list[list[float]]]:
    """Of each variant wall and processor seconds a step, and the tooth of its curve, in every round but the first."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in names}
    order = list(names)
    for round_ in range(rounds + 1 if rounds else 0):
        random.Random(round_).shuffle(order)
        for name in order:
            callbacks, logs = VARIANTS[name]
            per_step = turn(make, steps, callbacks(), logs)
            if round_:
                seconds[name].append(per_step)
        print(make.__name__, f"round {round_} of {rounds}", flush=True)
    return seconds


def table(title: str, seconds: dict[str, list[list[float]]]) -> list[str]:
    lines = [f"**{title}**", ""]
    lines += [
        "| callbacks | median step | it ÷ off (median, middle half) | it − off, wall | it − off, processor time | tooth |"
    ]
    lines += ["| --- | ---: | --- | ---: | ---: | ---: |"]
    for name, values in seconds.items():
        pairs = list(zip(values, seconds["off"], strict=True))
        ratios = [a[0] / b[0] for a, b in pairs]
        wall, processor = (median([a[clock] - b[clock] for a, b in pairs]) * 1e6 for clock in (0, 1))
        step, teeth = median([value[0] for value in values]) * 1e3, median([value[2] for value in values])
        lines.append(
            f"| {name} | {step:.3f} ms | {median(ratios):.3f} ({middle_half(ratios)}) | {wall:+,.0f} µs "
            f"| {processor:+,.0f} µs | {f'{teeth:.2f}' if teeth else '–'} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cnn-rounds", type=int, default=25)
    parser.add_argument("--cnn-steps", type=int, default=120)
    parser.add_argument("--linear-rounds", type=int, default=9)
    parser.add_argument("--linear-steps", type=int, default=2020)
    parser.add_argument(
        "--only", nargs="*", help="beginnings of the variants to compare with `off`; prints, writes nothing"
    )
    args = parser.parse_args()
    if min(args.cnn_steps, args.linear_steps) <= WARM_UP:
        parser.error(f"--cnn-steps, --linear-steps: take more than {WARM_UP}, which are warm-up")
    quiet_libraries()
    names = list(VARIANTS)
    if args.only is not None:
        names = [name for name in names if name == "off" or name.startswith(tuple(args.only))]
    small = compare(linear, names, args.linear_steps, args.linear_rounds)
    large = compare(cnn, [name for name in names if name in (*LONG, "off")], args.cnn_steps, args.cnn_rounds)
    lines = [*(table("SimpleCNN, batch 128", large) if args.cnn_rounds > 1 else []), ""]
    lines += table("one linear layer, batch 8", small)
    if args.only is None and args.cnn_rounds > 1:
        write_result("monitoring", "\n".join(lines), {"cnn": large, "linear": small})
    else:
        print("\n".join(["", *lines, "", machine()]))


if __name__ == "__main__":
    main()
