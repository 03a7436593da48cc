"""Are the roofline peaks peaks, and is the lower bound of a step below its time?

    python benchmarks/roofline.py peaks --threads 1 2
    python benchmarks/roofline.py steps
    python benchmarks/roofline.py steps --only mlp --batches 1 8 --threads 1
    python benchmarks/roofline.py steps --device cuda

`peaks` times layers of the zoo and large operations of traffic in passes with the microbenchmarks of the calibration, in
short blocks of which the best counts. FLOPs count as if every tap of a convolution met a pixel; a kernel may skip those in
the padding, so a second column counts only taps inside the image. No layer may reach more than 1.05 of a peak.

`steps` takes each model of the zoo at several batch sizes, in a plain loop without Lightning: zero_grad, forward, backward
and update. All take turns. The device is calibrated before and after them, and the better value of each peak counts. The
bound may be at most 1.05 of the median step. What the step takes beyond the bound is divided by what it is spent on.

A failure is exit code 1. On a machine that others use, both say more about them than about the peaks.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from harness import arguments, compare_variants, median, rows, write_result, zoo_batch, zoo_task
from torch import Tensor
from torch.nn import functional as F

from batchscope.hardware.calibration import Calibration
from batchscope.hardware.devices import cache_bytes
from batchscope.hardware.host_memory import keep_freed_memory
from batchscope.hardware.measure import calibrate
from batchscope.hardware.microbenchmarks import MEMORY, Microbenchmark, Run, best_rates, clock, microbenchmarks
from batchscope.hardware.operations import Operation, OperationRecorder, merge
from batchscope.hardware.roofline import least_seconds, lower_bound

MOST = 1.05  # of a peak, and of a step: a product by Winograd's algorithm takes fewer FLOPs than are counted
LARGEST = 4e9  # FLOPs of a layer that is still measured
PEAK, BANDWIDTH = "the peak: FLOP/s", "the peak: bytes/s"
# --- peaks
LAYER_BATCHES = (1, 8, 64, 512, 2048)
LINEAR = [(3136, 128), (784, 512), (512, 256), (156, 512), (256, 512), (1024, 1024)]  # features in and out
CONVOLUTIONS = [(1, 32, 28), (32, 64, 14), (64, 64, 8), (128, 128, 4), (256, 256, 2), (512, 512, 1), (64, 64, 28)]
RECURRENT = [(28, 28, 128), (28, 128, 128), (16, 512, 512)]  # time steps, features in, hidden size
Layer = tuple[
    str, float, float, Callable[[], Run]
]  # name, FLOPs, the share of them inside the image, what makes its run


def layers(device: str) -> Iterator[Layer]:
    random = partial(torch.randn, device=device)
    for batch in LAYER_BATCHES:
        for k, n in LINEAR:
            flops, name = 2.0 * batch * k * n, f"linear {batch}×{k} → {n}"
            yield name, flops, 1.0, lambda b=batch, k=k, n=n: partial(F.linear, random(b, k), random(n, k))
            yield (
                f"{name}, gradient of the weight", flops, 1.0,
                lambda b=batch, k=k, n=n: partial(torch.mm, random(b, n).t(), random(b, k)),
            )  # fmt: skip
        for c_in, c_out, size in CONVOLUTIONS:
            flops, inside = 2.0 * batch * c_in * c_out * 9 * size**2, ((3 * size - 2) / (3 * size)) ** 2
            for layout in (torch.contiguous_format, torch.channels_last):
                name = f"conv {batch}×{c_in}×{size}×{size} → {c_out}, {str(layout).removeprefix('torch.')}"
                of = partial(convolution, random, batch, c_in, c_out, size, layout)
                yield name, flops, inside, partial(of, backward=False)
                yield f"{name}, backward", 2 * flops, inside, partial(of, backward=True)
        for steps, features, hidden in RECURRENT:
            flops = 2.0 * steps * batch * 4 * hidden * (features + hidden)
            name = f"lstm {batch}×{steps}×{features} → {hidden}"
            yield name, flops, 1.0, partial(lstm, random, batch, steps, features, hidden)


def convolution(
    random: Callable, batch: int, c_in: int, c_out: int, size: int, layout: torch.memory_format, backward: bool
) -> Run:
    x, gradient = (random(batch, channels, size, size).to(memory_format=layout) for channels in (c_in, c_out))
    weight, ones = random(c_out, c_in, 3, 3).to(memory_format=layout), [1, 1]
    if not backward:
        return partial(F.conv2d, x, weight, padding=1)
    rest = (None, ones, ones, ones, False, [0, 0], 1, [True, True, False])
    return partial(torch.ops.aten.convolution_backward, gradient, x, weight, *rest)


def lstm(random: Callable, batch: int, steps: int, features: int, hidden: int) -> Run:
    states = (random(1, batch, hidden), random(1, batch, hidden))
    weights = [random(4 * hidden, features), random(4 * hidden, hidden), random(4 * hidden), random(4 * hidden)]
    return partial(torch.lstm, random(steps, batch, features), states, weights, True, 1, 0.0, False, False, False)


def traffic(device: str) -> Iterator[tuple[str, Callable[[], Run]]]:
    """Operations on tensors of 128 MiB, whose time is that of moving them."""
    rows_, random = 2**25, partial(torch.randn, device=device)
    yield "relu", lambda: partial(torch.relu, random(rows_))
    yield "a + b", lambda: partial(torch.add, random(rows_), random(rows_))
    yield "softmax", lambda: partial(torch.softmax, random(rows_ // 1024, 1024), 1)
    yield "layer norm", lambda: partial(F.layer_norm, random(rows_ // 1024, 1024), (1024,))
    yield "matrix × vector", lambda: partial(torch.mv, random(rows_ // 4096, 4096), random(4096))

    def adam() -> Run:
        weight = torch.nn.Parameter(random(rows_))
        weight.grad = random(rows_)
        return torch.optim.AdamW([weight], fused=True).step

    yield "fused AdamW", adam


def moved(make: Callable[[], Run]) -> float:
    """Bytes that an operation reads and writes, as a step's bound counts them."""
    run = make()
    run()  # AdamW makes its states
    with OperationRecorder() as recorder:
        run()
    return sum(operation.bytes for operation in recorder.operations())


