"""How long until a network reads 99 % of MNIST's test set: experiment=mnist_99, beside the loop that tutorials show.

    python benchmarks/coffee.py --root ../shared/data

The loop is that of the best-known PyTorch example: two convolutions without padding, dropout, a DataLoader that reads and
normalizes each image, Adadelta with a rate of 1.0 that is multiplied by 0.7 after each epoch, batches of 64, and a test after
every epoch. It ends at 99 %. The time of mnist_99 is that of the whole process, for ten seeds, with one test after the
training. Both run here, one after the other. The time of the loop leaves out its imports.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from harness import ROOT, arguments, in_a_process, median, rows, write_result
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset
from torchvision import datasets, transforms

from batchscope.records.read import read

GOAL, SEEDS, EPOCHS = 0.99, 10, 14
PICTURE = ROOT / "docs" / "coffee.png"


class Example(nn.Module):
    """Two convolutions, one pooling, two linear layers: 1,199,882 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
            nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def example(root: str, smallest: bool) -> list[list[float]]:
    """The loop: its seconds and its test accuracy after each epoch, until 99 %."""
    torch.manual_seed(1)
    began = time.perf_counter()
    convert = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    sets = [datasets.MNIST(root, train=train, transform=convert) for train in (True, False)]
    trained, tested = (Subset(dataset, range(640)) for dataset in sets) if smallest else sets
    batches, test = DataLoader(trained, batch_size=64, shuffle=True), DataLoader(tested, batch_size=1000)
    network = Example()
    optimizer = torch.optim.Adadelta(network.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    results: list[list[float]] = []
    for _ in range(1 if smallest else EPOCHS):
        network.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
        network.eval()
        with torch.no_grad():
            right = sum(int((network(x).argmax(1) == y).sum()) for x, y in test)
        schedule.step()
        results.append([time.perf_counter() - began, right / len(tested)])
        print(f"example: {results[-1][1]:.2%} after {results[-1][0]:.0f} s", file=sys.stderr, flush=True)
        if results[-1][1] >= GOAL:
            break
    return results


def run_recipe(seed: int, folder: Path, args: argparse.Namespace) -> list[float]:
    """Seconds of the whole process of mnist_99 with a seed, and its test accuracy."""
    options = ["experiment=mnist_99", f"seed={seed}", f"data.root={args.root}", f"hydra.run.dir={folder}"]
    options += ["data.num_train=512", "data.num_test=256"] if args.smallest else ["data.offline=error"]
    began = time.perf_counter()
    subprocess.run([sys.executable, "train.py", *options], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return [time.perf_counter() - began, read(folder)["metrics"]["test/acc"]]


def draw(loop: list[list[float]], runs: list[list[float]], file: Path) -> None:
    """Plot accuracy against seconds: the loop as a line, each run of mnist_99 as a point."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        *zip(*((s, 100 * accuracy) for s, accuracy in loop), strict=True),
        "s-",
        label="the tutorial's loop, after each epoch",
    )
    axes.plot(
        *zip(*((s, 100 * accuracy) for s, accuracy in runs), strict=True),
        "o",
        label="experiment=mnist_99, whole processes",
    )
    axes.axhline(100 * GOAL, color="0.7", linewidth=0.8)
    axes.set(xscale="log", xlabel=f"seconds on {os.cpu_count()} cores", ylabel="right on MNIST's test set, %")
    axes.set_xticks(ticks := [10, 20, 50, 100, 200, 500], labels=map(str, ticks), minor=False)
    axes.set_xticks([], minor=True)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(file, dpi=150)


def main() -> None:
    args = arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [run_recipe(seed, Path(folder) / str(seed), args) for seed in range(1 if args.smallest else SEEDS)]
    loop = in_a_process(example, args.root, args.smallest)
    seconds, accuracies = zip(*runs, strict=True)
    lines: list[list[Any]] = [[seed, f"{accuracy:.2%}", f"{s:.1f}"] for seed, (s, accuracy) in enumerate(runs)]
    lines += [["example", f"{accuracy:.2%}", f"{s:.0f}"] for s, accuracy in loop]
    reached = sum(accuracy >= GOAL for accuracy in accuracies)
    text = f"{rows(['seed', 'test accuracy', 'seconds'], lines)}\n\n{reached} of {len(runs)} seeds have {GOAL:.0%} or more. "
    text += f"The median process takes {median(seconds):.1f} s, the loop {loop[-1][0]:.0f} s until {loop[-1][1]:.2%}: "
    text += f"{loop[-1][0] / median(seconds):.0f} times as long."
    write_result("coffee", text, {"ours": runs, "example": loop, "cores": os.cpu_count()}, args)
    if not args.smallest:
        draw(loop, runs, PICTURE)


if __name__ == "__main__":
    main()
