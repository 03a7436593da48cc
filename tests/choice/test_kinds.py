"""Rows of a record as works: their kinds, and what a GPU computes for a recurrent kernel."""

import pytest

from batchscope.choice.kinds import works_of
from batchscope.records.operations import OperationRow
from tests.choice.trainings import convolution, elementwise, lstm, product


def only(row):
    (work,) = works_of(row)
    return work


@pytest.mark.parametrize(
    ("name", "dims", "flops", "kind"),
    [
        ("aten.addmm", (64, 10, 128), 2.0 * 64 * 10 * 128, "linear"),
        ("aten.mm", (64, 10, 128), 2.0 * 64 * 10 * 128, "linear"),
        ("aten.bmm", (4, 64, 10, 128), 8.0, "bmm"),
        ("aten.convolution", (64, 8, 9, 9, 4, 3, 3), 8.0, "convolution"),
        ("aten._softmax", (64, 10), 0, "softmax"),
        ("aten._log_softmax_backward_data", (64, 10), 0, "softmax"),
        ("aten.native_layer_norm", (64, 10), 0, "layer_norm"),
        ("aten._to_copy", (64, 10), 0, "copy"),
        ("aten.relu", (64, 10), 0, "elementwise"),
        ("aten._fused_adamw_", (4, 1000), 0, "elementwise"),
        ("aten._scaled_dot_product_flash_attention", (64, 10), 8.0, "other"),
    ],
)
def test_an_operation_has_its_kind(name, dims, flops, kind):
    row = OperationRow(name, "m", "forward", "fp32", dims, 2.0, 2 * flops, 200.0)
    work = only(row)
    assert (work.kind, work.name, work.calls, work.part, work.module) == (kind, name, 2.0, "forward", "m")
    assert (work.flops, work.bytes) == (flops, 100.0)  # of a call
    assert work.dims == (() if kind == "convolution" else dims)


def test_dimensions_that_are_not_those_of_the_kind_are_left_out():
    assert only(OperationRow("aten.mm", "", "forward", "fp32", (3,), flops=8.0)).dims == ()
    assert only(OperationRow("aten.mv", "", "forward", "fp32", (3, 1, 4), flops=8.0)).dims == (3, 1, 4)


def test_a_batch_norm_reads_its_input_twice():
    row = convolution(8)[1]
    assert only(row).bytes == 1.5 * row.bytes


@pytest.mark.parametrize("row", [product("m", "forward", 3, 4, 5), elementwise("aten.relu", "m", "backward", 3, 4)])
def test_all_calls_together_do_what_the_row_says(row):
    work = only(row)
    assert (work.flops * work.calls, work.bytes * work.calls) == (row.flops, row.bytes)


def test_a_recurrent_kernel_is_its_products_step_by_step():
    forward, backward = (list(works_of(row)) for row in lstm(16, steps=64, features=32, hidden=128))
    assert [(work.kind, work.dims, work.calls) for work in forward] == [
        ("linear", (64 * 16, 512, 32), 1),
        ("linear", (16, 512, 128), 64),
        ("elementwise", (16, 512), 64),
    ]
    for works, row in zip((forward, backward), lstm(16), strict=True):
        assert sum(work.flops * work.calls for work in works) == pytest.approx(row.flops)
        assert {(work.part, work.name) for work in works} == {(row.part, row.name)}
