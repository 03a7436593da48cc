"""Samples a second of each data pipeline: ours, bare tensor indexing, and torchvision's per-sample MNIST.

    python benchmarks/pipelines.py --root ../shared/data --rounds 5

Every pipeline serves shuffled batches of 128 of MNIST's training set on the CPU; nothing consumes them. torchvision's is
that of the tutorials: `DataLoader(MNIST(transform=[ToTensor, Normalize]), shuffle=True)`, without worker processes and with
two. The pipelines take turns; a slow one serves fewer batches in its turn. Ratios are medians over rounds.
"""

import argparse
import time
from collections.abc import Callable, Iterator

import torch
from harness import median, spread, write_result
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import MNIST as TorchvisionMNIST

from batchscope.data.mnist import MNIST

BATCH_SIZE = 128


def ours(root: str, pipeline: str) -> Callable[[], Iterator]:
    data = MNIST(root=root, batch_size=BATCH_SIZE, pipeline=pipeline, num_workers=2)
    data.setup("fit")
    loader = data.train_dataloader()
    return lambda: iter(loader)


def bare_indexing(root: str) -> Callable[[], Iterator]:
    data = MNIST(root=root)
    data.setup("fit")
    x, y = data.tensors("train")
    return lambda: ((x[i], y[i]) for i in torch.randperm(len(x)).split(BATCH_SIZE))


def torchvision_per_sample(root: str, num_workers: int) -> Callable[[], Iterator]:
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    dataset = TorchvisionMNIST(root, train=True, transform=transform)
    loader = DataLoader(dataset, BATCH_SIZE, shuffle=True, num_workers=num_workers)
    return lambda: iter(loader)


def samples_per_sec(start: Callable[[], Iterator], seconds: float) -> float:
    """Serve batches for about this many seconds; the first batch is warm-up."""
    batches = start()
    next(batches)
    served, started = 0, time.perf_counter()
    while True:
        for x, _ in batches:
            served += len(x)
            elapsed = time.perf_counter() - started
            if elapsed > seconds:
                return served / elapsed
        batches = start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each turn")
    args = parser.parse_args()
    pipelines = {
        "memory": ours(args.root, "memory"),
        "device (here the CPU)": ours(args.root, "device"),
        "workers (2)": ours(args.root, "workers"),
        "bare tensor indexing": bare_indexing(args.root),
        "torchvision per sample, 0 workers": torchvision_per_sample(args.root, 0),
        "torchvision per sample, 2 workers": torchvision_per_sample(args.root, 2),
    }
    rates: dict[str, list[float]] = {name: [] for name in pipelines}
    for round_ in range(args.rounds):
        for name, start in pipelines.items():
            rates[name].append(samples_per_sec(start, args.seconds))
        print(f"round {round_ + 1}", {name: f"{r[-1]:,.0f}" for name, r in rates.items()}, flush=True)
    lines = ["| pipeline | samples/s (median) | memory ÷ it (median, range) |", "| --- | ---: | --- |"]
    for name, values in rates.items():
        ratios = [a / b for a, b in zip(rates["memory"], values, strict=True)]
        lines.append(f"| {name} | {median(values):,.0f} | {median(ratios):.2f} ({spread(ratios)}) |")
    write_result("pipelines", "\n".join(lines), {"samples_per_sec": rates})


if __name__ == "__main__":
    main()
