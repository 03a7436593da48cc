"""The speed of alternatives: data pipelines, kept and returned freed memory, train.py and loops by hand, start-up.

    python benchmarks/speed.py pipelines --root ../shared/data
    python benchmarks/speed.py memory
    python benchmarks/speed.py epoch --root ../shared/data
    python benchmarks/speed.py start --root ../shared/data

All variants of a subject take turns, in a new order each round. A ratio is the median over rounds of the ratio within a
round, with its quartiles.
"""

import argparse
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import MNIST as SPEC
from harness import ROOT, arguments, compare_variants, in_a_process, rows, train, write_result
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset
from torchvision import datasets, transforms

from batchscope._system import keep_freed_memory
from batchscope.data.mnist import MNIST
from batchscope.models import SimpleCNN
from batchscope.records.read import read

BATCH_SIZE = 128
TRAINED, HELD_OUT = 55_000, 5_000  # images of MNIST's training set
MEMORY = (8, 32, 128, 512, 2048)  # samples of a batch


def pipelines(args: argparse.Namespace, rounds: int) -> tuple[str, Any]:
    """Samples a second without a consumer: shuffled batches of 128 from MNIST's training set on the CPU.

    The torchvision pipeline is the one of the tutorials.
    """
    MNIST(root=args.root, offline="error").prepare_data()  # a one-line error if MNIST is missing
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    per_sample = datasets.MNIST(args.root, train=True, transform=transform)

    def datamodule(pipeline: str) -> MNIST:
        data = MNIST(root=args.root, batch_size=BATCH_SIZE, pipeline=pipeline, num_workers=2)
        data.setup("fit")
        return data

    x, y = datamodule("memory").tensors("train")
    served: dict[str, Callable[[], Iterator]] = {
        "memory": datamodule("memory").train_dataloader().__iter__,
        "device (here the CPU)": datamodule("device").train_dataloader().__iter__,
        "bare tensor indexing": lambda: ((x[i], y[i]) for i in torch.randperm(len(x)).split(BATCH_SIZE)),
        "torchvision per sample, 0 workers": DataLoader(per_sample, BATCH_SIZE, shuffle=True).__iter__,
    }
    if not args.smallest:
        loader = DataLoader(per_sample, BATCH_SIZE, shuffle=True, num_workers=2)
        served["torchvision per sample, 2 workers"] = loader.__iter__
        served["workers (2)"] = datamodule("workers").train_dataloader().__iter__
    seconds = 0.05 if args.smallest else 3.0
    turns = {name: partial(samples_per_sec, start, seconds) for name, start in served.items()}
    compared = compare_variants(turns, rounds)
    lines = [[name, f"{compared.median(name):,.0f}", compared.ratio("memory", name)] for name in served]
    return rows(["pipeline", "samples/s", "memory ÷ it (middle half)"], lines), compared.rounds


def samples_per_sec(start: Callable[[], Iterator], seconds: float) -> float:
    """Serve batches for about `seconds`, epoch after epoch; the first batch is warm-up."""
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
        turns = {freed: partial(in_a_process, memory_here, size, freed) for freed in ("kept", "returned")}
        compared = compare_variants(turns, rounds)
        data[str(size)] = compared.rounds
        cells = [f"{1e3 * compared.median(freed):.2f} ms" for freed in ("returned", "kept")]
        cells.append(compared.ratio("returned", "kept"))
        cells += [f"{compared.median(freed, 'faults'):,.0f}" for freed in ("returned", "kept")]
        lines.append([size, *cells, *(f"{compared.median(freed, 'peak_gib'):.2f}" for freed in ("returned", "kept"))])
    head = ["batch", "step, default malloc", "step, memory kept", "default ÷ kept (middle half)"]
    head += ["page faults a step: default", "kept", "peak GiB: default", "kept"]
    return rows(head, lines), data


def memory_here(size: int, freed: str) -> dict[str, float]:
    """Seconds (the best of five stretches), page faults and peak memory of a step, in this process."""
    if freed == "kept":
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
    while (timing := stretch(steps))["seconds"] * steps < 0.5:
        steps *= 2
    timing["seconds"] = min(stretch(steps)["seconds"] for _ in range(5))
    return timing | {"peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


LOOPS = (
    "a tutorial's loop",
    "a tuned loop",
    "a tuned loop that keeps freed memory",
    "the same that pools before its ReLUs",
)


def epoch(args: argparse.Namespace, rounds: int) -> tuple[str, Any]:
    """An epoch of SimpleCNN on MNIST with its validation: train.py and usual loops by hand, each in its own process.

    All train the same network on 55,000 images in batches of 128, train.py with AdamW and the loops with Adam, and validate it on
    5,000. The tutorial's loop reads and normalizes each image in a DataLoader. A tuned one has all images in memory, normalized,
    channels last, and a fused Adam. These loops pool after the ReLU, as tutorials do. The last loop pools before the ReLU, as SimpleCNN
    does, which gives the same result with less work.
    """
    turns: dict[str, Callable[[], float]] = {"train.py": partial(epoch_of_train, args)}
    turns |= {loop: partial(in_a_process, epoch_of_loop, loop, args.root, args.smallest) for loop in LOOPS}
    compared = compare_variants(turns, rounds)
    lines = [[name, f"{compared.median(name):.1f} s", compared.ratio("train.py", name)] for name in turns]
    return rows(["an epoch", "seconds", "train.py ÷ it (middle half)"], lines), compared.rounds


def epoch_of_train(args: argparse.Namespace) -> float:
    """Seconds of the fit of a run, without the time before and after it."""
    options = ["model=cnn", "trainer.max_epochs=1", f"data.root={args.root}", "test=false"]
    options += ["data.num_train=1280", "data.num_val=640"] if args.smallest else ["data.offline=error"]
    with tempfile.TemporaryDirectory() as folder:
        assert train(Path(folder) / "run", options)
        return read(Path(folder) / "run")["fit_seconds"]


def epoch_of_loop(loop: str, root: str, smallest: bool) -> float:
    """Seconds of an epoch of a loop by hand, in this process."""
    torch.manual_seed(0)
    if tuned := loop != LOOPS[0]:
        assert loop == LOOPS[1] or keep_freed_memory()
    model = SimpleCNN(SPEC)
    if loop != LOOPS[3]:
        first, pool, relu, second, *_ = model.features
        model.features = nn.Sequential(first, relu, pool, second, relu, pool)
    model = model.to(memory_format=torch.channels_last) if tuned else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=tuned)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    images = datasets.MNIST(root, train=True, transform=transform)
    trained, held_out = (1_280, 640) if smallest else (TRAINED, HELD_OUT)
    if tuned:
        x = ((images.data[:, None] / 255 - 0.1307) / 0.3081).to(memory_format=torch.channels_last)
        y, indices = images.targets, torch.arange(trained, trained + held_out)
        batches = lambda: ((x[i], y[i]) for i in torch.randperm(trained).split(BATCH_SIZE))
        validation = lambda: ((x[i], y[i]) for i in indices.split(1_000))
    else:
        batches = DataLoader(Subset(images, range(trained)), BATCH_SIZE, shuffle=True).__iter__
        validation = DataLoader(Subset(images, range(trained, trained + held_out)), 1_000).__iter__
    began = time.perf_counter()
    model.train()
    for x_batch, y_batch in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(x_batch), y_batch).backward()
        optimizer.step()
    model.eval()
    with torch.inference_mode():
        right = sum(int((model(x_batch).argmax(1) == y_batch).sum()) for x_batch, y_batch in validation())
    assert smallest or right > 0.95 * held_out
    return time.perf_counter() - began