def parts_of_peaks(device: str, seconds: float, smallest: bool) -> dict[str, list[float]]:
    """By name: the rate, its part of the peak, and the part inside the image; layers and traffic, best first."""
    found = [layer for layer in layers(device) if layer[1] <= LARGEST][: 3 if smallest else None]
    moves = list(traffic(device))[: 0 if smallest else None]
    peaks = microbenchmarks(torch.device(device), cache_bytes(torch.device(device)))
    products = list(peaks["fp32"])[: 2 if smallest else None]
    compute = {name: [Microbenchmark(flops, make)] for name, flops, _, make in found} | {PEAK: products}
    memory = {name: [Microbenchmark(moved(make), make)] for name, make in moves} | {BANDWIDTH: peaks[MEMORY]}
    inside = {name: share for name, _, share, _ in found}
    with torch.inference_mode():
        rates = (best_rates(memory, seconds / 4) if moves else {}) | best_rates(compute, seconds)
    of = {name: rate / rates[PEAK if name in compute else BANDWIDTH] for name, rate in rates.items()}
    parts = {name: [rate, of[name], of[name] * inside.get(name, 1.0)] for name, rate in rates.items()}
    return dict(sorted(parts.items(), key=lambda part: -part[1][1]))


def peaks(args: argparse.Namespace) -> bool:
    """Layers against peaks, each number of threads in a process of its own."""
    if args.child:
        torch.set_num_threads(args.threads[0])
        print(json.dumps(parts_of_peaks(args.device, args.seconds, args.smallest)))
        return True
    lines, data, over = [], {}, []
    for threads in args.threads:
        line = [sys.executable, __file__, "peaks", "--child", "--threads", str(threads), "--device", args.device]
        line += ["--seconds", "0.1" if args.smallest else str(args.seconds), *(["--smallest"] if args.smallest else [])]
        done = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True)
        parts = data[threads] = json.loads(done.stdout)
        over += [f"{name} ({threads} threads): {part[2]:.2f}" for name, part in parts.items() if part[2] > MOST]
        for name in [name for place, name in enumerate(parts) if place < 12 or name in (PEAK, BANDWIDTH)]:
            rate, part, inside = parts[name]
            lines.append([threads, name, f"{rate / 1e9:.1f} G/s", f"{part:.2f}", f"{inside:.2f}"])
    table = rows(["threads", "layer", "rate", "÷ peak", "taps inside the image ÷ peak"], lines, words=2)
    write_result("roofs", f"{table}\n\nAbove {MOST}: {'; '.join(over) or 'nothing'}.", {"rates": data}, args)
    return not over or args.smallest


