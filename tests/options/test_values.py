"""A value is what its option's annotation takes, and a node has the options that its target takes, or it is one line."""

from math import inf, nan
from typing import Annotated, Any, Literal, Optional, Union

import pytest

from batchscope.options.nodes import check_node
from batchscope.options.types import Choice, Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Purpose, Range, Seed
from batchscope.options.values import check_value, choices_in
from tests.support.command_lines import refusal
from tests.support.own_package import Write

SIZES = "a list, each item a whole number"
SPEED = Annotated[PositiveInt | None, Purpose.SPEED]
HUGE = 2**63
UP_TO = f", up to {HUGE - 1:,}"
# An annotation, the values that it takes, those that it does not, and how it is described.
ANNOTATIONS = [
    (int, [3], [3.0, True, "3", None, ""], "a whole number"),
    (float, [3, 0.5], ["fast", nan, inf, -inf, True], "a number"),
    (bool, [False], [1, "yes"], "true or false"),
    (str, [""], [5], "a text"),
    (int | None, [None, 3], ["x"], "a whole number or null"),
    (Optional[int], [None], ["x"], "a whole number or null"),  # noqa: UP045 - as other people's code still spells it
    (Union[int, str], ["x", 3], [None], "a whole number or a text"),  # noqa: UP007
    (Literal["memory", "device"], ["device"], ["x"], "memory or device"),
    (Literal["memory", "device"], [], ["memry"], "memory or device. Did you mean 'memory'?"),
    (Literal[1, 2], [1], [True], "1 or 2"),
    (Literal["a", 1] | None, [1, "a", None], ["b"], "a or 1 or null"),
    (PositiveInt, [1], [0], "a whole number of at least 1"),
    (PositiveInt, [HUGE - 1], [HUGE], f"a whole number of at least 1{UP_TO}"),
    (NonNegativeInt, [0], [-1], "a whole number of at least 0"),
    (PositiveFloat, [1e-9], [0], "a number above 0"),
    (PositiveFloat, [], [10**400], f"a number above 0{UP_TO}"),
    (Fraction, [0, 1.0], [1.5, nan], "a number from 0 to 1"),
    (Seed, [2**32 - 1], [2**32, HUGE], "a whole number from 0 to 4,294,967,295"),
    (Annotated[int, Range(2)], [2], [1], "a whole number of at least 2"),
    (list[int], [[], [1, 2]], [1, ["a"]], SIZES),
    (list[int] | str, ["auto", [1]], [], ""),
    (list[PositiveInt] | tuple[PositiveInt, ...], [[1]], [[0]], f"{SIZES} of at least 1"),
    (tuple[float, ...], [[1, 0.5]], [], ""),
    (dict[str, int], [{"a": 1}], [[1]], "dict"),
    (SPEED, [None, 1], [0], "a whole number of at least 1 or null"),
    (Annotated[Literal["a"], Purpose.SPEED], ["a"], ["x"], "a"),
    (Choice | dict, ["x"], [], ""),
    (None, [object()], [], ""),
]


@pytest.mark.parametrize(("annotation", "right", "wrong", "takes"), ANNOTATIONS)
def test_a_value_is_what_its_option_takes_or_is_refused_with_that(annotation, right, wrong, takes) -> None:
    for value in right:
        check_value("model.size", value, annotation)
    for value in wrong:
        shown = "null" if value is None else "nothing" if value == "" else repr(value)
        said = f"model.size: got {shown}, takes {takes}"
        assert refusal(check_value, "model.size", value, annotation).removesuffix(".") == said


@pytest.mark.parametrize(
    ("annotation", "choices"),
    [
        (Literal["a", 1] | None, ["a", 1]),
        (Annotated[bool | Literal["a"], Purpose.SPEED], ["a"]),
        *((kind, []) for kind in (None, str | None, Choice, dict, list[str], object, "Quoted", PositiveInt)),
    ],
)
def test_the_choices_of_an_annotation_are_those_that_it_lists(annotation: Any, choices: list[Any]) -> None:
    assert choices_in(annotation) == choices


THING = "mynet.one.Thing"
NODES: list[tuple[dict[str, Any], str]] = [
    *(({"batch_size": 4, **more}, "") for more in ({}, {"_args_": [1]}, {"_partial_": True})),
    ({"_convert_": "none", "_recursive_": False}, ""),
    (
        {"batch_size": 4, "batch_sise": 3},
        "batch_sise: no such option. Did you mean 'batch_size'? data takes spec, batch_size, part, parts.",
    ),
    *(
        (
            {place: {"a": [{"_target_": THING, "batch_size": 0}]}},
            f"{place}.a.0.batch_size: got 0, takes a whole number of at least 1.",
        )
        for place in ("part", "parts", "_args_")
    ),
    *(
        ({"_target_": target}, f"_target_: got {target!r}, takes the full name of a class or function")
        for target in (5, None, "", ".", "Thing", [THING])
    ),
    ({"_arg_": []}, "_arg_: no such option; "),
    *(({"_target_": target, "any": 1}, "") for target in ("torch.nn.Missing", "missing.Thing", f"{THING}.made")),
    # with an annotation that cannot be read
    *(({"_target_": "mynet.one.odd", **dict.fromkeys("abcde", value)}, "") for value in (None, 1, "x", [1], {"a": 1})),
]
ONE = """
class Thing:
    def __init__(self, spec, batch_size: PositiveInt = 1, part=None, parts=()): pass
def odd(a: timedelta, b: Optional[nn.Module], c: 'Quoted', d: Optional['Quoted'], e: int + 1): pass
"""


@pytest.mark.parametrize(("node", "said"), NODES)
def test_a_node_has_the_options_that_its_target_takes(node: dict[str, Any], said: str, package: Write) -> None:
    package(one=ONE)
    if said:
        assert refusal(check_node, {"_target_": THING, **node}, "data").startswith(f"data.{said}")
    else:
        check_node({"_target_": THING, **node}, "data")


def test_what_is_not_declared_is_left_to_the_trainer() -> None:
    check_node({"_target_": "lightning.Trainer", "strategy": "foo", "plugins": "foo"}, "trainer")
