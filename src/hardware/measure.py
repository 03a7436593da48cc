"""A device's calibration, from the cache or measured: by microbenchmarks, while nothing else computes there."""

import contextlib
import json
import subprocess
import sys

import torch

from ..records.terminal import say
from .calibration import PRECISIONS, Calibration
from .calibration_cache import cached_calibration, identity, store
from .devices import cache_bytes

_PASSES_S = 1.5  # for the fastest microbenchmarks, after each was tried once
_PATIENCE_S = 600  # for a calibration in a subprocess, on a machine that is a hundred times slower than usual
_PROGRAM = """
import json, sys, torch
from batchscope.hardware.measure import load_or_measure
torch.set_num_threads(int(sys.argv[2]))
print(json.dumps(load_or_measure(torch.device(sys.argv[1])).to_dict()))
"""


def find_calibration(device: torch.device, measure: bool) -> Calibration | None:
    """The device's calibration from the cache. If there is none and `measure`, it is measured, which a line says.

    A process of its own measures, so that the measurement's memory (0.6 GiB on a CPU) is not in the peak of this one.
    Where there can be no such process, or it cannot use the device beside this one, this process measures.
    """
    found = cached_calibration(device)
    if found is not None or not measure:
        return found
    say(f"measuring what this {device.type} can do; once, some seconds …")
    line = [sys.executable, "-c", _PROGRAM, str(device), str(torch.get_num_threads())]
    try:
        done = subprocess.run(
            line, check=True, timeout=_PATIENCE_S, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        return Calibration.from_dict(json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, IndexError):
        return load_or_measure(device)


def load_or_measure(device: torch.device) -> Calibration:
    """The device's calibration, from the cache or measured by this process, which takes a few seconds."""
    found = cached_calibration(device)
    if found is None:
        found = calibrate(device)
        store(found)
    return found


def calibrate(device: torch.device) -> Calibration:
    """Measure what a device can do, which takes a few seconds.

    torch's random states and its TF32 switches stay as they are; the peak of its memory statistics grows.
    """
    # Only the process that measures needs these.
    from .contention import Contention
    from .microbenchmarks import LAUNCHES, MEMORY, TRANSFERS, microbenchmarks
    from .timing import best_rates

    cache = cache_bytes(device)
    on_device = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with on_device, torch.inference_mode(), Contention(device) as others:
        rates = best_rates(microbenchmarks(device, cache), _PASSES_S)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    launches = rates.get(LAUNCHES)
    return Calibration(
        **identity(device),
        matmul_flops_per_sec={name: rates[name] for name in PRECISIONS if name in rates},
        memory_bytes_per_sec=rates.get(MEMORY),
        launch_us=1e6 / launches if launches else None,
        h2d_bytes_per_sec=rates.get(TRANSFERS),
        disturbed=others.finding,
        cache_bytes=cache,
    )
