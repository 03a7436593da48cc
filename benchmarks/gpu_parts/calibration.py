"""Part 2: the calibration, twice in fresh processes, beside torch's own timer and the datasheet; and the MFU."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from built_in.child import fit
from built_in.modules import Plain, linears, same
from torch.utils.benchmark import Timer

from batchscope.callbacks import ThroughputMonitor
from batchscope.hardware.calibration import PRECISIONS, Calibration
from batchscope.hardware.datasheet import datasheet
from batchscope.hardware.measure import load_or_measure

from . import Result, Setting

WITHIN = 0.05  # of each other: two calibrations
PROGRAM = """
import json, sys, torch
from batchscope.hardware.measure import calibrate
print(json.dumps(calibrate(torch.device(sys.argv[1])).to_dict()))
"""
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


def roofs(setting: Setting) -> Result:
    """Products, memory, launch and transfers: two calibrations, torch's timer, and what the datasheet states."""
    first = _rates(_calibrated(setting))
    second = first if setting.small else _rates(_calibrated(setting))
    timed, stated = timers(setting), _stated(setting)
    lines = ["| quantity | first | second | second ÷ first | torch.utils.benchmark | datasheet | best ÷ datasheet |"]
    lines.append("| --- " + "| ---: " * 6 + "|")
    above, apart = [], []
    for name, value in first.items():
        other, sheet = second.get(name, float("nan")), stated.get(name)
        best = max(value, other, timed.get(name, 0.0))
        cells = [_shown(name, each) for each in (value, other)] + [f"{other / value:.3f}"]
        cells += [_shown(name, timed.get(name)), _shown(name, sheet), f"{best / sheet:.2f}" if sheet else ""]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        apart += [name] if not abs(other / value - 1) <= WITHIN else []
        above += [name] if sheet and best > sheet else []
    claims = {
        f"two calibrations agree within {WITHIN:.0%} (not: {', '.join(apart) or 'none'})": not apart,
        f"nothing is above the datasheet (above: {', '.join(above) or 'none'})": not above,
    }
    return Result("\n".join(lines), {"first": first, "second": second, "timer": timed, "stated": stated}, claims)


def mfu(setting: Setting) -> Result:
    """The MFU of layers that are as large as the card likes best, at each precision: never above 1."""
    size, batch, steps = (64, 32, 8) if setting.small else (8192, 8192, 40)
    device = torch.device(setting.device)
    lines, data = ["| trainer.precision | step | FLOP/s | MFU |", "| --- | ---: | ---: | ---: |"], {}
    if not setting.small:
        load_or_measure(device)
    for precision, float32 in (
        ("32-true", "highest"),
        ("32-true", "high"),
        ("bf16-mixed", "highest"),
        ("16-mixed", "highest"),
    ):
        if setting.small and precision != "32-true":
            continue
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(float32)
        monitor = ThroughputMonitor(calibrate=False, verbose=False)
        module = Plain(linears(*[size] * 4, act=None, bias=False))
        try:
            batches = same(torch.randn(batch, size, device=device))
            fit((module, batches, {"precision": precision}), monitor, steps, None, setting.device)
        finally:
            torch.set_float32_matmul_precision(before)
        name = f"{precision}, float32 products at {float32!r}"
        found = data[name] = {key: monitor.summary.get(key) for key in ("step_ms_median", "flops_per_sec", "mfu")}
        shown = f"{found['flops_per_sec'] / 1e12:.4g} TFLOP/s" if found["flops_per_sec"] else ""
        lines.append(f"| {name} | {found['step_ms_median']:.3g} ms | {shown} | {found['mfu'] or float('nan'):.3f} |")
    known = [each["mfu"] for each in data.values() if each["mfu"] is not None]
    return Result("\n".join(lines), data, {"the MFU is known, and never above 1": bool(known) and max(known) <= 1})


def _calibrated(setting: Setting) -> Calibration:
    """A calibration in a fresh process."""
    line = [sys.executable, "-c", PROGRAM, setting.device]
    said = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Calibration.from_dict(json.loads(said.splitlines()[-1]))


def _rates(found: Calibration) -> dict[str, float]:
    """FLOP/s, bytes/s and operations/s by name."""
    rates = {f"products in {name}": found.matmul_flops_per_sec.get(name) for name in PRECISIONS}
    rates |= {"memory traffic": found.memory_bytes_per_sec, "host to device, pinned": found.h2d_bytes_per_sec}
    rates |= {"small operations": 1e6 / found.launch_us if found.launch_us else None}
    return {name: rate for name, rate in rates.items() if rate}


def _stated(setting: Setting) -> dict[str, float]:
    sheet = datasheet(torch.cuda.get_device_name()) if setting.device == "cuda" else None
    if sheet is None:
        return {}
    peaks = {f"products in {name}": rate for name, rate in sheet.flops_per_sec.items()}
    return peaks | {"memory traffic": sheet.memory_bytes_per_sec}


def timers(setting: Setting) -> dict[str, float]:
    """The same quantities by torch.utils.benchmark, one shape for each; memory traffic is a copy."""
    size, mib, device = (256, 8, setting.device) if setting.small else (8192, 1024, setting.device)
    seconds = partial(_seconds, 0.02 if setting.small else 0.5)
    found = {}
    for name, dtype in DTYPES.items():
        if name == "tf32" and device == "cpu":
            continue
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        found[f"products in {name}"] = 2 * size**3 / seconds(lambda a=a, b=b: torch.mm(a, b))
        torch.set_float32_matmul_precision(before)
    here, there = (torch.ones(mib * 2**18, device=device) for _ in range(2))
    found["memory traffic"] = 2 * here.nbytes / seconds(lambda: there.copy_(here))
    one = torch.zeros(1, device=device)
    found["small operations"] = 1 / seconds(lambda: one.neg_())
    if device == "cuda":
        host = torch.ones(mib * 2**16, pin_memory=True)
        place = torch.ones_like(host, device=device)
        found["host to device, pinned"] = host.nbytes / seconds(lambda: place.copy_(host))
    return found


def _seconds(least: float, work: Callable[[], Any]) -> float:
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=least).median


def _shown(name: str, rate: float | None) -> str:
    if not rate:
        return ""
    if name == "small operations":
        return f"{1e6 / rate:.2f} µs each"
    return f"{rate / 1e12:.1f} TFLOP/s" if "products" in name else f"{rate / 1e9:,.0f} GB/s"
