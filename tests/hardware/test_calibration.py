"""A calibration: measured once for each device, driver and torch, and the peak of the precision in which a step computes."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import psutil
import pynvml
import pytest
import torch

from batchscope.hardware import measure, microbenchmarks
from batchscope.hardware.calibration import Calibration, faster_precision, peak_flops_per_sec
from batchscope.hardware.devices import cache_bytes
from batchscope.hardware.measure import (
    cached_calibration,
    calibrate,
    find_calibration,
    identity,
    load_or_measure,
    store,
)
from batchscope.hardware.processor import Noise, NoiseMeter
from tests.hardware.conftest import REFUSED
from tests.support.devices import GPU, HOST

CPU = torch.device("cpu")


@pytest.mark.slow
def test_this_machines_processor_is_measured(monkeypatch):
    monkeypatch.setattr(measure, "_PASSES_S", 0.0)
    random_state = torch.get_rng_state()
    result = calibrate(CPU)
    assert (result.device, result.threads, result.cache_bytes) == ("cpu", torch.get_num_threads(), cache_bytes(CPU))
    assert min(result.matmul_flops_per_sec["fp32"], result.memory_bytes_per_sec) > 1e8
    assert 0.1 < result.launch_us < 1000
    assert torch.get_rng_state().equal(random_state)


@pytest.mark.slow
def test_a_processor_is_the_same_one_before_and_after_openmp_has_bound_its_threads():
    bound = {"OMP_PROC_BIND": "true", "OMP_NUM_THREADS": "2"}
    program = (
        "import torch; from batchscope.hardware.measure import identity; device = torch.device('cpu')\n"
        "before = identity(device); torch.rand(512, 512) @ torch.rand(512, 512); assert identity(device) == before"
    )
    subprocess.run([sys.executable, "-c", program], env=os.environ | bound, check=True)


def with_peaks(calibration, **peaks):
    return dataclasses.replace(calibration, matmul_flops_per_sec=peaks)


SLOW_HALVES, OLDER = with_peaks(HOST, fp32=100e9, bf16=5e9), with_peaks(GPU, fp32=15e12, fp16=110e12)
RECURRENT = {"matmul": 0.0, "convolution": 0.0, "recurrent": 1.0}
MIXED = {"matmul": 0.5, "convolution": 0.25, "recurrent": 0.25}
# What float32 is computed in: by matrix products, convolutions and recurrent kernels of CUDA, and on a processor.
IEEE, DEFAULT = ("ieee", "ieee", "ieee", "none"), ("ieee", "tf32", "tf32", "none")
PEAKS = {  # the calibration, torch's switches, the precision, shares of the FLOPs → the peak
    "that of the precision": (GPU, IEEE, "bf16-mixed", None, 790e12),
    "half precision": (GPU, IEEE, "16-true", None, 780e12),
    "a precision as a number": (GPU, IEEE, 64, None, 60e12),
    "a precision that was not measured": (HOST, IEEE, "16-mixed", None, None),
    "an unknown precision": (HOST, IEEE, "transformer-engine", None, None),
    "the default": (HOST, IEEE, None, None, 450e9),
    "mixed precision is the faster of two formats": (SLOW_HALVES, IEEE, "bf16-mixed", None, 100e9),
    "true precision is its own": (SLOW_HALVES, IEEE, "bf16-true", None, 5e9),
    "float32 on a processor as bf16": (HOST, ("ieee", "tf32", "tf32", "bf16"), "32-true", None, 900e9),
    "float32 is TF32 where a switch allows it": (GPU, DEFAULT, "32-true", None, 400e12),
    "float32 where none does": (GPU, IEEE, "32-true", None, 50e12),
    "kinds of products weigh by their FLOPs": (GPU, DEFAULT, "32-true", MIXED, 1 / (0.5 / 50e12 + 0.5 / 400e12)),
    "recurrent kernels alone": (GPU, DEFAULT, "32-true", RECURRENT, 400e12),
    "without cuDNN they are matrix products": (GPU, DEFAULT, "32-true", RECURRENT, 50e12),
    "a GPU without TF32": (OLDER, DEFAULT, "32-true", RECURRENT, 15e12),
}


@pytest.fixture
def switches():
    """The switches of torch for the format of float32; the test's changes are undone."""
    backends = torch.backends
    switches = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul)
    saved = [switch.fp32_precision for switch in switches]
    yield switches
    for switch, value in zip(switches, saved, strict=True):
        switch.fp32_precision = value


