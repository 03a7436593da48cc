"""Time CPU training steps with and without `keep_freed_memory`, which avoids page faults on memory that was just freed.

    python benchmarks/allocator.py

Every measurement has its own process, because an allocator cannot be reset. The two ways take turns. In each process
the best of five stretches counts. The table has medians over rounds, and the median of the ratios within a round.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from harness import median, write_result
from torch.nn import functional as F

from batchscope.data.spec import DataSpec
from batchscope.hardware.host_memory import keep_freed_memory
from batchscope.models.cnn import SimpleCNN
from batchscope.models.recurrent import StackedLSTM

CASES = [("SimpleCNN", b) for b in (8, 32, 128, 512, 2048)] + [("StackedLSTM", b) for b in (64, 512)]


def measure(model: str, batch_size: int, keep: bool) -> dict[str, float]:
    """Seconds, page faults and peak memory of training steps, in this process."""
    if keep:
        assert keep_freed_memory()
    torch.manual_seed(0)
    step = cnn_step(batch_size) if model == "SimpleCNN" else lstm_step(batch_size)
    stretch, best, faults = 1, float("inf"), 0.0
    while True:  # until the stretch takes half a second
        seconds, faults = timed(step, stretch)
        if seconds > 0.5:
            break
        stretch *= 2
    for _ in range(5):
        seconds, faults = timed(step, stretch)
        best = min(best, seconds / stretch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"ms": best * 1e3, "faults": faults, "peak_gib": peak}


def timed(step, steps: int) -> tuple[float, float]:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
    for _ in range(steps):
        step()
    seconds = time.perf_counter() - started
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / steps


def cnn_step(batch_size: int):
    model = SimpleCNN(DataSpec("image", (1, 28, 28), "class", 10)).to(memory_format=torch.channels_last)
    x = torch.randn(batch_size, 1, 28, 28).to(memory_format=torch.channels_last)
    y = torch.randint(10, (batch_size,))
    return stepper(model, lambda: F.cross_entropy(model(x), y))


def lstm_step(batch_size: int):
    model = StackedLSTM(2, 28, 128)
    x = torch.randn(batch_size, 28, 28)
    return stepper(model, lambda: model(x)[0].square().mean())


def stepper(model, loss):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)  # one measurement, in its process
    args = parser.parse_args()
    if args.measure:
        model, batch_size, keep = args.measure
        print(json.dumps(measure(model, int(batch_size), keep == "keep")))
        return
    results: dict[str, list[dict[str, float]]] = {}
    for round_ in range(args.rounds):
        for model, batch_size in CASES:
            for way in ("keep", "return")[:: 1 if round_ % 2 else -1]:
                line = [sys.executable, __file__, "--measure", model, str(batch_size), way]
                found = json.loads(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
                results.setdefault(f"{model} {batch_size} {way}", []).append(found)
                print(f"round {round_ + 1}: {model} {batch_size} {way}", found, flush=True)
    columns = ["model", "batch", "step, default malloc", "step, memory kept", "default ÷ kept (median, range)"]
    columns += ["page faults a step: default", "kept", "peak GiB: default", "kept"]
    rows = [f"| {' | '.join(columns)} |", f"| --- {'| ---: ' * 3}| --- {'| ---: ' * 4}|"]
    for model, batch_size in CASES:
        default, kept = results[f"{model} {batch_size} return"], results[f"{model} {batch_size} keep"]
        ratios = [a["ms"] / b["ms"] for a, b in zip(default, kept, strict=True)]

        rows.append(
            f"| {model} | {batch_size} | {_median(default, 'ms'):.2f} ms | {_median(kept, 'ms'):.2f} ms "
            f"| {median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}) "
            f"| {_median(default, 'faults'):,.0f} | {_median(kept, 'faults'):,.0f} "
            f"| {_median(default, 'peak_gib'):.2f} | {_median(kept, 'peak_gib'):.2f} |"
        )
    write_result("allocator", "\n".join(rows), {"results": results, "rounds": args.rounds})


def _median(runs: list[dict[str, float]], key: str) -> float:
    return median([run[key] for run in runs])


if __name__ == "__main__":
    main()
