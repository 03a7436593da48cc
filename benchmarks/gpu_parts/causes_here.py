"""Part 6: the verdict on causes that are built in, and predictions of this card held against measurements."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import causes as comparison
import numpy as np
import torch
from built_in.on_gpu import gpu_cases
from device_choice.measurements import read
from harness import median
from torch.nn import functional as F

from batchscope.choice.kernels import predict
from batchscope.choice.measured import read_trainings
from batchscope.choice.step import step_on
from batchscope.hardware.datasheet import datasheet
from batchscope.hardware.microbenchmarks import Microbenchmark

from . import Result, Setting
from .sweeps import SMALL

LEAST_RIGHT, LEAST_COVERED = 0.9, 0.6  # of the verdicts; of intervals that promise 80 %
CHOOSE_SIZES = (64, 512, 4096)
ROWS, WIDTHS = (4096, 16384, 65536), (768, 1024, 4096)


def causes(setting: Setting) -> Result:
    """Each case in a process of its own, as in `benchmarks/causes.py`; the checks of the causes run on this device, too."""
    cases = gpu_cases(setting.device, small=setting.small)
    threads = 1 if setting.small else min(8, os.cpu_count() or 1)
    folder = setting.work / "causes"
    folder.mkdir(parents=True, exist_ok=True)
    how = (threads, 8, 1) if setting.small else (threads, 60, 1)
    if not setting.small:
        calibrated = comparison.in_a_process("", threads, 0, 0, str(folder), setting.device)
        if "error" in calibrated:
            raise RuntimeError(calibrated["error"])
    results = {}
    for name, case in cases.items():
        if setting.small:  # in this process: each of its own would import torch again
            from built_in.child import run

            found = run(case, 8, 1, setting.device, most_s=0.5)
        else:
            found = comparison.in_a_process(name, *how, str(folder), setting.device)
        if setting.small and "error" in found:
            raise RuntimeError(f"{name}: {found['error']}")
        results[name, threads] = [comparison.judge(case, found)]
    runs = [each for found in results.values() for each in found]
    right = sum(run["right"] for run in runs)
    against = [name for (name, _), found in results.items() if found[0]["contradictions"]]
    claims = {
        f"{LEAST_RIGHT:.0%} of the verdicts are right ({right} of {len(runs)})": right >= LEAST_RIGHT * len(runs),
        f"no verdict contradicts its own numbers ({', '.join(against) or 'none'})": not against,
    }
    data = [{"case": name, "threads": threads, "runs": found} for (name, threads), found in results.items()]
    return Result(comparison.table(results, cases), data, claims)


def choose(setting: Setting) -> Result:
    """`batchscope choose` with both devices measured: each predicted from the other, and held against its own steps."""
    sizes = "8,16" if setting.small else ",".join(map(str, CHOOSE_SIZES))
    options = ["model=cnn", *setting.data(32), f"data.batch_size={sizes}"]
    options += [SMALL[1]] if setting.small else []  # the calibration is needed
    line = [sys.executable, "-m", "batchscope", "choose", *options, "--epochs", "10"]
    done = subprocess.run(
        line, cwd=setting.work, env={**os.environ, "COLUMNS": "120"}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
    ((training,), _) = read_trainings([setting.work / done.stdout.splitlines()[-1].removeprefix("measured ")])
    checks = []
    for card in (source for source in training.sources if source.device.kind == "cuda"):
        for source in (source for source in training.sources if source is not card):
            for size, measured in card.sizes.items():
                predicted = step_on(source, card.device, size).seconds
                holds = predicted.low <= measured.seconds.middle <= predicted.high
                checks.append(
                    {
                        "batch_size": size,
                        "predicted_s": predicted.ends(),
                        "measured_s": measured.seconds.middle,
                        "holds": holds,
                    }
                )
    held = sum(check["holds"] for check in checks)
    claims = {
        f"this card's steps lie in what the CPU's steps predict ({held} of {len(checks)})": 0 < len(checks) == held
    }
    return Result(f"```text\n{done.stdout.strip()}\n```", {"checks": checks}, claims)


def kernels(setting: Setting) -> Result:
    """Single operations by the package's coefficients, which public measurements of other cards gave, and as measured."""
    folder = setting.work / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "devices.csv", [_device_row(setting)])
    _write(folder / "kernels.csv", _measured(setting))
    kept = setting.out / "kernels"
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(folder, kept)
    cases: dict[str, list[tuple[float, bool]]] = {}
    for work, device, seconds in read(folder).rows:
        low, middle, high = map(float, predict([work], device)[:, 0])
        cases.setdefault(work.kind, []).append((middle / seconds, low <= seconds <= high))
    lines = ["| kind | operations | median error | predicted ÷ measured | intervals that hold |"]
    lines.append("| --- " + "| ---: " * 4 + "|")
    for kind, found in cases.items():
        ratios = [ratio for ratio, _ in found]
        error, bias = median([abs(ratio - 1) for ratio in ratios]), float(np.exp(median(list(np.log(ratios)))))
        covered = sum(holds for _, holds in found) / len(found)
        lines.append(f"| {kind} | {len(found)} | {error:.0%} | {bias:.2f} | {covered:.0%} |")
    every = [holds for found in cases.values() for _, holds in found]
    share = sum(every) / max(1, len(every))
    claims = {f"{LEAST_COVERED:.0%} of the 80 % intervals hold ({share:.0%} of {len(every)})": share >= LEAST_COVERED}
    return Result("\n".join(lines), {"cases": cases}, claims)


