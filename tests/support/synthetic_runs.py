"""Run records as train.py would have left them, of steps whose time is a known function of the batch size."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from batchscope.records.read import SCHEMA
from batchscope.records.step_parts import PARTS
from batchscope.records.step_times import StepTimes, thinned, write_step_times


def serial(floor_ms: float, slope_ms: float) -> Callable[[int], float]:
    return lambda b: floor_ms + slope_ms * b


def overlapped(floor_ms: float, slope_ms: float, p: float = 3.0) -> Callable[[int], float]:
    return lambda b: (floor_ms**p + (slope_ms * b) ** p) ** (1 / p)


def write_run(
    folder: Path,
    batch_size: int = 64,
    step_ms: float | None = None,
    *,
    model: str = "cnn",
    device: str = "cpu",
    device_name: str | None = None,
    status: str = "finished",
    error: str | None = None,
    seed: int = 0,
    options: dict[str, Any] | None = None,
    metrics: dict[str, float] | None = None,
    steps: int | None = None,
    throughput: dict[str, Any] | None = None,
    hardware: dict[str, Any] | None = None,
    train_samples: int = 55000,
    parts: tuple[float, ...] = (0.02, 0.03, 0.3, 0.5, 0.1, 0.05),
    rerun: dict[str, Any] | None = None,
    versions: dict[str, str] | None = None,
) -> Path:
    """One run; `options` sets config values by dotted name, `parts` are shares of the step."""
    config: dict[str, Any] = {
        "seed": seed,
        "run_dir": str(folder),
        "model": {"_target_": f"batchscope.models.{model}", "hidden_size": 128},
        "data": {
            "_target_": "batchscope.data.mnist.MNIST",
            "batch_size": batch_size,
            "pipeline": "memory",
            "seed": seed,
        },
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 0.004},
        "trainer": {"accelerator": "auto", "precision": "32-true", "max_epochs": 2, "accumulate_grad_batches": 1},
        "callbacks": {"checkpoint": {"dirpath": f"{folder}/checkpoints"}},
    }
    for name, value in (options or {}).items():
        group, _, key = name.partition(".")
        (config[group] if key else config)[key or group] = value
    record = {
        "schema": SCHEMA,
        "status": status,
        "overrides": [f"data.batch_size={batch_size}"],
        "choices": {"model": model, "data": "mnist", "optimizer": "adamw", "trainer": "default"},
        "config": config,
        "hardware": {
            "device": device,
            "device_name": device_name or {"cpu": "A CPU", "cuda": "A GPU"}[device],
            "torch_threads": 2,
            "memory_gib": 16.0,
            **(hardware or {}),
        },
        "versions": versions or {"torch": "2.9.0"},
    }
    if status != "running":
        record["seconds"] = 30.0
    record |= {key: value for key, value in (("error", error), ("rerun", rerun)) if value}
    if status == "finished":
        record["dataset"] = {"name": "mnist", "fingerprint": "0", "train_samples": train_samples}
        record["metrics"] = metrics or {}
        record["steps"] = steps or 110000 // batch_size
    if step_ms is not None:
        record["throughput"] = {
            "batch_size": batch_size,
            "step_ms": step_ms,
            "step_ms_median": step_ms,
            "step_ms_p10": 0.95 * step_ms,
            "step_ms_p90": 1.1 * step_ms,
            "parts_ms": {part: share * step_ms for part, share in zip(PARTS, parts, strict=True)},
            **(throughput or {}),
        }
        if "samples_per_sec" not in record["throughput"]:
            record["throughput"]["samples_per_sec"] = _rate(record["throughput"], config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    return folder


def _rate(throughput: dict[str, Any], config: dict[str, Any]) -> float:
    """Of all devices: the samples of a whole batch over the median step."""
    samples = throughput["batch_size"] * config["trainer"]["accumulate_grad_batches"] * throughput.get("processes", 1)
    return 1e3 * samples / throughput["step_ms_median"]


def write_sweep(folder: Path, sizes: list[int], t: Callable[[int], float], first: int = 0, **facts: Any) -> Path:
    """A run a size, in folders numbered from `first`."""
    for number, size in enumerate(sizes, first):
        write_run(folder / str(number), size, t(size), **facts)
    return folder


def write_curve(folder: Path, points: list[tuple[int, float]], step_ms: float, metric: str = "val/acc") -> None:
    """`csv/metrics.csv` with a step time at every step, and after some a validation, which Lightning counts from 0."""
    values = dict(points)
    lines = [f"epoch,step,time/step_ms,{metric}"]
    for step in range(1, max(values) + 1):
        lines.append(f"0,{step},{step_ms},")
        if step in values:
            lines.append(f"0,{step - 1},,{values[step]}")
    (folder / "csv").mkdir(exist_ok=True)
    (folder / "csv" / "metrics.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_steps(
    folder: Path,
    step_ms: Sequence[Sequence[float]],
    *,
    rounds: Sequence[int] | None = None,
    shares: Sequence[float] = (0.02, 0.03, 0.3, 0.5, 0.1, 0.05),
    disturbed: Sequence[int] = (),
    others: float = math.nan,
) -> Path:
    """`steps.npz` of a run's folder: the steps of each window, its pass, the windows that were disturbed, and the
    share of the processor that other programs took.
    """
    steps = np.array([ms for window in step_ms for ms in window]) / 1e3
    count = len(step_ms)
    parts, every = thinned(steps[:, None] * np.array(shares))
    times = StepTimes(
        step_s=steps,
        window=np.cumsum([0, *(len(window) for window in step_ms[:-1])]),
        pass_=np.array(rounds if rounds is not None else [-1] * count),
        start_unix=np.arange(count, dtype=float),
        others_share=np.full(count, others),
        disturbed=np.array([float(number in disturbed) for number in range(count)]),
        parts_s=parts,
        parts_every=every,
    )
    write_step_times(folder, times)
    return folder


def write_measured(
    folder: Path,
    step_ms: Mapping[int, float],
    *,
    first: int = 0,
    windows: int = 12,
    noise: float = 0.003,
    drift: float = 0.02,
    passes: bool = True,
    others: float = math.nan,
    seed: int = 0,
    test_samples: int | None = None,
    **facts: Any,
) -> Path:
    """A run with windows for each size, in folders numbered from `first`; the time of a step by size.

    Args:
        windows: of each run.
        noise, drift: the standard deviation of a window, and of the change from one pass to the next, in logs.
        passes: whether the runs were visited side by side.
        others: the share of the processor that other programs took.
        test_samples: on which the test metrics were measured.
        facts: of `write_run`; a function gets the size.
    """
    random = np.random.default_rng(seed)
    drifts = np.cumsum(random.normal(0, drift, windows))
    for number, (size, ms) in enumerate(step_ms.items(), first):
        own = {name: fact(size) if callable(fact) else fact for name, fact in facts.items()}
        run = write_run(folder / str(number), size, ms, seed=seed, **own)
        if test_samples:
            change_record(run, evaluated={"test": test_samples}, epochs=1)
        times = ms * np.exp(drifts + random.normal(0, noise, windows))
        write_steps(run, [[t] * 5 for t in times], rounds=range(windows) if passes else None, others=others)
    return folder


def change_record(folder: Path, **facts: Any) -> None:
    """Set values of the record of a run."""
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    (folder / "run.json").write_text(json.dumps({**record, **facts}), encoding="utf-8")
