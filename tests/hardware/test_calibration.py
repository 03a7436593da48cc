"""A calibration survives its dict, and a peak is that of the precision in which the device computes."""

import contextlib
import dataclasses
import json

import pytest
import torch
from torch import nn

from batchscope.hardware.calibration import Calibration, faster_precision, peak_flops_per_sec
from tests.support.devices import GPU, HOST


def test_a_calibration_survives_its_dict():
    for each in (GPU, HOST):
        assert Calibration.from_dict(json.loads(json.dumps(each.to_dict()))) == each
    assert "h2d_bytes_per_sec" not in HOST.to_dict()


@pytest.mark.parametrize(
    "change",
    [{"launch_us": -1}, {"memory_bytes_per_sec": float("nan")}, {"matmul_flops_per_sec": {"fp32": None}}, {"speed": 3}],
)
def test_what_is_no_calibration_is_refused(change):
    with pytest.raises((ValueError, TypeError)):
        Calibration.from_dict({**HOST.to_dict(), **change})


@pytest.mark.parametrize(
    ("precision", "peak"), [("bf16-mixed", "bf16"), ("16-true", "fp16"), (16, "fp16"), (64, "fp64")]
)
def test_the_peak_is_that_of_the_precision(precision, peak):
    assert peak_flops_per_sec(GPU, precision) == GPU.matmul_flops_per_sec[peak]


@pytest.mark.parametrize("precision", ["transformer-engine", "16-mixed", "64-true"])
def test_what_was_not_measured_has_no_peak(precision):
    assert peak_flops_per_sec(HOST, precision) is None


@pytest.mark.parametrize("precision", [None, "32-true", 32])
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
        (nn.LSTM(1, 1), "ieee", "tf32", "tf32", "tf32"),
        (nn.LSTM(1, 1), "ieee", "tf32", "ieee", "fp32"),
        (None, "ieee", "tf32", "ieee", "tf32"),
    ],
)
def test_float32_on_cuda_is_tf32_where_torch_may_use_it(module, matmul, conv, rnn, peak):
    with switched(matmul, conv, rnn):
        assert peak_flops_per_sec(GPU, "32-true", module) == GPU.matmul_flops_per_sec[peak]


def test_kinds_of_products_weigh_by_their_flops():
    shares = {"matmul": 0.5, "convolution": 0.25, "recurrent": 0.25}
    with switched("ieee", "tf32", "tf32"):
        found = peak_flops_per_sec(GPU, "32-true", nn.LSTM(1, 1), shares)
    assert found == pytest.approx(1 / (0.5 / 50e12 + 0.5 / 400e12))


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
        pytest.param("cpu", {"fp32": 100e9, "bf16": 16e9, "fp16": 300e9}, None, id="16-mixed on a CPU"),
        pytest.param("cpu", {"fp32": 170e9, "bf16": 900e9}, "bf16-mixed", id="a processor with AMX"),
        pytest.param("cuda", {"fp32": 50e12, "bf16": 55e12}, None, id="hardly faster"),
    ],
)
def test_a_precision_is_recommended_where_this_device_was_measured_to_be_faster(device, peaks, faster):
    measured = Calibration(device, "a device", None, "2.15", None, peaks)
    assert faster_precision(measured, "32-true") == faster
    assert faster_precision(measured, "bf16-mixed") is None


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
