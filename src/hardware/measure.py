"""The calibration of a device: microbenchmarks measure it once, on an idle device, and the user's cache keeps it.

The cache has one file for each combination of the values of `IDENTITY`: the device, its driver, the version of torch, ….
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
from .devices import as_current_device, cache_bytes, check_computing, device_name
from .nvml_readings import UTILIZATION, gpu_queries, nvml_device
from .processor import MAX_SHARE, Noise, NoiseMeter, is_disturbed, usable_cores

SCHEMA = 8  # of the cached file and of the method of measurement
# How long a disturbed calibration is used. Its rates are too low, but the runs of a sweep do not repeat the measurement.
DISTURBED_S = 600
_PASSES_S = 1.5  # for the fastest microbenchmarks, after each has run once
_TIMEOUT_S = 600  # of a calibration in a subprocess; allows for a machine a hundred times slower than usual
_PROGRAM = """
import dataclasses, json, psutil, sys
process = psutil.Process()  # a thread that OpenMP has bound to a core passes on only that one
if hasattr(process, "cpu_affinity"):
    process.cpu_affinity([*map(int, sys.argv[1].split(","))])
import torch
from batchscope.hardware.measure import load_or_measure
torch.set_num_threads(int(sys.argv[3]))
print(json.dumps(dataclasses.asdict(load_or_measure(torch.device(sys.argv[2])))))
"""


def find_calibration(device: torch.device, measure: bool) -> Calibration | None:
    """Return the device's calibration from the cache. If there is none and `measure` is true, measure it and print a line.

    A subprocess measures, so that the measurement's memory (0.6 GiB on a CPU) is not in this process's peak. If the subprocess
    cannot start, or cannot use the device beside this process, this process measures.
    """
    cached = cached_calibration(device)
    if cached is not None or not measure:
        return cached
    say(f"measuring what this {device.type} can do; once, some seconds …")
    cores = ",".join(map(str, affinity()))
    command = [sys.executable, "-P", "-c", _PROGRAM, cores, str(device), str(torch.get_num_threads())]
    try:
        result = subprocess.run(
            command, check=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        return Calibration(**json.loads(result.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, IndexError):
        return load_or_measure(device)


def load_or_measure(device: torch.device) -> Calibration:
    """Return the device's calibration from the cache, or measure it in this process, which takes a few seconds."""
    calibration = cached_calibration(device)
    if calibration is None:
        calibration = calibrate(device)
        store(calibration)
    return calibration


def calibrate(device: torch.device) -> Calibration:
    """Measure the rates of a device, which takes a few seconds.

    torch's random states and TF32 switches do not change; the peak of its memory statistics may grow.
    Raise UserError as `check_computing`.
    """
    # Imported here, since only the measuring process needs it.
    from .microbenchmarks import LAUNCHES, MEMORY, best_rates, microbenchmarks

    check_computing(device)
    cache = cache_bytes(device)
    load, meter = _measure_gpu_load(device), NoiseMeter()
    with as_current_device(device), torch.inference_mode():
        rates = best_rates(microbenchmarks(device, cache), _PASSES_S)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        elif device.type == "mps":
            torch.mps.empty_cache()
    disturbed, launches = _describe_disturbance(device, load, meter.read(), MEMORY in rates), rates.get(LAUNCHES)
    return Calibration(
        **identity(device),
        matmul_flops_per_sec={name: rates[name] for name in PRECISIONS if name in rates},
        memory_bytes_per_sec=rates.get(MEMORY),
        launch_us=1e6 / launches if launches else None,
        disturbed=disturbed,
        cache_bytes=cache,
    )


def _measure_gpu_load(device: torch.device) -> float:
    """Return the share of a second in which an NVIDIA GPU computes for other processes; 0 if NVML does not report it."""
    shares = []
    with contextlib.suppress(Exception):  # NVML raises many types of exceptions
        read = gpu_queries(device)[UTILIZATION] if device.type == "cuda" else None
        while read and len(shares) < 5:
            time.sleep(0.2)
            shares.append(float(read()) / 100)  # pyrefly: ignore[bad-argument-type]
    return sum(shares) / len(shares) if shares else 0.0


