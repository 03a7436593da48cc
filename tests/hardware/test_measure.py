"""What a device can do: timed from idle to idle, in short blocks of which the best counts."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from batchscope.hardware import measure
from batchscope.hardware.calibration import Calibration
from batchscope.hardware.contention import Contention
from batchscope.hardware.measure import (
    Effort,
    Work,
    as_calibration,
    best_rates,
    calibrate,
    calibrate_in_subprocess,
    time_runs,
    works,
)

CPU = torch.device("cpu")
EFFORT = Effort(seconds=10.0, turn_s=1.0, slowest_run_s=2.0)


# --- timing ---


class FakeDevice:
    """A device on which work takes exactly what the test says; its clock stands still otherwise."""

    now = 0.0

    def clock(self) -> float:
        return self.now

    def run(self, *seconds: float) -> Callable[[], None]:
        """Takes these seconds, one after another; the last of them from then on."""
        left = list(seconds)

        def run() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run

    def work(self, amount: float, *seconds: float) -> Work:
        return Work(amount, lambda: self.run(*seconds))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Times are read off the clock of a fake device, in blocks of half a second."""
    fake = FakeDevice()
    monkeypatch.setattr(measure, "clock", fake.clock)
    monkeypatch.setattr(measure, "_BLOCK_S", 0.5)
    return fake


def test_runs_are_timed_from_an_idle_accelerator_to_an_idle_one(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: calls.append("read") or len(calls))
    assert time_runs(lambda: calls.append("run"), 2) == 6 - 2
    assert calls == ["wait", "read", "run", "run", "wait", "read"]


def test_the_best_block_counts(device):
    assert best_rates({"a": [device.work(100, 1.5, 4.0, 1.25, 8.0, 3.0)]}, EFFORT) == {"a": 100 / 1.25}


def test_the_fastest_of_several_ways_is_the_rate(device):
    ways = [device.work(1, 1.0), device.work(2, 0.5), device.work(2, 2.0)]
    assert best_rates({"a": ways}, EFFORT) == {"a": 4.0}


def test_a_slow_start_costs_no_way_its_chance(device):
    late = device.work(5, 2.0, 2.0, 1.0)
    assert best_rates({"a": [device.work(4, 1.0), late]}, EFFORT) == {"a": 5.0}


def test_short_work_is_timed_in_blocks_that_the_clock_can_resolve(device, monkeypatch):
    blocks = []
    monkeypatch.setattr(measure, "time_runs", lambda run, times: blocks.append(times) or time_runs(run, times))
    device.work(1, 0.125).take_turn(1.0)
    assert blocks == [1, 4, 4]  # 1/8 s to learn how fast it is, then blocks of half a second until the turn is over


def test_the_start_of_a_library_in_the_first_run_hides_no_larger_work(device):
    first = device.work(0.1, 5.0, 0.125)  # 40 times slower than it is: what follows would seem to take 50 s
    assert best_rates({"a": [first, device.work(1, 0.5)]}, EFFORT) == {"a": 2.0}


def test_work_that_would_take_too_long_is_not_begun(device):
    assert best_rates({"a": [device.work(10, 1.0), device.work(21, 0.001)]}, EFFORT) == {"a": 10.0}


def test_what_a_device_does_not_support_is_left_out(device):
    def unsupported() -> Work:
        def run() -> None:
            raise RuntimeError('"addmm" not implemented for this format')

        return Work(1, lambda: run)

    choices = {"a": [unsupported()], "b": [unsupported(), device.work(2, 1.0)]}
    assert best_rates(choices, EFFORT) == {"b": 2.0}


def test_what_does_not_fit_into_memory_is_left_out(device):
    def no_memory() -> Callable[[], None]:
        raise torch.OutOfMemoryError("out of memory")

    assert best_rates({"a": [device.work(1, 1.0), Work(2, no_memory)]}, EFFORT) == {"a": 1.0}


def test_measuring_ends_when_its_time_is_up(device):
    best_rates({"a": [device.work(1, 1.0)], "b": [device.work(1, 1.0)]}, EFFORT)
    assert device.now == 2 * (1 + 1) + 10  # a first run and a turn of each, then the time for the finals


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_products_do_as_many_flops_as_they_say(precision, monkeypatch):
    monkeypatch.setattr(
        measure, "_random", lambda device, dtype, *shape: torch.empty(shape, device=device, dtype=dtype)
    )
    done = []

    def count(run: Callable[[], object], times: int) -> float:
        with FlopCounterMode(display=False) as counter:
            run()
        done.append(counter.get_total_flops())
        return 1.0

    monkeypatch.setattr(measure, "time_runs", count)
    for work in works(torch.device("meta"))[f"products in {precision}"]:
        work.take_turn(0.0)
        assert done[-1] == work.amount