def _device_row(setting: Setting) -> dict[str, Any]:
    """This card's line of devices.csv; numbers without a meaning for the CPU of a rehearsal."""
    if setting.device == "cpu":
        return {"device": "rehearsal", "bandwidth_gb_s": 20, "fp32_gflop_s": 200}
    properties, sheet = torch.cuda.get_device_properties(0), datasheet(torch.cuda.get_device_name())
    if sheet is None:
        raise RuntimeError(f"no datasheet of {torch.cuda.get_device_name()} in devices.yaml")
    row = {"device": sheet.names[0], "memory_gb": sheet.memory_gib, "bandwidth_gb_s": sheet.memory_bytes_per_sec / 1e9}
    row |= {"sms": properties.multi_processor_count, "cores_per_sm": sheet.cores_per_sm, "mhz": sheet.clock_mhz}
    return row | {"fp32_gflop_s": sheet.flops_per_sec["fp32"] / 1e9, "l2_mb": sheet.l2_mib, "tdp_w": sheet.tdp_w}


def _measured(setting: Setting) -> list[dict[str, Any]]:
    """Rows of kernels.csv: float32, each the best of many blocks, without the host's launch where the kernel is longer."""
    shrink = 64 if setting.small else 1
    name = _device_row(setting)["device"]

    def made(*shape: int) -> torch.Tensor:
        return torch.rand(*(max(8, size // shrink) for size in shape), device=setting.device) + 0.5

    rows = []

    def add(op: str, dims: dict[str, int], run: Any) -> None:
        kernel = Microbenchmark(1.0, lambda: run)
        kernel.time_for(0.005 if setting.small else 0.1)
        small = {key: max(8, size // shrink) for key, size in dims.items()}
        rows.append(
            {"op": op, "B": "", "M": "", "N": "", "K": "", "H": "", **small, "device": name, "ms": 1e3 / kernel.rate}
        )

    for m, n, k in ((1024, 1024, 1024), (4096, 4096, 1024), (8192, 4096, 4096), (2048, 768, 3072), (16384, 1024, 1024)):
        a, w, bias = made(m, k), made(n, k), made(n)
        add("linear", {"M": m, "N": n, "K": k}, lambda a=a, w=w, bias=bias: F.linear(a, w, bias))
    for b, m, n, k in ((64, 512, 512, 64), (96, 1024, 1024, 128), (16, 2048, 2048, 512)):
        a, w = made(b, m, k), made(b, k, n)
        add("bmm", {"B": b, "M": m, "N": n, "K": k}, lambda a=a, w=w: torch.bmm(a, w))
    for b in ROWS:
        for h in WIDTHS:
            x, y, weight = made(b, h), made(b, h), made(h)
            each = {"add": lambda x=x, y=y: x + y, "tanh": lambda x=x: x.tanh(), "relu": lambda x=x: x.relu()}
            each |= {"softmax": lambda x=x: x.softmax(-1), "ln": lambda x=x, w=weight: F.layer_norm(x, w.shape, w, w)}
            for op, run in each.items():
                add(op, {"B": b, "H": h}, run)
    return rows


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
