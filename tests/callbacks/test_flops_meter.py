"""The datasheet's peak for a training step: by precision, and by torch's switches for float32."""

import pytest
from torch import nn

from batchscope._torch import float32_computed_as
from batchscope.callbacks._flops_meter import datasheet_peak


def test_a_device_without_a_datasheet_has_no_peak():
    assert datasheet_peak("NVIDIA A10G", "32-true") is None
    assert datasheet_peak("AMD Instinct MI300X", "32-true") is None


@pytest.mark.parametrize(
    ("precision", "peak"),
    [("bf16-mixed", 989.4e12), ("16-true", 989.4e12), ("64-true", 66.9e12), ("transformer-engine", None)],
)
def test_the_peak_is_that_of_the_precision(precision, peak):
    assert datasheet_peak("NVIDIA H100 80GB HBM3", precision) == peak


def test_a_precision_without_hardware_has_no_peak():
    assert datasheet_peak("Tesla T4", "bf16-true") is None
    assert datasheet_peak("Tesla T4", "16-mixed") == 65e12


@pytest.mark.parametrize(("form", "peak"), [("ieee", 66.9e12), ("tf32", 494.7e12)])
def test_torchs_switches_decide_between_fp32_and_tf32(form, peak):
    with float32_computed_as(form):
        assert datasheet_peak("NVIDIA H200", "32-true", nn.Linear(1, 1)) == peak