# --- steps

BATCHES = (1, 8, 64, 512, 2048)
MOST_FLOPS = 6e10  # of a step on a CPU; larger ones take too long
FEW = 8  # samples: every model takes so many, and no such step is long
SMALL_S = 30e-6  # a call: what an operation costs whatever its work is; the verdict's limit, too
REST = ("between", "small", "memory", "cache", "arithmetic")
PARTS = ("forward", "backward", "optimizer")
VARIANTS = {"cnn": ("cnn",), "mlp": ("mlp",), "torchvision resnet18": ("torchvision",)} | {
    f"{model} {backend}": (model, f"model.backend={backend}")
    for model in ("rnn_cell", "lstm_cell", "stacked_lstm")
    for backend in ("reference", "fused")
}


class Step:
    """A training step of a model of the zoo on one batch, and its operations."""

    def __init__(self, name: str, batch: int, device: str, calibration: Calibration):
        model, *options = VARIANTS[name]
        self.task = zoo_task(model, *options).to(device)
        self.data: tuple[Tensor, ...] = tuple(each.to(device) for each in zoo_batch(model, batch))
        if self.task.channels_last:
            self.task.model.to(memory_format=torch.channels_last)
        self.optimizer = self.task.optimizer_recipe.build(self.task.parameters())
        self.fits = batch >= self.task.min_samples
        self.operations = self._record(calibration) if self.fits else []

    def __call__(self, enter: Callable[[str], object] = lambda part: None) -> None:
        self.optimizer.zero_grad()
        enter("forward")
        loss = self.task.training_step(self.data, 0)["loss"]
        enter("backward")
        loss.backward()
        enter("optimizer")
        self.optimizer.step()
        enter("end")

    def timed(self, seconds: float) -> dict[str, float]:
        """The medians of the steps of a turn, whole and by part; a first one finds another step's data in the cache."""
        self()
        found: list[list[float]] = []
        while len(found) < 3 or sum(each[0] for each in found) < seconds:
            marks = [clock()]
            self(lambda part, marks=marks: marks.append(clock()))
            found.append([marks[-1] - marks[0], *(end - start for start, end in pairwise(marks[1:]))])
        return dict(zip(("seconds", *PARTS), map(median, zip(*found, strict=True)), strict=True))

    def _record(self, calibration: Calibration) -> list[Operation]:
        now = ["other"]
        recorder = OperationRecorder(self.task, getattr(calibration, "cache_bytes", None), lambda: now[0])
        self()
        for _ in range(3):
            recorder.next_step()
            with recorder:
                self(lambda part: now.__setitem__(0, part))
        if recorder.error is not None:
            raise recorder.error
        return recorder.operations()


