"""Run records as train.py would have left them, of steps whose times a test chooses."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from batchscope.records.read import SCHEMA
from batchscope.records.step_parts import PARTS
from batchscope.records.step_times import StepTimes, write_step_times

SHARES = (0.02, 0.03, 0.3, 0.5, 0.1, 0.05)  # of the parts of a step


def write_run(
    folder, batch_size=64, step_ms=None, *, model="cnn", device="cpu", status="finished", seed=0, **facts
) -> Path:
    """One run. `facts` are values of the record; `options` config values by dotted name, `parts` shares of the step."""
    options, hardware, throughput = (facts.pop(name, None) or {} for name in ("options", "hardware", "throughput"))
    config = {
        "seed": seed,
        "model": {"_target_": f"batchscope.models.{model}", "hidden_size": 128},
        "data": {"_target_": "batchscope.data.mnist.MNIST", "batch_size": batch_size, "pipeline": "memory"},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.004},
        "trainer": {"accelerator": "auto", "precision": "32-true", "max_epochs": 2, "accumulate_grad_batches": 1},
        "callbacks": {"checkpoint": {"monitor": "val/loss"}},
    }
    for name, value in {"data.seed": seed, **options}.items():
        group, _, key = name.partition(".")
        (config[group] if key else config)[key or group] = value
    name = facts.pop("device_name", None) or {"cpu": "A CPU", "cuda": "A GPU"}[device]
    known = {"device": device, "device_name": name, "torch_threads": 2, "memory_gib": 16.0}
    record = {
        "schema": SCHEMA,
        "status": status,
        "overrides": [f"data.batch_size={batch_size}"],
        "choices": {"model": model, "data": "mnist", "optimizer": "adamw", "trainer": "default"},
        "config": config,
        "hardware": known | hardware,
        "versions": {"torch": "2.9.0"},
        "seconds": 30.0,
    }
    if status == "finished":
        record["dataset"] = {"name": "mnist", "fingerprint": "0", "train_samples": facts.pop("train_samples", 55000)}
        record |= {"metrics": {}, "steps": 110000 // batch_size}
    if step_ms is not None:
        measured = {"batch_size": batch_size, "step_ms": step_ms, "step_ms_median": step_ms}
        measured |= {"step_ms_p10": 0.95 * step_ms, "step_ms_p90": 1.1 * step_ms}
        shares = facts.pop("parts", SHARES)
        measured["parts_ms"] = {part: share * step_ms for part, share in zip(PARTS, shares, strict=True)}
        measured |= throughput
        samples = measured["batch_size"] * config["trainer"]["accumulate_grad_batches"] * measured.get("processes", 1)
        record["throughput"] = {"samples_per_sec": 1e3 * samples / measured["step_ms_median"], **measured}
    folder.mkdir(parents=True, exist_ok=True)
    record |= {key: value for key, value in facts.items() if value is not None}
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    return folder


def change_record(folder: Path, **facts: Any) -> None:
    """Set values of the record of a run."""
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    (folder / "run.json").write_text(json.dumps({**record, **facts}), encoding="utf-8")


def write_sweep(folder: Path, sizes: list[int], t: Callable[[int], float]) -> Path:
    """A run without single steps for each size."""
    return write_measured(folder, {size: t(size) for size in sizes}, windows=0)


def write_steps(folder, step_ms: Sequence[Sequence[float]], *, rounds=None, others=math.nan, disturbed=0.0) -> Path:
    """`steps.npz` of a run's folder: the steps of each window, its pass, and what other programs took and disturbed.

    The last two are numbers, or have one for each window.
    """
    steps = np.array([ms for window in step_ms for ms in window]) / 1e3
    count = len(step_ms)
    times = StepTimes(
        step_s=steps,
        window=np.cumsum([0, *(len(window) for window in step_ms[:-1])]),
        pass_=np.array([-1] * count if rounds is None else list(rounds)),
        start_unix=np.arange(count, dtype=float),
        others_share=np.full(count, others),
        disturbed=np.full(count, disturbed),
    )
    write_step_times(folder, times)
    return folder


def write_measured(
    folder, step_ms, *, first=0, windows=12, noise=0.003, drift=0.02, passes=True, others=math.nan, seed=0, **facts
) -> Path:
    """A run for each size, in folders numbered from `first`, of windows that deviate by `noise` (SD, in logs).

    Args:
        step_ms: the time of a step by size.
        windows: of each run; 0 for no single steps.
        drift: the standard deviation of the change from one pass to the next, in logs.
        passes: whether the runs were visited side by side.
        others: the share of the processor that other programs took.
        facts: of `write_run`; a function gets the size.
    """
    random = np.random.default_rng(seed)
    drifts = np.cumsum(random.normal(0, drift, windows))
    for number, (size, ms) in enumerate(step_ms.items(), first):
        own = {name: fact(size) if callable(fact) else fact for name, fact in facts.items()}
        run = write_run(folder / str(number), size, ms, seed=seed, **own)
        if windows:
            times = ms * np.exp(drifts + random.normal(0, noise, windows))
            write_steps(run, [[t] * 5 for t in times], rounds=range(windows) if passes else None, others=others)
    return folder


def write_rates(folder: Path, rates: Mapping[int, float], **facts: Any) -> Path:
    """The same by the samples/s of each size."""
    return write_measured(folder, {size: 1e3 * size / rate for size, rate in rates.items()}, **facts)
