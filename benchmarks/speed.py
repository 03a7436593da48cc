"""What one thing takes in the place of another: a data pipeline, freed memory that is kept.

    python benchmarks/speed.py pipelines --root ../shared/data
    python benchmarks/speed.py memory

All variants of a subject take turns, in another order in each round. A ratio is the median over rounds of the ratio within
a round, with its middle half.
"""

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from harness import MNIST as SPEC
from harness import arguments, compare_variants, in_a_process, rows, write_result
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from batchscope._system import keep_freed_memory
from batchscope.data.mnist import MNIST
from batchscope.models import SimpleCNN

BATCH_SIZE = 128
MEMORY = (8, 32, 128, 512, 2048)  # samples of a batch


def pipelines(args: argparse.Namespace, rounds: int) -> tuple[str, Any]:
    """Samples a second that nothing consumes: shuffled batches of 128 of MNIST's training set on the CPU.

    torchvision's pipeline is that of the tutorials.
    """
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    per_sample = datasets.MNIST(args.root, train=True, transform=transform)

    def ours(pipeline: str) -> MNIST:
        data = MNIST(root=args.root, batch_size=BATCH_SIZE, pipeline=pipeline, num_workers=2)
        data.setup("fit")
        return data

    x, y = ours("memory").tensors("train")
    served: dict[str, Callable[[], Iterator]] = {
        "memory": ours("memory").train_dataloader().__iter__,
        "device (here the CPU)": ours("device").train_dataloader().__iter__,
        "bare tensor indexing": lambda: ((x[i], y[i]) for i in torch.randperm(len(x)).split(BATCH_SIZE)),
        "torchvision per sample, 0 workers": DataLoader(per_sample, BATCH_SIZE, shuffle=True).__iter__,
    }
    if not args.smallest:
        loader = DataLoader(per_sample, BATCH_SIZE, shuffle=True, num_workers=2)
        served["torchvision per sample, 2 workers"] = loader.__iter__
        served["workers (2)"] = ours("workers").train_dataloader().__iter__
    seconds = 0.05 if args.smallest else 3.0
    turns = {name: partial(samples_per_sec, start, seconds) for name, start in served.items()}
    found = compare_variants(turns, rounds)
    lines = [[name, f"{found.median(name):,.0f}", found.ratio("memory", name)] for name in served]
    return rows(["pipeline", "samples/s", "memory ÷ it (middle half)"], lines), found.rounds


def samples_per_sec(start: Callable[[], Iterator], seconds: float) -> float:
    """Serve batches for about so many seconds, epoch after epoch; the first batch is warm-up."""
    batches = start()
    next(batches)
    served, started = 0, time.perf_counter()
    while True:
        for x, _ in batches:
            served += len(x)
            if (elapsed := time.perf_counter() - started) > seconds:
                return served / elapsed
        batches = start()


def memory(args: argparse.Namespace, rounds: int) -> tuple[str, Any]:
    """SimpleCNN's steps on a CPU with and without `keep_freed_memory`, each measurement in its own process."""
    lines, data = [], {}
    for size in MEMORY[:1] if args.smallest else MEMORY:
        turns = {way: partial(in_a_process, memory_here, size, way) for way in ("kept", "returned")}
        found = compare_variants(turns, rounds)
        data[str(size)] = found.rounds
        cells = [f"{1e3 * found.median(way):.2f} ms" for way in ("returned", "kept")]
        cells.append(found.ratio("returned", "kept"))
        cells += [f"{found.median(way, 'faults'):,.0f}" for way in ("returned", "kept")]
        lines.append([size, *cells, *(f"{found.median(way, 'peak_gib'):.2f}" for way in ("returned", "kept"))])
    head = ["batch", "step, default malloc", "step, memory kept", "default ÷ kept (middle half)"]
    head += ["page faults a step: default", "kept", "peak GiB: default", "kept"]
    return rows(head, lines), data


def memory_here(size: int, way: str) -> dict[str, float]:
    """Seconds (the best of five stretches), page faults and peak memory of a step, in this process."""
    if way == "kept":
        assert keep_freed_memory()
    torch.manual_seed(0)
    model = SimpleCNN(SPEC).to(memory_format=torch.channels_last)
    x, y = torch.randn(size, *SPEC.input_shape).to(memory_format=torch.channels_last), torch.randint(10, (size,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def stretch(steps: int) -> dict[str, float]:
        before, started = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        return {"seconds": (time.perf_counter() - started) / steps, "faults": faults / steps}

    stretch(3)  # warm-up
    steps = 1
    while (found := stretch(steps))["seconds"] * steps < 0.5:
        steps *= 2
    found["seconds"] = min(stretch(steps)["seconds"] for _ in range(5))
    return found | {"peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


SUBJECTS = {"pipelines": (pipelines, "pipelines", 5), "memory": (memory, "allocator", 3)}  # measures, result, rounds


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("subject", choices=SUBJECTS)
    args = parser.parse_args()
    measure, name, rounds = SUBJECTS[args.subject]
    table, found = measure(args, 1 if args.smallest else rounds)
    write_result(name, table, {"rounds": found}, args)


if __name__ == "__main__":
    main()
