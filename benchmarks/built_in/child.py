"""One case of `cases.py` in this process: the verdict, then the check of the cause with a clock of its own."""

import contextlib
import dataclasses
import os
import statistics
import sys
import time
from datetime import timedelta
from itertools import pairwise
from typing import Any

import lightning
import torch
from harness import median
from lightning.pytorch.callbacks import Callback

from batchscope.callbacks import ThroughputMonitor

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
            self.ends.append(time.perf_counter())
            enough = len(self.ends) > SHORTEST and self.ends[-1] - self.ends[0] > TURN_S
            trainer.should_stop = trainer.should_stop or enough

    @property
    def seconds(self) -> float:
        """The lower quartile of the updates without the first: what disturbs a step only makes it longer."""
        return statistics.quantiles([after - before for before, after in pairwise(self.ends[1:])], n=4)[0]


def fit(parts: Any, callback: Callback, steps: int, seconds: float | None = None) -> None:
    module, loader, options = parts
    options = {"logger": False, **options, "callbacks": [callback, *options.get("callbacks", [])]}
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        lightning.Trainer(
            accelerator="cpu",
            max_steps=steps,
            max_time=timedelta(seconds=seconds) if seconds else None,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            use_distributed_sampler=False,
            **options,
        ).fit(module, loader)


def step_seconds(case: Case, **sizes: Any) -> float:
    clock = Clock()
    fit(case.make(**{**case.sizes, **sizes}), clock, TURN_STEPS)
    return clock.seconds


def balanced(case: Case) -> Case:
    """A mixed case with its halves set so that each takes `HALF_MS`."""
    if case.halves is None:
        return case
    nothing = step_seconds(case)
    sizes: dict[str, Any] = {}
    for half in case.halves:
        added = step_seconds(case, **{half: UNITS[half]}) - nothing
        times = UNITS[half] * HALF_MS / 1e3 / max(added, 1e-6)
        sizes[half] = times if half == "input" else max(1, round(times))
    return dataclasses.replace(case, sizes=sizes)


def verdict(case: Case, steps: int) -> dict[str, Any]:
    monitor = ThroughputMonitor(verbose=False)
    fit(case.make(**case.sizes), monitor, steps, MOST_S)
    return monitor.summary


def rate_of(amount: float, run: Any) -> float:
    """The best of several runs of a plain operation, in FLOPs or bytes a second."""
    run()
    taken = []
    for _ in range(8):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return amount / min(taken)


def product_rate() -> float:
    a = torch.randn(1024, 1024)
    out = torch.empty_like(a)
    return rate_of(2 * 1024**3, lambda: torch.mm(a, a, out=out))


def copy_rate() -> float:
    a = torch.ones(32 << 20)
    out = torch.empty_like(a)
    return rate_of(2 * a.nbytes, lambda: out.copy_(a))


def check(case: Case, rounds: int) -> dict[str, float]:
    """Ratios of the ablation and of the roofs, medians over rounds in which all take turns."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        base = step_seconds(case)
        if case.ablation is not None:
            found.setdefault("ablation", []).append(step_seconds(case, **case.ablation.sizes) / base)
        if case.flops is not None:
            found.setdefault("of torch.mm", []).append(case.flops / base / product_rate())
        if case.bytes is not None:
            found.setdefault("of copy_", []).append(case.bytes / base / copy_rate())
    return {name: median(values) for name, values in found.items()}


def run(case: Case, steps: int, rounds: int) -> dict[str, Any]:
    """The summary of the run, and the ratios of the check, of so many rounds."""
    case = balanced(case)
    summary = verdict(case, steps)
    print(f"{summary.get('bottleneck')}", file=sys.stderr, flush=True)
    return {"summary": summary, "sizes": dict(case.sizes), "checks": check(case, rounds), "bandwidth": copy_rate()}
