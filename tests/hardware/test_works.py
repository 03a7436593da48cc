"""What is measured of a device: each work does as much as it says."""

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from batchscope.hardware import timing, works
from batchscope.hardware.operations import OperationRecorder

CPU = torch.device("cpu")
MIB = 2**20


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_products_do_as_many_flops_as_they_say(precision, monkeypatch):
    monkeypatch.setattr(works, "_random", lambda device, dtype, *shape: torch.empty(shape, device=device, dtype=dtype))
    done = []

    def count(run: Callable[[], object], times: int) -> float:
        with FlopCounterMode(display=False) as counter:
            run()
        done.append(counter.get_total_flops())
        return 1.0

    monkeypatch.setattr(timing, "time_runs", count)
    for work in works.works(torch.device("meta"))[f"products in {precision}"]:
        work.take_turn(0.0)
        assert done[-1] == work.amount


def test_products_come_smallest_first():
    amounts = [work.amount for work in works.works(CPU)["products in fp32"]]
    assert amounts == sorted(amounts)


@pytest.mark.parametrize("name", ["memory copy", "memory traffic"])
def test_traffic_counts_every_byte_that_its_operation_reads_and_writes(name, monkeypatch):
    moved = []

    def count(run: Callable[[], object], times: int) -> float:
        with OperationRecorder() as recorder:
            run()
        moved.append(sum(operation.bytes for operation in recorder.operations()))
        return 1.0

    monkeypatch.setattr(timing, "time_runs", count)
    for work in works.works(torch.device("meta"))[name]:
        work.take_turn(0.0)
        assert moved[-1] == pytest.approx(work.amount, rel=1e-3)  # a sum's result and a vector are small


@pytest.mark.parametrize(
    ("cache", "tensor"),
    [(None, 256 * MIB), (32 * MIB, 256 * MIB), (50 * MIB, 400 * MIB), (1024 * MIB, 1024 * MIB)],
)
def test_traffic_is_of_tensors_several_times_larger_than_the_cache(cache, tensor):
    (copy,) = works.works(torch.device("meta"), cache)["memory copy"]
    assert copy.amount == 2 * tensor


def test_traffic_keeps_the_values_finite(monkeypatch):
    monkeypatch.setattr(works, "_MIN_TRAFFIC", 2**16)
    for work in works.works(CPU)["memory traffic"]:
        run = work._make()
        results = [run() for _ in range(3)]
        assert results[-1].isfinite().all() and results[-1].equal(results[0])


def test_a_cpu_has_no_transfers_and_no_tf32():
    assert set(works.works(CPU)) == {
        *(f"products in {name}" for name in ("fp32", "bf16", "fp16", "fp64")),
        "memory copy",
        "memory traffic",
        "small operations",
        "page faults",
    }


@pytest.mark.parametrize(("capability", "has_tf32"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_an_nvidia_gpu_has_transfers_and_tf32_from_ampere_on(capability, has_tf32, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    names = set(works.works(torch.device("cuda")))
    assert ("products in tf32" in names) == has_tf32
    assert {"host to device", "host to device, pinned", "device to host", "device to host, pinned"} < names


def test_a_page_fault_is_timed_on_fresh_memory():
    (work,) = works.works(CPU)["page faults"]
    work.take_turn(0.01)
    assert 1e4 < work.rate < 1e8  # faults a second
