"""`batchscope hardware`: what is measured and cached, the tables, and the comparison of devices."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from batchscope.cli import hardware as command
from batchscope.errors import UserError
from batchscope.hardware import comparison as program
from batchscope.hardware import timing
from batchscope.hardware.calibration_cache import cached_calibration, identity
from batchscope.hardware.measure import as_calibration
from tests.support.devices import GPU, HOST

CPU = torch.device("cpu")


def comparison(rows: int, cpu: float, cuda: float) -> program.Comparison:
    return program.Comparison(rows, 30, {"cpu": cpu, "cuda": cuda})


SIZES = [comparison(70, 0.001, 0.003), comparison(140, 0.002, 0.003), comparison(280, 0.02, 0.003)]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Every measurement that is made; none takes any time. The cache is empty."""
    made = []

    def fake(device, quick=False, say=None):
        made.append(device)
        return as_calibration(identity(device), {"products in fp32": 1e11, "memory copy": 1e10})

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(program, "calibrate", fake)
    return made


@pytest.fixture
def busy(measured: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes compute during every measurement."""
    undisturbed = program.calibrate

    def disturbed(*args, **kwargs):
        return dataclasses.replace(undisturbed(*args, **kwargs), disturbed="others used 43 % of the CPU")

    monkeypatch.setattr(program, "calibrate", disturbed)


def test_products_are_timed_for_the_budget_and_the_best_block_counts_100_times(monkeypatch):
    left = [4.0, 0.5, 0.25, 1.0]  # seconds of blocks of one product; the first starts a library
    monkeypatch.setattr(timing, "time_runs", lambda run, times: left.pop(0))
    assert program.compare(["cpu"], 7, 3, budget=1.5) == program.Comparison(7, 3, {"cpu": 100 * 0.25})
    assert left == []


def test_the_timed_work_is_the_product():
    with FlopCounterMode(display=False) as counter:
        program._product(CPU, 70, 30)()
    assert counter.get_total_flops() == 2 * 70 * 70 * 30


def test_the_text_is_two_aligned_tables_and_a_conclusion():
    products = [comparison(7000, 150.0, 0.75), SIZES[0]]
    assert program.as_text([HOST, GPU], products, SIZES).splitlines() == [
        "cpu: AMD EPYC (2 threads, AVX512, torch 2.15.0)",
        "cuda: NVIDIA H200 (driver 570.1, torch 2.15.0)",
        "",
        "                                   cpu         cuda",
        "products in fp32           450 GFLOP/s   50 TFLOP/s",
        "products in tf32                     –  400 TFLOP/s",
        "products in bf16           900 GFLOP/s  790 TFLOP/s",
        "products in fp16                     –  780 TFLOP/s",
        "products in fp64                     –   60 TFLOP/s",
        "main memory, read + write            –     4.4 TB/s",
        "memory copy, read + write      40 GB/s       4 TB/s",
        "host to device                       –      10 GB/s",
        "host to device, pinned               –      50 GB/s",
        "caches                               –       50 MiB",
        "one small operation            1.75 µs       3.5 µs",
        "",
        "100 products A @ A.T in float32, summed up",
        "A          cpu    cuda          fastest",
        "7000×30  2 min  750 ms  cuda, 200 times",
        "70×30     1 ms    3 ms     cpu, 3 times",
        "",
        "cpu is the fastest from 70×30 on, cuda from 280×30 on.",
    ]


def test_the_same_winner_everywhere_is_said():
    assert program.as_text([HOST, GPU], SIZES[:1], SIZES[:2]).splitlines()[-1] == (
        "cpu is the fastest at every size from 70×30 to 140×30."
    )


def test_one_device_is_compared_with_nothing():
    lines = program.as_text([HOST], [program.Comparison(70, 30, {"cpu": 0.001})], []).splitlines()
    assert lines[-3:] == ["70×30  1 ms", "", "Only cpu was measured: there is nothing to compare it with."]


@pytest.fixture
def no_products(monkeypatch):
    monkeypatch.setattr(
        program,
        "compare",
        lambda kinds, m, n, budget: program.Comparison(m, n, {"cpu": 1.5}),
    )


def test_json_is_one_document_and_progress_goes_elsewhere(measured, no_products, capsys):
    command.run(["--json", "--device", "cpu"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["devices"]["cpu"]["matmul_flops_per_sec"] == {"fp32": 1e11}
    assert [(each["rows"], each["columns"], each["winner"]) for each in printed["products"]] == [
        (7000, 3000, "cpu"),
        (70, 30, "cpu"),
    ]


def test_what_is_cached_is_measured_again_only_when_asked(measured, no_products, capsys):
    for options, times in (([], 1), ([], 1), (["--quick"], 1), (["--refresh"], 2)):
        command.run(["--device", "cpu", *options])
        assert len(measured) == times


def test_a_quick_measurement_is_not_kept(measured, no_products, capsys):
    command.run(["--device", "cpu", "--quick"])
    assert cached_calibration(CPU) is None


def test_a_busy_processor_is_measured_with_a_warning_and_again_each_time(measured, busy, no_products, capsys):
    for _ in range(2):
        command.run(["--device", "cpu"])
        assert capsys.readouterr().err == (
            "others used 43 % of the CPU: the rates of this cpu are too low, and are not kept for long\n"
        )
    assert len(measured) == 2


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
        command.run(["--device", device])
    assert str(error.value) == message


def test_help_and_a_wrong_name_need_no_torch():
    code = "import sys; from batchscope.cli import hardware; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_mistake_ends_the_program_with_one_line_and_1(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["hardware", "--device", "abacus"])
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as exit:
        command.main()
    assert exit.value.code == 1
    assert capsys.readouterr().err == "error: --device: got 'abacus', takes cpu, cuda or mps.\n"
