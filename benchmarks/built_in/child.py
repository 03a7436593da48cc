"""One case of `cases.py` in this process: the verdict, then the check of the cause with a clock of its own."""

import contextlib
import dataclasses
import os
import statistics
import sys
from datetime import timedelta
from itertools import pairwise
from typing import Any

import lightning
import torch
from harness import median
from lightning.pytorch.callbacks import Callback

from batchscope.callbacks import ThroughputMonitor
from batchscope.hardware.microbenchmarks import clock

from .case import Case

MOST_S = 10.0  # of the run that gets the verdict
TURN_S, TURN_STEPS = 1.5, 12  # of a turn in a check
SHORTEST = 5  # steps of a turn, whatever they take
HALF_MS = 20.0  # of a mixed step
UNITS = {"memory": 2, "compute": 4, "host": 8, "input": 10}  # what is timed of a half before it is set


class Clock(Callback):
    """Seconds from the end of each update to the end of the next one."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.step = 0

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step != self.step:
            self.step = trainer.global_step
            self.ends.append(clock())  # waits for a GPU, which runs behind the host
            enough = len(self.ends) > SHORTEST and self.ends[-1] - self.ends[0] > TURN_S
            trainer.should_stop = trainer.should_stop or enough

    @property
    def seconds(self) -> float:
        """The lower quartile of the updates without the first: what disturbs a step only makes it longer."""
        return statistics.quantiles([after - before for before, after in pairwise(self.ends[1:])], n=4)[0]


def fit(parts: Any, callback: Callback, steps: int, seconds: float | None = None, device: str = "cpu") -> None:
    module, loader, options = parts
    options = {"logger": False, **options, "callbacks": [callback, *options.get("callbacks", [])]}
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        lightning.Trainer(
            accelerator="cpu" if device == "cpu" else "gpu",
            devices=1,
            max_steps=steps,
            max_time=timedelta(seconds=seconds) if seconds else None,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            use_distributed_sampler=False,
            **options,
        ).fit(module, loader)


def step_seconds(case: Case, device: str, **sizes: Any) -> float:
    outside = Clock()
    fit(case.make(**{**case.sizes, **sizes}), outside, TURN_STEPS, device=device)
    return outside.seconds


def balanced(case: Case, device: str) -> Case:
    """A mixed case with its halves set so that each takes `HALF_MS`."""
    if case.halves is None:
        return case
    nothing = step_seconds(case, device)
    sizes: dict[str, Any] = {}
    for half in case.halves:
        added = step_seconds(case, device, **{half: UNITS[half]}) - nothing
        times = UNITS[half] * HALF_MS / 1e3 / max(added, 1e-6)
        sizes[half] = times if half == "input" else max(1, round(times))
    return dataclasses.replace(case, sizes=sizes)


def verdict(case: Case, steps: int, device: str, most_s: float) -> dict[str, Any]:
    monitor = ThroughputMonitor(verbose=False, calibrate=most_s >= MOST_S)
    fit(case.make(**case.sizes), monitor, steps, most_s, device)
    return monitor.summary


def rate_of(amount: float, run: Any) -> float:
    """The best of several runs of a plain operation, in FLOPs or bytes a second."""
    run()
    taken = []
    for _ in range(8):
        start = clock()
        run()
        taken.append(clock() - start)
    return amount / min(taken)


def product_rate(device: str) -> float:
    size = 1024 if device == "cpu" else 8192
    a = torch.randn(size, size, device=device)
    out = torch.empty_like(a)
    return rate_of(2 * size**3, lambda: torch.mm(a, a, out=out))


def copy_rate(device: str) -> float:
    a = torch.ones(32 << 20 if device == "cpu" else 1 << 28, device=device)
    out = torch.empty_like(a)
    return rate_of(2 * a.nbytes, lambda: out.copy_(a))


def check(case: Case, rounds: int, device: str) -> dict[str, float]:
    """Ratios of the ablation and of the roofs, medians over rounds in which all take turns."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        base = step_seconds(case, device)
        if case.ablation is not None:
            found.setdefault("ablation", []).append(step_seconds(case, device, **case.ablation.sizes) / base)
        if case.flops is not None:
            found.setdefault("of torch.mm", []).append(case.flops / base / product_rate(device))
        if case.bytes is not None:
            found.setdefault("of copy_", []).append(case.bytes / base / copy_rate(device))
    return {name: median(values) for name, values in found.items()}


def run(case: Case, steps: int, rounds: int, device: str = "cpu", most_s: float = MOST_S) -> dict[str, Any]:
    """The summary of the run, and the ratios of the check, of so many rounds. `most_s` bounds the run."""
    case = balanced(case, device)
    summary = verdict(case, steps, device, most_s)
    print(f"{summary.get('bottleneck')}", file=sys.stderr, flush=True)
    checks, bandwidth = check(case, rounds, device), copy_rate(device)
    return {"summary": summary, "sizes": dict(case.sizes), "checks": checks, "bandwidth": bandwidth}