def _describe_disturbance(device: torch.device, gpu_load: float, noise: Noise, has_memory: bool = True) -> str | None:
    """Return what other processes did on the device; None if they did not disturb the measurement.

    `has_memory`: whether the device had memory left to measure the bandwidth.
    """
    if gpu_load > MAX_SHARE:
        return f"other processes computed on the GPU in {percent(gpu_load)} of the second before the measurement"
    if device.type == "cuda" and not has_memory:
        return "other processes held the memory of the GPU during the measurement"
    if device.type == "cpu" and is_disturbed(noise):
        return f"other processes used {percent(noise.others_share)} of the CPU during the measurement"
    return None


def cached_calibration(device: torch.device) -> Calibration | None:
    """Return the device's calibration for this driver and torch from the cache; None if there is none. Never measures.

    An unreadable cache counts as empty. A file without a valid calibration is ignored, with one warning.
    """
    device_identity = identity(device)
    for folder in _cache_folders():
        path = folder / _file_name(device_identity)
        try:
            calibration, age = Calibration(**json.loads(path.read_bytes())), time.time() - path.stat().st_mtime
        except OSError:
            continue
        except Exception:  # noqa: BLE001 - a damaged file may raise anything in JSON or in Calibration
            with contextlib.suppress(Warning):  # where warnings are errors
                warnings.warn(f"{path} is damaged, and is ignored", stacklevel=2)
            continue
        if not calibration.disturbed or 0 <= age < DISTURBED_S:
            return calibration
    return None


def store(calibration: Calibration) -> None:
    """Write a calibration atomically to the first writable cache folder."""
    name = _file_name({key: getattr(calibration, key) for key in IDENTITY})
    for folder in _cache_folders():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_text(folder / name, f"{json.dumps(dataclasses.asdict(calibration), indent=2)}\n")
            return


def identity(device: torch.device) -> dict[str, Any]:
    """Return the values that identify a measurement; a change in any value requires a new measurement."""
    values: dict[str, Any] = dict.fromkeys(IDENTITY)
    values |= {"device": device.type, "device_name": device_name(device), "torch": torch.__version__}
    with contextlib.suppress(AttributeError, OSError):  # psutil lacks the function on some systems
        battery = psutil.sensors_battery()
        values["on_battery"] = None if battery is None or battery.power_plugged is None else not battery.power_plugged
    if device.type == "cpu":
        torch.zeros(2**17).add_(1)  # starts OpenMP's threads, of which each may be bound to other cores
        max_isa = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA")
        values["driver"] = torch.backends.cpu.get_cpu_capability() + (f", oneDNN up to {max_isa}" if max_isa else "")
        return values | {"threads": torch.get_num_threads(), "cores": usable_cores()}
    if device.type == "mps":
        return values | {"driver": platform.mac_ver()[0] or None}
    if torch.version.hip:
        return values | {"driver": torch.version.hip}
    with contextlib.suppress(Exception):  # NVML raises many types of exceptions
        nvml, handle = nvml_device(device)
        values["driver"] = str(nvml.nvmlSystemGetDriverVersion())
        values["power_limit_w"] = nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
    return values


def _cache_folders() -> Iterator[Path]:
    """Yield the user's cache folder; then a temporary one, for a missing or read-only home, unless another user owns it."""
    with contextlib.suppress(RuntimeError):  # the system has no home folder for the user
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchscope"
    with contextlib.suppress(OSError, psutil.Error):  # no temporary folder, or an unknown user
        user, _ = user_and_group(psutil.Process())  # a number; on Windows a name, with or without a domain
        name = str(user).rpartition("\\")[2]
        folder = Path(tempfile.gettempdir()) / f"batchscope-{name}"
        if isinstance(user, str) or not folder.exists() or folder.lstat().st_uid == user:
            yield folder


def _file_name(identity_values: Mapping[str, Any]) -> str:
    key = json.dumps([SCHEMA, *map(identity_values.get, IDENTITY)])
    digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return f"calibration-{identity_values['device']}-{digest}.json"
