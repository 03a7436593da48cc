"""A node has the options that its target takes, as far as the target's source text says which."""

from collections.abc import Callable
from typing import Any

import pytest

from batchscope.options.nodes import check_node
from tests.support.command_lines import refusal


@pytest.fixture
def thing(write: Callable[..., None]) -> str:
    write(
        one="""
        class Thing:
            def __init__(self, spec, batch_size: PositiveInt = 1, part=None, parts=()): pass
        """
    )
    return "toy.one.Thing"


@pytest.mark.parametrize(
    "more", [{}, {"_args_": [1]}, {"_partial_": True}, {"_convert_": "none", "_recursive_": False}]
)
def test_a_node_with_known_options_and_hydras_keys_passes(more: dict[str, Any], thing: str) -> None:
    assert check_node({"_target_": thing, "batch_size": 4, **more}, "data") is None


def test_an_unknown_option_is_refused_with_the_nearest_and_those_that_there_are(thing: str) -> None:
    node = {"_target_": thing, "batch_size": 4, "batch_sise": 3}
    assert (
        refusal(check_node, node, "data")
        == "data.batch_sise: no such option. Did you mean 'batch_size'? data takes spec, batch_size, part, parts."
    )


@pytest.mark.parametrize("place", ["part", "parts", "_args_"])
def test_nodes_are_checked_within_nodes_lists_and_dicts(place: str, thing: str) -> None:
    node = {"_target_": thing, place: {"a": [{"_target_": thing, "batch_size": 0}]}}
    assert (
        refusal(check_node, node, "data") == f"data.{place}.a.0.batch_size: got 0, takes a whole number of at least 1."
    )


@pytest.mark.parametrize("target", [5, None, "", ".", "Thing", ["toy.one.Thing"]])
def test_a_target_is_the_full_name_of_a_class_or_function(target: Any) -> None:
    assert refusal(check_node, {"_target_": target}, "model").startswith(
        f"model._target_: got {target!r}, takes the full name of a"
    )


def test_another_key_between_underscores_is_no_option(thing: str) -> None:
    assert refusal(check_node, {"_target_": thing, "_arg_": []}, "data").startswith("data._arg_: no such option; ")


@pytest.mark.parametrize("target", ["torch.nn.Missing", "missing.Thing", "toy.one.Thing.made"])
def test_what_cannot_be_read_is_not_checked(target: str, thing: str) -> None:
    assert check_node({"_target_": target, "anything": 1}, "model") is None


@pytest.mark.parametrize(
    "annotation", ["timedelta", "Optional[nn.Module]", "'Quoted'", "Optional['Quoted']", "int + 1"]
)
def test_an_annotation_that_cannot_be_read_is_not_checked(annotation: str, write: Callable[..., None]) -> None:
    write(one=f"class Thing:\n    def __init__(self, size: {annotation}): pass")
    for value in (None, 1, "x", [1], {"a": 1}):
        check_node({"_target_": "toy.one.Thing", "size": value}, "thing")
