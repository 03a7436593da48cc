"""What one thing takes in the place of another: an epoch, a pipeline, freed memory.

    python benchmarks/speed.py epoch --root ../shared/data
    python benchmarks/speed.py pipelines --root ../shared/data
    python benchmarks/speed.py memory

All variants of a subject take turns, in another order in each round. A ratio is the median over rounds of the ratio within
a round, with its middle half.
"""

import argparse
import contextlib
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning
import torch
from harness import MNIST as SPEC
from harness import arguments, compare_variants, in_a_process, rows, write_result
from lightning.pytorch.callbacks import Callback
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from batchscope.data.mnist import MNIST
from batchscope.hardware.host_memory import keep_freed_memory
from batchscope.models import SimpleCNN
from batchscope.options.compose import check_command_line
from batchscope.training import run as program

BATCH_SIZE = 128
Turn = dict[str, float]
Step = Callable[[], Any]


# --- epoch: train.py against loops that are written by hand ---------------------------------------------------------

EPOCHS = ("train.py", "plain loop", "tuned loop", "tuned loop, memory kept")


def epoch(args: argparse.Namespace) -> tuple[str, Any]:
    """SimpleCNN on MNIST at batch 128 with AdamW and one-cycle, then a validation, each epoch in its own process.

    train.py has its defaults: loggers, curves of every step, progress bar, checkpoints. The plain loop is a tutorial's; the
    tuned one has channels-last, a fused optimizer and index_select. The processor time is that of all threads.
    """
    names = EPOCHS[:2] if args.smallest else EPOCHS
    line = ["epoch", "--root", args.root, *(["--smallest"] if args.smallest else []), "--child"]
    found = compare_variants({name: partial(in_a_process, __file__, *line, name) for name in names}, args.rounds)
    lines = []
    for name in names:
        times = [f"{found.median(name, key):.2f}" for key in ("seconds", "processor")]
        lines.append([name, *times, *(found.ratio("train.py", name, key) for key in ("seconds", "processor"))])
    head = ["epoch of", "wall s", "processor s", "train.py ÷ it: wall (middle half)", "processor"]
    return rows(head, lines), found.rounds


class EpochClock(Callback):
    """Starts with an epoch, and ends with the training: with checkpoints and validation."""

    def on_train_epoch_start(self, *_: Any) -> None:
        self.started = now()

    def on_train_end(self, *_: Any) -> None:
        self.taken = since(self.started)


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float]) -> Turn:
    return {"seconds": time.perf_counter() - start[0], "processor": time.process_time() - start[1]}


def epoch_here(name: str, args: argparse.Namespace) -> Turn:
    """One of EPOCHS, in this process."""
    batches = 8 if args.smallest else 10**6
    if name == "train.py":
        return by_framework(args.root, batches)
    return hand_written(args.root, batches, "tuned" in name, "kept" in name)


def by_framework(root: str, batches: int) -> Turn:
    outside, build = EpochClock(), program.build_trainer

    def build_trainer(*parts: Any) -> lightning.Trainer:  # a config builds callbacks of packages only
        trainer = build(*parts)
        trainer.callbacks.append(outside)
        return trainer

    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        overrides = [f"data.root={root}", "trainer.max_epochs=1", "test=false", f"run_dir={folder}"]
        overrides += [f"trainer.limit_train_batches={batches}"] if batches < 10**6 else []
        config = check_command_line(overrides, multirun=False)[0]
        with mock.patch.object(program, "build_trainer", build_trainer):
            program.train(config, Path(folder), {"model": "cnn", "data": "mnist"}, overrides)
    return outside.taken


