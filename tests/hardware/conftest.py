"""What the tests of hardware share: warnings that a process gives once are given, and a fake plays NVML."""

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from batchscope.hardware import probes

UUIDS = ["11111111-aaaa-0000-0000-000000000000", "22222222-bbbb-0000-0000-000000000000"]


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_warned", set())  # a set of this process, which no function clears


class FakeNvml(types.ModuleType):
    """The part of pynvml that is in use, for two GPUs and a MIG instance. A test changes its attributes."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_CLOCK_SM = 1
    nvmlClocksEventReasonSwPowerCap = 0x4
    nvmlClocksEventReasonHwSlowdown = 0x8
    nvmlClocksEventReasonSwThermalSlowdown = 0x20
    nvmlClocksEventReasonHwThermalSlowdown = 0x40
    nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.refused: set[str] = set()  # the functions that raise an error
        self.busy_pct, self.limit_mw, self.version = 40, 700_000, "570.1"
        self.reasons, self.reasons_known = 0, 0x1FF  # why the clocks are lowered
        self.functions: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: self.version,
            "nvmlDeviceGetHandleByUUID": self._handle,
            "nvmlDeviceGetUtilizationRates": lambda handle: types.SimpleNamespace(gpu=self.busy_pct + handle),
            "nvmlDeviceGetPowerUsage": lambda handle: 250_000,
            "nvmlDeviceGetPowerManagementLimit": lambda handle: self.limit_mw,
            "nvmlDeviceGetTotalEnergyConsumption": lambda handle: 1_000_000,
            "nvmlDeviceGetClockInfo": lambda handle, kind: {self.NVML_CLOCK_SM: 1_980}[kind],
            "nvmlDeviceGetSupportedClocksEventReasons": lambda handle: self.reasons_known,
            "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: self.reasons,
        }

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self.functions:
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            if name in self.refused:
                raise self.NVMLError("refused")
            return self.functions[name](*args)

        return call

    def _handle(self, uuid: str) -> int:
        known = {f"GPU-{uuid}": index for index, uuid in enumerate(UUIDS)} | {"MIG-33": 1, f"MIG-{'4' * 8}": 1}
        if uuid not in known:
            raise self.NVMLError("no such device")
        return known[uuid]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A fake driver, and torch's view of the first GPU that it may see, which a test changes; it holds no memory."""
    fake = FakeNvml()
    fake.seen = types.SimpleNamespace(uuid=UUIDS[0])
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    answers = {"get_device_properties": fake.seen, "current_device": 0, "get_device_name": "NVIDIA H200"}
    for name, answer in (answers | {"reset_peak_memory_stats": None, "memory_stats_as_nested_dict": {}}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    return fake
