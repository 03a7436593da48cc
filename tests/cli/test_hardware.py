"""`batchscope hardware`: what is measured and cached, and the table."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from batchscope.cli import hardware
from batchscope.hardware import devices, measure
from batchscope.hardware.calibration import Calibration
from batchscope.hardware.measure import identity
from tests.support.command_lines import answer
from tests.support.devices import GPU, HOST


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Every measurement that is made; none takes any time. The cache is empty."""
    made = []

    def fake(device: torch.device) -> Calibration:
        made.append(device)
        return Calibration(**identity(device), matmul_flops_per_sec={"fp32": 1e11}, launch_us=0.422)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "calibrate", fake)
    return made


def test_the_text_is_one_table_with_the_datasheet_beside_a_known_card():
    assert hardware.as_text([HOST, GPU]).splitlines() == [
        "cpu: AMD EPYC (2 threads, AVX512, torch 2.15.0)",
        "cuda: NVIDIA H200 (driver 570.1, torch 2.15.0)",
        "",
        "                                   cpu         cuda     datasheet reached",
        "products in fp32           450 GFLOP/s   50 TFLOP/s  66.9 TFLOP/s    75 %",
        "products in tf32                     –  400 TFLOP/s   495 TFLOP/s    81 %",
        "products in bf16           900 GFLOP/s  790 TFLOP/s   989 TFLOP/s    80 %",
        "products in fp16                     –  780 TFLOP/s   989 TFLOP/s    79 %",
        "products in fp64                     –   60 TFLOP/s  66.9 TFLOP/s    90 %",
        "main memory, read + write      40 GB/s     4.4 TB/s      4.8 TB/s    92 %",
        "one launch                     1.75 µs       3.5 µs             –       –",
        "caches                               –       50 MiB             –       –",
    ]


def test_what_no_device_has_is_no_row():
    quick = dataclasses.replace(HOST, matmul_flops_per_sec={"fp32": 1e11}, memory_bytes_per_sec=None, launch_us=0.422)
    assert [line.split() for line in hardware.as_text([quick]).splitlines()[2:]] == [
        ["cpu"],
        ["products", "in", "fp32", "100", "GFLOP/s"],
        ["one", "launch", "0.422", "µs"],
    ]


def test_json_is_one_document_and_progress_goes_elsewhere(measured):
    found = answer("hardware", "--json", "--device", "cpu")
    assert json.loads(found.out)["devices"]["cpu"]["matmul_flops_per_sec"] == {"fp32": 1e11}
    assert found.err == "measuring cpu, which takes some seconds …\n"


def test_what_is_cached_is_measured_again_only_when_asked(measured):
    for options, times in (([], 1), ([], 1), (["--refresh"], 2)):
        assert answer("hardware", "--device", "cpu", *options).code == 0
        assert len(measured) == times


def test_a_busy_processor_is_measured_with_a_warning(measured, monkeypatch):
    undisturbed = measure.calibrate
    busy = "others used 43 % of the CPU"
    monkeypatch.setattr(measure, "calibrate", lambda device: dataclasses.replace(undisturbed(device), disturbed=busy))
    said = "others used 43 % of the CPU: the rates of this cpu are too low, and are not kept for long\n"
    assert [answer("hardware", "--device", "cpu").err.endswith(said) for _ in range(2)] == [True, True]


def test_a_device_that_this_machine_has_not_is_refused(monkeypatch):
    monkeypatch.setattr(devices, "available", lambda: ["cpu"])
    said = "error: --device: got 'cuda', and this machine has cpu\n"
    assert answer("hardware", "--device", "cuda") == (1, "", said)
