"""What a device can do: timed by its own clock, the best of several rounds, kept in the cache, shown in tables."""

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import types
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from batchscope.cli import hardware as program
from batchscope.errors import UserError
from batchscope.hardware import calibrate as measuring
from batchscope.hardware.calibrate import (
    Calibration,
    Effort,
    Work,
    as_calibration,
    best_rates,
    cached_calibration,
    calibrate,
    calibration,
    candidates,
    faster_precision,
    keep,
    peak_flops_per_sec,
    time_by_clock,
    time_by_events,
)
from batchscope.hardware.contention import Contention

CPU = torch.device("cpu")
GPU = Calibration(
    device="cuda",
    device_name="NVIDIA H200",
    driver="570.1",
    torch="2.15.0",
    threads=None,
    matmul_flops_per_sec={"fp32": 50e12, "tf32": 400e12, "bf16": 790e12, "fp16": 780e12, "fp64": 60e12},
    copy_bytes_per_sec=4e12,
    launch_us=3.5,
    h2d_bytes_per_sec=10e9,
    h2d_pinned_bytes_per_sec=50e9,
)
HOST = Calibration("cpu", "AMD EPYC", "AVX512", "2.15.0", 2, {"fp32": 450e9, "bf16": 900e9}, 40e9, 1.75)


# --- timing ---


class FakeDevice:
    """A device on which work takes exactly what the test says; its clock stands still otherwise."""

    def __init__(self):
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def work(self, *seconds: float) -> partial:
        """Takes these seconds, one after another; the last of them from then on."""
        left = list(seconds)

        def run() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run

    def timer(self, run, times: int) -> float:
        return time_by_clock(run, times, clock=self.clock)

    def rates(self, effort: Effort, **choices) -> dict[str, float]:
        found = {name: [(work.amount, lambda work=work: work) for work in works] for name, works in choices.items()}
        return best_rates(found, self.timer, effort, self.clock, say=lambda line: None)


EFFORT = Effort(seconds=10.0, turn_seconds=1.0, round_seconds=0.5, slowest_run_seconds=2.0)


def test_the_hosts_clock_times_from_an_idle_device_to_an_idle_device():
    device, waits = FakeDevice(), []

    def synchronize():
        waits.append(device.now)
        device.now += 5 if len(waits) == 1 else 0.25  # what was queued before is not ours, what we queued is

    assert time_by_clock(device.work(2), 3, synchronize, device.clock) == 3 * 2 + 0.25
    assert waits == [0, 5 + 3 * 2]


def test_cuda_is_timed_between_two_events_after_it_has_become_idle():
    calls = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            calls.append("record")

        def synchronize(self):
            calls.append("wait for the event")

        def elapsed_time(self, end):
            return 250.0  # ms

    cuda = type("FakeCuda", (), {"Event": Event, "synchronize": lambda: calls.append("wait for the device")})
    assert time_by_events(lambda: calls.append("run"), 2, cuda) == 0.25
    assert calls == ["wait for the device", "record", "run", "run", "record", "wait for the event"]


def test_the_best_round_counts():
    device = FakeDevice()
    assert device.rates(EFFORT, a=[Work(100, device.work(1.5, 4.0, 1.25, 8.0, 3.0))]) == {"a": 100 / 1.25}


def test_the_fastest_of_several_ways_is_the_rate():
    device = FakeDevice()
    ways = [Work(1, device.work(1.0)), Work(2, device.work(0.5)), Work(2, device.work(2.0))]
    assert device.rates(EFFORT, a=ways) == {"a": 4.0}


def test_a_slow_start_costs_no_way_its_chance():
    device = FakeDevice()
    late = Work(5, device.work(2.0, 2.0, 1.0))
    assert device.rates(EFFORT, a=[Work(4, device.work(1.0)), late]) == {"a": 5.0}