def test_products_come_smallest_first():
    amounts = [work.amount for work in works(CPU)["products in fp32"]]
    assert amounts == sorted(amounts)


def test_a_copy_counts_what_it_reads_and_what_it_writes(monkeypatch):
    moved = []
    monkeypatch.setattr(measure, "time_runs", lambda run, times: moved.append(run().nbytes) or 1.0)
    (work,) = works(torch.device("meta"))["memory copy"]
    work.take_turn(0.0)
    assert work.amount == 2 * moved[0]


def test_a_cpu_has_no_transfers_and_no_tf32():
    assert set(works(CPU)) == {
        *(f"products in {name}" for name in ("fp32", "bf16", "fp16", "fp64")),
        "memory copy",
        "small operations",
    }


@pytest.mark.parametrize(("capability", "has_tf32"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_an_nvidia_gpu_has_transfers_and_tf32_from_ampere_on(capability, has_tf32, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    names = set(works(torch.device("cuda")))
    assert ("products in tf32" in names) == has_tf32
    assert {"host to device", "host to device, pinned", "device to host", "device to host, pinned"} < names


def test_rates_become_a_calibration_in_the_units_of_its_names():
    identity = {"device": "cuda", "device_name": "GPU", "driver": None, "torch": "2.15", "threads": None}
    rates = {"products in bf16": 9e14, "small operations": 250_000.0, "host to device, pinned": 5e10}
    made = as_calibration(identity, rates)
    assert made.matmul_flops_per_sec == {"bf16": 9e14}
    assert made.launch_us == 4.0
    assert made.h2d_pinned_bytes_per_sec == 5e10
    assert made.h2d_bytes_per_sec is None and made.copy_bytes_per_sec is None


def test_this_machines_processor_is_measured(monkeypatch):
    monkeypatch.setattr(measure, "QUICK", Effort(0.02, 0.001, 0.01))
    switches = torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
    random_state = torch.get_rng_state()
    lines = []
    found = calibrate(CPU, quick=True, say=lines.append)
    assert found.device == "cpu" and found.threads == torch.get_num_threads()
    assert found.matmul_flops_per_sec["fp32"] > 1e8
    assert found.copy_bytes_per_sec > 1e8
    assert 0.1 < found.launch_us < 1000
    assert lines[0] == "measuring cpu: products in fp32"
    assert torch.get_rng_state().equal(random_state)
    assert (torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision) == switches


def test_the_measurement_itself_is_watched(monkeypatch):
    during = []

    class Others(Contention):
        def __exit__(self, *exception):
            self.finding = "others did something"

    def rates(*args, **kwargs):
        during.append(True)
        return {"products in fp32": 1e11}

    monkeypatch.setattr(measure, "Contention", Others)
    monkeypatch.setattr(measure, "best_rates", rates)
    assert calibrate(CPU).disturbed == "others did something"
    assert during


# --- a process of its own ---


MEASURED = Calibration("cpu", "a CPU", "AVX2", torch.__version__, 1, {"fp32": 1e11}, launch_us=2.0)


GROWTH = """
import resource, torch
from batchscope.hardware.measure import calibrate_in_subprocess
torch.set_num_threads(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = calibrate_in_subprocess(torch.device("cpu"))
assert found.threads == 1 and found.matmul_flops_per_sec["fp32"] > 1e9
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_what_measuring_takes_is_not_in_this_processs_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2**16  # KiB


@pytest.mark.parametrize(
    "ending",
    [OSError("no more processes"), subprocess.CalledProcessError(1, "python"), "", "no JSON", json.dumps({"a": 1})],
    ids=str,
)
def test_where_the_process_fails_this_one_measures(ending: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        if isinstance(ending, str):
            return subprocess.CompletedProcess([], 0, stdout=ending)
        raise ending

    monkeypatch.setattr(measure.subprocess, "run", run)
    monkeypatch.setattr(measure, "load_or_measure", lambda device: MEASURED)
    assert calibrate_in_subprocess(CPU) is MEASURED


def test_what_the_process_says_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "a library's greeting\n" + json.dumps(MEASURED.to_dict())
    monkeypatch.setattr(measure.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=said))
    monkeypatch.setattr(measure, "load_or_measure", lambda device: pytest.fail("measured in this process"))
    assert calibrate_in_subprocess(CPU) == MEASURED
