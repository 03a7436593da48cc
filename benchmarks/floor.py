"""The lower bound of a training step beside its measured time, for each model of the zoo, and counted work beside paper.

    python benchmarks/floor.py
    python benchmarks/floor.py --only mlp --batches 1 8 --threads 1

A step is zero_grad, forward, backward and the optimizer's update in a plain loop, without Lightning: so nothing that the
bound does not know makes a step longer. All steps take turns, for several rounds. The device is calibrated before and after
them, and the better value of each peak counts. A bound of more than 1.05 of the median step is an error: exit code 1.
"""

import argparse
import dataclasses
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from counted_on_paper import table as paper_table
from harness import machine, median, write_result
from zoo_steps import zoo_batch, zoo_task

from batchscope.hardware.calibration import Calibration
from batchscope.hardware.host_memory import keep_freed_memory
from batchscope.hardware.measure import calibrate
from batchscope.hardware.operations import Operation, OperationRecorder, merge
from batchscope.hardware.roofline import Peaks, lower_bound, peaks_of

BATCHES = (1, 8, 64, 512, 2048)
MOST_FLOPS = 6e10  # of a step; larger ones take too long
MOST = 1.05  # bound ÷ step: a product by Winograd's algorithm takes fewer FLOPs than are counted
FEW = 8  # samples: every model takes so many, and no such step is long
TURN_S, TURN_STEPS = 0.5, 3
SMALL_S = 30e-6  # a call: what an operation costs whatever its work is; the verdict's limit, too
REST = ("between", "small", "memory", "cache", "arithmetic")
PARTS = ("forward", "backward", "optimizer")
RECURRENT = ("rnn_cell", "lstm_cell", "stacked_lstm")
VARIANTS = {"cnn": ("cnn",), "mlp": ("mlp",), "torchvision resnet18": ("torchvision",)} | {
    f"{model} {backend}": (model, f"model.backend={backend}")
    for model in RECURRENT
    for backend in ("reference", "fused")
}

REST_TITLE = """What the rest is, as shares: Python between the operations; calls of less than 30 µs; longer operations
without FLOPs that miss the cache, and those that do not; operations with FLOPs below the peak."""


@dataclass
class Measured:
    """A step of a model, its operations, and its times in seconds."""

    step: Callable[[Callable[[str], object]], None]
    operations: list[Operation]
    seconds: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})

    def take_turn(self) -> None:
        """Time steps for so long."""
        end = time.perf_counter() + TURN_S
        for number in range(10**6):
            marks = [("", time.perf_counter())]
            self.step(lambda part, marks=marks: marks.append((part, time.perf_counter())))
            marks.append(("end", time.perf_counter()))
            if number:  # the first one finds another step's data in the cache
                self.seconds.append(marks[-1][1] - marks[0][1])
                for (part, start), (_, stop) in pairwise(marks[1:]):
                    self.parts[part].append(stop - start)
            if number >= TURN_STEPS and marks[-1][1] > end:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, metavar="NAME", help="models; results are printed only")
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    keep_freed_memory()
    lines = ["| model | batch | threads | launch | memory | compute | bound | step | bound ÷ step | in operations |"]
    lines[0] += " forward | backward | optimizer |"
    lines.append("| --- |" + " ---: |" * 12)
    data: list[dict[str, Any]] = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        data += measure_all(args.only or VARIANTS, args.batches, args.rounds)
    lines += [*map(row, data), "", REST_TITLE, "", rest_table(data)]
    above = [
        f"{each['model']}, batch {each['batch']}, {each['threads']} threads" for each in data if each["ratio"] > MOST
    ]
    verdict = f"A lower bound above {MOST} of the step: {'; '.join(above) or 'none'}."
    paper, operations = paper_table()
    text = "\n".join(["Times in ms.", "", *lines, "", verdict, "", paper])
    if args.only:
        print(f"\n{text}\n\n{machine()}")
    else:
        write_result("floor", text, {"results": data, "operations": operations, "machine": machine()})
    sys.exit(1 if above else 0)


def measure_all(names: Any, batches: Any, rounds: int) -> list[dict[str, Any]]:
    """The rows of every model at every batch size, with the present number of threads."""
    device = torch.device("cpu")
    before = calibrate(device)
    steps = {
        (name, batch): measured for name in names for batch in batches if (measured := prepare(name, batch, before))
    }
    for round_ in range(rounds):
        for each in random.Random(round_).sample(list(steps.values()), len(steps)):
            each.take_turn()
        print(f"{torch.get_num_threads()} threads, round {round_ + 1} of {rounds}", flush=True)
    after = calibrate(device)
    peaks = peaks_of(best_of(before, after))
    return [
        facts(name, batch, each, peaks, before.disturbed or after.disturbed) for (name, batch), each in steps.items()
    ]


def best_of(a: Calibration, b: Calibration) -> Calibration:
    """The better value of each roof: the cost of a launch is a time, all others are rates."""
    values = {}
    for key, value in a.to_dict().items():
        other = getattr(b, key)
        if key == "matmul_flops_per_sec":
            values[key] = {name: max(rate, other.get(name, rate)) for name, rate in value.items()}
        elif key == "launch_us" and other is not None:
            values[key] = min(value, other)
        elif key.endswith("_per_sec") and other is not None:
            values[key] = max(value, other)
    return dataclasses.replace(a, **values)


