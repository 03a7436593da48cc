"""The microbenchmarks of a device: each does the amount of work that it states, and the best of many short blocks counts."""

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from batchscope.hardware import microbenchmarks as bench
from batchscope.hardware.microbenchmarks import LAUNCHES, MEMORY, Microbenchmark, best_rates, microbenchmarks, time_runs
from batchscope.hardware.operations import OperationRecorder
from tests.support.devices import Clock

CPU = torch.device("cpu")
MIB = 2**20


def test_products_do_as_many_flops_as_they_say_smallest_first(monkeypatch):
    done = []

    def count(run: Callable[[], object], times: int) -> float:
        with FlopCounterMode(display=False) as counter:
            run()
        done.append(counter.get_total_flops())
        return 1.0

    monkeypatch.setattr(bench, "time_runs", count)
    with FakeTensorMode():
        for product in microbenchmarks(CPU)["bf16"]:
            product.time_for(0.0)
            assert done[-1] == product.amount
    assert done == sorted(done) and len(done) > 20


@pytest.mark.parametrize(("cache_mib", "tensor_mib"), [(None, 256), (32, 256), (50, 400), (1024, 1024)])
def test_traffic_counts_every_byte_of_tensors_several_times_larger_than_the_cache(cache_mib, tensor_mib, monkeypatch):
    def count(run: Callable[[], object], times: int) -> float:
        with OperationRecorder() as recorder:
            run()
        moved.append(sum(operation.bytes for operation in recorder.operations()) / (tensor_mib * MIB))
        return 1.0

    moved = []
    monkeypatch.setattr(bench, "time_runs", count)
    benchmarks = list(microbenchmarks(torch.device("meta"), cache_mib and cache_mib * MIB)[MEMORY])
    for traffic in benchmarks:
        traffic.time_for(0.0)
    assert moved == pytest.approx([1, 1, 2, 2, 3], rel=1e-3)  # a sum's result and a vector are small
    assert [traffic.amount for traffic in benchmarks] == [times * tensor_mib * MIB for times in (1, 1, 2, 2, 3)]


@pytest.mark.parametrize(("capability", "has_tf32"), [((7, 5), False), ((8, 0), True)])
def test_an_nvidia_gpu_has_tf32_from_ampere_on_and_a_cpu_has_none(capability, has_tf32, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    names = {"fp32", "bf16", "fp16", "fp64", MEMORY, LAUNCHES}
    assert set(microbenchmarks(torch.device("cuda"))) == names | ({"tf32"} if has_tf32 else set())
    assert set(microbenchmarks(CPU)) == names


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of a device whose runs take exactly what the test says, in blocks of half a second."""
    device = Clock()
    monkeypatch.setattr(bench, "synchronized_time", device)
    for name, value in {"_BLOCK_S": 0.5, "_PASS_S": 1.0, "_SLOWEST_RUN_S": 2.0, "_ALWAYS_TIMED": 2}.items():
        monkeypatch.setattr(bench, name, value)  # so that the numbers of the tests are exact
    return device


def runs(device: Clock, amount: float, *seconds: float) -> Microbenchmark:
    """Successive runs take these seconds; further runs take the last of them."""
    pending = list(seconds)

    def run() -> None:
        device.now += pending.pop(0) if len(pending) > 1 else pending[0]

    return Microbenchmark(amount, lambda: run)


@pytest.mark.parametrize(("has_cuda", "is_used", "waits"), [
    (True, True, ["wait"]), (True, False, []), (False, False, ["wait"]),
], ids=["a GPU", "a GPU that nothing here uses", "another accelerator"])  # fmt: skip
def test_runs_are_timed_from_an_idle_accelerator_to_an_idle_one(has_cuda, is_used, waits, monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_used)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(bench.time, "perf_counter", lambda: calls.append("read") or len(calls))
    assert time_runs(lambda: calls.append("run"), 2) == 3 + len(waits)
    assert calls == [*waits, "read", "run", "run", *waits, "read"]


@pytest.mark.parametrize(
    ("candidates", "rate"),
    [
        pytest.param([(100, 1.5, 4.0, 1.25, 8.0, 3.0)], 100 / 1.25, id="the best block"),
        pytest.param([(1, 1.0), (2, 0.5), (2, 2.0)], 4.0, id="the fastest candidate"),
        pytest.param([(4, 1.0), (5, 2.0, 2.0, 1.0)], 5.0, id="fast in a later pass"),
        pytest.param([(0.1, 5.0, 0.125), (1, 0.5)], 2.0, id="a library starts in the first run"),
        pytest.param([(1, 100.0), (16, 1.0)], 16.0, id="a slow first candidate leaves out nothing"),
        pytest.param([(1, 1.0), (10, 1.0), (21, 0.001)], 10.0, id="a run that would take too long is not begun"),
    ],
)
def test_the_best_rate(candidates, rate, device):
    no_memory = Mock(side_effect=torch.OutOfMemoryError("out of memory"))
    unsupported = Mock(side_effect=RuntimeError('"addmm" not implemented for this format'))
    refused = [Microbenchmark(1, lambda: unsupported), Microbenchmark(1, no_memory)]
    timed = [runs(device, *candidate) for candidate in candidates]
    assert best_rates({"a": timed, "of no format that is known here": refused}, seconds=10.0) == {"a": rate}


def test_short_runs_are_timed_in_blocks_until_the_time_is_up(device, monkeypatch):
    blocks = []
    monkeypatch.setattr(bench, "time_runs", lambda run, times: blocks.append(times) or time_runs(run, times))
    runs(device, 1, 0.125).time_for(1.0)
    assert blocks == [1, 4, 4]  # a run of 1/8 s as an estimate, then blocks of half a second
    device.now = 0.0
    best_rates({name: [runs(device, 1, 1.0)] for name in "ab"}, seconds=10.0)
    assert device.now == 2 * (1 + 1) + 10  # a first run and a visit of each, then the time for the passes