def test_short_work_is_timed_in_rounds_that_the_clock_can_resolve():
    device, rounds = FakeDevice(), []

    def timer(run, times):
        rounds.append(times)
        return device.timer(run, times)

    Work(1, device.work(0.125)).take_a_turn(timer, EFFORT)
    assert rounds == [1, 4, 4]  # 1/8 s to learn how fast it is, then rounds of half a second until the turn is over


def test_the_start_of_a_library_in_the_first_run_hides_no_larger_work():
    device = FakeDevice()
    first = Work(0.1, device.work(5.0, 0.125))  # 40 times slower than it is: what follows would seem to take 50 s
    assert device.rates(EFFORT, a=[first, Work(1, device.work(0.5))]) == {"a": 2.0}


def test_work_that_would_take_too_long_is_not_begun():
    device = FakeDevice()
    assert device.rates(EFFORT, a=[Work(10, device.work(1.0)), Work(21, device.work(0.001))]) == {"a": 10.0}


def test_what_a_device_does_not_support_is_left_out():
    def unsupported():
        raise RuntimeError('"addmm" not implemented for this format')

    device = FakeDevice()
    assert device.rates(EFFORT, a=[Work(1, unsupported)], b=[Work(1, unsupported), Work(2, device.work(1.0))]) == {
        "b": 2.0
    }


def test_measuring_ends_when_its_time_is_up():
    device = FakeDevice()
    device.rates(EFFORT, a=[Work(1, device.work(1.0))], b=[Work(1, device.work(1.0))])
    assert device.now == 2 * (1 + 1) + 10  # a first run and a turn of each, then the time for the finals


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_products_do_as_many_flops_as_they_say(precision, monkeypatch):
    monkeypatch.setattr(
        measuring, "_random", lambda device, dtype, *shape: torch.empty(shape, device=device, dtype=dtype)
    )

    def timer(run, times):
        with FlopCounterMode(display=False) as counter:
            run()
        return times * counter.get_total_flops() / 1e12

    meta = torch.device("meta")
    for _, make in candidates(meta)[f"products in {precision}"]:
        work = make()
        work.take_a_turn(timer, Effort(0, 1e-12, 1e-12, 1))
        assert work.rate == pytest.approx(1e12)


def test_products_come_smallest_first():
    amounts = [amount for amount, _ in candidates(CPU)["products in fp32"]]
    assert amounts == sorted(amounts)


def test_a_copy_counts_what_it_reads_and_what_it_writes():
    moved = []
    ((_, make),) = candidates(torch.device("meta"))["memory copy"]
    work = make()
    work.take_a_turn(lambda run, times: moved.append(run().nbytes) or 1.0, EFFORT)
    assert work.amount == 2 * moved[0]


def test_a_cpu_has_no_transfers_and_no_tf32():
    assert set(candidates(CPU)) == {
        *(f"products in {name}" for name in ("fp32", "bf16", "fp16", "fp64")),
        "memory copy",
        "small operations",
    }


