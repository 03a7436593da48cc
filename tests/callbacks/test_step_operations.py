"""After a fit the monitor has the operations of a step, as rows with their dimensions."""

import pytest
import torch

from batchscope.callbacks._step_operations import rows_of, step_operations
from batchscope.hardware.calibration import Calibration
from batchscope.hardware.operations import Operation
from tests.callbacks.test_recording import BATCH, Net, fit


def test_the_operations_of_a_step_have_their_dimensions():
    step = fit(Net()).operations
    assert (step.batch_size, step.batches, step.device, step.precision) == (BATCH, 1, "cpu", "32-true")
    assert step.threads == torch.get_num_threads()
    products = {row.module: row.dims for row in step.rows if row.name == "aten.addmm"}
    assert products == {"net.0": (BATCH, 16, 8), "net.2": (BATCH, 2, 16)}
    assert {row.part for row in step.rows} >= {"forward", "backward", "optimizer"}
    assert all(row.calls > 0 and row.bytes > 0 and row.seconds > 0 for row in step.rows)


def test_accumulated_gradients_are_several_batches_of_a_step():
    assert fit(Net(), accumulate_grad_batches=2).operations.batches == pytest.approx(2, abs=0.01)


def test_a_step_that_is_not_recorded_has_none():
    assert fit(Net(), steps=1).operations is None


def test_calls_of_the_same_dimensions_are_one_row():
    relu = Operation("aten.relu", "forward", "m", "fp32", 1, 0, 100, 50, 1e-6, dims=(4, 8))
    other = Operation("aten.relu", "forward", "m", "fp32", 1, 0, 200, 50, 1e-6, dims=(4, 16))
    rows = rows_of([relu, relu, other])
    assert [(row.dims, row.calls, row.bytes) for row in rows] == [((4, 8), 2, 200), ((4, 16), 1, 200)]


def test_the_calibration_says_what_the_device_can_do_and_not_which_it_is():
    known = Calibration("cpu", "A CPU", "avx2", "2.9", 2, {"fp32": 1e11}, launch_us=1.5, host="somewhere")
    summary = {"batch_size": 4, "batches_per_sec": 100.0, "step_ms_median": 10.0, "device": "cpu"}
    summary |= {"device_name": "A CPU", "precision": "32-true"}
    step = step_operations([Operation("aten.relu", "forward", "", "fp32")], summary, known)
    assert step.calibration == {"threads": 2, "matmul_flops_per_sec": {"fp32": 1e11}, "launch_us": 1.5}
