"""Part 4: the step of train.py against a bare loop, with and without monitors, and beside Lightning's own monitors."""

import random
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
from harness import median, middle_half
from monitoring import WARM_UP, Clock, cnn, default_trainer, lightnings_own, ours, turn
from torch.nn import functional as F

from batchscope.hardware.microbenchmarks import clock
from batchscope.hardware.probes import probe_for

from . import Result, Setting

Turn = Callable[[], float]  # seconds a step
MOST_RATIO, MOST_MONITORS, MOST_MONITORS_US = 1.05, 1.01, 100.0


def batch_4096(setting: Setting) -> Result:
    """Steps that are long enough for a ratio."""
    seconds = _compare(setting, batch=64 if setting.small else 4096, steps=25 if setting.small else 80)
    ratio, monitors = (
        _ratio(seconds, "train.py", "bare loop"),
        _ratio(seconds, "Lightning, our monitors", "Lightning alone"),
    )
    claims = {
        f"train.py ÷ bare loop is at most {MOST_RATIO} (is {ratio:.3f})": ratio <= MOST_RATIO,
        f"monitors on ÷ off is at most {MOST_MONITORS} (is {monitors:.3f})": monitors <= MOST_MONITORS,
    }
    return Result(_table(seconds), seconds, claims)


def batch_64(setting: Setting) -> Result:
    """Steps that are so short that the microseconds of Lightning and of batchscope show."""
    seconds = _compare(setting, batch=8 if setting.small else 64, steps=25 if setting.small else 620)
    added = 1e6 * _difference(seconds, "Lightning, our monitors", "Lightning alone")
    claims = {f"monitors add at most {MOST_MONITORS_US:.0f} µs (add {added:.0f})": added <= MOST_MONITORS_US}
    return Result(_table(seconds), seconds, claims)


def readings(setting: Setting) -> Result:
    """What a reading of the device and of the process takes: a thread makes it four times a second."""
    device = torch.device(setting.device, 0) if setting.device == "cuda" else torch.device("cpu")
    probe, taken = probe_for(device), []
    for _ in range(4 if setting.small else 40):
        started = time.perf_counter()
        probe.read()
        taken.append(time.perf_counter() - started)
        time.sleep(0.01 if setting.small else 0.12)
    words = f"median {1e6 * median(taken):,.0f} µs, slowest of {len(taken)} {1e6 * max(taken):,.0f} µs"
    return Result(words, {"probe": taken})


def _compare(setting: Setting, batch: int, steps: int) -> dict[str, list[float]]:
    """Seconds a step of each variant, one number a round; the first round is not counted."""
    make, accelerator = partial(cnn, batch=batch), setting.accelerator
    variants: dict[str, Turn] = {
        "bare loop": partial(bare_loop, make, steps, setting.device),
        "Lightning alone": lambda: turn(make, steps, [], False, accelerator)[0],
        "Lightning, our monitors": lambda: turn(make, steps, ours(), True, accelerator)[0],
        "train.py": partial(train_py, make, steps, accelerator),
        "Lightning's own monitors": lambda: turn(make, steps, lightnings_own(), True, accelerator)[0],
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(2 if setting.small else 8):
        for name in random.Random(round_).sample(list(variants), len(variants)):
            taken = variants[name]()
            if round_:
                seconds[name].append(taken)
    return seconds


def bare_loop(make: Callable, steps: int, device: str) -> float:
    """The same model, loader, optimizer and schedule, without a framework."""
    task, loader = make(steps, device=torch.device(device, 0) if device == "cuda" else torch.device(device))
    model = task.model.to(device, memory_format=torch.channels_last)
    optimizer = task.optimizer_recipe.build(model.parameters())
    schedule = task.optimizer_recipe.build_schedule(optimizer, steps + 1)
    started = 0.0
    for number, (x, y) in enumerate(loader):
        if number == WARM_UP:
            started = clock()
        if number == steps:
            break
        loss = F.cross_entropy(model(x.to(memory_format=torch.channels_last)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return (clock() - started) / (steps - WARM_UP)


def train_py(make: Callable, steps: int, accelerator: str) -> float:
    """Seconds a step with all default callbacks and loggers of train.py, from the same tensors."""
    outside = Clock(steps)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = default_trainer(folder, accelerator, [outside])
        trainer.fit(*make(steps, device=trainer.strategy.root_device))
    return outside.per_step[0]


def _ratio(seconds: dict[str, list[float]], one: str, other: str) -> float:
    return median([a / b for a, b in zip(seconds[one], seconds[other], strict=True)])


def _difference(seconds: dict[str, list[float]], one: str, other: str) -> float:
    return median([a - b for a, b in zip(seconds[one], seconds[other], strict=True)])


def _table(seconds: dict[str, list[float]]) -> str:
    lines = ["| step of | median | ÷ bare loop (middle half) | − bare loop | − Lightning alone |"]
    lines.append("| --- | ---: | --- | ---: | ---: |")
    for name, values in seconds.items():
        ratios = [a / b for a, b in zip(values, seconds["bare loop"], strict=True)]
        added = (f"{1e6 * _difference(seconds, name, base):+,.0f} µs" for base in ("bare loop", "Lightning alone"))
        lines.append(
            f"| {name} | {1e3 * median(values):.3f} ms | {median(ratios):.3f} ({middle_half(ratios)}) | {' | '.join(added)} |"
        )
    return "\n".join(lines)
