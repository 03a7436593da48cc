"""Does any layer beat the measured roofs of this machine? Layers of the zoo and large memory-bound operations.

    python benchmarks/roofs.py --threads 1 2 --seconds 60

The layers are timed in passes with the microbenchmarks of the calibration, in many short blocks of which the best counts.
A roof holds if no layer reaches more than 1.05 of it. On a machine that others use, the table says more about them than
about the roofs.

FLOPs count as if every tap of a convolution met a pixel. A kernel may skip the taps in the padding, which are most of them
on the smallest images, so a second column counts only taps inside the image.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from harness import write_result
from torch.nn import functional as F

from batchscope.hardware.devices import cache_bytes
from batchscope.hardware.microbenchmarks import MEMORY, Microbenchmark, Run, best_rates, microbenchmarks
from batchscope.hardware.operations import OperationRecorder

CPU = torch.device("cpu")
LIMIT = 1.05
BATCHES = (1, 8, 64, 512, 2048)
LINEAR = [(3136, 128), (784, 512), (512, 256), (156, 512), (256, 512), (1024, 1024)]  # features in and out
CONVOLUTIONS = [(1, 32, 28), (32, 64, 14), (64, 64, 8), (128, 128, 4), (256, 256, 2), (512, 512, 1), (64, 64, 28)]
RECURRENT = [(28, 28, 128), (28, 128, 128), (16, 512, 512)]  # time steps, features in, hidden size
LARGEST = 4e9  # FLOPs of a layer that is still measured
PEAK, BANDWIDTH = "the roof: FLOP/s", "the roof: bytes/s"


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def layers() -> Iterator[tuple[str, float, float, Callable[[], Run]]]:
    """A layer's name, its FLOPs, the share of them inside the image, and what makes its run."""
    for batch in BATCHES:
        for k, n in LINEAR:
            flops = 2.0 * batch * k * n
            yield f"linear {batch}×{k} → {n}", flops, 1.0, partial(linear, batch, k, n)
            yield f"linear {batch}×{k} → {n}, gradient of the weight", flops, 1.0, partial(weight_gradient, batch, k, n)
            yield f"linear {batch}×{k} → {n}, gradient of the input", flops, 1.0, partial(linear, batch, n, k)
        for c_in, c_out, size in CONVOLUTIONS:
            flops, inside = 2.0 * batch * c_in * c_out * 9 * size**2, ((3 * size - 2) / (3 * size)) ** 2
            for layout in (torch.contiguous_format, torch.channels_last):
                name = f"conv {batch}×{c_in}×{size}×{size} → {c_out}, {str(layout).removeprefix('torch.')}"
                yield name, flops, inside, partial(convolution, batch, c_in, c_out, size, layout)
                backward = partial(convolution_backward, batch, c_in, c_out, size, layout)
                yield f"{name}, backward", 2 * flops, inside, backward
        for steps, features, hidden in RECURRENT:
            flops = 2.0 * steps * batch * 4 * hidden * (features + hidden)
            yield (
                f"lstm {batch}×{steps}×{features} → {hidden}",
                flops,
                1.0,
                partial(lstm, batch, steps, features, hidden),
            )


def linear(batch: int, k: int, n: int) -> Run:
    return partial(F.linear, random(batch, k), random(n, k))


def weight_gradient(batch: int, k: int, n: int) -> Run:
    return partial(torch.mm, random(batch, n).t(), random(batch, k))


def convolution(batch: int, c_in: int, c_out: int, size: int, layout: torch.memory_format) -> Run:
    weight = random(c_out, c_in, 3, 3).to(memory_format=layout)
    return partial(F.conv2d, random(batch, c_in, size, size).to(memory_format=layout), weight, padding=1)


def convolution_backward(batch: int, c_in: int, c_out: int, size: int, layout: torch.memory_format) -> Run:
    x, gradient = (random(batch, channels, size, size).to(memory_format=layout) for channels in (c_in, c_out))
    weight, ones = random(c_out, c_in, 3, 3).to(memory_format=layout), [1, 1]
    rest = (None, ones, ones, ones, False, [0, 0], 1, [True, True, False])
    return partial(torch.ops.aten.convolution_backward, gradient, x, weight, *rest)


