"""An epoch of `python train.py` against an epoch of a hand-written PyTorch loop over the same tensors.

    python benchmarks/overhead.py --root ../shared/data --rounds 7

All train the SimpleCNN on MNIST at batch 128 with AdamW and one-cycle, then validate on 5,000 images. train.py has its
defaults (loggers, curves of every step, progress bar, checkpoints). Three loops are written by hand: `plain loop` is
what a tutorial shows, `tuned loop` has the framework's optimisations inside a step (channels-last, fused optimizer,
index_select), and `tuned loop, memory kept` also has its setting of the allocator. Every epoch has its own process.
They take turns, and the result is the median over rounds of the ratio within a round. The processor time of the whole
process with all its threads is given beside the wall time; on a shared machine it is the steadier one.
"""

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning
import torch
from harness import median, middle_half, write_result
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn import functional as F

from batchscope.data.mnist import MNIST
from batchscope.hardware.host_memory import keep_freed_memory
from batchscope.models.cnn import SimpleCNN
from batchscope.options.compose import check_command_line
from batchscope.training import run as program

BATCH_SIZE = 128
EPOCHS = ("train.py", "plain loop", "tuned loop", "tuned loop, memory kept")


class EpochClock(Callback):
    """Wall and processor time from the start of an epoch to the end of training, with checkpoints and validation."""

    seconds: tuple[float, float]

    def on_train_epoch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._started = now()

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        EpochClock.seconds = since(self._started)


def now() -> tuple[float, float]:
    """Wall and processor time, in seconds."""
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float]) -> tuple[float, float]:
    wall, processor = now()
    return wall - start[0], processor - start[1]


def framework_epoch(root: str) -> tuple[float, float]:
    """Seconds of one epoch of train.py, as the command line would run it."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        overrides = [f"data.root={root}", "trainer.max_epochs=1", "test=false", f"run_dir={folder}"]
        config = check_command_line(overrides, multirun=False)[0]
        clocked = partial(_with_clock, program.build_trainer)
        with mock.patch.object(program, "build_trainer", clocked):  # a config builds callbacks of packages only
            program.train(config, Path(folder), {"model": "cnn", "data": "mnist"}, overrides)
    return EpochClock.seconds


def _with_clock(build_trainer: Callable[..., lightning.Trainer], *parts: Any) -> lightning.Trainer:
    trainer = build_trainer(*parts)
    trainer.callbacks.append(EpochClock())
    return trainer


def hand_written_epoch(root: str, tuned: bool, memory_kept: bool) -> tuple[float, float]:
    """Seconds of one epoch of a loop without a framework."""
    if memory_kept:
        keep_freed_memory()
    torch.manual_seed(0)
    data = MNIST(root=root)
    data.setup("fit")
    x, y = data.tensors("train")
    model = SimpleCNN(data.spec)
    if tuned:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01, fused=tuned)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=-(-len(x) // BATCH_SIZE))
    started = now()
    model.train()
    for samples in torch.randperm(len(x)).split(BATCH_SIZE):
        inputs, labels = (x.index_select(0, samples), y.index_select(0, samples)) if tuned else (x[samples], y[samples])
        if tuned:
            inputs = inputs.to(memory_format=torch.channels_last)
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    _validate(model, *data.tensors("val"))
    return since(started)


def _validate(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    model.eval()
    with torch.inference_mode():
        right = sum((model(a).argmax(1) == b).sum() for a, b in zip(x.split(256), y.split(256), strict=True))
    return float(right) / len(x)


def epoch(name: str, root: str) -> tuple[float, float]:
    """Seconds of one of EPOCHS, in a new process."""
    line = [sys.executable, __file__, "--root", root, "--epoch", name]
    wall, processor = subprocess.run(line, capture_output=True, text=True, check=True).stdout.split()[-2:]
    return float(wall), float(processor)


def row(name: str, times: dict[str, list[tuple[float, float]]]) -> str:
    """A line of the table: medians of both clocks, and of the ratios of train.py to this epoch."""
    cells = [name, *(f"{median([seconds[clock] for seconds in times[name]]):.2f}" for clock in (0, 1))]
    for clock in (0, 1):
        ratios = [ours[clock] / its[clock] for ours, its in zip(times["train.py"], times[name], strict=True)]
        cells.append("" if name == "train.py" else f"{median(ratios):.3f} ({middle_half(ratios)})")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--epoch", choices=EPOCHS, help=argparse.SUPPRESS)  # one of them, in this process
    args = parser.parse_args()
    if args.epoch == "train.py":
        print(*framework_epoch(args.root))
        return
    if args.epoch:
        print(*hand_written_epoch(args.root, tuned="tuned" in args.epoch, memory_kept="kept" in args.epoch))
        return
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in EPOCHS}
    for round_ in range(1, args.rounds + 1):
        order = sorted(EPOCHS, key=lambda name: random.Random(f"{name} {round_}").random())  # another one every round
        for name in order:
            times[name].append(epoch(name, args.root))
        print(f"round {round_}", {name: [round(s, 2) for s in times[name][-1]] for name in EPOCHS}, flush=True)
    columns = ["epoch of", "wall s", "processor s", "train.py ÷ it: wall (median, middle half)", "processor"]
    lines = [f"| {' | '.join(columns)} |", "| --- | ---: | ---: | --- | --- |", *(row(name, times) for name in EPOCHS)]
    write_result("overhead", "\n".join(lines), {"seconds": times, "rounds": args.rounds})


if __name__ == "__main__":
    main()
