"""Recurrent models against torch's own, against the readable cells, and against their matrix products alone.

    python benchmarks/recurrent.py --rounds 25
    python benchmarks/recurrent.py --device cuda

A shape is (T, F, H, L, B): steps, features, hidden units, layers, batch. All variants take turns within a round; a ratio
is the median over rounds of the ratio within a round.

- Forward runs without gradients, as in validation. In forward+backward every step's output has a gradient, and none is
  small enough to be denormal.
- The products are the matrix products of the definition alone, with one product for the inputs of all steps and one for
  each weight's gradient.
- Freed memory is kept, as in train.py. Peak memory is measured in a process that returns freed memory, relative to the
  memory before the step.
- torch's network runs twice in each round: the ratio of the two shows the noise of this machine.
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Compared, arguments, compare_variants, median, rows, write_result
from torch import Tensor, nn

from batchscope.hardware.host_memory import keep_freed_memory
from batchscope.hardware.microbenchmarks import clock
from batchscope.models.layout import torch_state_dict
from batchscope.models.recurrent import RNNCell, StackedLSTM, unroll

SHAPES = [
    (28, 28, 128, 2, 64),
    (28, 28, 128, 2, 256),
    (100, 2, 128, 1, 32),
    (784, 1, 128, 1, 64),
    (28, 28, 512, 1, 128),
    (200, 64, 256, 3, 16),
]
Shape = tuple[int, int, int, int, int]
# An RNNCell has one layer, whatever the shape says.
CASES = [("LSTM", shape) for shape in SHAPES] + [("RNN", (*shape[:3], 1, shape[4])) for shape in SHAPES]
WAYS = ("auto", "torch", "reference")


def network(kind: str, shape: Shape, way: str) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """A network with weights by seed, and how to run it: `(B, T, F)` → `(B, T, H)`."""
    _, features, hidden, layers, _ = shape
    torch.manual_seed(0)
    ours = RNNCell(features, hidden) if kind == "RNN" else StackedLSTM(layers, features, hidden, dropout=0)
    if way == "torch":
        theirs = (nn.RNN if kind == "RNN" else nn.LSTM)(features, hidden, layers, batch_first=True)
        theirs.load_state_dict(torch_state_dict(ours))
        return theirs, lambda x: theirs(x)[0]
    if kind == "RNN":
        return ours, lambda x: unroll(ours, x, backend=way)[0]
    ours.backend = way
    return ours, lambda x: ours(x)[0]


def passes(kind: str, shape: Shape, way: str, device: str) -> dict[str, Callable[[], object]]:
    """The two timed functions of a variant."""
    steps, features, hidden, _, batch = shape
    net, run = network(kind, shape, way)
    net.to(device)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, steps, features, generator=generator).to(device)
    gradient = torch.randn(batch, steps, hidden, generator=generator).to(device)

    def forward() -> Tensor:
        with torch.no_grad():
            return run(x)

    def both() -> None:
        net.zero_grad()
        run(x).backward(gradient)

    return {"forward": forward, "forward+backward": both}


def products(kind: str, shape: Shape, device: str) -> dict[str, Callable[[], object]]:
    """The matrix products of all layers alone, on buffers made beforehand."""
    steps, features, hidden, layers, batch = shape
    gates = hidden * (1 if kind == "RNN" else 4)
    one, state = torch.randn(batch, gates, device=device), torch.randn(batch, hidden, device=device)
    recurrent = torch.randn(hidden, gates, device=device)
    back = recurrent.t().contiguous()
    every, states = (torch.randn(steps * batch, size, device=device) for size in (gates, hidden))
    widths = [features] + [hidden] * (layers - 1)
    inputs = {width: torch.randn(steps * batch, width, device=device) for width in widths}
    weights = {width: torch.randn(width, gates, device=device) for width in widths}

    def forward() -> None:
        for width in widths:
            torch.mm(inputs[width], weights[width], out=every)
            for _ in range(steps):
                torch.mm(state, recurrent, out=one)

    def both() -> None:
        forward()
        for layer, width in enumerate(widths):
            for _ in range(steps):
                torch.mm(one, back, out=state)
            torch.mm(every.t(), states)
            torch.mm(every.t(), inputs[width])
            if layer:
                torch.mm(every, weights[width].t())

    return {"forward": forward, "forward+backward": both}


def seconds(work: Callable[[], object], repeats: int) -> float:
    started = clock()
    for _ in range(repeats):
        work()
    return (clock() - started) / repeats


def times(kind: str, shape: Shape, args: argparse.Namespace) -> dict[str, Compared]:
    """Every variant of forward and of forward+backward, in turns."""
    work = {way: passes(kind, shape, way, args.device) for way in WAYS} | {
        "products": products(kind, shape, args.device)
    }
    work["torch again"] = passes(kind, shape, "torch", args.device)
    found = {}
    for what in ("forward", "forward+backward"):
        for way in work:
            work[way][what]()
        turns = {way: partial(seconds, of[what], max(1, int(0.05 / seconds(of[what], 1)))) for way, of in work.items()}
        found[what] = compare_variants(turns, args.rounds)
    return found


def peaks_in_a_process(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """MiB of every case and variant, from a process that returns freed memory, so that its peak is the memory in use."""
    line = [sys.executable, __file__, "--device", args.device, "--peaks", *(["--smallest"] if args.smallest else [])]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    return json.loads(subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True, env=env).stdout)


def measured_peak(kind: str, shape: Shape, way: str, device: str) -> float:
    """MiB that a network, its input and its forward+backward add to the memory in use."""
    passes(kind, (2, *shape[1:]), way, device)["forward+backward"]()  # the first call allocates more than a step
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        passes(kind, shape, way, device)["forward+backward"]()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak: proc(5)
    before = peak_resident_kib()
    passes(kind, shape, way, device)["forward+backward"]()
    return (peak_resident_kib() - before) / 2**10


def peak_resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def table(results: dict[str, dict[str, Any]], what: str) -> str:
    head = ["network", "T, F, H, L, B", "auto", "torch's", "torch's ÷ auto (middle half)", "torch's ÷ itself"]
    head += ["reference ÷ auto", "products alone", "auto ÷ products", "torch's ÷ products"]
    lines = []
    for found in results.values():
        of = found["compared"][what]
        pairs = ("torch", "torch again"), ("reference", "auto"), ("auto", "products"), ("torch", "products")
        itself, reference, auto, theirs = (f"{median(of.ratios(*pair)):.2f}" for pair in pairs)
        cells = [
            found["kind"],
            ", ".join(map(str, found["shape"])),
            *(f"{1e3 * of.median(w):.1f}" for w in ("auto", "torch")),
        ]
        cells += [of.ratio("torch", "auto"), itself, reference, f"{1e3 * of.median('products'):.1f}", auto, theirs]
        lines.append(cells)
    return f"**{what}**, ms\n\n{rows(head, lines, words=2)}"


def main() -> None:
    parser = arguments(__doc__, rounds=25, device=True)
    parser.add_argument("--peaks", action="store_true", help=argparse.SUPPRESS)  # in this process
    args = parser.parse_args()
    cases = [("LSTM", (5, 4, 8, 2, 3)), ("RNN", (5, 4, 8, 1, 3))] if args.smallest else CASES
    args.rounds = 2 if args.smallest else args.rounds
    if args.peaks:
        print(json.dumps({f"{k} {s}": {w: measured_peak(k, s, w, args.device) for w in WAYS} for k, s in cases}))
        return
    keep_freed_memory()
    peaks, results = peaks_in_a_process(args), {}
    for kind, shape in cases:
        results[f"{kind} {shape}"] = {"kind": kind, "shape": shape, "compared": times(kind, shape, args)}
        print(kind, shape, flush=True)
    tables = [table(results, what) for what in ("forward", "forward+backward")]
    memory = [[*name.split(" ", 1), *(f"{found[way]:.0f}" for way in WAYS)] for name, found in peaks.items()]
    tables.append(
        f"**Peak memory of forward+backward**, MiB\n\n{rows(['network', 'T, F, H, L, B', *WAYS], memory, words=2)}"
    )
    seconds_ = {name: {what: of.rounds for what, of in found["compared"].items()} for name, found in results.items()}
    write_result("recurrent", "\n\n".join(tables), {"seconds": seconds_, "peaks_mib": peaks}, args)


if __name__ == "__main__":
    main()