@pytest.mark.parametrize("name", PEAKS)
def test_a_step_is_compared_with_the_peak_of_what_it_computes(name, switches, monkeypatch):
    calibration, formats, precision, shares, peak = PEAKS[name]
    for switch, value in zip(switches, formats, strict=True):
        switch.fp32_precision = value
    monkeypatch.setattr(torch.backends.cudnn, "enabled", not name.startswith("without cuDNN"))
    assert peak_flops_per_sec(calibration, precision, shares) == (peak and pytest.approx(peak))


def test_products_in_another_format_than_the_trainers_have_the_peak_of_that_format(switches):
    gpu = with_peaks(GPU, fp32=50e12, bf16=800e12)
    for switch in switches:
        switch.fp32_precision = "ieee"
    halves = {"matmul": 0.5, "matmul bf16": 0.5}
    assert peak_flops_per_sec(gpu, "32-true", halves) == pytest.approx(1 / (0.5 / 50e12 + 0.5 / 800e12))
    assert peak_flops_per_sec(gpu, "32-true", {"matmul bf16": 1.0}) == pytest.approx(800e12)
    assert peak_flops_per_sec(gpu, "32-true", {"matmul fp8": 1.0}) == pytest.approx(800e12)
    assert peak_flops_per_sec(gpu, "bf16-mixed", halves) == pytest.approx(800e12)


FASTER = {  # the calibration, and the peak of the run in FLOP/s → the precision that is recommended to a run in float32
    "a GPU with bf16": (with_peaks(GPU, fp32=50e12, bf16=790e12, fp16=780e12), None, "bf16-mixed"),
    "a GPU that emulates bf16": (with_peaks(GPU, fp32=8e12, bf16=3e12, fp16=50e12), None, "16-mixed"),
    "16-mixed on a CPU": (with_peaks(HOST, fp32=100e9, bf16=16e9, fp16=300e9), None, None),
    "a processor with AMX": (with_peaks(HOST, fp32=170e9, bf16=900e9), None, "bf16-mixed"),
    "hardly faster": (with_peaks(GPU, fp32=50e12, bf16=55e12), None, None),
    "in float32": (with_peaks(GPU, fp32=50e12, tf32=400e12, bf16=410e12), 50e12, "bf16-mixed"),
    "in TF32 already": (with_peaks(GPU, fp32=50e12, tf32=400e12, bf16=410e12), 400e12, None),
}


@pytest.mark.parametrize("name", FASTER)
def test_a_precision_is_recommended_where_this_device_was_measured_to_be_faster(name):
    calibration, peak, faster = FASTER[name]
    assert faster_precision(calibration, "32-true", peak) == faster
    assert faster_precision(calibration, "bf16-mixed", peak) is None


MEASURED = Calibration("cpu", "a CPU", "AVX2", torch.__version__, 1, {"fp32": 1e11}, launch_us=2.0)


def test_rates_become_a_calibration_in_the_units_of_its_names_and_others_are_watched_meanwhile(monkeypatch):
    rates = {"bf16": 9e14, "memory": 3e10, "launches": 250_000.0}
    monkeypatch.setattr(NoiseMeter, "read", lambda meter: Noise(0.43, 0.1))
    monkeypatch.setattr(microbenchmarks, "best_rates", lambda candidates, seconds: rates)
    result = measure.calibrate(CPU)
    assert result.matmul_flops_per_sec == {"bf16": 9e14}
    assert (result.memory_bytes_per_sec, result.launch_us, result.cache_bytes) == (3e10, 4.0, cache_bytes(CPU))
    assert result.disturbed == "other processes used 43 % of the CPU during the measurement"


