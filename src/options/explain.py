"""Which option Hydra refuses, and what the user may have meant, in one line."""

import difflib
import glob
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException

from ..errors import UserError, did_you_mean
from .groups import COLLECTIONS, GROUPS, choices_of, config_dir, top_level_names
from .habits import answer_to, habit
from .purpose import OF_EXPERIMENTS, signature_at

# Plugins of Hydra that an extra of this package installs: (group, choice) → extra.
_EXTRAS = {("hydra/launcher", "joblib"): "joblib", ("hydra/sweeper", "optuna"): "optuna"}


def missing_choice(error: MissingConfigException) -> UserError:
    """The choice that a group does not have, and those that it has."""
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    if (group, name) in _EXTRAS:
        return UserError(f"{group}: {name} is not installed; pip install 'batchscope[{_EXTRAS[group, name]}]'")
    found = [option for option in error.options or () if not option.startswith("_")]
    choices = sorted({*(choices_of(group) if group in GROUPS else ()), *found})
    instead = answer_to(group, name) or _beside(group, name)
    hint = f"; {instead}" if instead else f".{did_you_mean(name, choices)}"
    return UserError(f"{group}: got '{name}', takes {', '.join(choices)}{hint}")


def _beside(group: str, name: str) -> str:
    """That a folder here has the choice, where no `--config-dir` names it; empty where none has it."""
    found = () if config_dir() else sorted(Path().glob(f"*/{group}/{glob.escape(name)}.yaml"))
    return f"{found[0]} has it: add --config-dir={shlex.quote(found[0].parts[0])}" if found else ""


def value_of(one: Override) -> str:
    """The value of an override, as it was typed."""
    return (one.input_line or "").partition("=")[2]


def wrong_choice(overrides: list[Override]) -> UserError | None:
    """What is wrong with a `group=choice`; None if nothing is."""
    for one in overrides:
        group = one.key_or_group
        if group in GROUPS and one.is_add():
            return UserError(f"{group}: is chosen already; write {group}=… without the plus")
        if group in GROUPS and not one.is_delete() and not isinstance(value := one.value(), str | list):
            shown = "null" if value is None else repr(value)
            return UserError(f"{group}: got {shown}, takes {', '.join(choices_of(group))}")
    return None


def chooses(override: Override) -> bool:
    """Whether an override is about the choice of a group, or about where choices are looked for."""
    key = override.get_key_element().lstrip("+~")
    return re.split("[@/]", key)[0] in GROUPS or key == "hydra.searchpath"


def wrong_key(config: dict[str, Any], one: Override) -> UserError | None:
    """What is wrong with the option's name in an override of `config`, in plain containers; None if nothing is."""
    key = one.key_or_group
    wrong = _unknown_part(config, key)
    if wrong and (known := habit(key, value_of(one))):
        return known
    if wrong and not one.is_add() and not one.is_force_add():
        return wrong
    there = None if wrong else _select(config, _parts(key))
    if one.is_add() and there is not None and not isinstance(one.value(), dict | list):  # which would be merged
        return UserError(f"{key}: is set already; write {key}=… without the plus")
    if one.is_delete() and there is None:
        return UserError(f"{key}: is null, which leaves nothing to delete")
    return None


def nearest_option(config: dict[str, Any], parts: list[str], here: str) -> str:
    """`" Did you mean …?"` with an option that ends in what was written (`batch_size`), with the nearest one at its place,
    which `here` says, or with an option that ends in nearly its last word.
    """
    options = [option for option in _full_names(config) if option != ".".join(parts)]
    if same := [option for option in options if option.split(".")[-len(parts) :] == parts]:
        return f" Did you mean '{same[0]}'?"
    words = {option.rpartition(".")[2]: option for option in reversed(options)}
    near = difflib.get_close_matches(parts[-1], words, n=1, cutoff=0.8)
    return here or (f" Did you mean '{words[near[0]]}'?" if near else "")


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _unknown_part(config: dict[str, Any], key: str) -> UserError | None:
    """The first part of a dotted key that the configuration does not have, with the nearest that it has."""
    node: Any = config
    parts = _parts(key)
    for depth, part in enumerate(parts):
        parent = ".".join(parts[:depth])
        if isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                return UserError(f"{key}: {parent} is a list of {len(node)}, numbered from 0")
            node = node[int(part)]
            continue
        if not isinstance(node, dict):
            what = "null" if node is None else "a value"
            return UserError(f"{key}: no such option. {parent} is {what}, not a section.")
        if part not in node:
            break
        node = node[part]
    else:
        return None
    if not parent and part in COLLECTIONS:
        return UserError(f"{key}: there is no {part} section to set it in; {part}=null leaves the section out")
    if not parent and part in OF_EXPERIMENTS:
        return UserError(f"{key}: is an option of experiment={OF_EXPERIMENTS[part]}; write both")
    signature = signature_at(parent, node.get("_target_"))
    unset = list(signature.parameters) if signature else []
    in_a_list = isinstance(_select(config, parts[: depth - 1]), list)  # the owner of a list checks its items' keys
    if part in unset or in_a_list:
        return UserError(f"{key}: not set by the config; write +{key}=… to set it")
    shown = [str(k) for k in node if not str(k).startswith("_")] if parent else top_level_names()
    takes = f" {parent or 'The command'} takes {', '.join(shown)}." if 0 < len(shown) <= 16 else ""
    near = nearest_option(config, parts, did_you_mean(part, shown + unset + ([] if parent else [*OF_EXPERIMENTS])))
    return UserError(f"{key}: no such option.{near}{takes}")


def _parts(key: str) -> list[str]:
    return key.replace("/", ".").split(".")


def _select(node: Any, parts: list[str]) -> Any:
    for part in parts:
        if isinstance(node, list):
            node = node[int(part)] if part.isdecimal() and int(part) < len(node) else None
        else:
            node = node.get(part) if isinstance(node, dict) else None
    return node


def _full_names(node: dict[str, Any], above: str = "") -> Iterator[str]:
    """The full names of everything that a configuration sets, sections included, without Hydra's own."""
    for key, child in node.items():
        if not str(key).startswith("_") and key != "hydra":
            yield f"{above}{key}"
            if isinstance(child, dict):
                yield from _full_names(child, f"{above}{key}.")
