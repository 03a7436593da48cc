"""An explanation adds its operations up by module, and survives its file."""

import json
from dataclasses import replace

import pytest

from batchscope.records.explanation import SCHEMA, Cost, Gap
from tests.support.explanations import cost, explanation


def test_a_module_has_the_sum_of_its_operations_in_both_passes() -> None:
    step = explanation(
        cost("net.0", "forward", seconds=1.0, flops=10, calls=1),
        cost("net.0", "backward", seconds=2.0, flops=20, calls=2),
    )
    (row,) = step.modules()
    assert (row.module, row.seconds, row.flops, row.calls) == ("net.0", 3.0, 30, 3)


def test_the_optimizer_is_one_row_whatever_its_operations_work_on() -> None:
    step = explanation(
        cost("net.0", "optimizer", seconds=1.0), cost("", "optimizer", seconds=2.0), cost("net.0", "forward")
    )
    assert [row.module for row in step.modules()] == ["optimizer", "net.0"]


def test_a_depth_adds_modules_up_to_what_contains_them() -> None:
    step = explanation(cost("net.a.0", seconds=1.0), cost("net.a.1", seconds=1.0), cost("net.b", seconds=1.5))
    assert [row.module for row in step.modules()] == ["net.b", "net.a.0", "net.a.1"]
    assert [row.module for row in step.modules(depth=2)] == ["net.a", "net.b"]
    assert [row.module for row in step.modules(depth=1)] == ["net"]


def test_too_many_rows_are_shown_at_the_depth_that_has_few_enough() -> None:
    step = explanation(*(cost(f"net.{block}.{layer}") for block in range(3) for layer in range(4)))
    assert [len(step.modules(most=most)) for most in (12, 11)] == [12, 3]


def test_the_costliest_operations_keep_their_module_and_part() -> None:
    step = explanation(*(cost(f"net.{n}", seconds=n) for n in range(20)))
    rows = step.costliest(10)
    assert [row.module for row in rows] == [f"net.{n}" for n in range(19, 9, -1)]


def test_the_time_outside_is_what_no_operation_and_no_wait_between_batches_explains() -> None:
    step = replace(explanation(cost("net", seconds=3.0)), step_seconds=5.0, between_seconds=0.5)
    assert step.outside_seconds == pytest.approx(1.5)
    assert replace(step, step_seconds=3.2).outside_seconds == 0


def test_floor_over_time_is_unknown_without_either() -> None:
    assert cost("net", seconds=2.0, floor_seconds=1.0).of_floor == 0.5
    assert cost("net", seconds=2.0).of_floor is None
    assert cost("net", floor_seconds=1.0).of_floor is None


def test_its_file_holds_the_facts_and_the_sums() -> None:
    gap = Gap("aten.a", "aten.b", 1e-3, 2, 1e-3)
    known = json.loads(json.dumps(replace(explanation(cost("net")), gaps=[gap]).to_dict()))
    assert known["schema"] == SCHEMA
    assert Gap(**known["gaps"][0]) == gap
    assert [Cost(**each) for each in known["operations"]] == [cost("net")]
    assert (known["modules"][0]["module"], known["modules"][0]["of_floor"]) == ("net", None)


def test_a_step_without_operations_has_no_cost() -> None:
    step = explanation()
    assert step.total == Cost("", "", "", "other")
    assert step.modules() == []
