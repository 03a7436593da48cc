"""The grammar of a command line: `option=value`, `+option=value`, `~option`, `group=choice`, parsed and written."""

import contextlib
import itertools
from collections.abc import Iterable
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Quote, QuotedString
from hydra.errors import HydraException, OverrideParseException

from .. import _system
from ..errors import UserError, did_you_mean
from .groups import COLLECTIONS, GROUPS, OPTIONAL_GROUPS, SEARCHES, SECTIONS, choices_of
from .habits import answer_to
from .tree import flatten

_SYNTAX = (
    "write option=value without spaces around the =; a value with a comma, a quote, a bracket, or in a list a = or a letter such as ö, "
    "in double quotes of its own: 'option=\"a, b\"'"
)
_HOME = "a shell replaces ~ at the beginning of a word alone; write the whole path"
_OF_GRAMMAR = {*"\"',()[]{}"}  # signs by which a value is more than a text
_SPELLED = {"True": "true", "False": "false"}  # as Hydra writes a switch, and as people do


def parse(overrides: list[str]) -> list[Override]:
    """The overrides in Hydra's terms; UserError with exit code 2 for a text that cannot be parsed.

    `experiment=null` becomes `experiment=[]`, Hydra's spelling of a group without a choice. Of callbacks and loggers,
    which are added to the default ones, `logger=null` becomes `logger=none`, and so do `logger=[]` and `~logger`.
    """
    parser = OverridesParser.create()
    parsed = [_parsed(text, parser) for text in overrides]
    for one in parsed:
        if not one.key_or_group:
            raise UserError(f"{one.input_line}: cannot be parsed: no option before '='", exit_code=2)
        if isinstance(one.value(), Glob):
            raise UserError(f"{one.input_line}: takes names, such as {one.key_or_group}=a,b, and no glob")
        if one.key_or_group == "hydra.searchpath":
            raise UserError("hydra.searchpath: write --config-dir=<folder> in its place")
    return [_choice(one) if one.key_or_group in GROUPS else one for one in parsed]


def _parsed(text: str, parser: OverridesParser) -> Override:
    """A word in Hydra's terms: its value quoted, if it is a text of which Hydra would refuse a sign, as in a folder with an umlaut."""
    key, _, value = text.partition("=")
    words = [text]
    if value.isprintable() and value[:1] not in ("", "~") and not _OF_GRAMMAR & {*value}:
        words.append(f"{key}={quoted(value.strip())}")
        if _system.NETWORK_PATHS and value.startswith("\\\\"):  # of which Hydra would leave one backslash
            words.remove(text)
    for word in words:
        with contextlib.suppress(OverrideParseException):
            return parser.parse_overrides([word])[0]
    reason = _SYNTAX if "=" in text or text.startswith("~") else _bare_word(text)
    raise UserError(f"{text or repr(text)}: cannot be parsed: {_HOME if value[:1] == '~' else reason}", exit_code=2)


def _choice(one: Override) -> Override:
    """The override of a group, which can be one; UserError for one that cannot."""
    group, value = one.key_or_group, one.value()
    if group in COLLECTIONS and (one.is_delete() or value in (None, [])):
        return OverridesParser.create().parse_override(f"{group}=none")
    if one.is_delete():
        return one
    if group == SEARCHES and not choices_of(group):
        raise UserError(f"{group}: {answer_to(group, str(value))}")
    if value is None and group in OPTIONAL_GROUPS:
        return OverridesParser.create().parse_override(f"{group}=[]")
    if one.is_add():
        raise UserError(f"{group}: is chosen already; write {group}=… without the plus")
    if isinstance(value, list) and group in SECTIONS:  # Hydra merges them
        raise UserError(f"{text_of(one)}: {group} takes one choice; write -m {group}=a,b for a run each")
    texts = value if isinstance(value, list) else [] if isinstance(value, dict) else [value]
    if not one.is_sweep_override() and not all(isinstance(name, str) for name in texts):
        typed, known = text_of(one).partition("=")[2], choices_of(group)  # null, or a text that reads as a number
        shown = typed if value is None else repr(typed)
        raise UserError(f"{group}: got {shown}, takes {', '.join(known)}.{did_you_mean(typed, known)}")
    return one


def combinations(overrides: list[str]) -> list[list[str]]:
    """The overrides of each run of a sweep over all combinations of values, in the order of Hydra's basic sweeper."""
    values: dict[str, list[str]] = {}  # a later word for the same option takes the place of an earlier one
    for one in OverridesParser.create().parse_overrides(overrides):
        key = one.get_key_element()
        if getattr(one.value(), "shuffle", False):
            raise UserError(
                f"{text_of(one)}: draws another order each time, so that no sweep could go on; write the values in order"
            )
        swept = one.sweep_string_iterator() if one.is_sweep_override() else [one.get_value_element_as_str()]
        values[key] = [f"{key}={_SPELLED.get(value, value)}" for value in swept]
        if not values[key]:
            raise UserError(f"{text_of(one)}: has no value, so there is no run")
    return [list(run) for run in itertools.product(*values.values())]


def text_of(override: Override) -> str:
    """The override as it was typed."""
    return override.input_line or ""


def set_by(overrides: Iterable[str]) -> tuple[set[str], set[str]]:
    """The full names of the options that a command line sets, and the groups that it chooses for.

    A value in braces sets only the options that it names; a choice replaces the group's node, of the trainer a part.
    """
    options: set[str] = set()
    groups: set[str] = set()
    for one in parse(list(overrides)):
        key, value = one.key_or_group, None if one.is_delete() else one.value()
        if key in GROUPS and not isinstance(value, dict):
            groups.add(key)
        elif not one.is_delete():
            options |= {name for name, _ in flatten(value, f"{key}.")} if isinstance(value, dict) else {key}
    return options, groups


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


def _bare_word(word: str) -> str:
    groups = [group for group in GROUPS if group != "hydra" and word in choices_of(group)]
    return "options are written as option=value" + (f"; did you mean '{groups[0]}={word}'?" if groups else "")
