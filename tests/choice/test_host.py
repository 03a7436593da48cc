"""Another number of threads: what torch divides scales as the roofs, and the rest stays."""

import pytest

from batchscope.choice.host import Processor, other_threads, predict_threads
from batchscope.choice.measured import measured
from batchscope.errors import UserError
from batchscope.records.operations import OperationRow
from tests.choice.trainings import elementwise, mlp, product, write_training

ONE = Processor(1, {"fp32": 50e9}, 20e9, 1e-6)
TWO = Processor(2, {"fp32": 100e9}, 30e9, 1e-6)


def timed(row, seconds):
    return OperationRow(**{**vars(row), "seconds": seconds})


LARGE = timed(product("m", "forward", 4096, 1024, 1024), 1.0)
COLD = timed(elementwise("aten.relu", "m", "forward", 2**20, 64), 1.0)
WARM = timed(OperationRow("aten.relu", "m", "forward", "fp32", (2**10, 2**10), 1, 0, 8.0 * 2**20), 1.0)
SMALL = timed(OperationRow("aten.relu", "m", "forward", "fp32", (8, 64), 1, 0, 8.0 * 512), 20e-6)


@pytest.mark.parametrize(("row", "ratio"), [(LARGE, 2.0), (COLD, 1.5), (WARM, 2.0)])
def test_large_work_scales_as_the_roof_that_it_runs_at(row, ratio):
    assert predict_threads([row], 1.0, ONE, TWO).middle == pytest.approx(1 / ratio, rel=0.01)
    assert predict_threads([row], 1.0, TWO, ONE).middle == pytest.approx(ratio, rel=0.01)


def test_small_work_is_not_divided():
    assert predict_threads([SMALL], 20e-6, TWO, ONE).middle == pytest.approx(20e-6)


def test_python_and_waiting_have_one_thread():
    seconds = predict_threads([timed(LARGE, 1.0)], 3.0, TWO, ONE, waiting_s=0.5).middle
    assert seconds == pytest.approx(2.0 + 2.0, rel=0.01)


def test_operations_that_took_longer_while_they_were_recorded_are_scaled():
    assert predict_threads([timed(LARGE, 2.0)], 1.0, TWO, ONE).middle == pytest.approx(2.0, rel=0.01)


def test_one_from_two_and_two_from_one_agree():
    rows = [timed(row, 1e-3) for row in mlp(512)]
    two = predict_threads(rows, 20e-3, ONE, TWO)
    again = [timed(row, two.middle) for row in rows]
    assert two.low < two.middle < two.high
    assert predict_threads(again, sum(row.seconds for row in again), TWO, ONE).middle > two.middle


def test_all_sizes_of_a_training(tmp_path):
    (source,) = measured(write_training(tmp_path, rows=lambda size: mlp(size, 2048)))
    target = {"threads": 1, "matmul_flops_per_sec": {"fp32": 50e9}, "memory_bytes_per_sec": 15e9, "launch_us": 1.0}
    found = other_threads(source, target)
    assert sorted(found) == [8, 64, 512]
    assert found[512].middle == pytest.approx(2 * source.seconds[512].middle, rel=0.1)


def test_a_processor_that_was_not_measured_is_one_line():
    with pytest.raises(UserError, match="batchscope hardware measures it"):
        Processor.of({"threads": 2, "matmul_flops_per_sec": {"bf16": 1e9}})