ONE_STEP = ("model=cnn", "trainer.max_steps=1", "test=false", "callbacks.progress=null")
LIBRARIES = "import torch, torchvision, lightning.pytorch; torch.optim.Adam([torch.zeros(1, requires_grad=True)])"
OWNERS = (
    "torch",
    "torch._dynamo",
    "torchvision",
    "lightning",
    "torchmetrics",
    "scipy",
    "matplotlib",
    "numpy",
    "hydra",
    "omegaconf",
)
OWNERS += ("tensorboard", "rich", "batchscope")


def start(args: argparse.Namespace, rounds: int) -> tuple[str, Any]:
    """The whole process of train.py with one step, beside the imports of its libraries alone, and the time of each import.

    An import counts for the innermost listed library that asked for it: the imports of torch._dynamo count as torch._dynamo.
    """
    turns = {
        "train.py, one step": lambda: one_step(args)[0],
        "its libraries alone": partial(process, [sys.executable, "-c", LIBRARIES]),
        "torch alone": partial(process, [sys.executable, "-c", "import torch"]),
    }
    compared = compare_variants(turns, rounds, warm_up=1)
    imports = imported(one_step(args, "-X", "importtime")[1])
    lines = [[name, f"{compared.median(name):.1f} s", compared.ratio(name, "its libraries alone")] for name in turns]
    table = rows(["a process", "seconds", "÷ its libraries (middle half)"], lines)
    total = sum(imports.values())
    shares = [[name, f"{seconds:.2f} s", f"{seconds / total:.0%}"] for name, seconds in imports.most_common()]
    return f"{table}\n\n{rows(['imports of train.py', 'seconds', 'share'], shares)}", compared.rounds | {
        "imports": imports
    }


def one_step(args: argparse.Namespace, *python: str) -> tuple[float, str]:
    """Seconds of a process of train.py with one step, and its stderr."""
    with tempfile.TemporaryDirectory() as folder:
        line = [sys.executable, *python, "train.py", *ONE_STEP, f"data.root={args.root}", f"hydra.run.dir={folder}/run"]
        line += ["data.num_train=640", "data.num_val=320"] if args.smallest else ["data.offline=error"]
        began = time.perf_counter()
        completed = subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True)
        return time.perf_counter() - began, completed.stderr


def process(line: Sequence[str]) -> float:
    """Seconds of a process from its start to its end."""
    began = time.perf_counter()
    subprocess.run(line, cwd=ROOT, check=True, capture_output=True)
    return time.perf_counter() - began


def imported(log: str) -> Counter[str]:
    """Seconds of imports by the library that asked for them, from the output of `python -X importtime`."""
    seconds: Counter[str] = Counter()
    outer: list[str] = []  # by depth, the owner of the module that is imported there
    for own_us, indent, name in reversed(re.findall(r"^import time: +(\d+) \| +\d+ \|( +)(\S+)$", log, re.MULTILINE)):
        depth = (len(indent) - 1) // 2
        del outer[depth:]
        asked = outer[-1] if outer else "Python and others"
        owner = max((library for library in OWNERS if f"{name}.".startswith(f"{library}.")), key=len, default=asked)
        outer += [asked if asked.startswith(f"{owner}.") else owner] * (depth + 1 - len(outer))
        seconds[outer[depth]] += int(own_us) / 1e6
    return seconds


SUBJECTS = {  # function, name of the result, rounds
    "pipelines": (pipelines, "pipelines", 5),
    "memory": (memory, "allocator", 3),
    "epoch": (epoch, "epoch", 7),
    "start": (start, "start", 9),
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("subject", choices=SUBJECTS)
    args = parser.parse_args()
    measure, name, rounds = SUBJECTS[args.subject]
    table, data = measure(args, 1 if args.smallest else rounds)
    write_result(name, table, {"rounds": data}, args)


if __name__ == "__main__":
    main()