def flops_of(operations: list[Operation]) -> float:
    return sum(operation.flops for operation in operations)


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The facts of every model at every batch size, with the present number of threads."""
    device = torch.device(args.device)
    before, made = calibrate(device), {}
    for name in args.only or VARIANTS:
        few = flops_of(Step(name, FEW, args.device, before).operations)
        for batch in args.batches:
            if args.device == "cpu" and batch > FEW and few * batch / FEW > MOST_FLOPS:
                continue
            made[f"{name}, {batch:,}"] = name, batch, Step(name, batch, args.device, before)
    made = {key: each for key, each in made.items() if each[2].fits}
    turns = {key: partial(step.timed, 0.01 if args.smallest else 0.5) for key, (_, _, step) in made.items()}
    found = compare_variants(turns, args.rounds)
    best = best_of(before, calibrate(device))
    return [
        facts(name, batch, step, best, {part: found.median(key, part) for part in ("seconds", *PARTS)})
        for key, (name, batch, step) in made.items()
    ]


def best_of(a: Calibration, b: Calibration) -> Calibration:
    """The better value of each peak: the cost of a launch is a time, all others are rates."""
    values = {}
    for key, value in a.to_dict().items():
        other = getattr(b, key)
        if key == "matmul_flops_per_sec":
            values[key] = {name: max(rate, other.get(name, rate)) for name, rate in value.items()}
        elif other is not None and (key == "launch_us" or key.endswith("_per_sec")):
            values[key] = min(value, other) if key == "launch_us" else max(value, other)
    return dataclasses.replace(a, **values)


def facts(name: str, batch: int, step: Step, peaks: Calibration, seconds: Mapping[str, float]) -> dict[str, Any]:
    bound, whole, operations = lower_bound(step.operations, peaks), seconds["seconds"], step.operations
    merged = merge(operations, lambda each: each.name).values()
    most = max(merged, key=lambda each: each.seconds - least_seconds(each, peaks))
    return {
        "model": name,
        "batch": batch,
        "threads": torch.get_num_threads(),
        "floor_ms": {key: 1e3 * value for key, value in bound.items()},
        "parts_ms": {key: 1e3 * value for key, value in seconds.items()},
        "ratio": bound["total"] / whole,
        "rest": rest_of(operations, peaks, whole),
        "costliest": f"{most.name.removeprefix('aten.')} ({least_seconds(most, peaks) / most.seconds:.0%})",
    }


def rest_of(operations: list[Operation], peaks: Calibration, step_s: float) -> dict[str, float]:
    """What a step takes beyond its bound, as shares of the time of its operations or of the step, whichever is longer.

    A call of less than SMALL_S is `small`. Of longer ones an operation with FLOPs is `arithmetic`, one that misses the cache
    `memory`, any other `cache`. `between` is Python between the operations.
    """
    sums = dict.fromkeys(REST, 0.0)
    for each in operations:
        kind = "arithmetic" if each.flops else "memory" if each.cold_bytes else "cache"
        beyond = max(0.0, each.seconds - least_seconds(each, peaks))
        sums["small" if each.seconds < SMALL_S * each.calls else kind] += beyond
    in_operations = sum(each.seconds for each in operations)
    whole = max(step_s, in_operations)
    sums["between"] = whole - in_operations
    return {kind: seconds / whole for kind, seconds in sums.items()}


def steps(args: argparse.Namespace) -> bool:
    """The bound of each step against its time, and what the rest is spent on."""
    if args.smallest:
        args.only, args.batches, args.threads, args.rounds = ["mlp"], [FEW], [1], 1
    keep_freed_memory()
    data: list[dict[str, Any]] = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        data += measured(args)
    lines, rest = [], []
    for each in data:
        bound, parts = each["floor_ms"], each["parts_ms"]
        name = [each["model"], f"{each['batch']:,}", each["threads"]]
        numbers = [*(bound[key] for key in ("launch", "memory", "compute", "total")), parts["seconds"]]
        lines.append(
            [*name, *(f"{ms:.3g}" for ms in numbers), f"{each['ratio']:.2f}", *(f"{parts[p]:.3g}" for p in PARTS)]
        )
        shares = [1 - sum(each["rest"].values()), *(each["rest"][kind] for kind in REST)]
        rest.append([*name, *(f"{share:.0%}" for share in shares), f"`{each['costliest']}`"])
    over = [f"{e['model']}, batch {e['batch']}, {e['threads']} threads" for e in data if e["ratio"] > MOST]
    head = ["model", "batch", "threads"]
    spent = (
        "What the step is spent on: Python between the operations; calls of less than 30 µs; longer operations without "
    )
    spent += "FLOPs that miss the cache, and those that do not; operations with FLOPs below the peak."
    text = [
        "Times in ms.",
        rows([*head, "launch", "memory", "compute", "bound", "step", "bound ÷ step", *PARTS], lines),
        spent,
        rows([*head, "bound", *REST, "loses most (its bound ÷ its time)"], rest),
        f"A lower bound above {MOST} of the step: {'; '.join(over) or 'none'}.",
    ]
    write_result("floor", "\n\n".join(text), {"results": data}, args)
    return not over or args.smallest


def main() -> None:
    parser = arguments(__doc__, rounds=5, device=True)
    parser.add_argument("part", choices=("peaks", "steps"))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--seconds", type=float, default=60.0, help="of `peaks`, after everything was tried once")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, metavar="NAME", help="models of `steps`")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.threads = [1] if args.smallest else args.threads
    sys.exit(0 if {"peaks": peaks, "steps": steps}[args.part](args) else 1)


if __name__ == "__main__":
    main()
