"""A calibration survives its dict, and a peak is that of the precision in which the device computes."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from batchscope.hardware.calibration import Calibration, faster_precision, peak_flops_per_sec
from tests.support.devices import GPU, HOST


def test_a_calibration_survives_its_dict() -> None:
    for each in (GPU, HOST):
        assert Calibration.from_dict(json.loads(json.dumps(each.to_dict()))) == each
    assert "uuid" not in HOST.to_dict()


@pytest.mark.parametrize(
    "change", [{"launch_us": -1}, {"cache_bytes": float("nan")}, {"matmul_flops_per_sec": {"fp32": 0}}, {"speed": 3}]
)
def test_what_is_no_calibration_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Calibration.from_dict({**HOST.to_dict(), **change})


def with_peaks(calibration: Calibration, **peaks: float) -> Calibration:
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
    "a GPU without TF32": (OLDER, DEFAULT, "32-true", RECURRENT, 15e12),
}


@pytest.fixture
def switch() -> Iterator[Callable[..., None]]:
    """Sets torch's switches."""
    backends = torch.backends
    switches = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul)

    def to(*formats: str) -> None:
        for each, value in zip(switches, formats, strict=True):
            each.fp32_precision = value

    before = [each.fp32_precision for each in switches]
    yield to
    to(*before)


@pytest.mark.parametrize("name", PEAKS)
def test_a_step_is_compared_with_the_peak_of_what_it_computes(name: str, switch: Callable[..., None]) -> None:
    calibration, switches, precision, shares, peak = PEAKS[name]
    switch(*switches)
    assert peak_flops_per_sec(calibration, precision, shares) == (peak and pytest.approx(peak))


def test_without_cudnn_a_recurrent_kernel_consists_of_matrix_products(switch: Callable[..., None]) -> None:
    switch(*DEFAULT)
    with torch.backends.cudnn.flags(enabled=False):
        assert peak_flops_per_sec(GPU, "32-true", RECURRENT) == 50e12


FASTER = {  # the calibration, what the run is known to reach → the precision that is recommended to it in float32
    "a GPU with bf16": (with_peaks(GPU, fp32=50e12, bf16=790e12, fp16=780e12), None, "bf16-mixed"),
    "a GPU that emulates bf16": (with_peaks(GPU, fp32=8e12, bf16=3e12, fp16=50e12), None, "16-mixed"),
    "16-mixed on a CPU": (with_peaks(HOST, fp32=100e9, bf16=16e9, fp16=300e9), None, None),
    "a processor with AMX": (with_peaks(HOST, fp32=170e9, bf16=900e9), None, "bf16-mixed"),
    "hardly faster": (with_peaks(GPU, fp32=50e12, bf16=55e12), None, None),
    "in float32": (with_peaks(GPU, fp32=50e12, tf32=400e12, bf16=410e12), 50e12, "bf16-mixed"),
    "in TF32 already": (with_peaks(GPU, fp32=50e12, tf32=400e12, bf16=410e12), 400e12, None),
}


@pytest.mark.parametrize("name", FASTER)
def test_a_precision_is_recommended_where_this_device_was_measured_to_be_faster(name: str) -> None:
    measured, peak, faster = FASTER[name]
    assert faster_precision(measured, "32-true", peak) == faster
    assert faster_precision(measured, "bf16-mixed", peak) is None
