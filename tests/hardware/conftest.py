"""Fixtures for tests of hardware: a fake NVML with the answers that a test sets."""

from types import SimpleNamespace
from unittest.mock import Mock

import pynvml
import pytest
import torch

UUIDS = ["11111111-aaaa-0000-0000-000000000000", "22222222-bbbb-0000-0000-000000000000"]
REFUSED = Mock(side_effect=pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED))  # replaces a function of NVML


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The answers of the driver of two GPUs and a MIG instance, and the UUID of the device that torch sees."""
    state = SimpleNamespace(uuid=UUIDS[0], busy_pct=40, limit_mw=700_000, version="570.1", reasons=0, supported=0x1FF)
    handles = {f"GPU-{uuid}": index for index, uuid in enumerate(UUIDS)} | {"MIG-33": 1, f"MIG-{'4' * 8}": 1}
    driver_functions = {
        "Init": lambda: None,
        "SystemGetDriverVersion": lambda: state.version,
        "DeviceGetHandleByUUID": lambda uuid: handles[uuid] if uuid in handles else REFUSED(),
        "DeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=state.busy_pct + handle),
        "DeviceGetPowerUsage": lambda handle: 250_000,
        "DeviceGetPowerManagementLimit": lambda handle: state.limit_mw,
        "DeviceGetTotalEnergyConsumption": lambda handle: 1_000_000,
        "DeviceGetClockInfo": lambda handle, kind: {pynvml.NVML_CLOCK_SM: 1_980}[kind],
        "DeviceGetSupportedClocksEventReasons": lambda handle: state.supported,
        "DeviceGetCurrentClocksEventReasons": lambda handle: state.reasons,
    }
    for name, answer in driver_functions.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", answer)
    answers = {"get_device_properties": state, "current_device": 0, "get_device_name": "NVIDIA H200"}
    for name, answer in (answers | {"reset_peak_memory_stats": None, "memory_stats_as_nested_dict": {}}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    return state
