"""`batchscope hardware`: what is measured and cached, and the table."""

import json

import pytest

from batchscope.cli import hardware
from batchscope.hardware import devices, measure
from batchscope.hardware.calibration import Calibration
from batchscope.hardware.measure import identity
from tests.support.command_lines import answer
from tests.support.devices import GPU, HOST


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """What disturbs the next measurement, then an item per measurement; none takes any time. The cache is empty."""
    measurements = [None]

    def fake(device):
        measurements.append(measurements[0])
        rates = {"fp32": 1e11}
        return Calibration(**identity(device), matmul_flops_per_sec=rates, launch_us=0.422, disturbed=measurements[0])

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "calibrate", fake)
    return measurements


def test_the_text_is_a_number_a_line_with_the_share_of_a_known_datasheet():
    assert [line for calibration in (HOST, GPU) for line in hardware.lines_of(calibration)] == [
        "cpu: AMD EPYC (2 threads, AVX512, torch 2.15.0)",
        "  products in fp32           450 GFLOP/s",
        "  products in bf16           900 GFLOP/s",
        "  main memory, read + write  40 GB/s",
        "  one launch                 1.75 µs",
        "cuda: NVIDIA H200 (driver 570.1, torch 2.15.0)",
        "  products in fp32           50 TFLOP/s (75 % of the datasheet)",
        "  products in tf32           400 TFLOP/s (81 % of the datasheet)",
        "  products in bf16           790 TFLOP/s (80 % of the datasheet)",
        "  products in fp16           780 TFLOP/s (79 % of the datasheet)",
        "  products in fp64           60 TFLOP/s (90 % of the datasheet)",
        "  main memory, read + write  4.4 TB/s (92 % of the datasheet)",
        "  one launch                 3.5 µs",
        "  caches                     50 MiB",
    ]


def test_what_is_cached_is_measured_again_only_when_asked_and_json_is_one_document(measured):
    for options, times in (([], 1), ([], 1), (["--refresh"], 2), (["--json"], 2), (["--json", "--refresh"], 3)):
        result = answer("hardware", "--device", "cpu", *options)
        assert (result.code, len(measured) - 1) == (0, times)
    assert json.loads(result.out)["devices"]["cpu"]["matmul_flops_per_sec"] == {"fp32": 1e11}
    assert result.err == "measuring cpu, which takes some seconds …\n"


def test_a_busy_processor_is_measured_with_a_warning(measured):
    measured[0] = "others used 43 % of the CPU"
    warning = "others used 43 % of the CPU: the rates of this cpu are too low, and are not kept for long\n"
    assert [answer("hardware", "--device", "cpu").err.endswith(warning) for _ in range(2)] == [True, True]


def test_a_device_that_this_machine_has_not_is_refused(monkeypatch):
    monkeypatch.setattr(devices, "available", lambda: ["cpu"])
    message = "error: --device: got 'cuda', and this machine has cpu\n"
    assert answer("hardware", "--device", "cuda") == (1, "", message)