def lstm(batch: int, steps: int, features: int, hidden: int) -> Run:
    states = (random(1, batch, hidden), random(1, batch, hidden))
    weights = [random(4 * hidden, features), random(4 * hidden, hidden), random(4 * hidden), random(4 * hidden)]
    return partial(torch.lstm, random(steps, batch, features), states, weights, True, 1, 0.0, False, False, False)


def traffic() -> Iterator[tuple[str, Callable[[], Run]]]:
    """Operations on tensors of 128 MiB, whose time is that of moving them."""
    rows = 2**25
    yield "relu", lambda: partial(torch.relu, random(rows))
    yield "a + b", lambda: partial(torch.add, random(rows), random(rows))
    yield "softmax", lambda: partial(torch.softmax, random(rows // 1024, 1024), 1)
    yield "layer norm", lambda: partial(F.layer_norm, random(rows // 1024, 1024), (1024,))
    yield "matrix × vector", lambda: partial(torch.mv, random(rows // 4096, 4096), random(4096))
    yield "fused AdamW", adam


def adam() -> Run:
    weight = torch.nn.Parameter(torch.zeros(2**25))
    weight.grad = torch.ones(2**25)
    return torch.optim.AdamW([weight], fused=True).step


def moved(make: Callable[[], Run]) -> float:
    """Bytes that an operation reads and writes, as a step's floor counts them."""
    run = make()
    run()  # AdamW makes its states
    with OperationRecorder() as recorder:
        run()
    return sum(operation.bytes for operation in recorder.operations())


def measure(seconds: float) -> dict[str, list[float]]:
    """By name: the rate, its part of the roof, and the part inside the image; layers and traffic, best first."""
    found = [layer for layer in layers() if layer[1] <= LARGEST]
    peaks = microbenchmarks(CPU, cache_bytes(CPU))
    compute = {name: [Microbenchmark(flops, make)] for name, flops, _, make in found} | {PEAK: peaks["fp32"]}
    memory = {name: [Microbenchmark(moved(make), make)] for name, make in traffic()} | {BANDWIDTH: peaks[MEMORY]}
    inside = {name: share for name, _, share, _ in found}
    with torch.inference_mode():
        rates = best_rates(memory, seconds / 4) | best_rates(compute, seconds)
    roofs = {name: rates[PEAK if name in compute else BANDWIDTH] for name in rates}
    parts = {
        name: [rate, rate / roofs[name], rate / roofs[name] * inside.get(name, 1.0)] for name, rate in rates.items()
    }
    return dict(sorted(parts.items(), key=lambda part: -part[1][1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--seconds", type=float, default=60.0, help="for the passes, after everything was tried once")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        torch.set_num_threads(options.threads[0])
        print(json.dumps(measure(options.seconds)))
        return
    lines = [
        "| threads | layer | rate | ÷ roof | taps inside the image ÷ roof |",
        "| ---: | --- | ---: | ---: | ---: |",
    ]
    data, over = {}, []
    for threads in dict.fromkeys(options.threads):
        line = [sys.executable, __file__, "--child", "--threads", str(threads), "--seconds", str(options.seconds)]
        done = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True)
        parts = data[threads] = json.loads(done.stdout)
        over += [f"{name} ({threads} threads): {part[2]:.2f}" for name, part in parts.items() if part[2] > LIMIT]
        shown = [name for place, name in enumerate(parts) if place < 12 or name in (PEAK, BANDWIDTH)]
        for name in shown:
            rate, part, inside = parts[name]
            lines.append(f"| {threads} | {name} | {rate / 1e9:.1f} G/s | {part:.2f} | {inside:.2f} |")
    closing = f"Above {LIMIT}: {'; '.join(over)}." if over else f"Nothing is above {LIMIT}."
    write_result("roofs", "\n".join([*lines, "", closing]), {"rates": data})
    sys.exit(1 if over else 0)


if __name__ == "__main__":
    main()
