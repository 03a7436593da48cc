"""A device's calibration: measured once by microbenchmarks, while nothing else computes there, and kept in the user's cache.

The cache has one file for each combination of what `IDENTITY` names: the device, its driver, the version of torch, ….
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from .._system import affinity, user_and_group
from ..files import write_text
from ..records.formatting import percent
from ..records.terminal import say
from .calibration import IDENTITY, PRECISIONS, Calibration
from .devices import cache_bytes, check_computing, current, device_name
from .nvml_readings import UTILIZATION, gpu_queries, nvml_device
from .processor import MAX_SHARE, Noise, NoiseMeter, is_disturbed, usable_cores

SCHEMA = 8  # of the cached file and of the way in which it is measured
# How long a disturbed calibration is used: its rates are too low, but the runs of a sweep do not measure them again.
DISTURBED_S = 600
_PASSES_S = 1.5  # for the fastest microbenchmarks, after each was tried once
_PATIENCE_S = 600  # for a calibration in a subprocess, on a machine that is a hundred times slower than usual
_PROGRAM = """
import dataclasses, json, psutil, sys
process = psutil.Process()  # a thread that OpenMP has bound to one core passes on that one
if hasattr(process, "cpu_affinity"):
    process.cpu_affinity([*map(int, sys.argv[1].split(","))])
import torch
from batchscope.hardware.measure import load_or_measure
torch.set_num_threads(int(sys.argv[3]))
print(json.dumps(dataclasses.asdict(load_or_measure(torch.device(sys.argv[2])))))
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
    cores = ",".join(map(str, affinity()))
    line = [sys.executable, "-P", "-c", _PROGRAM, cores, str(device), str(torch.get_num_threads())]
    try:
        done = subprocess.run(
            line, check=True, timeout=_PATIENCE_S, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        return Calibration(**json.loads(done.stdout.splitlines()[-1]))
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
    Raises UserError as `check_computing`.
    """
    # Only the process that measures needs it.
    from .microbenchmarks import LAUNCHES, MEMORY, best_rates, microbenchmarks

    check_computing(device)
    cache = cache_bytes(device)
    load, meter = _gpu_load(device), NoiseMeter()
    with current(device), torch.inference_mode():
        rates = best_rates(microbenchmarks(device, cache), _PASSES_S)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        elif device.type == "mps":
            torch.mps.empty_cache()
    disturbed, launches = _disturbed(device, load, meter.read(), MEMORY in rates), rates.get(LAUNCHES)
    return Calibration(
        **identity(device),
        matmul_flops_per_sec={name: rates[name] for name in PRECISIONS if name in rates},
        memory_bytes_per_sec=rates.get(MEMORY),
        launch_us=1e6 / launches if launches else None,
        disturbed=disturbed,
        cache_bytes=cache,
    )


def _gpu_load(device: torch.device) -> float:
    """The share of a second in which an NVIDIA GPU computes for other processes; 0 where nobody tells."""
    shares = []
    with contextlib.suppress(Exception):  # NVML has an exception for each thing that can be missing
        read = gpu_queries(device)[UTILIZATION] if device.type == "cuda" else None
        while read and len(shares) < 5:
            time.sleep(0.2)
            shares.append(float(read()) / 100)  # pyrefly: ignore[bad-argument-type]
    return sum(shares) / len(shares) if shares else 0.0


def _disturbed(device: torch.device, gpu_load: float, noise: Noise, has_memory: bool = True) -> str | None:
    """What other processes did on the device; None where they did not matter.

    `has_memory`: whether there was memory to measure its bandwidth.
    """
    if gpu_load > MAX_SHARE:
        return f"other processes computed on the GPU in {percent(gpu_load)} of the second before the measurement"
    if device.type == "cuda" and not has_memory:
        return "other processes held the memory of the GPU during the measurement"
    if device.type == "cpu" and is_disturbed(noise):
        return f"other processes used {percent(noise.others_share)} of the CPU during the measurement"
    return None


def cached_calibration(device: torch.device) -> Calibration | None:
    """The device's calibration, if it was measured before with this driver and torch. Never measures.

    A cache that cannot be read counts as empty. A file that is no calibration is ignored, with one warning.
    """
    known = identity(device)
    for folder in _folders():
        file = folder / _file_name(known)
        try:
            found, age = Calibration(**json.loads(file.read_bytes())), time.time() - file.stat().st_mtime
        except OSError:
            continue
        except Exception:  # noqa: BLE001 - whatever a damaged file makes of JSON and of the calibration's values
            warnings.warn(f"{file} is damaged, and is ignored", stacklevel=2)
            continue
        if not found.disturbed or 0 <= age < DISTURBED_S:
            return found
    return None


def store(calibration: Calibration) -> None:
    """Write a calibration to the first cache folder that can be written, with an atomic write."""
    name = _file_name({key: getattr(calibration, key) for key in IDENTITY})
    for folder in _folders():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_text(folder / name, f"{json.dumps(dataclasses.asdict(calibration), indent=2)}\n")
            return


def identity(device: torch.device) -> dict[str, Any]:
    """What a measurement is of; a change in any value asks for a new measurement."""
    known: dict[str, Any] = dict.fromkeys(IDENTITY)
    known |= {"device": device.type, "device_name": device_name(device), "torch": torch.__version__}
    with contextlib.suppress(AttributeError, OSError):  # psutil has no such function on every system
        battery = psutil.sensors_battery()
        known["on_battery"] = None if battery is None or battery.power_plugged is None else not battery.power_plugged
    if device.type == "cpu":
        torch.zeros(2**17).add_(1)  # starts OpenMP's threads: before that, only the main one could tell its cores
        most = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA")
        known["driver"] = torch.backends.cpu.get_cpu_capability() + (f", oneDNN up to {most}" if most else "")
        return known | {"threads": torch.get_num_threads(), "cores": usable_cores()}
    if device.type == "mps":
        return known | {"driver": platform.mac_ver()[0] or None}
    if torch.version.hip:
        return known | {"driver": torch.version.hip}
    with contextlib.suppress(Exception):  # NVML has an exception for each thing that can be missing
        nvml, handle = nvml_device(device)
        known["driver"] = str(nvml.nvmlSystemGetDriverVersion())
        known["power_limit_w"] = nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
    return known


def _folders() -> Iterator[Path]:
    """The user's cache folder, and one of temporary files, for a home folder that is not there or cannot be written.

    The latter is not used where another user has made it.
    """
    with contextlib.suppress(RuntimeError):  # the system knows no home folder
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchscope"
    with contextlib.suppress(OSError, psutil.Error):  # nowhere can a temporary file be made, or nobody tells the user
        user, _ = user_and_group(psutil.Process())  # a number; on Windows a name, before which a domain may stand
        name = str(user).rpartition("\\")[2]
        folder = Path(tempfile.gettempdir()) / f"batchscope-{name}"
        if isinstance(user, str) or not folder.exists() or folder.lstat().st_uid == user:
            yield folder


def _file_name(known: Mapping[str, Any]) -> str:
    key = json.dumps([SCHEMA, *map(known.get, IDENTITY)])
    digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return f"calibration-{known['device']}-{digest}.json"
