"""What augmenting a batch costs, beside a training step on the same batch.

    python benchmarks/data.py --rounds 5

Batches of 28×28 and 3×32×32 images on the CPU, one thread, all four changes at once and single ones; the step is
SimpleCNN's.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import median, write_result
from torch import nn

from batchscope.data import Augment, DataSpec
from batchscope.models import SimpleCNN

CHANGES = {
    "shift": {"shift": 2},
    "rotation": {"rotation": 10},
    "all four": {"shift": 2, "rotation": 10, "crop": 3, "flip": True},
}


def seconds(work: Callable[[], Any], least: float = 0.3) -> float:
    """The time of one call, after one that warms up."""
    work()
    calls, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < least:
        work()
        calls += 1
    return elapsed / calls


def step(shape: tuple[int, ...], batch_size: int) -> Callable[[], Any]:
    model = SimpleCNN(DataSpec("image", shape, "class", 10)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.rand(batch_size, *shape).to(memory_format=torch.channels_last)
    y = torch.zeros(batch_size, dtype=torch.long)

    def run() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return run


def augmenting(rounds: int) -> list[str]:
    rows = ["| images | batch | change | ms | of a SimpleCNN step |", "| --- | ---: | --- | ---: | ---: |"]
    for shape in ((1, 28, 28), (3, 32, 32)):
        for batch_size in (128, 512):
            x = torch.rand(batch_size, *shape)
            whole = median([seconds(step(shape, batch_size)) for _ in range(rounds)])
            for name, options in CHANGES.items():
                augment = Augment(**options)
                taken = median([seconds(lambda a=augment, x=x: a(x, 0, 0, 0)) for _ in range(rounds)])
                size = "×".join(map(str, shape))
                rows.append(f"| {size} | {batch_size} | {name} | {1e3 * taken:.2f} | {100 * taken / whole:.1f} % |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = augmenting(rounds)
    write_result("data", "\n".join(rows), {"augment": rows})


if __name__ == "__main__":
    main()
