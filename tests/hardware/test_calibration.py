"""A calibration survives its dict, and a peak is that of the precision in which the device computes."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator

import pytest
import torch

from batchscope.hardware.calibration import Calibration, faster_precision, peak_flops_per_sec
from tests.support.devices import GPU, HOST


def test_a_calibration_survives_its_dict() -> None:
    for each in (GPU, HOST):
        assert Calibration.from_dict(json.loads(json.dumps(each.to_dict()))) == each
    assert "uuid" not in HOST.to_dict()


@pytest.mark.parametrize(
    "change",
    [{"launch_us": -1}, {"memory_bytes_per_sec": float("nan")}, {"matmul_flops_per_sec": {"fp32": None}}, {"speed": 3}],
)
def test_what_is_no_calibration_is_refused(change: dict) -> None:
    with pytest.raises((ValueError, TypeError)):
        Calibration.from_dict({**HOST.to_dict(), **change})


@contextlib.contextmanager
def switched(matmul: str, conv: str, rnn: str, mkldnn: str = "none") -> Iterator[None]:
    """What torch's switches allow float32 to be computed in."""
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


SLOW_HALVES = Calibration("cpu", "old", None, "2.15", 2, {"fp32": 100e9, "bf16": 5e9})
OLDER = dataclasses.replace(GPU, matmul_flops_per_sec={"fp32": 15e12, "fp16": 110e12})
RECURRENT = {"matmul": 0.0, "convolution": 0.0, "recurrent": 1.0}
MIXED = {"matmul": 0.5, "convolution": 0.25, "recurrent": 0.25}
IEEE, TF32 = ("ieee", "ieee", "ieee"), ("tf32", "tf32", "tf32")
BY_DEFAULT = ("ieee", "tf32", "tf32")
PEAKS = {  # the calibration, torch's switches, the precision, shares of the FLOPs → the peak
    "that of the precision": (GPU, IEEE, "bf16-mixed", None, 790e12),
    "half precision": (GPU, IEEE, "16-true", None, 780e12),
    "a precision as a number": (GPU, IEEE, 64, None, 60e12),
    "a precision that was not measured": (HOST, IEEE, "16-mixed", None, None),
    "an unknown precision": (HOST, IEEE, "transformer-engine", None, None),
    "the default": (HOST, IEEE, None, None, 450e9),
    "mixed precision is the faster of two formats": (SLOW_HALVES, IEEE, "bf16-mixed", None, 100e9),
    "true precision is its own": (SLOW_HALVES, IEEE, "bf16-true", None, 5e9),
    "float32 on a processor as bf16": (HOST, (*BY_DEFAULT, "bf16"), "32-true", None, 900e9),
    "float32 is TF32 where a switch allows it": (GPU, BY_DEFAULT, "32-true", None, 400e12),
    "float32 where none does": (GPU, IEEE, "32-true", None, 50e12),
    "kinds of products weigh by their FLOPs": (GPU, BY_DEFAULT, "32-true", MIXED, 1 / (0.5 / 50e12 + 0.5 / 400e12)),
    "recurrent kernels alone": (GPU, BY_DEFAULT, "32-true", RECURRENT, 400e12),
    "a GPU without TF32": (OLDER, TF32, "32-true", RECURRENT, 15e12),
}


@pytest.mark.parametrize("name", PEAKS)
def test_a_step_is_compared_with_the_peak_of_what_it_computes(name: str) -> None:
    calibration, switches, precision, shares, peak = PEAKS[name]
    with switched(*switches):
        assert peak_flops_per_sec(calibration, precision, shares) == (peak and pytest.approx(peak))


def test_without_cudnn_a_recurrent_kernel_consists_of_matrix_products() -> None:
    with switched(*BY_DEFAULT), torch.backends.cudnn.flags(enabled=False):
        assert peak_flops_per_sec(GPU, "32-true", RECURRENT) == 50e12


FASTER = {  # kind, measured peaks, the precision that is recommended to a run in float32
    "a GPU with bf16": ("cuda", {"fp32": 50e12, "bf16": 790e12, "fp16": 780e12}, "bf16-mixed"),
    "a GPU that emulates bf16": ("cuda", {"fp32": 8e12, "bf16": 3e12, "fp16": 50e12}, "16-mixed"),
    "16-mixed on a CPU": ("cpu", {"fp32": 100e9, "bf16": 16e9, "fp16": 300e9}, None),
    "a processor with AMX": ("cpu", {"fp32": 170e9, "bf16": 900e9}, "bf16-mixed"),
    "hardly faster": ("cuda", {"fp32": 50e12, "bf16": 55e12}, None),
}


@pytest.mark.parametrize("name", FASTER)
def test_a_precision_is_recommended_where_this_device_was_measured_to_be_faster(name: str) -> None:
    device, peaks, faster = FASTER[name]
    measured = Calibration(device, "a device", None, "2.15", None, peaks)
    assert faster_precision(measured, "32-true") == faster
    assert faster_precision(measured, "bf16-mixed") is None


def test_what_is_reached_by_tf32_already_counts_as_it_is() -> None:
    measured = dataclasses.replace(GPU, matmul_flops_per_sec={"fp32": 50e12, "tf32": 400e12, "bf16": 410e12})
    assert faster_precision(measured, "32-true", peak=50e12) == "bf16-mixed"
    assert faster_precision(measured, "32-true", peak=400e12) is None
