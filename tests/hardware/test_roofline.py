"""The peaks of a device, and the lower bound of a step: no step is faster."""

import pytest

from batchscope.hardware.calibration import Calibration
from batchscope.hardware.roofline import compute_seconds, lower_bound
from batchscope.records.operations import OperationRow

MB = 1e6
CPU = Calibration("cpu", "", None, "2", 1, {"fp32": 100e9}, 20e9, launch_us=2.0, cache_bytes=10_000_000)
GPU = Calibration("cuda", "", None, "2", None, {"fp32": 50e12}, 2e12, launch_us=5.0, cache_bytes=50_000_000)


def operation(gflop: float = 0.0, cold_mb: float = 0.0, calls: int = 1) -> OperationRow:
    return OperationRow("aten.mm", "", "forward", "fp32", (), calls, gflop * 1e9, cold_mb * MB, cold_mb * MB)


def test_on_a_cpu_it_is_the_sum_of_the_largest_needs():
    found = lower_bound([operation(gflop=0.5), operation(cold_mb=60), operation(calls=100)], CPU)
    assert found == pytest.approx({"total": 7.2e-3, "compute": 5e-3, "memory": 2e-3, "launch": 0.2e-3})


def test_traffic_counts_without_what_the_cache_may_hold_before_and_after_each_call():
    assert lower_bound([operation(cold_mb=60)], CPU)["memory"] == pytest.approx(40 * MB / 20e9)
    assert lower_bound([operation(cold_mb=60, calls=3)], CPU)["memory"] == 0


def test_on_an_asynchronous_device_it_is_the_larger_of_its_own_and_the_hosts():
    work = [operation(gflop=50), operation(cold_mb=4100)]
    assert lower_bound(work, GPU)["total"] == pytest.approx(3e-3)
    assert lower_bound([*work, operation(calls=1000)], GPU)["total"] == pytest.approx(1002 * 5e-6)


def test_an_operation_of_a_type_without_a_peak_is_held_against_the_highest():
    odd = OperationRow("aten.mm", "", "forward", "other", (), 1, 100e9)
    assert compute_seconds(odd, CPU) == pytest.approx(1.0)
