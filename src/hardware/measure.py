"""Measure a device: products, memory, transfers, and the cost of issuing an operation.

`works.py` has what is measured, and `timing.py` how.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ..records.terminal import say
from .calibration import PRECISIONS, Calibration
from .calibration_cache import cached_calibration, identity, store
from .contention import Contention
from .devices import cache_bytes
from .timing import Effort, Say, best_rates
from .works import works

FULL = Effort(seconds=1.5, turn_s=0.02, slowest_run_s=0.06)
QUICK = Effort(seconds=0.3, turn_s=0.01, slowest_run_s=0.03)
_PATIENCE_S = 600  # for a calibration in a subprocess, on a machine that is a hundred times slower than usual


def load_or_measure(device: torch.device) -> Calibration:
    """The device's calibration, from the cache or measured now, which takes a few seconds."""
    found = cached_calibration(device)
    if found is None:
        found = calibrate(device)
        store(found)
    return found


def find_calibration(device: torch.device, measure: bool) -> Calibration | None:
    """The device's calibration from the cache; if there is none and `measure`, it is measured, which a line says."""
    found = cached_calibration(device)
    if found is None and measure:
        say(f"measuring what this {device.type} can do; once, some seconds …")
        found = calibrate_in_subprocess(device)
    return found


def calibrate_in_subprocess(device: torch.device) -> Calibration:
    """`load_or_measure` without the measurement's memory (0.6 GiB on a CPU) in the peak of this process.

    Where there can be no such process, or it cannot use the device beside this one, this process measures.
    """
    line = [sys.executable, "-c", _PROGRAM, str(device), str(torch.get_num_threads())]
    try:
        done = subprocess.run(
            line, check=True, timeout=_PATIENCE_S, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        return Calibration.from_dict(json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, IndexError):
        return load_or_measure(device)


_PROGRAM = """
import json, sys, torch
from batchscope.hardware.measure import load_or_measure
torch.set_num_threads(int(sys.argv[2]))
print(json.dumps(load_or_measure(torch.device(sys.argv[1])).to_dict()))
"""


def calibrate(device: torch.device, quick: bool = False, say: Say = lambda line: None) -> Calibration:
    """Measure what a device can do; takes a few seconds, and with `quick` less than two, at less accuracy.

    torch's random states and its TF32 switches stay as they are; the peak of its memory statistics grows. `say` is called
    with what is being measured.
    """
    known = identity(device)
    cache = cache_bytes(device)
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device, torch.inference_mode(), Contention(device) as others:
        effort = QUICK if quick else FULL
        rates = best_rates(works(device, cache), effort, lambda line: say(f"measuring {device.type}: {line}"))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return as_calibration(known, rates, others.finding, cache)


def as_calibration(
    known: Mapping[str, Any], rates: Mapping[str, float], disturbed: str | None = None, cache: int | None = None
) -> Calibration:
    """Measured rates, by the names of `works`, as a Calibration of what `known` identifies."""
    launches, faults = rates.get("small operations"), rates.get("page faults")
    traffic = [rates[name] for name in ("memory copy", "memory traffic") if name in rates]
    products = {name: rates[f"products in {name}"] for name in PRECISIONS if f"products in {name}" in rates}
    return Calibration(
        **known,
        matmul_flops_per_sec=products,
        copy_bytes_per_sec=rates.get("memory copy"),
        launch_us=1e6 / launches if launches else None,
        h2d_bytes_per_sec=rates.get("host to device"),
        h2d_pinned_bytes_per_sec=rates.get("host to device, pinned"),
        d2h_bytes_per_sec=rates.get("device to host"),
        d2h_pinned_bytes_per_sec=rates.get("device to host, pinned"),
        disturbed=disturbed,
        memory_bytes_per_sec=max(traffic, default=None),
        page_fault_us=1e6 / faults if faults else None,
        cache_bytes=cache,
    )
