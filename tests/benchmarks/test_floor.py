"""Counted FLOPs and bytes equal those on paper, and the roofs of two calibrations are the better ones."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from counted_on_paper import Work, compared
from floor import best_of

from batchscope.hardware.calibration import Calibration

OPERATIONS = {name: (counted, paper) for name, counted, paper in compared()}


@pytest.mark.parametrize("name", OPERATIONS)
def test_counted_work_is_that_on_paper(name: str):
    counted, paper = OPERATIONS[name]
    assert counted == Work(*paper)


def calibration(peak: float, copy: float, launch: float) -> Calibration:
    return Calibration("cpu", "a CPU", None, "2.15", 2, {"fp32": peak}, memory_bytes_per_sec=copy, launch_us=launch)


def test_the_better_value_of_each_roof_counts():
    best = best_of(calibration(100e9, 20e9, 3.0), calibration(90e9, 25e9, 2.0))
    assert best.matmul_flops_per_sec == {"fp32": 100e9}
    assert best.memory_bytes_per_sec == 25e9
    assert best.launch_us == 2.0
