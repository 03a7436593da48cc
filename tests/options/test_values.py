"""A value is what its option's annotation takes, or is refused with what the option takes."""

from typing import Annotated, Any, Literal, Optional, Union

import pytest

from batchscope.options.types import Choice, Fraction, NonNegativeInt, PositiveFloat, PositiveInt, Purpose, Range, Seed
from batchscope.options.values import check_value, choices_in
from tests.support.command_lines import refusal

TAKEN = [
    (int, 3),
    (float, 3),
    (float, 0.5),
    (bool, False),
    (str, ""),
    (int | None, None),
    (Optional[int], None),  # noqa: UP045 - as other people's code still spells it
    (Union[int, str], "x"),  # noqa: UP007
    (Literal["a", "b"], "b"),
    (Literal["a", 1] | None, 1),
    (list[int], []),
    (list[int], [1, 2]),
    (tuple[float, ...], [1, 0.5]),
    (list[int] | str, "auto"),
    (list[PositiveInt] | tuple[PositiveInt, ...], [1]),
    (dict[str, int], {"a": 1}),
    (PositiveInt, 1),
    (NonNegativeInt, 0),
    (PositiveFloat, 1e-9),
    (Fraction, 0),
    (Fraction, 1.0),
    (Seed, 2**32 - 1),
    (Annotated[PositiveInt | None, Purpose.SPEED], None),
    (Annotated[PositiveInt | None, Purpose.SPEED], 1),
    (Choice | dict, "x"),
    (None, object()),
]

REFUSED = [
    (int, 3.0, "got 3.0, takes a whole number."),
    (int, True, "got True, takes a whole number."),
    (int, "3", "got '3', takes a whole number."),
    (int, None, "got null, takes a whole number."),
    (float, "fast", "got 'fast', takes a number."),
    *((float, float(odd), f"got {odd}, takes a number.") for odd in ("nan", "inf", "-inf")),
    (float, True, "got True, takes a number."),
    (bool, 1, "got 1, takes true or false."),
    (bool, "yes", "got 'yes', takes true or false."),
    (str, 5, "got 5, takes a text."),
    (int | None, "x", "got 'x', takes a whole number or null."),
    (int, "", "got nothing, takes a whole number."),
    (Literal["memory", "device"], "memry", "got 'memry', takes memory or device. Did you mean 'memory'?"),
    (Literal["memory", "device"], "x", "got 'x', takes memory or device."),
    (Literal[1, 2], True, "got True, takes 1 or 2."),
    (Literal["a"] | None, "b", "got 'b', takes a or null."),
    (PositiveInt, 0, "got 0, takes a whole number of at least 1."),
    (PositiveInt, 2**63, f"got {2**63}, takes a whole number of at least 1, up to {2**63 - 1:,}."),
    (PositiveFloat, 10**400, f"got {10**400}, takes a number above 0, up to {2**63 - 1:,}."),
    (Seed, 2**63, "got 9223372036854775808, takes a whole number from 0 to 4,294,967,295."),
    (NonNegativeInt, -1, "got -1, takes a whole number of at least 0."),
    (PositiveFloat, 0, "got 0, takes a number above 0."),
    (Fraction, 1.5, "got 1.5, takes a number from 0 to 1."),
    (Fraction, float("nan"), "got nan, takes a number from 0 to 1."),
    (Seed, 2**32, "got 4294967296, takes a whole number from 0 to 4,294,967,295."),
    (Annotated[int, Range(2)], 1, "got 1, takes a whole number of at least 2."),
    (list[int], 1, "got 1, takes a list, each item a whole number."),
    (list[int], ["a"], "got ['a'], takes a list, each item a whole number."),
    (
        list[PositiveInt] | tuple[PositiveInt, ...],
        [0],
        "got [0], takes a list, each item a whole number of at least 1.",
    ),
    (dict[str, int], [1], "got [1], takes dict."),
    (Annotated[PositiveInt | None, Purpose.SPEED], 0, "got 0, takes a whole number of at least 1 or null."),
    (Annotated[Literal["a"], Purpose.SPEED], "x", "got 'x', takes a."),
]


@pytest.mark.parametrize(("annotation", "value"), TAKEN)
def test_a_value_of_the_right_kind_is_taken(annotation: Any, value: Any) -> None:
    assert check_value("model.size", value, annotation) is None


@pytest.mark.parametrize(("annotation", "value", "message"), REFUSED)
def test_a_value_of_another_kind_is_refused_with_what_the_option_takes(annotation, value, message):
    assert refusal(check_value, "model.size", value, annotation) == f"model.size: {message}"


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
