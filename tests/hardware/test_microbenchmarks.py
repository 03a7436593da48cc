"""What is measured of a device: each microbenchmark does as much as it says."""

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from batchscope.hardware import timing
from batchscope.hardware.microbenchmarks import LAUNCHES, MEMORY, TRANSFERS, microbenchmarks
from batchscope.hardware.operations import OperationRecorder

CPU = torch.device("cpu")
MIB = 2**20


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_products_do_as_many_flops_as_they_say_smallest_first(precision, monkeypatch):
    done = []

    def count(run: Callable[[], object], times: int) -> float:
        with FlopCounterMode(display=False) as counter:
            run()
        done.append(counter.get_total_flops())
        return 1.0

    monkeypatch.setattr(timing, "time_runs", count)
    with FakeTensorMode():
        for product in microbenchmarks(CPU)[precision]:
            product.time_for(0.0)
            assert done[-1] == product.amount
    assert done == sorted(done) and len(done) > 20


def test_traffic_counts_every_byte_that_its_operation_reads_and_writes(monkeypatch):
    moved = []

    def count(run: Callable[[], object], times: int) -> float:
        with OperationRecorder() as recorder:
            run()
        moved.append(sum(operation.bytes for operation in recorder.operations()))
        return 1.0

    monkeypatch.setattr(timing, "time_runs", count)
    for traffic in microbenchmarks(torch.device("meta"))[MEMORY]:
        traffic.time_for(0.0)
        assert moved[-1] == pytest.approx(traffic.amount, rel=1e-3)  # a sum's result and a vector are small


@pytest.mark.parametrize(
    ("cache", "tensor"),
    [(None, 256 * MIB), (32 * MIB, 256 * MIB), (50 * MIB, 400 * MIB), (1024 * MIB, 1024 * MIB)],
)
def test_traffic_is_of_tensors_several_times_larger_than_the_cache(cache, tensor):
    amounts = {traffic.amount for traffic in microbenchmarks(CPU, cache)[MEMORY]}
    assert amounts == {tensor, 2 * tensor, 3 * tensor}


def test_a_cpu_has_no_transfers_and_no_tf32():
    assert set(microbenchmarks(CPU)) == {"fp32", "bf16", "fp16", "fp64", MEMORY, LAUNCHES}


@pytest.mark.parametrize(("capability", "has_tf32"), [((7, 5), False), ((8, 0), True)])
def test_an_nvidia_gpu_has_transfers_and_tf32_from_ampere_on(capability, has_tf32, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    quantities = microbenchmarks(torch.device("cuda"))
    assert ("tf32" in quantities) == has_tf32
    assert TRANSFERS in quantities
