"""Rows of a record as works: their kinds, what a GPU computes for a recurrent kernel, and in which precision."""

import pytest

from batchscope.choice.cards import find_card
from batchscope.choice.work import as_computed, works_of
from batchscope.errors import UserError
from batchscope.records.operations import OperationRow
from tests.choice.trainings import convolution, elementwise, lstm, product


def only(row):
    (work,) = works_of(row)
    return work


@pytest.mark.parametrize(
    ("name", "dims", "flops", "kind"),
    [
        ("aten.addmm", (64, 10, 128), 2.0 * 64 * 10 * 128, "linear"),
        ("aten.bmm", (4, 64, 10, 128), 8.0, "bmm"),
        ("aten.convolution", (64, 8, 9, 9, 4, 3, 3), 8.0, "convolution"),
        ("aten._softmax", (64, 10), 0, "softmax"),
        ("aten.native_layer_norm", (64, 10), 0, "layer_norm"),
        ("aten._to_copy", (64, 10), 0, "copy"),
        ("aten._fused_adamw_", (4, 1000), 0, "elementwise"),
        ("aten._scaled_dot_product_flash_attention", (64, 10), 8.0, "other"),
    ],
)
def test_an_operation_has_its_kind_and_the_numbers_of_a_call(name, dims, flops, kind):
    work = only(OperationRow(name, "m", "forward", "fp32", dims, 2.0, 2 * flops, 200.0))
    assert (work.kind, work.name, work.calls, work.part) == (kind, name, 2.0, "forward")
    assert (work.flops, work.bytes) == (flops, 100.0)
    assert work.dims == (() if kind == "convolution" else dims)


def test_dimensions_that_are_not_those_of_the_kind_are_left_out():
    assert only(OperationRow("aten.mm", "", "forward", "fp32", (3,), flops=8.0)).dims == ()


def test_a_batch_norm_reads_its_input_twice():
    row = convolution(8)[1]
    assert only(row).bytes == 1.5 * row.bytes


def test_a_recurrent_kernel_is_its_products_step_by_step():
    forward, backward = (list(works_of(row)) for row in lstm(16, steps=64, features=32, hidden=128))
    assert [(work.kind, work.dims, work.calls) for work in forward] == [
        ("linear", (64 * 16, 512, 32), 1),
        ("linear", (16, 512, 128), 64),
        ("elementwise", (16, 512), 64),
    ]
    for works, row in zip((forward, backward), lstm(16), strict=True):
        assert sum(work.flops * work.calls for work in works) == pytest.approx(row.flops)


LINEAR, RELU = only(product("m", "forward", 64, 64, 64)), only(elementwise("aten.relu", "m", "forward", 64, 64))


@pytest.mark.parametrize(
    ("work", "card", "precision", "computed"),
    [
        (LINEAR, "a100", None, "fp32"),
        (LINEAR, "a100", "tf32", "tf32"),
        (LINEAR, "a100", "bf16-mixed", "bf16"),
        (only(convolution(8)[0]), "a100", None, "tf32"),  # torch's default
        (only(convolution(8)[0]), "v100", None, "fp32"),
        (RELU, "a100", "bf16-mixed", "fp32"),
    ],
)
def test_a_work_is_computed_in_the_precision_that_torch_takes_on_the_card(work, card, precision, computed):
    found = as_computed(work, find_card(card), precision)
    assert found.precision == computed
    assert found.bytes == work.bytes / (2 if precision == "bf16-mixed" else 1)


def test_a_card_without_the_precision_is_refused():
    with pytest.raises(UserError, match="has no hardware for bf16"):
        as_computed(LINEAR, find_card("t4"), "bf16-mixed")