@pytest.mark.parametrize(("capability", "has_tf32"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_an_nvidia_gpu_has_transfers_and_tf32_from_ampere_on(capability, has_tf32, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    names = set(candidates(torch.device("cuda")))
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
    monkeypatch.setattr(measuring, "QUICK", Effort(0.02, 0.001, 0.001, 0.01))
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


# --- the peak ---


@pytest.mark.parametrize(
    ("precision", "peak"),
    [
        ("bf16-mixed", "bf16"),
        ("bf16-true", "bf16"),
        ("16-mixed", "fp16"),
        ("16-true", "fp16"),
        ("bf16", "bf16"),
        (16, "fp16"),
        ("64-true", "fp64"),
        (64, "fp64"),
    ],
)
def test_the_peak_is_that_of_the_precision(precision, peak):
    assert peak_flops_per_sec(GPU, precision) == GPU.matmul_flops_per_sec[peak]


@pytest.mark.parametrize("precision", ["transformer-engine", "nf4", "16-mixed", "64-true"])
def test_what_was_not_measured_has_no_peak(precision):
    assert peak_flops_per_sec(HOST, precision) is None


@pytest.mark.parametrize("precision", [None, "32-true", "32", 32])
def test_a_processor_computes_float32_in_float32(precision):
    assert peak_flops_per_sec(HOST, precision) == 450e9


@contextlib.contextmanager
def switched(matmul: str, conv: str, rnn: str, mkldnn: str = "none"):
    backends = torch.backends
    switches = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul)
    before = [switch.fp32_precision for switch in switches]
    for switch, value in zip(switches, (matmul, conv, rnn, mkldnn), strict=True):
        switch.fp32_precision = value
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value


@pytest.mark.parametrize(
    ("module", "matmul", "conv", "rnn", "peak"),
    [
        (nn.Linear(1, 1), "ieee", "tf32", "tf32", "fp32"),
        (nn.Linear(1, 1), "tf32", "ieee", "ieee", "tf32"),
        (nn.Sequential(nn.Conv2d(1, 1, 1)), "ieee", "tf32", "tf32", "tf32"),
        (nn.Sequential(nn.Conv2d(1, 1, 1)), "ieee", "ieee", "tf32", "fp32"),
        (nn.LSTM(1, 1), "ieee", "tf32", "tf32", "tf32"),
        (nn.LSTM(1, 1), "ieee", "tf32", "ieee", "fp32"),
        (None, "ieee", "tf32", "ieee", "tf32"),
        (None, "ieee", "ieee", "ieee", "fp32"),
    ],
)
def test_float32_on_cuda_is_tf32_where_torch_may_use_it(module, matmul, conv, rnn, peak):
    with switched(matmul, conv, rnn):
        assert peak_flops_per_sec(GPU, "32-true", module) == GPU.matmul_flops_per_sec[peak]


@pytest.mark.parametrize(
    ("shares", "peak"),
    [
        ({"matmul": 1.0, "convolution": 0.0, "recurrent": 0.0}, 50e12),
        ({"matmul": 0.0, "convolution": 0.0, "recurrent": 1.0}, 400e12),
        ({"matmul": 0.5, "convolution": 0.25, "recurrent": 0.25}, 1 / (0.5 / 50e12 + 0.5 / 400e12)),
    ],
)
def test_kinds_of_products_weigh_by_their_flops(shares, peak):
    with switched("ieee", "tf32", "tf32"):
        assert peak_flops_per_sec(GPU, "32-true", nn.LSTM(1, 1), shares) == pytest.approx(peak)


RECURRENT = {"matmul": 0.0, "convolution": 0.0, "recurrent": 1.0}


def test_without_cudnn_a_recurrent_kernel_consists_of_matrix_products():
    with switched("ieee", "tf32", "tf32"), torch.backends.cudnn.flags(enabled=False):
        assert peak_flops_per_sec(GPU, "32-true", None, RECURRENT) == 50e12


def test_a_gpu_without_tf32_computes_float32_in_float32():
    older = dataclasses.replace(GPU, matmul_flops_per_sec={"fp32": 15e12, "fp16": 110e12})
    with switched("tf32", "tf32", "tf32"):
        assert peak_flops_per_sec(older, "32-true", None, RECURRENT) == 15e12


@pytest.mark.parametrize(
    ("device", "peaks", "faster"),
    [
        pytest.param("cuda", {"fp32": 50e12, "bf16": 790e12, "fp16": 780e12}, "bf16-mixed", id="a GPU with bf16"),
        pytest.param("cuda", {"fp32": 8e12, "bf16": 3e12, "fp16": 50e12}, "16-mixed", id="a GPU that emulates bf16"),
        pytest.param("cpu", {"fp32": 100e9, "bf16": 16e9, "fp16": 7e9}, None, id="a processor that emulates it"),
        pytest.param("cpu", {"fp32": 100e9, "bf16": 16e9, "fp16": 300e9}, None, id="16-mixed on a CPU"),
        pytest.param("cpu", {"fp32": 170e9, "bf16": 900e9}, "bf16-mixed", id="a processor with AMX"),
        pytest.param("mps", {"fp32": 5e12, "fp16": 10e12}, None, id="16-mixed on MPS"),
        pytest.param("cuda", {"fp32": 50e12, "bf16": 55e12}, None, id="hardly faster"),
        pytest.param("cuda", {"fp32": 50e12}, None, id="not measured"),
    ],
)
def test_a_precision_is_recommended_where_this_device_was_measured_to_be_faster(device, peaks, faster):
    measured = Calibration(device, "a device", None, "2.15", None, peaks)
    assert faster_precision(measured, "32-true") == faster
    assert faster_precision(measured, "bf16-mixed") is None


def test_no_precision_is_recommended_where_nothing_was_measured():
    assert faster_precision(None, "32-true") is None


def test_what_is_reached_by_tf32_already_counts_as_it_is():
    measured = dataclasses.replace(GPU, matmul_flops_per_sec={"fp32": 50e12, "tf32": 400e12, "bf16": 410e12})
    assert faster_precision(measured, "32-true", peak=50e12) == "bf16-mixed"
    assert faster_precision(measured, "32-true", peak=400e12) is None


def test_float32_on_a_processor_may_be_bf16_when_asked_for():
    with switched("none", "tf32", "tf32", mkldnn="bf16"):
        assert peak_flops_per_sec(HOST, "32-true") == 900e9


def test_mixed_precision_has_the_peak_of_the_faster_format():
    slow_halves = Calibration("cpu", "old", None, "2.15", 2, {"fp32": 100e9, "bf16": 5e9})
    assert peak_flops_per_sec(slow_halves, "bf16-mixed") == 100e9
    assert peak_flops_per_sec(slow_halves, "bf16-true") == 5e9


# --- the cache ---


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "batchscope"


@pytest.fixture
def measured(cache, monkeypatch) -> list[torch.device]:
    """Every measurement that is made; none takes any time."""
    made = []

    def fake(device, quick=False, say=None):
        made.append(device)
        return as_calibration(measuring._identity(device), {"products in fp32": 1e11, "memory copy": 1e10})

    monkeypatch.setattr(measuring, "calibrate", fake)
    return made


@pytest.fixture
def busy(measured, monkeypatch) -> None:
    """Others compute during every measurement."""
    undisturbed = measuring.calibrate

    def disturbed(*args, **kwargs):
        return dataclasses.replace(undisturbed(*args, **kwargs), disturbed="others used 43% of the processor meanwhile")

    monkeypatch.setattr(measuring, "calibrate", disturbed)


def test_a_calibration_survives_its_dict():
    for each in (GPU, HOST):
        assert Calibration.from_dict(json.loads(json.dumps(each.to_dict()))) == each
    assert "h2d_bytes_per_sec" not in HOST.to_dict()


@pytest.mark.parametrize("change", [{"launch_us": -1}, {"copy_bytes_per_sec": float("nan")}, {"speed": 3}])
def test_what_is_no_calibration_is_refused(change):
    with pytest.raises((ValueError, TypeError)):
        Calibration.from_dict({**HOST.to_dict(), **change})


def test_a_device_is_measured_once(measured):
    assert cached_calibration(CPU) is None
    first = calibration(CPU)
    assert calibration(CPU) == cached_calibration(CPU) == first
    assert measured == [CPU]


def test_another_torch_or_number_of_threads_is_measured_anew(measured, monkeypatch):
    calibration(CPU)
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert cached_calibration(CPU) is None
    calibration(CPU)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert cached_calibration(CPU) is None
    assert len(measured) == 1 + 1


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", "null", '{"device": "cpu"}', "\xff\xfe", "[" * 100_000),
        '{"device": "cpu", "device_name": "x", "torch": "1", "matmul_flops_per_sec": {"fp32": 1' + "0" * 400 + "}}",
    ],
    ids=lambda content: content[:20],
)
def test_a_cache_that_cannot_be_read_is_measured_again(measured, cache, content):
    calibration(CPU)
    (file,) = cache.iterdir()
    file.write_bytes(content.encode("latin-1"))
    assert calibration(CPU).matmul_flops_per_sec == {"fp32": 1e11}
    assert len(measured) == 2
    assert cached_calibration(CPU) is not None


def test_a_cache_that_cannot_be_written_is_done_without(measured, cache):
    cache.write_text("a file where the folder should be")
    assert calibration(CPU).matmul_flops_per_sec == {"fp32": 1e11}


def test_the_cache_is_written_whole_or_not_at_all(measured, cache, monkeypatch):
    calibration(CPU)
    (file,) = cache.iterdir()
    before = file.read_text()

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(measuring.os, "replace", full)
    keep(calibration(CPU))
    assert [path.read_text() for path in cache.iterdir()] == [before]


def test_the_cache_is_on_the_disk_before_its_name_is(measured, cache, monkeypatch):
    done = []
    monkeypatch.setattr("os.fsync", lambda _: done.append("fsync"))
    monkeypatch.setattr("os.replace", lambda *_: done.append("replace"))
    calibration(CPU)
    assert done == ["fsync", "replace", "fsync"]


def test_what_was_measured_while_others_computed_is_used_and_not_kept(busy):
    assert calibration(CPU).matmul_flops_per_sec == {"fp32": 1e11}
    assert cached_calibration(CPU) is None


def test_the_measurement_itself_is_watched(monkeypatch):
    during = []

    class Others(Contention):
        def __exit__(self, *exception):
            self.finding = "others did something"

    def rates(*args, **kwargs):
        during.append(True)
        return {"products in fp32": 1e11}

    monkeypatch.setattr(measuring, "Contention", Others)
    monkeypatch.setattr(measuring, "best_rates", rates)
    assert calibrate(CPU).disturbed == "others did something"
    assert during


@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_a_processor_that_may_use_fewer_instructions_is_another_one(measured, monkeypatch, variable):
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    calibration(CPU)
    monkeypatch.setenv(variable, "SSE41")
    assert cached_calibration(CPU) is None


def test_another_machine_with_the_same_home_is_measured_anew(measured, monkeypatch):
    calibration(CPU)
    monkeypatch.setattr(measuring.platform, "node", lambda: "another")
    assert cached_calibration(CPU) is None


class FakeNvml(types.ModuleType):
    """What is asked of the driver."""

    limit_mw, version = 700_000, "570.1"

    def __init__(self):
        super().__init__("pynvml")
        self.nvmlInit = self.nvmlShutdown = lambda: None
        self.NVMLError = RuntimeError
        self.nvmlSystemGetDriverVersion = lambda: self.version
        self.nvmlDeviceGetHandleByUUID = lambda name: name
        self.nvmlDeviceGetPowerManagementLimit = lambda handle: self.limit_mw


@pytest.fixture
def gpu(measured, monkeypatch) -> tuple[types.SimpleNamespace, FakeNvml]:
    """An NVIDIA GPU's properties, and its driver."""
    properties, nvml = types.SimpleNamespace(uuid="1234"), FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.version, "hip", None)
    return properties, nvml


