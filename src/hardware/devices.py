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


def as_current_device(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Make a GPU torch's current device within the context; without effect for another kind of device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def available() -> list[str]:
    """Return the kinds of device that torch can train on here: `cpu`, and `cuda` or `mps`."""
    offered = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    return [kind for kind, is_there in offered.items() if is_there]


def selected_device(accelerator: str | None) -> tuple[str, int]:
    """Return the kind of device that Lightning selects here for a `trainer.accelerator`, and the number of such devices."""
    kind = "cpu" if accelerator == "cpu" else available()[-1]
    return kind, torch.cuda.device_count() if kind == "cuda" else 1


def check_accelerator(config: Mapping[str, Any]) -> None:
    """Raise UserError if a configuration needs a device that this machine lacks, or a feature that the device lacks."""
    trainer = config["trainer"]
    accelerator, devices = trainer.get("accelerator", "auto"), trainer.get("devices", "auto")
    if accelerator not in ("auto", *_ALIASES):
        raise UserError(f"trainer.accelerator: got '{accelerator}', takes auto, cpu, gpu, cuda or mps")
    kinds = available()
    if accelerator != "cpu" and "mps" in kinds:  # the device that Lightning then selects
        _check_mps(str(trainer.get("precision") or "32-true"), config.get("compile"))
    if "cuda" in kinds and accelerator in ("auto", "gpu", "cuda"):
        _check_gpus(devices, trainer.get("strategy"))
    if accelerator != "auto" and not set(_ALIASES[accelerator]) & set(kinds):
        raise UserError(
            f"trainer.accelerator: got '{accelerator}', and this machine has {' and '.join(kinds)}; "
            f"leave it at auto, or write trainer.accelerator=cpu"
        )


def _check_gpus(devices: Any, strategy: Any) -> None:
    """Raise UserError for more GPUs than the machine has, and for several GPUs without NCCL to exchange gradients."""
    gpus = torch.cuda.device_count()
    indices = [index for index in devices if isinstance(index, int)] if isinstance(devices, list) else []
    wanted = max(indices) + 1 if indices else gpus if devices in ("auto", -1) else devices
    if not isinstance(wanted, int):  # Lightning checks it
        return
    if wanted > gpus:
        available_gpus = f"{formatting.count(gpus, 'GPU')}{', numbered from 0' if indices else ''}"
        raise UserError(f"trainer.devices: got {devices}, and this machine has {available_gpus}")
    count = len(indices) or wanted
    if count > 1 and not isinstance(strategy, Mapping) and not torch.distributed.is_nccl_available():
        raise UserError(
            f"trainer.devices: got {devices}, and torch has no NCCL here, by which GPUs exchange gradients; write "
            "trainer.devices=1, or a trainer.strategy with process_group_backend=gloo"
        )


def _check_mps(precision: str, compile: Any) -> None:
    """Raise UserError for options that torch does not support on an Apple GPU."""
    message = (
        "trainer.precision: got {}, and an Apple GPU {}; write trainer.precision=32-true, or trainer.accelerator=cpu"
    )
    if precision.startswith("64"):
        raise UserError(message.format(precision, "has no float64"))
    if precision.startswith("bf16") and not torch.backends.mps.is_macos_or_newer(14, 0):
        raise UserError(message.format(precision, "has bf16 from macOS 14 on"))
    if compile in ("reduce-overhead", "max-autotune"):
        raise UserError(
            f"compile: got {compile}, which takes CUDA graphs, and an Apple GPU has none; write compile=default"
        )


def device_name(device: torch.device) -> str:
    """Return the model of a device: `NVIDIA H200`, or the processor's name, which on a Mac is also the name of the GPU.

    Raise UserError for a GPU whose driver is too old for this torch: counting the GPUs does not find that.
    """
    with _refuse_unusable():
        return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def check_computing(device: torch.device) -> None:
    """Raise UserError for a GPU on which this torch cannot compute, such as an older one that it has no kernels for."""
    if device.type == "cuda":
        with _refuse_unusable():
            torch.zeros(1, device=device)


@contextlib.contextmanager
def _refuse_unusable() -> Iterator[None]:
    """Turn torch's error for a GPU that it cannot use into a UserError; an out-of-memory error passes through."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason, remedy = in_one_line(error), "write trainer.accelerator=cpu, or install a torch for this GPU"
        problem = f"torch {torch.__version__} cannot use this GPU: {reason}"
        raise UserError(f"trainer.accelerator: {problem}; {remedy}") from error


def cache_bytes(device: torch.device, cpus: Path = CPUS) -> int | None:
    """Return the bytes that a device's caches in front of its main memory hold; None if the device does not report them.

    On a GPU this is the L2 cache. On a CPU these are the caches that torch's threads can reach: each thread uses one of the
    process's cores, and the L2 and L3 cache of that core. Both add up, since on most processors the L3 does not duplicate the
    L2. A virtual machine reports the L3 of its host, which it shares with others.
    """
    if device.type == "cuda":
        return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", None) or None
    if device.type != "cpu":
        return None
    sizes: dict[str, dict[str, int]] = {"2": {}, "3": {}}  # level → cores that share a cache → bytes of the cache
    for core in affinity():
        for folder in (cpus / f"cpu{core}" / "cache").glob("index*"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                names = ("level", "type", "size", "shared_cpu_list")
                level, kind, size, shared_cpus = ((folder / name).read_text().strip() for name in names)
                if kind != "Instruction":
                    sizes[level][shared_cpus] = int(size[:-1]) * _UNITS[size[-1]]
    threads = torch.get_num_threads()
    return sum(sum(sorted(by_cores.values(), reverse=True)[:threads]) for by_cores in sizes.values()) or None


def describe(device: torch.device) -> dict[str, Any]:
    """Return the description of the machine for the run record. Raise UserError if torch cannot compute on its GPU."""
    device_memory = {}
    check_computing(device)
    if device.type != "cpu":
        device_memory = {"device_memory_gib": round(total_memory(device) / 2**30, 1)}
    return {
        "device": device.type,
        "device_name": device_name(device),
        **device_memory,
        "cpu": processor_name(),
        **cores_and_threads(),
        "memory_gib": round(total_memory(torch.device("cpu")) / 2**30, 1),
        "platform": platform.platform(),
    }


def cores_and_threads() -> dict[str, float]:
    """Return the usable cores and torch's threads. A fit may change both, so read them after it.

    Lightning gives each of several ranks its share of the threads. Under OMP_PROC_BIND the process gets the cores of OpenMP's
    threads, which start with the first step.
    """
    cores = usable_cores()
    return {"cpu_cores": round(cores) if cores % 1 == 0 else cores, "torch_threads": torch.get_num_threads()}
