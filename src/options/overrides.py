"""The grammar of a command line: `option=value`, `+option=value`, `~option`, `group=choice`, parsed and written."""

import re
from collections.abc import Iterable
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, OverrideParseException

from ..errors import UserError
from .groups import GROUPS, OPTIONAL_GROUPS, choices_of
from .tree import flatten


def parse(overrides: list[str]) -> list[Override]:
    """The overrides in Hydra's terms; UserError with exit code 2 for a text that cannot be parsed."""
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except OverrideParseException as error:
        text = error.override
        reason = _syntax_error(error) if "=" in text or text.startswith("~") else _bare_word(text)
        raise UserError(f"{text or repr(text)}: cannot be parsed: {reason}", exit_code=2) from error
    for one in parsed:
        if not one.key_or_group:
            raise UserError(f"{one.input_line}: cannot be parsed: no option before '='", exit_code=2)
    return parsed


def text_of(override: Override) -> str:
    """The override as it was typed."""
    return override.input_line or ""


def is_null_group(override: Override) -> bool:
    """Whether an override switches an optional group off: `logger=null`."""
    return override.key_or_group in OPTIONAL_GROUPS and not override.is_delete() and override.value() is None


def accept_null_groups(overrides: list[str]) -> list[str]:
    """Write `logger=null` as `logger=[]`, Hydra's spelling of a group without a choice. Raises UserError as `parse`."""
    pairs = zip(overrides, parse(overrides), strict=True)
    return [f"{one.key_or_group}=[]" if is_null_group(one) else text for text, one in pairs]


def refuse_several_values(parsed: list[Override], hint: str) -> None:
    """Raise UserError for an option with a list of values to sweep over."""
    for one in parsed:
        if one.is_sweep_override():
            raise UserError(f"{one.key_or_group}: got several values, takes one{hint}")


def set_by(overrides: Iterable[str]) -> tuple[set[str], set[str]]:
    """The full names of the options that a command line sets, and the groups that it chooses for.

    A value in braces is merged into its node, so it sets only the options that it names; a choice replaces the group's
    node. Raises UserError as `parse`.
    """
    options: set[str] = set()
    groups: set[str] = set()
    for one in parse(list(overrides)):
        key = one.key_or_group
        if key in GROUPS:
            groups.add(key)
        elif not one.is_delete():
            value = one.value()
            options |= {name for name, _ in flatten(value, f"{key}.")} if isinstance(value, dict) else {key}
    return options, groups


def value_of(option: str, overrides: Iterable[str]) -> Any:
    """The value that a command line gives an option; None if it gives none. Raises UserError as `parse`."""
    values = [None if one.is_delete() else one.value() for one in parse(list(overrides)) if one.key_or_group == option]
    return values[-1] if values else None


def as_override(key: str, value: Any) -> str:
    """`key=value` as Hydra reads it back: quoted where the bare text would be split, evaluated or refused."""
    bare, quoted = f"{key}={value}", f"{key}={_literal(value)}"
    if not isinstance(value, str):
        return quoted
    try:
        return bare if OverridesParser.create().parse_override(bare).value() == value else quoted
    except HydraException:
        return quoted


def quoted(text: str) -> str:
    """A text in quotes of Hydra's grammar."""
    return QuotedString(text, Quote.double).with_quotes()


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return f"[{','.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_literal(child)}' for key, child in value.items())}}}"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def _syntax_error(error: OverrideParseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    found = [line for line in lines if line and not line.startswith(("Error parsing override", "See https://"))]
    if re.match(r"[^=]*\s=|[^=]*=\s", error.override):
        return "write option=value without spaces around the ="
    if "LexerNoViableAlt" in str(error):
        return "a quote is not closed, or a character has to stand in quotes: option='value'"
    # What Hydra's grammar expected instead is a list of the names of its tokens.
    return found[0].partition(" expecting ")[0] if found else "write option=value"


def _bare_word(word: str) -> str:
    groups = [group for group in GROUPS if group != "hydra" and word in choices_of(group)]
    return "options are written as option=value" + (f"; did you mean '{groups[0]}={word}'?" if groups else "")