def hand_written(root: str, batches: int, tuned: bool, memory_kept: bool) -> Turn:
    if memory_kept:
        keep_freed_memory()
    torch.manual_seed(0)
    (x, y), validation = mnist_tensors(root)
    model = SimpleCNN(SPEC)
    if tuned:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01, fused=tuned)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=-(-len(x) // BATCH_SIZE))
    started = now()
    for samples in torch.randperm(len(x)).split(BATCH_SIZE)[:batches]:
        inputs, labels = (x.index_select(0, samples), y.index_select(0, samples)) if tuned else (x[samples], y[samples])
        if tuned:
            inputs = inputs.to(memory_format=torch.channels_last)
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.inference_mode():
        pairs = zip(*(tensor.split(256) for tensor in validation), strict=True)
        float(sum((model(inputs).argmax(1) == labels).sum() for inputs, labels in pairs))
    return since(started)


def mnist_tensors(root: str) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    data = MNIST(root=root)
    data.setup("fit")
    return data.tensors("train"), data.tensors("val")


# --- pipelines: samples a second that nothing consumes --------------------------------------------------------------


def pipelines(args: argparse.Namespace) -> tuple[str, Any]:
    """Shuffled batches of 128 of MNIST's training set on the CPU. torchvision's pipeline is that of the tutorials."""
    root, workers = args.root, 0 if args.smallest else 2
    (x, y), _ = mnist_tensors(root)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    per_sample = datasets.MNIST(root, train=True, transform=transform)

    def ours(pipeline: str) -> Iterator:
        data = MNIST(root=root, batch_size=BATCH_SIZE, pipeline=pipeline, num_workers=2)
        data.setup("fit")
        return data.train_dataloader()

    served = {
        "memory": ours("memory").__iter__,
        "device (here the CPU)": ours("device").__iter__,
        "bare tensor indexing": lambda: ((x[i], y[i]) for i in torch.randperm(len(x)).split(BATCH_SIZE)),
    }
    for count in range(0, workers + 1, 2):
        loader = DataLoader(per_sample, BATCH_SIZE, shuffle=True, num_workers=count)
        served[f"torchvision per sample, {count} workers"] = loader.__iter__
    if workers:
        served["workers (2)"] = ours("workers").__iter__
    found = compare_variants(
        {name: partial(samples_per_sec, start, 0.05 if args.smallest else 3.0) for name, start in served.items()},
        args.rounds,
    )
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


# --- memory: freed memory that is kept, or returned to the system ----------------------------------------------------

MEMORY = (8, 32, 128, 512, 2048)  # samples of a batch


def memory(args: argparse.Namespace) -> tuple[str, Any]:
    """SimpleCNN's steps on a CPU with and without `keep_freed_memory`, each measurement in its own process."""
    lines, data = [], {}
    for size in MEMORY[:1] if args.smallest else MEMORY:
        ways = {
            way: partial(in_a_process, __file__, "memory", "--child", f"{size} {way}") for way in ("kept", "returned")
        }
        found = data[str(size)] = compare_variants(ways, args.rounds)
        cells = [f"{1e3 * found.median(way):.2f} ms" for way in ("returned", "kept")]
        cells.append(found.ratio("returned", "kept"))
        cells += [f"{found.median(way, 'faults'):,.0f}" for way in ("returned", "kept")]
        lines.append([size, *cells, *(f"{found.median(way, 'peak_gib'):.2f}" for way in ("returned", "kept"))])
    head = ["batch", "step, default malloc", "step, memory kept", "default ÷ kept (middle half)"]
    head += ["page faults a step: default", "kept", "peak GiB: default", "kept"]
    return rows(head, lines), {size: found.rounds for size, found in data.items()}


def memory_here(name: str, _: argparse.Namespace) -> Turn:
    """Seconds (the best of five stretches), page faults and peak memory of a step, in this process."""
    size, way = name.split()
    if way == "kept":
        assert keep_freed_memory()
    step, steps = cnn_step(int(size)), 1
    while (found := stretch(step, steps))["seconds"] * steps < 0.5:
        steps *= 2
    found["seconds"] = min(stretch(step, steps)["seconds"] for _ in range(5))
    return found | {"peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def stretch(step: Step, steps: int) -> Turn:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
    for _ in range(steps):
        step()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return {"seconds": (time.perf_counter() - started) / steps, "faults": faults / steps}


def cnn_step(size: int) -> Step:
    model = SimpleCNN(SPEC).to(memory_format=torch.channels_last)
    x, y = torch.randn(size, *SPEC.input_shape).to(memory_format=torch.channels_last), torch.randint(10, (size,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


# subject → what measures it, the name of its result, and rounds
SUBJECTS = {
    "epoch": (epoch, "overhead", 7),
    "pipelines": (pipelines, "pipelines", 5),
    "memory": (memory, "allocator", 3),
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--rounds", type=int, help="by default 3 to 7, by the subject")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # one measurement, in this process
    args = parser.parse_args()
    if args.child:
        print(json.dumps({"epoch": epoch_here, "memory": memory_here}[args.subject](args.child, args)))
        return
    measure, name, rounds = SUBJECTS[args.subject]
    args.rounds = 1 if args.smallest else args.rounds or rounds
    table, found = measure(args)
    write_result(name, table, {"rounds": found}, args)


if __name__ == "__main__":
    main()
