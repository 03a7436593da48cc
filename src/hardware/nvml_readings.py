"""Readings of a GPU: of NVIDIA's, or a MIG instance, through NVML, which finds the device by its UUID.

torch.cuda has readings of its own for some of them. It counts devices as NVML does, in the order of the PCI bus, while CUDA
counts the fastest first: in a machine with two kinds of cards torch may read another one than the one that trains.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

UTILIZATION = "device/utilization_pct"  # share of a window of 1/6 to 1 s in which any kernel ran, however small
SM_CLOCK = "device/sm_clock_mhz"
POWER = "device/power_w"  # of the whole device; newer NVIDIA devices report the mean of the last second
ENERGY = "device/energy_j"  # a counter of the whole device that only grows; NVIDIA Volta and later

# 100 while the clocks are lowered, else 0, so that a mean is a share of the time.
THROTTLED = "device/throttled_pct"
# Why they are; not because the device idles, or because a user has set them.
_THROTTLING = ("SwPowerCap", "HwPowerBrakeSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwSlowdown")

Clock = Callable[[], float]
Query = Callable[[], float | Mapping[str, float] | None]


def nvml_device(device: torch.device) -> tuple[Any, Any]:
    """NVML, and its handle of one of torch's devices: NVML ignores CUDA_VISIBLE_DEVICES when it counts.

    Raises:
        ImportError: without nvidia-ml-py.
        pynvml.NVMLError: without a driver, or for a device that NVML does not know.
    """
    import pynvml

    pynvml.nvmlInit()
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = str(torch.cuda.get_device_properties(index).uuid)  # torch gives it bare, NVML wants a prefix
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # A process sees one MIG instance at most, so the name in the variable is the device's.
    names = [visible] if visible.startswith("MIG-") else []
    names += [uuid if uuid.startswith("GPU-") else f"GPU-{uuid}", f"MIG-{uuid}"]
    for name in names:
        with contextlib.suppress(pynvml.NVMLError):
            return pynvml, pynvml.nvmlDeviceGetHandleByUUID(name)
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)


def takes_one_process() -> bool:
    """Whether the driver lets only one process use a GPU at a time; False where NVML does not say."""
    with contextlib.suppress(Exception):  # NVMLError has its class in the module, which may be missing
        import pynvml

        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return any(pynvml.nvmlDeviceGetComputeMode(each) != pynvml.NVML_COMPUTEMODE_DEFAULT for each in handles)
    return False


def gpu_queries(device: torch.device) -> dict[str, Query]:
    """What can be read of a device, by key. Raises as `nvml_device` does."""
    if torch.version.hip:  # through torch, which returns 0 for an unknown clock, and whose unit of power is not sure
        utilization, clock = (partial(read, device) for read in (torch.cuda.utilization, torch.cuda.clock_rate))
        return {UTILIZATION: utilization, SM_CLOCK: lambda: clock() or None}
    nvml, handle = nvml_device(device)
    queries: dict[str, Query] = {
        UTILIZATION: lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        POWER: lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        ENERGY: lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
        SM_CLOCK: lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
    }
    # An older binding does not know these, and an older driver or device, or a MIG instance, does not offer them.
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        reasons = sum(getattr(nvml, f"nvmlClocksEventReason{reason}") for reason in _THROTTLING)
        if reasons := reasons & nvml.nvmlDeviceGetSupportedClocksEventReasons(handle):
            queries[THROTTLED] = lambda: 100.0 * bool(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle) & reasons)
    return queries