def test_a_gpu_on_which_others_compute_is_disturbed(nvml, monkeypatch):
    monkeypatch.setattr(measure.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(nvml, "busy_pct", 95)
    gpu = torch.device("cuda")
    assert measure._measure_gpu_load(gpu) == pytest.approx(0.95)
    assert measure._describe_disturbance(gpu, 0.95, Noise()) == (
        "other processes computed on the GPU in 95 % of the second before the measurement"
    )
    # The load of the processor does not disturb the GPU.
    assert measure._describe_disturbance(gpu, 0.05, Noise(0.9, 0.0)) is None
    reason = measure._describe_disturbance(gpu, 0.05, Noise(), has_memory=False)  # an idle process may hold nearly all
    assert reason == "other processes held the memory of the GPU during the measurement"
    assert measure._measure_gpu_load(CPU) == 0.0
    monkeypatch.setattr(pynvml, "nvmlInit", REFUSED)
    assert measure._measure_gpu_load(gpu) == 0.0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "batchscope"


@pytest.fixture
def measurer(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Replaces the measurement by this process; counts the calls, none of which takes any time."""
    measurer = Mock(side_effect=lambda device: Calibration(**identity(device), matmul_flops_per_sec={"fp32": 1e11}))
    monkeypatch.setattr(measure, "calibrate", measurer)
    return measurer


@pytest.mark.parametrize(
    ("output", "times"),
    [
        pytest.param("a library's greeting\n" + json.dumps(dataclasses.asdict(MEASURED)), 0, id="a calibration"),
        pytest.param("no JSON", 1, id="no JSON"),
        pytest.param(OSError("no more processes"), 1, id="no process"),
        pytest.param(subprocess.CalledProcessError(1, "python"), 1, id="an error"),
    ],
)
def test_a_process_measures_where_permitted_and_this_one_where_it_fails(output, times, measurer, monkeypatch, capsys):
    run = Mock(side_effect=[subprocess.CompletedProcess([], 0, stdout=output) if isinstance(output, str) else output])
    monkeypatch.setattr(measure.subprocess, "run", run)
    assert find_calibration(CPU, measure=False) is None
    assert capsys.readouterr().out == ""
    calibration = find_calibration(CPU, measure=True)
    assert capsys.readouterr().out == "measuring what this cpu can do; once, some seconds …\n"
    line = run.call_args.args[0]
    assert line[1] == "-P"  # the child imports nothing from the current folder
    assert line[-2:] == ["cpu", str(torch.get_num_threads())]
    assert (calibration == MEASURED, measurer.call_count) == (not times, times)
    assert not times or find_calibration(CPU, measure=True) == cached_calibration(CPU) == calibration
    assert not times or capsys.readouterr().out == ""


def test_a_device_is_measured_once_in_each_setting(measurer, nvml, monkeypatch):
    monkeypatch.setattr(psutil, "sensors_battery", lambda: SimpleNamespace(power_plugged=True), raising=False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    gpu = torch.device("cuda")
    for device in (CPU, gpu):
        calibration = load_or_measure(device)
        assert calibration == load_or_measure(device) == cached_calibration(device)
    assert measurer.call_args_list == [call(CPU), call(gpu)]
    assert (calibration.power_limit_w, calibration.driver) == (700, "570.1")
    for device, place, name, value in (
        (CPU, torch, "__version__", "9.9"),
        (CPU, torch, "get_num_threads", lambda: 77),
        (CPU, measure, "usable_cores", lambda: 0.5),
        (CPU, psutil, "sensors_battery", lambda: SimpleNamespace(power_plugged=False)),
        (CPU, os, "environ", os.environ | {"ONEDNN_MAX_CPU_ISA": "SSE41"}),
        (gpu, nvml, "limit_mw", 500_000),
        (gpu, nvml, "version", "580.2"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            assert cached_calibration(device) is None, name
    monkeypatch.setattr(pynvml, "nvmlInit", REFUSED)
    assert identity(gpu)["driver"] is None


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_cache_is_ignored_with_one_warning_and_measured_again(measurer, cache, content):
    load_or_measure(CPU)
    (file,) = cache.iterdir()
    file.write_bytes(content)
    with pytest.warns(UserWarning, match=f"{file.name} is damaged, and is ignored"):
        load_or_measure(CPU)
    assert measurer.call_count == 2
    assert cached_calibration(CPU) is not None


@pytest.mark.filterwarnings("error")
def test_a_damaged_cache_is_measured_again_where_warnings_are_errors(measurer, cache):
    load_or_measure(CPU)
    next(cache.iterdir()).write_bytes(b"")
    load_or_measure(CPU)
    assert measurer.call_count == 2


def test_where_the_cache_cannot_be_written_a_temporary_folder_of_the_user_is_it(measurer, cache, tmp_path, monkeypatch):
    cache.write_text("a file where the folder should be")
    assert load_or_measure(CPU) == load_or_measure(CPU)
    assert measurer.call_count == 1
    (folder,) = (tmp_path / "temporary").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(tempfile, "tempdir", str(cache))  # where nothing can be written either, nothing is kept
    assert load_or_measure(CPU).matmul_flops_per_sec == {"fp32": 1e11}
    assert measurer.call_count == 2


def test_without_a_folder_of_temporary_files_either_nothing_is_kept(measurer, cache, monkeypatch):
    cache.write_text("a file where the folder should be")
    monkeypatch.setattr(tempfile, "gettempdir", Mock(side_effect=FileNotFoundError("no usable temporary directory")))
    assert load_or_measure(CPU) == load_or_measure(CPU)
    assert measurer.call_count == 2


def test_a_temporary_folder_that_another_user_has_made_is_not_used(measurer, cache, tmp_path, monkeypatch):
    cache.write_text("a file where the folder should be")
    monkeypatch.setattr(measure, "user_and_group", lambda process: (-1, 0))  # a user who owns no folder
    (tmp_path / "temporary" / "batchscope--1").mkdir(parents=True)
    assert load_or_measure(CPU) == load_or_measure(CPU)
    assert measurer.call_count == 2


def test_a_damaged_file_in_a_home_that_cannot_be_written_hides_no_temporary_one(measurer, cache, tmp_path):
    cache.write_text("a file where the folder should be")
    calibration = load_or_measure(CPU)
    (file,) = (tmp_path / "temporary").glob("*/*")
    cache.unlink()
    cache.mkdir()
    (cache / file.name).write_bytes(b"")
    with pytest.warns(UserWarning, match="is damaged, and is ignored"):
        assert cached_calibration(CPU) == calibration


def test_what_was_measured_while_others_computed_is_used_for_some_minutes(cache):
    store(Calibration(**identity(CPU), matmul_flops_per_sec={"fp32": 1e11}, disturbed="others used 43 % of the CPU"))
    (file,) = cache.iterdir()
    for age, is_used in ((0, True), (measure.DISTURBED_S - 60, True), (measure.DISTURBED_S + 1, False), (-60, False)):
        os.utime(file, (time.time() - age,) * 2)
        assert (cached_calibration(CPU) is not None) == is_used, age


@pytest.mark.usefixtures("measurer")
def test_without_xdg_the_cache_is_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert load_or_measure(CPU) == cached_calibration(CPU)
    assert (tmp_path / "home" / ".cache" / "batchscope").stat().st_mode & 0o777 == 0o700


def test_without_a_home_folder_a_temporary_one_has_it_and_an_error_of_the_device_is_told(
    measurer, tmp_path, monkeypatch
):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(measure.Path, "home", Mock(side_effect=RuntimeError("no home")))
    assert load_or_measure(CPU) == cached_calibration(CPU)
    monkeypatch.setattr(measure, "identity", Mock(side_effect=RuntimeError("CUDA error: out of order")))
    with pytest.raises(RuntimeError, match="CUDA error"):
        cached_calibration(CPU)


@pytest.mark.parametrize(
    "change", [{"launch_us": 0}, {"memory_bytes_per_sec": -1.0}, {"matmul_flops_per_sec": {"fp32": math.nan}}]
)
def test_a_rate_that_is_no_positive_number_is_refused(change):
    with pytest.raises(ValueError, match="a rate that is no positive number"):
        dataclasses.replace(MEASURED, **change)
