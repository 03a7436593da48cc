"""Readings of an NVIDIA GPU, or of a MIG instance, through NVML, which finds the device by its UUID.

torch.cuda offers some of these readings, too. It counts devices as NVML does, in the order of the PCI bus, while CUDA counts the
fastest first: in a machine with two kinds of cards torch may read a card that is not the training device.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

UTILIZATION = "device/utilization_pct"  # share of a window of 1/6 to 1 s in which any kernel ran
SM_CLOCK = "device/sm_clock_mhz"
POWER = "device/power_w"  # of the whole device; newer NVIDIA devices report the mean of the last second
ENERGY = "device/energy_j"  # increasing counter of the whole device; NVIDIA Volta and later

# 100 while the clocks are lowered, else 0, so that a mean is a share of the time.
THROTTLED = "device/throttled_pct"
# Reasons for lowered clocks that count, without an idle device and clocks that a user has set.
_THROTTLING = ("SwPowerCap", "HwPowerBrakeSlowdown", "SwThermalSlowdown", "HwThermalSlowdown", "HwSlowdown")

Clock = Callable[[], float]
Query = Callable[[], float | Mapping[str, float] | None]


def nvml_device(device: torch.device) -> tuple[Any, Any]:
    """Return NVML and its handle of a torch device. Indices differ, as NVML ignores CUDA_VISIBLE_DEVICES.

    Raises:
        ImportError: without nvidia-ml-py.
        pynvml.NVMLError: without a driver, or for a device that NVML does not know.
    """
    import pynvml

    pynvml.nvmlInit()
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = str(torch.cuda.get_device_properties(index).uuid)  # torch's has no prefix, NVML expects one
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    # A process sees at most one MIG instance, so the variable holds the name of the device.
    names = [visible] if visible.startswith("MIG-") else []
    names += [uuid if uuid.startswith("GPU-") else f"GPU-{uuid}", f"MIG-{uuid}"]
    for name in names:
        with contextlib.suppress(pynvml.NVMLError):
            return pynvml, pynvml.nvmlDeviceGetHandleByUUID(name)
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)


def takes_one_process() -> bool:
    """Return whether the driver lets only one process use a GPU at a time; False if NVML does not report it."""
    with contextlib.suppress(Exception):  # NVMLError is defined in pynvml, which may be missing
        import pynvml

        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):  # a MIG device has no compute mode
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                if pynvml.nvmlDeviceGetComputeMode(handle) != pynvml.NVML_COMPUTEMODE_DEFAULT:
                    return True
    return False


def gpu_queries(device: torch.device) -> dict[str, Query]:
    """Return the queries of a device's readings, by key. Raise the errors of `nvml_device`."""
    if torch.version.hip:  # through torch: 0 is an unknown clock, and the unit of its power is unclear
        utilization, clock = (partial(read, device) for read in (torch.cuda.utilization, torch.cuda.clock_rate))
        return {UTILIZATION: utilization, SM_CLOCK: lambda: clock() or None}
    nvml, handle = nvml_device(device)
    queries: dict[str, Query] = {
        UTILIZATION: lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        POWER: lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        ENERGY: lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
        SM_CLOCK: lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
    }
    # Older bindings, drivers or devices, and MIG instances, do not offer these.
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        reasons = sum(getattr(nvml, f"nvmlClocksEventReason{reason}") for reason in _THROTTLING)
        if reasons := reasons & nvml.nvmlDeviceGetSupportedClocksEventReasons(handle):
            queries[THROTTLED] = lambda: 100.0 * bool(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle) & reasons)
    return queries
