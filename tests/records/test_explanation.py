"""An explanation adds its operations up by module, and survives its file."""

import json
from dataclasses import asdict, replace

import pytest

from batchscope.records.explanation import SCHEMA, Cost
from tests.support.explanations import cost, explanation


def test_a_module_has_the_sum_of_its_operations_and_the_optimizer_is_one_row():
    step = explanation(
        cost("net.0", "forward", seconds=1.0, flops=10, calls=1),
        cost("net.0", "backward", seconds=2.0, flops=20, calls=2),
        cost("net.0", "optimizer", seconds=1.5),
        cost("", "optimizer", seconds=2.0),
    )
    assert [row.seconds for row in step.costliest()] == [2.0, 2.0, 1.5, 1.0]
    rows = [(row.module, row.seconds, row.flops, row.calls) for row in step.modules(9)]
    assert rows == [("optimizer", 3.5, 0, 0), ("net.0", 3.0, 30, 3)]


def test_modules_are_added_up_to_the_depth_that_has_few_enough_rows():
    step = explanation(cost("net.a.0", seconds=1.0), cost("net.a.1", seconds=1.0), cost("net.b", seconds=1.5))
    all_names, short = ["net.b", "net.a.0", "net.a.1"], ["net.a", "net.b"]
    names = [[row.module for row in step.modules(most)] for most in (3, 2, 1)]
    assert names == [all_names, short, ["net"]]


def test_the_time_outside_is_what_no_operation_and_no_wait_explains_and_floor_over_time_needs_both():
    step = replace(explanation(cost("net", seconds=3.0)), step_seconds=5.0, between_seconds=0.5)
    assert step.outside_seconds == pytest.approx(1.5)
    assert replace(step, step_seconds=3.2).outside_seconds == 0
    costs = cost("net", seconds=2.0, floor_seconds=1.0), cost("net", seconds=2.0), cost("net", floor_seconds=1.0)
    assert [operation.of_floor for operation in costs] == [0.5, None, None]


def test_its_file_holds_the_facts():
    written = json.loads(json.dumps(explanation(cost("net")).to_dict()))
    assert written["schema"] == SCHEMA
    assert written["operations"] == [asdict(cost("net")) | {"dims": []}]
    assert (explanation().total, explanation().modules(9)) == (Cost("", "", "", "other"), [])
