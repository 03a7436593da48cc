"""Check values against the annotations of options, and describe an annotation to a user."""

import math
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from ..errors import UserError, did_you_mean
from .tree import TARGET
from .types import INT64, Range

_KIND_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    types.NoneType: "null",
    tuple: "a list",
}


def check_value(name: str, value: Any, annotation: Any) -> None:
    """Raise UserError if an annotation does not take a value; an annotation of None takes any value."""
    if annotation is None or _fits(value, annotation):
        return
    shown = "null" if value is None else "nothing" if value == "" else repr(value)
    near = did_you_mean(str(value), map(str, choices_in(annotation)))
    raise UserError(f"{name}: got {shown}, takes {_describe(annotation)}.{near}")


def alternatives(annotation: Any, marks: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield the types that an annotation takes, each with its metadata from `Annotated`."""
    if get_origin(annotation) is Annotated:
        kind, *metadata = get_args(annotation)
        yield from alternatives(kind, (*marks, *metadata))
    elif get_origin(annotation) in (Union, types.UnionType):
        for kind in get_args(annotation):
            yield from alternatives(kind, marks)
    else:
        yield annotation, marks


def choices_in(annotation: Any) -> list[Any]:
    """Return the values that an annotation lists, as `Literal["memory", "device"]` does."""
    return [choice for kind, _ in alternatives(annotation) if get_origin(kind) is Literal for choice in get_args(kind)]


def _fits(value: Any, annotation: Any) -> bool:
    if isinstance(value, dict) and TARGET in value:  # nobody knows what a node builds
        return True
    if isinstance(value, int) and abs(value) > INT64:
        return False
    return any(
        _is_of_kind(value, kind) and all(mark.holds(value) for mark in marks if isinstance(mark, Range))
        for kind, marks in alternatives(annotation)
    )


def _is_of_kind(value: Any, kind: Any) -> bool:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in args)
    if kind is types.NoneType:
        return value is None
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if origin is tuple and args[-1] is not Ellipsis:  # a fixed number of items, each with a type
        return isinstance(value, list) and len(value) == len(args) and all(map(_fits, value, args))
    if origin in (list, tuple):
        return isinstance(value, list) and all(_fits(item, args[0]) for item in value)
    kind = list if kind is tuple else origin or kind  # a file has no tuples
    return not isinstance(kind, type) or isinstance(value, kind)  # a forward reference in quotes is not checked


def _describe(annotation: Any) -> str:
    return " or ".join(dict.fromkeys(_describe_kind(*kind) for kind in alternatives(annotation)))


def _describe_kind(kind: Any, marks: tuple[Any, ...]) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        choices = list(dict.fromkeys(str(choice) for choice in args))
        return " or ".join(choices) if len(choices) < 4 else ", ".join(choices)
    if origin is tuple and args[-1] is not Ellipsis:
        return f"a list of {len(args)} items: {', '.join(map(_describe, args))}"
    if origin in (list, tuple):
        return f"a list, each item {_describe(args[0])}"
    description = next((mark for mark in marks if isinstance(mark, str)), None)
    words = description or _KIND_NAMES.get(kind) or getattr(origin or kind, "__name__", str(kind))
    return " ".join([words, *(str(mark) for mark in marks if isinstance(mark, Range))])