def prepare(name: str, batch: int, calibration: Calibration) -> Measured | None:
    """A step, run twice and then recorded for three steps; None where it takes too long or the model takes no such batch."""
    model, *options = VARIANTS[name]
    task = zoo_task(model, *options)
    if task.channels_last:
        task.model.to(memory_format=torch.channels_last)
    data = zoo_batch(model, batch)
    optimizer = task.optimizer_recipe.build(task.parameters())

    def step(enter: Callable[[str], object]) -> None:
        optimizer.zero_grad()
        enter("forward")
        loss = task.training_step(data, 0)["loss"]
        enter("backward")
        loss.backward()
        enter("optimizer")
        optimizer.step()

    too_long = batch > FEW and flops_of(step_of_few(name, calibration)) * batch / FEW > MOST_FLOPS
    if too_long or batch < task.min_samples:
        return None
    for _ in range(2):
        step(lambda part: None)
    return Measured(step, record(step, task, calibration))


def step_of_few(name: str, calibration: Calibration) -> list[Operation]:
    """The operations of a step of few samples, by which the FLOPs of a larger one are guessed."""
    few = prepare(name, FEW, calibration)
    assert few is not None
    return few.operations


def flops_of(operations: list[Operation]) -> float:
    return sum(operation.flops for operation in operations)


def record(step: Callable, task: torch.nn.Module, calibration: Calibration) -> list[Operation]:
    now = ["other"]
    recorder = OperationRecorder(task, getattr(calibration, "cache_bytes", None), lambda: now[0])
    for _ in range(3):
        recorder.next_step()
        with recorder:
            step(lambda part: now.__setitem__(0, part))
            now[0] = "other"
    if recorder.error is not None:
        raise recorder.error
    return recorder.operations()


def facts(name: str, batch: int, each: Measured, peaks: Peaks, disturbed: str | None) -> dict[str, Any]:
    step, bound = median(each.seconds), lower_bound(each.operations, peaks)
    return {
        "model": name,
        "batch": batch,
        "threads": torch.get_num_threads(),
        "floor_ms": {key: 1e3 * value for key, value in dataclasses.asdict(bound).items()},
        "step_ms": 1e3 * step,
        "ratio": bound.total / step,
        "in_operations": sum(operation.seconds for operation in each.operations) / step,
        "parts_ms": {part: 1e3 * median(values) for part, values in each.parts.items()},
        "calls": sum(operation.calls for operation in each.operations),
        "flops": flops_of(each.operations),
        "cold_bytes": sum(operation.cold_bytes for operation in each.operations),
        "rest": rest_of(each.operations, peaks, step),
        "costliest": costliest(each.operations, peaks),
        "disturbed": disturbed,
    }


def rest_of(operations: list[Operation], peaks: Peaks, step_s: float) -> dict[str, float]:
    """What a step does beyond its bound, as shares of the time of its operations or of the step, whichever is longer.

    A call of less than SMALL_S is `small`. Of longer ones an operation with FLOPs is `arithmetic`, one that misses the cache
    `memory`, any other `cache`.
    """
    sums = dict.fromkeys(REST, 0.0)
    for each in operations:
        beyond = max(0.0, each.seconds - peaks.least_seconds(each))
        kind = "arithmetic" if each.flops else "memory" if each.cold_bytes else "cache"
        sums["small" if each.seconds < SMALL_S * each.calls else kind] += beyond
    in_operations = sum(each.seconds for each in operations)
    whole = max(step_s, in_operations)
    sums["between"] = whole - in_operations
    return {kind: seconds / whole for kind, seconds in sums.items()}


def costliest(operations: list[Operation], peaks: Peaks) -> str:
    """The operation that loses most time beyond its bound, and the share of its time that the bound is."""
    merged = merge(operations, lambda each: each.name).values()
    most = max(merged, key=lambda each: each.seconds - peaks.least_seconds(each))
    return f"{most.name.removeprefix('aten.')} ({peaks.least_seconds(most) / most.seconds:.0%})"


def rest_table(data: list[dict[str, Any]]) -> str:
    """The bound and the rest of each step as shares, with the operation that loses most."""
    lines = [f"| model | batch | threads | bound | {' | '.join(REST)} | loses most (its bound ÷ its time) |"]
    lines.append(f"| --- |{' ---: |' * (3 + len(REST))} --- |")
    for found in data:
        cells = [found["model"], f"{found['batch']:,}", str(found["threads"])]
        cells.append(f"{1 - sum(found['rest'].values()):.0%}")
        cells += [f"{found['rest'][kind]:.0%}" for kind in REST]
        lines.append(f"| {' | '.join(cells)} | `{found['costliest']}` |")
    return "\n".join(lines)


def row(found: dict[str, Any]) -> str:
    floor, parts = found["floor_ms"], found["parts_ms"]
    numbers = [floor["launch"], floor["memory"], floor["compute"], floor["total"], found["step_ms"]]
    ratio = f"{found['ratio']:.2f}" if found["ratio"] <= MOST else f"**{found['ratio']:.2f}**"
    cells = [found["model"], f"{found['batch']:,}", str(found["threads"]), *(f"{ms:.3g}" for ms in numbers), ratio]
    cells += [f"{found['in_operations']:.0%}", *(f"{parts[part]:.3g}" for part in PARTS)]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
