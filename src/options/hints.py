"""Errors for unknown options and choices, in one line: what is wrong, and what may have been meant."""

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hydra.errors import MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from ..errors import UserError, did_you_mean
from .groups import COLLECTIONS, GROUPS, choices_of
from .habits import answer_to
from .overrides import as_override
from .purpose import (
    EXPERIMENT_OPTIONS,
    TASK_OPTIONS,
    TOP_LEVEL,
    annotation_of,
    lightning_module_of,
    marks,
    signature_at,
    why_unread,
)
from .tree import flatten
from .types import Purpose
from .values import choices_in

# Hydra plugins that an extra of this package installs: (group, choice) → extra.
_EXTRAS = {("hydra/launcher", "joblib"): "joblib", ("hydra/sweeper", "optuna"): "optuna"}
_MAX_LISTED = 20  # a section with more options is not listed in an error


@contextlib.contextmanager
def resolving(section: str) -> Iterator[None]:
    """Turn the failure to resolve an interpolation in the block into a UserError that names its option, or else the section."""
    try:
        yield
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or section}: {message_of(error)}") from error


def missing_choice(error: MissingConfigException) -> UserError:
    """Return the error for a choice that a group does not have, with the choices that it has."""
    if named := re.match(r"In '(.+)': Could not load '(.+)'", str(error)):
        return UserError(f"{named[1]}.yaml: its defaults name '{named[2]}', which is no YAML file of the configs")
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    if (group, name) in _EXTRAS:
        return UserError(f"{group}: {name} is not installed; pip install 'batchscope[{_EXTRAS[group, name]}]'")
    offered = [choice for choice in error.options or () if not choice.startswith("_")]
    choices = sorted({*(choices_of(group) if group in GROUPS else ()), *offered})
    if instead := answer_to(f"{group}={name}"):
        return UserError(f"{group}={name}: {instead}")
    contained = [choice for choice in choices if choice in name.lower()]  # cnn in simplecnn
    near = did_you_mean(name.lower(), choices) or did_you_mean(name.lower(), contained, cutoff=0)
    return UserError(f"{group}: got '{name}', takes {', '.join(choices)}.{near}")


def unknown_option(config: Mapping[str, Any], option: str, value: str) -> UserError:
    """Return the error for an option, as typed, whose section a configuration does not have."""
    if option in EXPERIMENT_OPTIONS:
        return UserError(f"{option}: is an option of experiment={EXPERIMENT_OPTIONS[option]}; write both")
    if why := why_unread(option, config):
        return UserError(f"{option}: {why}")
    section = option.rpartition(".")[0]
    group, _, name = section.partition(".")
    if option.partition(".")[0] in config and not _habit_answer(option, value, config):
        is_left_out = group in COLLECTIONS and name in (config[group] or {})  # by null
        return UserError(f"{option}: no such option. {section} is {'left out here' if is_left_out else 'no section'}.")
    return no_such_option(option, value, [*GROUPS, *TOP_LEVEL], "", config)


def no_such_option(
    option: str, value: object, names: Iterable[str], section: str, config: Mapping[str, Any]
) -> UserError:
    """Return the error for an option, as typed, that is not among the `names` that its section takes.

    It says what to write instead, or names the nearest option and lists the options of a small section.
    """
    if instead := _habit_answer(option, value, config, section):
        return UserError(f"{option}: {instead}")
    shown = [name for name in names if not name.startswith("_")]
    takes = f" {section} takes {', '.join(shown)}." if section and 0 < len(shown) <= _MAX_LISTED else ""
    return UserError(f"{option}: no such option.{_suggest(config, option.split('.'), section, shown)}{takes}")


def message_of(error: BaseException) -> str:
    """Return the message of an error in one line, without what OmegaConf says about its own types."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("full_key:", "object_type=", "reference_type="))]
    return " ".join(lines[:2]) or type(error).__name__


def _habit_answer(option: str, value: object, config: Mapping[str, Any], section: str = "") -> str | None:
    """Return what to write instead of an option typed by habit, for these data; None for a LightningModule's options."""
    if option.startswith("model.") and lightning_module_of(config):
        return None
    instead = answer_to(option, value if isinstance(value, str) else as_override("", value)[1:], section)
    if instead and "data.root" in instead:
        name = _data_folder_option(config.get("data"), refused=option.removeprefix("data."))
        return instead.replace("data.root", f"data.{name}") if name else "these data read no folder"
    return instead


def _data_folder_option(node: Any, refused: str) -> str | None:
    """Return the option of a data node that names the folder to read, other than the refused option; None without one."""
    node = node if isinstance(node, Mapping) else {}
    signature = signature_at("data", node.get("_target_"))
    names = [*(signature.parameters if signature else ()), *(name for name in map(str, node) if name != refused)]
    for name in names:
        annotation = annotation_of(f"data.{name}", node.get("_target_"))
        if Purpose.READ_FROM in marks(annotation) and not choices_in(annotation):
            return name
    return next((name for name in ("root", "data_dir", "path", "folder") if name in names), None)


def _suggest(config: Mapping[str, Any], parts: list[str], section: str, names: list[str]) -> str:
    """Return `" Did you mean …?"` with an option that ends in the typed names, or the nearest option of the section."""
    unread = {"hydra", *(TASK_OPTIONS if lightning_module_of(config) else ())} - {parts[0]}
    flat = flatten({key: value for key, value in config.items() if key not in unread})
    options = [option for option, _ in flat if option != ".".join(parts)]
    if matching := [option for option in options if option.split(".")[-len(parts) :] == parts]:
        return f" Did you mean '{matching[0]}'?"
    return did_you_mean(parts[section.count(".") + 1 if section else 0], names)
