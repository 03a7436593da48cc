"""The devices of this machine and their names."""

import contextlib
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .._system import CPUS, affinity, processor_name
from ..errors import UserError, in_one_line
from ..records import formatting
from .device_memory import is_out_of_memory, total_memory
from .processor import usable_cores

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_ALIASES = {"gpu": ("cuda", "mps"), "cuda": ("cuda",), "mps": ("mps",), "cpu": ("cpu",)}


def current(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Within it, functions of torch that are given no device mean this GPU; without effect for another kind of device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def available() -> list[str]:
    """The kinds of device that torch can train on here: `cpu`, and `cuda` or `mps`."""
    offered = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return [kind for kind, is_there in offered.items() if is_there]


def taken(accelerator: str | None) -> tuple[str, int]:
    """The kind of device that Lightning takes here for a `trainer.accelerator`, a GPU where it can, and how many there are of it."""
    kind = "cpu" if accelerator == "cpu" else available()[-1]
    return kind, torch.cuda.device_count() if kind == "cuda" else 1


def check_accelerator(config: Mapping[str, Any]) -> None:
    """Raise UserError if a configuration names a device that this machine does not have, or what its device cannot do."""
    trainer = config["trainer"]
    accelerator, devices = trainer.get("accelerator", "auto"), trainer.get("devices", "auto")
    if accelerator not in ("auto", *_ALIASES):
        raise UserError(f"trainer.accelerator: got '{accelerator}', takes auto, cpu, gpu, cuda or mps")
    found = available()
    if accelerator != "cpu" and "mps" in found:  # which is then the device that Lightning takes
        _check_mps(str(trainer.get("precision") or "32-true"), config.get("compile"))
    if "cuda" in found and accelerator in ("auto", "gpu", "cuda"):
        _check_gpus(devices, trainer.get("strategy"))
    if accelerator != "auto" and not set(_ALIASES[accelerator]) & set(found):
        raise UserError(
            f"trainer.accelerator: got '{accelerator}', and this machine has {' and '.join(found)}; "
            f"leave it at auto, or write trainer.accelerator=cpu"
        )


def _check_gpus(devices: Any, strategy: Any) -> None:
    """Raise UserError for more GPUs than there are, and for several that have nothing to exchange gradients by."""
    gpus = torch.cuda.device_count()
    numbers = [number for number in devices if isinstance(number, int)] if isinstance(devices, list) else []
    asked = max(numbers) + 1 if numbers else gpus if devices in ("auto", -1) else devices
    if not isinstance(asked, int):  # which Lightning checks
        return
    if asked > gpus:
        here = f"{formatting.count(gpus, 'GPU')}{', numbered from 0' if numbers else ''}"
        raise UserError(f"trainer.devices: got {devices}, and this machine has {here}")
    if (len(numbers) or asked) > 1 and not isinstance(strategy, Mapping) and not torch.distributed.is_nccl_available():
        raise UserError(
            f"trainer.devices: got {devices}, and torch has no NCCL here, by which GPUs exchange gradients; write "
            "trainer.devices=1, or a trainer.strategy with process_group_backend=gloo"
        )


def _check_mps(precision: str, compile: Any) -> None:
    """Raise UserError for what torch does not do on an Apple GPU."""
    lacks = (
        "trainer.precision: got {}, and an Apple GPU {}; write trainer.precision=32-true, or trainer.accelerator=cpu"
    )
    if precision.startswith("64"):
        raise UserError(lacks.format(precision, "has no float64"))
    if precision.startswith("bf16") and not torch.backends.mps.is_macos_or_newer(14, 0):
        raise UserError(lacks.format(precision, "has bf16 from macOS 14 on"))
    if compile in ("reduce-overhead", "max-autotune"):
        raise UserError(
            f"compile: got {compile}, which takes CUDA graphs, and an Apple GPU has none; write compile=default"
        )


def device_name(device: torch.device) -> str:
    """The model of a device: `NVIDIA H200`, or the processor's name, which on a Mac is that of the GPU as well.

    Raises UserError for a GPU whose driver is too old for this torch: GPUs are counted without a look at it.
    """
    with _usable():
        return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def check_computing(device: torch.device) -> None:
    """Raise UserError for a GPU on which this torch cannot compute, as it has no kernels for an older one."""
    if device.type == "cuda":
        with _usable():
            torch.zeros(1, device=device)


@contextlib.contextmanager
def _usable() -> Iterator[None]:
    """Turn what torch raises of a GPU that it cannot use into a UserError; a lack of memory stays as it is."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        why, way_out = in_one_line(error), "write trainer.accelerator=cpu, or install a torch for this GPU"
        raise UserError(
            f"trainer.accelerator: torch {torch.__version__} cannot use this GPU: {why}; {way_out}"
        ) from error


def cache_bytes(device: torch.device, cpus: Path = CPUS) -> int | None:
    """The most bytes that a device's caches hold in front of its main memory; None where the device does not say.

    Of a GPU it is the L2 cache. Of a CPU it is what the threads that torch computes with can reach: each uses one core of
    those that the process may run on, and the L2 and the L3 cache of that core. The two add up, since the L3 of most
    processors holds what the L2 does not. A virtual machine reports the L3 of its host, which it shares with others.
    """
    if device.type == "cuda":
        return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", None) or None
    if device.type != "cpu":
        return None
    sizes: dict[str, dict[str, int]] = {"2": {}, "3": {}}  # level → cores that share a cache → its bytes
    for core in affinity():
        for folder in (cpus / f"cpu{core}" / "cache").glob("index*"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                level, kind, size, shared = (
                    (folder / name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list")
                )
                if kind != "Instruction":
                    sizes[level][shared] = int(size[:-1]) * _UNITS[size[-1]]
    threads = torch.get_num_threads()
    return sum(sum(sorted(of_level.values(), reverse=True)[:threads]) for of_level in sizes.values()) or None


def describe(device: torch.device) -> dict[str, Any]:
    """The machine, as a run record has it; UserError where this torch cannot compute on its GPU."""
    own_memory = {}
    check_computing(device)
    if device.type != "cpu":
        own_memory = {"device_memory_gib": round(total_memory(device) / 2**30, 1)}
    return {
        "device": device.type,
        "device_name": device_name(device),
        **own_memory,
        "cpu": processor_name(),
        **cores_and_threads(),
        "memory_gib": round(total_memory(torch.device("cpu")) / 2**30, 1),
        "platform": platform.platform(),
    }


def cores_and_threads() -> dict[str, float]:
    """What of the machine a fit settles, and is to be read behind it.

    Lightning gives each of several ranks its part of the threads, and under OMP_PROC_BIND the process has the cores of
    OpenMP's threads, which begin with the first step.
    """
    cores = usable_cores()
    return {"cpu_cores": round(cores) if cores % 1 == 0 else cores, "torch_threads": torch.get_num_threads()}
