"""Operations at a batch size that was not measured: on lines, and where two sizes have other operations."""

import pytest

from batchscope.choice.scale import line, nearest, rows_at
from batchscope.records.operations import StepOperations
from tests.choice.trainings import elementwise, mlp, product


def step(size, rows):
    return StepOperations(size, 1.0, "cpu", "A CPU", "32-true", rows)


STEPS = {size: step(size, mlp(size)) for size in (8, 64, 512)}


@pytest.mark.parametrize("size", [1, 8, 30, 64, 200, 512, 4096])
def test_work_that_is_linear_in_the_batch_size_is_exact_everywhere(size):
    for found, true in zip(rows_at(STEPS, size), mlp(size), strict=True):
        assert (found.name, found.module, found.dims) == (true.name, true.module, true.dims)
        assert found.flops == pytest.approx(true.flops) and found.bytes == pytest.approx(true.bytes)
        assert found.calls == 1


def test_a_measured_size_has_its_own_rows():
    assert rows_at(STEPS, 64) == STEPS[64].rows


@pytest.mark.parametrize(
    ("size", "around"), [(1, (8, 64)), (8, (8, 64)), (9, (8, 64)), (65, (64, 512)), (512, (64, 512)), (9999, (64, 512))]
)
def test_a_number_lies_on_the_line_of_the_two_nearest_sizes(size, around):
    assert nearest([512, 8, 64], size) == around


def test_a_number_never_falls_below_what_it_cannot():
    assert line({64: 1.0, 128: 3.0}, 1) == 0.0
    falling = {64: step(64, [elementwise("aten.x", "", "forward", 64, 8)])}
    falling[128] = step(128, [elementwise("aten.x", "", "forward", 16, 8)])
    assert all(row.bytes > 0 and min(row.dims) > 0 for row in rows_at(falling, 4096))


def test_two_sizes_with_other_operations_give_those_of_the_nearer_one():
    small, large = product("m", "forward", 64, 8, 8), elementwise("aten.other", "m", "forward", 512, 8)
    steps = {64: step(64, [small]), 512: step(512, [large])}
    assert [row.name for row in rows_at(steps, 100)] == ["aten.addmm"]
    assert [row.name for row in rows_at(steps, 1024)] == ["aten.other"]
    assert rows_at(steps, 128)[0].flops == 2 * small.flops
