"""What the tests of hardware share: NVML says what a test wants."""

from types import SimpleNamespace
from unittest.mock import Mock

import pynvml
import pytest
import torch

UUIDS = ["11111111-aaaa-0000-0000-000000000000", "22222222-bbbb-0000-0000-000000000000"]
REFUSED = Mock(side_effect=pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED))  # in place of a function of NVML's


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the driver of two GPUs and a MIG instance says, and which of them torch sees; none holds memory."""
    says = SimpleNamespace(uuid=UUIDS[0], busy_pct=40, limit_mw=700_000, version="570.1", reasons=0, known=0x1FF)
    handles = {f"GPU-{uuid}": index for index, uuid in enumerate(UUIDS)} | {"MIG-33": 1, f"MIG-{'4' * 8}": 1}
    of_driver = {
        "Init": lambda: None,
        "SystemGetDriverVersion": lambda: says.version,
        "DeviceGetHandleByUUID": lambda uuid: handles[uuid] if uuid in handles else REFUSED(),
        "DeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=says.busy_pct + handle),
        "DeviceGetPowerUsage": lambda handle: 250_000,
        "DeviceGetPowerManagementLimit": lambda handle: says.limit_mw,
        "DeviceGetTotalEnergyConsumption": lambda handle: 1_000_000,
        "DeviceGetClockInfo": lambda handle, kind: {pynvml.NVML_CLOCK_SM: 1_980}[kind],
        "DeviceGetSupportedClocksEventReasons": lambda handle: says.known,
        "DeviceGetCurrentClocksEventReasons": lambda handle: says.reasons,
    }
    for name, answer in of_driver.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", answer)
    of_torch = {"get_device_properties": says, "current_device": 0, "get_device_name": "NVIDIA H200"}
    for name, answer in (of_torch | {"reset_peak_memory_stats": None, "memory_stats_as_nested_dict": {}}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    return says
