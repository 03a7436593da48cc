"""An epoch of `python train.py` against an epoch of a hand-written PyTorch loop over the same tensors.

    python benchmarks/overhead.py --root ../shared/data --rounds 7

Both train the SimpleCNN on MNIST at batch 128 with AdamW and one-cycle, then validate on 5,000 images; everything in
train.py is at its defaults (loggers, curves of every step, progress bar, checkpoints). Two loops are written by hand:
`tuned` has the framework's own tricks (channels-last, fused optimizer, index_select), `plain` is what a tutorial shows.
The three take turns in one process; the figure is the median over rounds of the ratio within a round.
"""

import argparse
import contextlib
import os
import random
import tempfile
import time
from pathlib import Path

import lightning
import torch
from harness import machine, median, middle_half, write_result
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn import functional as F

from batchscope import train as program
from batchscope.config import check_command_line
from batchscope.data.mnist import MNIST
from batchscope.models.cnn import SimpleCNN

BATCH_SIZE = 128


class EpochClock(Callback):
    """Wall time from one epoch's first moment to the next one's, so that checkpoints and validation are in it."""

    seconds: float

    def on_train_epoch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._started = time.perf_counter()

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        EpochClock.seconds = time.perf_counter() - self._started


def framework_epoch(root: str) -> float:
    """Seconds of one epoch of train.py, as the command line would run it."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        overrides = [f"data.root={root}", "trainer.max_epochs=1", "test=false", f"run_dir={folder}"]
        config = check_command_line(overrides, multirun=False)[0]
        config["callbacks"]["clock"] = {"_target_": f"{__name__}.EpochClock"}
        program.train(config, Path(folder), {"model": "cnn", "data": "mnist"}, overrides)
    return EpochClock.seconds


def hand_written_epoch(data: MNIST, tuned: bool) -> float:
    """Seconds of one epoch of the loop that one would write without a framework."""
    torch.manual_seed(0)
    x, y = data.tensors("train")
    model = SimpleCNN(data.spec)
    if tuned:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01, fused=tuned)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=-(-len(x) // BATCH_SIZE))
    started = time.perf_counter()
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
    return time.perf_counter() - started


def _validate(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    model.eval()
    with torch.inference_mode():
        right = sum((model(a).argmax(1) == b).sum() for a, b in zip(x.split(256), y.split(256), strict=True))
    return float(right) / len(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    data = MNIST(root=args.root)
    data.setup("fit")
    times: dict[str, list[float]] = {"train.py": [], "tuned loop": [], "plain loop": []}
    for round_ in range(args.rounds + 1):
        turns = {
            "train.py": lambda: framework_epoch(args.root),
            "tuned loop": lambda: hand_written_epoch(data, tuned=True),
            "plain loop": lambda: hand_written_epoch(data, tuned=False),
        }
        order = sorted(turns, key=lambda name: random.Random(f"{name} {round_}").random())  # another one every round
        row = {name: turns[name]() for name in order}
        print(("warm-up" if not round_ else f"round {round_}"), {k: round(v, 2) for k, v in row.items()}, flush=True)
        if round_:
            for name, seconds in row.items():
                times[name].append(seconds)
    ratios = {n: [a / b for a, b in zip(times["train.py"], times[n], strict=True)] for n in times if n != "train.py"}
    lines = [
        f"| {'epoch of':12} | median s | min s | train.py ÷ it (median, middle half) |",
        "| --- | ---: | ---: | --- |",
    ]
    for name, seconds in times.items():
        ratio = f"{median(ratios[name]):.3f} ({middle_half(ratios[name])})" if name in ratios else ""
        lines.append(f"| {name:12} | {median(seconds):.2f} | {min(seconds):.2f} | {ratio} |")
    write_result("overhead", "\n".join(lines), {"seconds": times, "machine": machine(), "rounds": args.rounds})


if __name__ == "__main__":
    main()
