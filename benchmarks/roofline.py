"""Does any layer exceed the measured peaks? Linear and convolutional layers and memory-bound operations, against a calibration.

    python benchmarks/roofline.py
    python benchmarks/roofline.py --device cuda

All layers are timed in passes with the microbenchmarks of the calibration, in short blocks, of which the fastest counts. The FLOPs
of a convolution include taps in the padding, which a kernel may skip; so a second column counts only taps inside the image. Bytes
count each tensor once for each read and write. The exit code is 1 if a rate exceeds 1.05 of a peak. On a shared machine the
result says more about other programs than about the peaks.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from harness import arguments, in_a_process, rows, write_result
from torch.nn import functional as F

from batchscope.hardware.devices import cache_bytes
from batchscope.hardware.microbenchmarks import MEMORY, Microbenchmark, best_rates, microbenchmarks

MOST = 1.05  # of a peak: a product by Winograd's algorithm takes fewer FLOPs than are counted
LARGEST = 4e9  # FLOPs of a layer that is still measured on a CPU
PEAK, BANDWIDTH = "the peak: FLOP/s", "the peak: bytes/s"
BATCHES = (1, 8, 64, 512, 2048)
LINEAR = [(3136, 128), (784, 512), (512, 256), (156, 512), (256, 512), (1024, 1024)]  # features in and out
CONVOLUTIONS = [(1, 32, 28), (32, 64, 14), (64, 64, 8), (128, 128, 4), (256, 256, 2), (512, 512, 1), (64, 64, 28)]
NUMBERS = {"cpu": 2**25, "cuda": 2**28}  # of a tensor of traffic: 128 MiB; 1 GiB, of which an L2 of 50 MiB holds little
Run = Callable[[], object]
# Name, FLOPs, the share of them inside the image, what makes its run.
Layer = tuple[str, float, float, Callable[[], Run]]


def layers(device: str) -> Iterator[Layer]:
    random = partial(torch.randn, device=device)
    for batch in BATCHES:
        for k, n in LINEAR:
            flops, name = 2.0 * batch * k * n, f"linear {batch}×{k} → {n}"
            yield name, flops, 1.0, lambda b=batch, k=k, n=n: partial(F.linear, random(b, k), random(n, k))
            gradient = lambda b=batch, k=k, n=n: partial(torch.mm, random(b, n).t(), random(b, k))
            yield f"{name}, gradient of the weight", flops, 1.0, gradient
        for c_in, c_out, size in CONVOLUTIONS:
            flops, share_inside = 2.0 * batch * c_in * c_out * 9 * size**2, ((3 * size - 2) / (3 * size)) ** 2
            for layout in (torch.contiguous_format, torch.channels_last):
                name = f"conv {batch}×{c_in}×{size}×{size} → {c_out}, {str(layout).removeprefix('torch.')}"
                make_run = partial(convolution, random, batch, c_in, c_out, size, layout)
                yield name, flops, share_inside, partial(make_run, backward=False)
                yield f"{name}, backward", 2 * flops, share_inside, partial(make_run, backward=True)


def convolution(
    random: Callable, batch: int, c_in: int, c_out: int, size: int, layout: torch.memory_format, backward: bool
) -> Run:
    x, gradient = (random(batch, channels, size, size).to(memory_format=layout) for channels in (c_in, c_out))
    weight, ones = random(c_out, c_in, 3, 3).to(memory_format=layout), [1, 1]
    if not backward:
        return partial(F.conv2d, x, weight, padding=1)
    options = (None, ones, ones, ones, False, [0, 0], 1, [True, True, False])
    return partial(torch.ops.aten.convolution_backward, gradient, x, weight, *options)


def traffic(device: str, count: int) -> Iterator[tuple[str, int, Callable[[], Run]]]:
    """Operations on tensors of `count` numbers: the name, how many tensors are read and written, what makes the run."""
    random = partial(torch.randn, device=device)
    yield "relu", 2, lambda: partial(torch.relu, random(count))
    yield "a + b", 3, lambda: partial(torch.add, random(count), random(count))
    yield "softmax", 2, lambda: partial(torch.softmax, random(count // 1024, 1024), 1)
    yield "layer norm", 2, lambda: partial(F.layer_norm, random(count // 1024, 1024), (1024,))
    yield "matrix × vector", 1, lambda: partial(torch.mv, random(count // 4096, 4096), random(4096))

    def adam() -> Run:
        weight = torch.nn.Parameter(random(count))
        weight.grad = random(count)
        return torch.optim.AdamW([weight], fused=True).step

    yield "fused AdamW", 7, adam  # reads four tensors, and writes all but the gradient


def parts_of_peaks(threads: int, of_device: str, smallest: bool) -> dict[str, list[float]]:
    """By name: the rate, rate ÷ peak, and the same for taps inside the image; the largest part of the peak first."""
    torch.set_num_threads(threads)
    device = torch.device(of_device)
    peaks, count = microbenchmarks(device, cache_bytes(device)), 2**16 if smallest else NUMBERS[of_device]
    of_peaks, of_layers, seconds = (2, 3, 0.1) if smallest else (None, None, 60.0)
    largest = LARGEST if of_device == "cpu" else float("inf")
    selected = [layer for layer in layers(of_device) if layer[1] <= largest][:of_layers]
    compute = {name: [Microbenchmark(flops, make)] for name, flops, _, make in selected}
    memory = {name: [Microbenchmark(4.0 * count * tensors, make)] for name, tensors, make in traffic(of_device, count)}
    with torch.inference_mode():
        products = best_rates(compute | {PEAK: list(peaks["fp32"])[:of_peaks]}, seconds)
        copies = best_rates(memory | {BANDWIDTH: list(peaks[MEMORY])[:of_peaks]}, seconds / 4)
    parts = {name: [rate, rate / products[PEAK]] for name, rate in products.items()}
    parts |= {name: [rate, rate / copies[BANDWIDTH]] for name, rate in copies.items()}
    shares_inside = {name: share for name, _, share, _ in selected}
    rates = {name: [rate, part, part * shares_inside.get(name, 1.0)] for name, (rate, part) in parts.items()}
    return dict(sorted(rates.items(), key=lambda item: -item[1][1]))


def main() -> None:
    args = arguments(__doc__, device=True).parse_args()
    lines, data, over = [], {}, []
    for threads in (1,) if args.smallest or args.device == "cuda" else (1, 2):
        parts = data[threads] = in_a_process(parts_of_peaks, threads, args.device, args.smallest)
        over += [f"{name} ({threads} threads): {part[2]:.2f}" for name, part in parts.items() if part[2] > MOST]
        for position, (name, (rate, part, part_inside)) in enumerate(parts.items()):
            if position < 12 or name in (PEAK, BANDWIDTH):
                lines.append([threads, name, f"{rate / 1e9:.1f} G/s", f"{part:.2f}", f"{part_inside:.2f}"])
    table = rows(["threads", "layer", "rate", "÷ peak", "taps inside the image ÷ peak"], lines, words=2)
    write_result("roofs", f"{table}\n\nAbove {MOST}: {'; '.join(over) or 'nothing'}.", {"rates": data}, args)
    sys.exit(1 if over and not args.smallest else 0)


if __name__ == "__main__":
    main()
