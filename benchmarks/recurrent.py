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
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from harness import median, middle_half, write_result
from torch import Tensor, nn

from batchscope.hardware.host_memory import keep_freed_memory
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


def seconds(work: Callable[[], object], device: str, repeats: int) -> float:
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize()
    return (time.perf_counter() - started) / repeats


def times(kind: str, shape: Shape, device: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every variant for forward and forward+backward, one number a round."""
    work = {way: passes(kind, shape, way, device) for way in WAYS} | {"products": products(kind, shape, device)}
    work["torch again"] = passes(kind, shape, "torch", device)
    found: dict[str, dict[str, list[float]]] = {}
    for what in ("forward", "forward+backward"):
        for way in work:
            work[way][what]()
        repeats = {way: max(1, int(0.05 / seconds(work[way][what], device, 1))) for way in work}
        found[what] = {way: [] for way in work}
        for round_ in range(rounds):
            for way in sorted(work, key=lambda way: random.Random(f"{way} {round_}").random()):
                found[what][way].append(seconds(work[way][what], device, repeats[way]))
    return found


def peaks_in_a_process(device: str) -> dict[str, dict[str, float]]:
    """MiB of every case and variant, from a process that returns freed memory, so that its peak is the memory in use."""
    line = [sys.executable, __file__, "--device", device, "--peaks"]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    return json.loads(subprocess.run(line, capture_output=True, text=True, check=True, env=env).stdout)


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


def table(results: dict[str, dict], what: str) -> str:
    theirs = "torch's"
    columns = ["network", "T, F, H, L, B", "auto", theirs, f"{theirs} ÷ auto (middle half)", f"{theirs} ÷ itself"]
    columns += ["reference ÷ auto", "products alone", "auto ÷ products", f"{theirs} ÷ products"]
    rows = [f"**{what}**, ms\n", f"| {' | '.join(columns)} |", f"| --- | --- {'| ---: ' * (len(columns) - 2)}|"]
    for found in results.values():
        of = found["seconds"][what]

        def ratios(a: str, b: str, of: dict = of) -> list[float]:
            return [x / y for x, y in zip(of[a], of[b], strict=True)]

        cells = [found["kind"], ", ".join(map(str, found["shape"]))]
        cells += [f"{median(of['auto']) * 1e3:.1f}", f"{median(of['torch']) * 1e3:.1f}"]
        cells += [f"{median(ratios('torch', 'auto')):.2f} ({middle_half(ratios('torch', 'auto'))})"]
        cells += [f"{median(ratios('torch', 'torch again')):.2f}"]
        cells += [f"{median(ratios('reference', 'auto')):.2f}", f"{median(of['products']) * 1e3:.1f}"]
        cells += [f"{median(ratios(way, 'products')):.2f}" for way in ("auto", "torch")]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def memory_table(results: dict[str, dict]) -> str:
    rows = ["**Peak memory of forward+backward**, MiB\n", "| network | T, F, H, L, B | auto | torch's | reference |"]
    rows.append("| --- | --- | ---: | ---: | ---: |")
    for found in results.values():
        peaks = " | ".join(f"{found['peak_mib'][way]:.0f}" for way in WAYS)
        rows.append(f"| {found['kind']} | {', '.join(map(str, found['shape']))} | {peaks} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--peaks", action="store_true", help=argparse.SUPPRESS)  # in this process
    args = parser.parse_args()
    if args.peaks:
        peaks = {f"{k} {s}": {w: measured_peak(k, s, w, args.device) for w in WAYS} for k, s in CASES}
        print(json.dumps(peaks))
        return
    keep_freed_memory()
    all_peaks, results = peaks_in_a_process(args.device), {}
    for kind, shape in CASES:
        found = times(kind, shape, args.device, args.rounds)
        peaks = all_peaks[f"{kind} {shape}"]
        results[f"{kind} {shape}"] = {"kind": kind, "shape": shape, "seconds": found, "peak_mib": peaks}
        shown = {what: {way: round(median(s) * 1e3, 1) for way, s in of.items()} for what, of in found.items()}
        print(kind, shape, json.dumps(shown), {way: round(mib) for way, mib in peaks.items()}, flush=True)
    tables = [table(results, what) for what in ("forward", "forward+backward")] + [memory_table(results)]
    name = "recurrent" if args.device == "cpu" else f"recurrent-{args.device}"
    write_result(name, "\n\n".join(tables), {"results": results, "rounds": args.rounds})


if __name__ == "__main__":
    main()
