"""Error hints: what is wrong with the name of an option or of a choice, and what may have been meant, in one line."""

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
    OF_EXPERIMENTS,
    OF_TASK,
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

# Plugins of Hydra that an extra of this package installs: (group, choice) → extra.
_EXTRAS = {("hydra/launcher", "joblib"): "joblib", ("hydra/sweeper", "optuna"): "optuna"}
_FEW = 20  # options of a section, which an error lists


@contextlib.contextmanager
def resolving(section: str) -> Iterator[None]:
    """Within, interpolations are resolved: UserError for one that cannot be, by its option or else by the section."""
    try:
        yield
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or section}: {message_of(error)}") from error


def missing_choice(error: MissingConfigException) -> UserError:
    """The choice that a group does not have, and those that it has."""
    if named := re.match(r"In '(.+)': Could not load '(.+)'", str(error)):
        return UserError(f"{named[1]}.yaml: its defaults name '{named[2]}', which is no YAML file of the configs")
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    if (group, name) in _EXTRAS:
        return UserError(f"{group}: {name} is not installed; pip install 'batchscope[{_EXTRAS[group, name]}]'")
    found = [option for option in error.options or () if not option.startswith("_")]
    choices = sorted({*(choices_of(group) if group in GROUPS else ()), *found})
    if instead := answer_to(f"{group}={name}"):
        return UserError(f"{group}={name}: {instead}")
    within = [choice for choice in choices if choice in name.lower()]  # simplecnn
    near = did_you_mean(name.lower(), choices) or did_you_mean(name.lower(), within, cutoff=0)
    return UserError(f"{group}: got '{name}', takes {', '.join(choices)}.{near}")


def unknown_option(config: Mapping[str, Any], option: str, value: str) -> UserError:
    """The error for an option, as typed, whose section a configuration does not have."""
    if option in OF_EXPERIMENTS:
        return UserError(f"{option}: is an option of experiment={OF_EXPERIMENTS[option]}; write both")
    if why := why_unread(option, config):
        return UserError(f"{option}: {why}")
    section = option.rpartition(".")[0]
    group, _, name = section.partition(".")
    if option.partition(".")[0] in config and not _answer(option, value, config):
        is_left_out = group in COLLECTIONS and name in (config[group] or {})  # by null
        return UserError(f"{option}: no such option. {section} is {'left out here' if is_left_out else 'no section'}.")
    return no_such_option(option, value, [*GROUPS, *TOP_LEVEL], "", config)


def no_such_option(
    option: str, value: object, known: Iterable[str], section: str, config: Mapping[str, Any]
) -> UserError:
    """The error for an option, as typed, that its section does not have: with a habit's answer, or the nearest option.

    What the section takes is listed where it is little.
    """
    if instead := _answer(option, value, config, section):
        return UserError(f"{option}: {instead}")
    shown = [name for name in known if not name.startswith("_")]
    takes = f" {section} takes {', '.join(shown)}." if section and 0 < len(shown) <= _FEW else ""
    return UserError(f"{option}: no such option.{_nearest(config, option.split('.'), section, shown)}{takes}")


def message_of(error: BaseException) -> str:
    """An error's message in one line, without what OmegaConf says of its own types."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    own = [line for line in lines if not line.startswith(("full_key:", "object_type=", "reference_type="))]
    return " ".join(own[:2]) or type(error).__name__


def _answer(option: str, value: object, config: Mapping[str, Any], section: str = "") -> str | None:
    """What to write instead of a word typed by habit, with these data's folder; a LightningModule's are its own."""
    if option.startswith("model.") and lightning_module_of(config):
        return None
    instead = answer_to(option, value if isinstance(value, str) else as_override("", value)[1:], section)
    if instead and "data.root" in instead:
        place = _folder_of_data(config.get("data"), refused=option.removeprefix("data."))
        return instead.replace("data.root", f"data.{place}") if place else "these data read no folder"
    return instead


def _folder_of_data(node: Any, refused: str) -> str | None:
    """The option by which data name the folder that they are read from; None where they have none but a refused one."""
    node = node if isinstance(node, Mapping) else {}
    signature = signature_at("data", node.get("_target_"))
    names = [*(signature.parameters if signature else ()), *(name for name in map(str, node) if name != refused)]
    for name in names:
        takes = annotation_of(f"data.{name}", node.get("_target_"))
        if Purpose.READ_FROM in marks(takes) and not choices_in(takes):
            return name
    return next((name for name in ("root", "data_dir", "path", "folder") if name in names), None)


def _nearest(config: Mapping[str, Any], parts: list[str], section: str, known: list[str]) -> str:
    """`" Did you mean …?"` with an option that ends in what was written, or the nearest one of the section."""
    unread = {"hydra", *(OF_TASK if lightning_module_of(config) else ())} - {parts[0]}
    every = flatten({key: value for key, value in config.items() if key not in unread})
    options = [option for option, _ in every if option != ".".join(parts)]
    if same := [option for option in options if option.split(".")[-len(parts) :] == parts]:
        return f" Did you mean '{same[0]}'?"
    return did_you_mean(parts[section.count(".") + 1 if section else 0], known)