def test_a_gpu_is_told_apart_by_its_uuid_its_power_limit_and_its_driver(gpu, measured):
    device, (properties, nvml) = torch.device("cuda"), gpu
    found = calibration(device)
    assert (found.uuid, found.power_limit_w, found.driver) == ("1234", 700, "570.1")
    assert cached_calibration(device) == found
    for thing, name, value in ((properties, "uuid", "5678"), (nvml, "limit_mw", 500_000), (nvml, "version", "580.2")):
        setattr(thing, name, value)
        assert cached_calibration(device) is None, name
        assert calibration(device) == cached_calibration(device)


def test_a_gpu_without_nvml_has_no_power_limit(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    found = calibration(torch.device("cuda"))
    assert (found.driver, found.power_limit_w, found.uuid) == (None, None, "1234")
    assert cached_calibration(torch.device("cuda")) == found


def test_without_xdg_the_cache_is_in_the_home_folder(measured, tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    calibration(CPU)
    assert len(list((tmp_path / ".cache" / "batchscope").iterdir())) == 1


@pytest.fixture
def no_home(tmp_path, monkeypatch) -> Path:
    """As in a container of a user whom the system does not know; the folder that such a user has."""

    def unknown(*_):
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"batchscope-{os.getuid()}"


def test_without_a_home_the_cache_is_among_temporary_files(measured, no_home):
    found = calibration(CPU)
    assert cached_calibration(CPU) == found
    assert no_home.stat().st_mode & 0o777 == 0o700
    assert measured == [CPU]


def test_a_home_that_cannot_be_written_to_is_none(measured, no_home, monkeypatch):
    monkeypatch.setenv("HOME", "/dev/null")  # not even root can make a folder there
    assert calibration(CPU) == cached_calibration(CPU)
    assert no_home.is_dir()


def test_a_folder_of_another_user_among_temporary_files_is_neither_believed_nor_written_to(
    measured, no_home, monkeypatch
):
    found = calibration(CPU)
    before = sorted(no_home.iterdir())
    monkeypatch.setattr(measuring, "_user_id", lambda: os.getuid() + 1)
    (no_home.parent / f"batchscope-{os.getuid() + 1}").symlink_to(no_home)
    assert cached_calibration(CPU) is None
    assert calibration(CPU) == found
    assert sorted(no_home.iterdir()) == before
    assert len(measured) == 2


# --- the program ---


def comparison(rows: int, cpu: float, cuda: float, measured: int = 100) -> program.Comparison:
    return program.Comparison(rows, 30, 100, {"cpu": cpu, "cuda": cuda}, {"cpu": measured, "cuda": 100})


SWEEP = [comparison(70, 0.001, 0.003), comparison(140, 0.002, 0.003), comparison(280, 0.02, 0.003)]


def test_products_are_timed_as_often_as_fits_and_scaled_up():
    device = FakeDevice()

    def timer(run, times):
        device.now += 0.5 * times
        return 0.5 * times

    seconds, measured = program.products_take(CPU, timer, 7, 3, repetitions=100, budget=10.0)
    assert (seconds, measured) == (100 * 0.5, 4)
    assert 10 <= device.now <= 10 + 4 * 0.5


def test_products_that_take_longer_than_the_budget_are_timed_once():
    assert program.products_take(CPU, lambda run, times: 3.0 * times, 7, 3, 100, budget=2.0) == (300.0, 1)


def test_products_that_are_short_are_timed_all_together():
    assert program.products_take(CPU, lambda run, times: 0.0009765625 * times, 7, 3, 100, budget=1.0) == (
        100 * 0.0009765625,
        100,
    )


def test_products_are_timed_on_a_device_that_has_started():
    begun = []
    with FlopCounterMode(display=False) as counter:
        program.products_take(
            torch.device("meta"),
            lambda run, times: begun.append(counter.get_total_flops()) or 1.0,
            70,
            30,
            1,
            budget=0.5,
        )
    assert begun == [2 * 30]


def test_the_timed_work_is_the_product():
    ran = []
    program.products_take(torch.device("meta"), lambda run, times: ran.append(count(run)) or 1.0, 70, 30, 1, budget=0.5)
    assert ran == [2 * 70 * 70 * 30]


def count(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def test_the_text_is_two_aligned_tables_and_a_verdict():
    products = [comparison(7000, 150.0, 0.75, measured=3), SWEEP[0]]
    assert program.as_text([HOST, GPU], products, SWEEP).splitlines() == [
        "cpu: AMD EPYC (2 threads, AVX512, torch 2.15.0)",
        "cuda: NVIDIA H200 (driver 570.1, torch 2.15.0)",
        "",
        "                                   cpu         cuda",
        "products in fp32           450 GFLOP/s   50 TFLOP/s",
        "products in tf32                     –  400 TFLOP/s",
        "products in bf16           900 GFLOP/s  790 TFLOP/s",
        "products in fp16                     –  780 TFLOP/s",
        "products in fp64                     –   60 TFLOP/s",
        "memory copy, read + write      40 GB/s       4 TB/s",
        "host to device                       –      10 GB/s",
        "host to device, pinned               –      50 GB/s",
        "one small operation             1.8 µs       3.5 µs",
        "",
        "100 products A @ A.T in float32, summed up",
        "A                                      cpu    cuda          fastest",
        "7000×30  150 s (measured 3, scaled to 100)  750 ms  cuda, 200 times",
        "70×30                                 1 ms    3 ms     cpu, 3 times",
        "",
        "cpu is the fastest from 70×30 on, cuda from 280×30 on.",
    ]


def test_the_same_winner_everywhere_is_said():
    assert program.as_text([HOST, GPU], SWEEP[:1], SWEEP[:2]).splitlines()[-1] == (
        "cpu is the fastest at every size from 70×30 to 140×30."
    )


def test_one_device_is_compared_with_nothing():
    alone = program.Comparison(70, 30, 100, {"cpu": 0.001}, {"cpu": 100})
    lines = program.as_text([HOST], [alone], []).splitlines()
    assert lines[-3:] == ["70×30  1 ms", "", "Only cpu was measured: there is nothing to compare it with."]


@pytest.fixture
def no_products(monkeypatch):
    monkeypatch.setattr(
        program,
        "compare",
        lambda timers, m, n, times, budget: program.Comparison(m, n, times, {"cpu": 1.5}, {"cpu": 1}),
    )


def test_json_is_one_document_and_progress_goes_elsewhere(measured, no_products, capsys):
    program.run(["--json", "--device", "cpu"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["devices"]["cpu"]["matmul_flops_per_sec"] == {"fp32": 1e11}
    assert [(each["rows"], each["columns"], each["winner"]) for each in printed["products"]] == [
        (7000, 3000, "cpu"),
        (70, 30, "cpu"),
    ]


def test_what_is_cached_is_measured_again_only_when_asked(measured, no_products, capsys):
    for options, times in (([], 1), ([], 1), (["--quick"], 1), (["--refresh"], 2)):
        program.run(["--device", "cpu", *options])
        assert len(measured) == times


def test_a_quick_measurement_is_not_kept(measured, no_products, capsys):
    program.run(["--device", "cpu", "--quick"])
    assert cached_calibration(CPU) is None


def test_a_busy_processor_is_measured_with_a_warning_and_not_kept(busy, no_products, capsys):
    program.run(["--device", "cpu"])
    assert capsys.readouterr().err == (
        "others used 43% of the processor meanwhile: what was measured of this cpu is too low, and not kept\n"
    )
    assert cached_calibration(CPU) is None


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cdua", "--device: got 'cdua', takes cpu, cuda or mps. Did you mean 'cuda'?"),
        ("cuda", "--device: got 'cuda', and this machine has cpu"),
        ("gpu", "--device: got 'gpu', and this machine has cpu"),
    ],
)
def test_a_device_that_is_not_there_is_refused(device, message, monkeypatch):
    monkeypatch.setattr(program, "available", lambda: ["cpu"])
    with pytest.raises(UserError) as error:
        program.run(["--device", device])
    assert str(error.value) == message


def test_a_mistake_ends_the_program_with_one_line_and_1(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["hardware", "--device", "abacus"])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as exit:
        program.main()
    assert exit.value.code == 1
    assert capsys.readouterr().err == "error: --device: got 'abacus', takes cpu, cuda or mps.\n"
