"""The memory of the device that trains: what is read of it, and which errors say that it is full."""

import pytest
import torch

from batchscope.hardware.device_memory import (
    ALLOCATED,
    PEAK,
    RESERVED,
    MemoryReadings,
    is_out_of_memory,
    measured_bytes,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (MemoryError(), True),
        (ValueError("out of memory"), False),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_which_errors_say_that_memory_is_full(error: Exception, full: bool) -> None:
    assert is_out_of_memory(error) is full


def test_a_sample_of_a_gpus_memory_asks_its_allocator_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reset, asked = [], []
    stats = {
        "allocated_bytes": {"all": {"current": GIB, "peak": 3 * GIB}},
        "reserved_bytes": {"all": {"current": 2 * GIB, "peak": 4 * GIB}},
    }
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: asked.append(device) or stats)
    cuda = torch.device("cuda", 1)
    assert MemoryReadings(cuda)() == {ALLOCATED: 1.0, PEAK: 3.0, RESERVED: 4.0}
    assert (reset, asked) == ([cuda], [cuda])
    assert measured_bytes(cuda) == {"allocated": 3 * GIB, "reserved": 4 * GIB}


def test_the_peak_of_a_device_without_a_counter_is_the_highest_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    held = iter([GIB, 3 * GIB, GIB])
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: next(held))
    read = MemoryReadings(torch.device("mps"))
    assert [read()[PEAK] for _ in range(3)] == [1.0, 3.0, 3.0]


def test_a_device_of_another_kind_has_no_reading() -> None:
    assert MemoryReadings(torch.device("meta"))() == {}
