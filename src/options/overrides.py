"""Overrides: `option=value`, `+option=value`, `~option` and `group=choice` are parsed and written here."""

import contextlib
import functools
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
_GRAMMAR_SIGNS = {*"\"',()[]{}"}  # a value with one of these may be more than a text
_SWITCH_SPELLING = {"True": "true", "False": "false"}  # of Hydra → of people


def parse(overrides: list[str]) -> list[Override]:
    """Parse overrides into Hydra's objects; UserError with exit code 2 for a text that cannot be parsed.

    `experiment=null` becomes `experiment=[]`, Hydra's spelling of a group without a choice. `callbacks` and `logger` are
    added to the default ones, so `logger=null`, `logger=[]` and `~logger` become `logger=none`.
    """
    parsed = [_parse_word(text) for text in overrides]
    for override in parsed:
        if not override.key_or_group:
            raise UserError(f"{override.input_line}: cannot be parsed: no option before '='", exit_code=2)
        if isinstance(override.value(), Glob):
            raise UserError(f"{override.input_line}: takes names, such as {override.key_or_group}=a,b, and no glob")
        if override.key_or_group == "hydra.searchpath":
            raise UserError("hydra.searchpath: write --config-dir=<folder> in its place")
    return [_normalize_choice(override) if override.key_or_group in GROUPS else override for override in parsed]


@functools.lru_cache(maxsize=1024)
def _parse_word(text: str) -> Override:
    """Parse one override. A text that Hydra refuses for one of its signs, such as an umlaut, is parsed in quotes."""
    key, _, value = text.partition("=")
    words = [text]
    if value.isprintable() and value[:1] not in ("", "~") and not _GRAMMAR_SIGNS & {*value}:
        words.append(f"{key}={quoted(value.strip())}")
        if _system.NETWORK_PATHS and value.startswith("\\\\"):  # unquoted, Hydra keeps one backslash
            words.remove(text)
    for word in words:
        with contextlib.suppress(OverrideParseException):
            return OverridesParser.create().parse_overrides([word])[0]
    reason = _SYNTAX if "=" in text or text.startswith("~") else _hint_for_bare_word(text)
    raise UserError(f"{text or repr(text)}: cannot be parsed: {_HOME if value[:1] == '~' else reason}", exit_code=2)


def _normalize_choice(override: Override) -> Override:
    """Return the override of a group as Hydra takes it; UserError for a value that cannot be a choice."""
    group, value = override.key_or_group, override.value()
    if group in COLLECTIONS and (override.is_delete() or value in (None, [])):
        return OverridesParser.create().parse_override(f"{group}=none")
    if override.is_delete():
        return override
    if group == SEARCHES and not choices_of(group):
        raise UserError(f"{group}: {answer_to(group, str(value))}")
    if value is None and group in OPTIONAL_GROUPS:
        return OverridesParser.create().parse_override(f"{group}=[]")
    if override.is_add():
        raise UserError(f"{group}: is chosen already; write {group}=… without the plus")
    if isinstance(value, list) and group in SECTIONS:  # Hydra would merge the choices
        raise UserError(f"{text_of(override)}: {group} takes one choice; write -m {group}=a,b for a run each")
    names = value if isinstance(value, list) else [] if isinstance(value, dict) else [value]
    if not override.is_sweep_override() and not all(isinstance(name, str) for name in names):
        typed, choices = text_of(override).partition("=")[2], choices_of(group)  # null, or a text read as a number
        shown = typed if value is None else repr(typed)
        raise UserError(f"{group}: got {shown}, takes {', '.join(choices)}.{did_you_mean(typed, choices)}")
    return override


def combinations(overrides: list[str]) -> list[list[str]]:
    """Return the overrides of each run of a grid sweep, in the order of Hydra's basic sweeper."""
    values: dict[str, list[str]] = {}
    for parsed in OverridesParser.create().parse_overrides(overrides):
        key = parsed.get_key_element()
        for name in set.union(*options_and_groups([text_of(parsed)])):  # a later override replaces an earlier one
            values.pop(name, None)
        if getattr(parsed.value(), "shuffle", False):
            raise UserError(
                f"{text_of(parsed)}: draws another order each time, so that no sweep could go on; write the values in order"
            )
        texts = parsed.sweep_string_iterator() if parsed.is_sweep_override() else [parsed.get_value_element_as_str()]
        is_dict = isinstance(parsed.value(), dict)  # it sets options of a node, whose choice stays
        words = [f"{key}={_SWITCH_SPELLING.get(value, value)}" for value in texts]
        if not words:
            raise UserError(f"{text_of(parsed)}: has no value, so there is no run")
        values[text_of(parsed) if is_dict else key.lstrip("+")] = words
    return [list(run) for run in itertools.product(*values.values())]


def text_of(override: Override) -> str:
    """Return the override as it was typed."""
    return override.input_line or ""


def options_and_groups(overrides: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return the full names of the options that a command line sets, and the groups for which it has a choice.

    A value in braces sets only the options that it names. A choice replaces the node of its group; for `trainer` a part.
    """
    options: set[str] = set()
    groups: set[str] = set()
    for override in parse(list(overrides)):
        key, value = override.key_or_group, None if override.is_delete() else override.value()
        if key in GROUPS and not isinstance(value, dict):
            groups.add(key)
        elif not override.is_delete():
            options |= {name for name, _ in flatten(value, f"{key}.")} if isinstance(value, dict) else {key}
    return options, groups


def as_override(key: str, value: Any) -> str:
    """Return `key=value` for Hydra, quoted where Hydra would split, evaluate or refuse the bare text."""
    bare, literal = f"{key}={value}", f"{key}={_literal(value)}"
    if not isinstance(value, str):
        return literal
    try:
        return bare if OverridesParser.create().parse_override(bare).value() == value else literal
    except HydraException:
        return literal


def quoted(text: str) -> str:
    """Return a text in quotes of Hydra's grammar."""
    return QuotedString(text, Quote.double).with_quotes()


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list):
        return f"[{','.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_literal(child)}' for key, child in value.items())}}}"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def _hint_for_bare_word(word: str) -> str:
    groups = [group for group in GROUPS if group != "hydra" and word in choices_of(group)]
    return "options are written as option=value" + (f"; did you mean '{groups[0]}={word}'?" if groups else "")
