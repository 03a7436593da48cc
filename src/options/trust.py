"""What a file may decide: a run's record and a checkpoint are data and may come from anybody.

The command line, the installed configs, and the configs of `--config-dir` decide what is built. A file may

- repeat what these configs hold at the same path: classes and functions (`_target_`), Hydra's other keys, texts,
  lists, but no logger that sends its data elsewhere;
- set numbers and switches of this package's own options, and choose among the values that an option lists; for any
  other class it may only replace a number of these configs by another number.

Anything more has to be typed on the command line, and the error has the words to type. `copy_plain` copies a file's
configuration, and `refuse_unconfirmed` refuses what was not typed.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

from .._system import command_line, relative
from ..errors import UserError, is_text
from .groups import COLLECTIONS, SECTIONS, config_dir, nodes_of_configs
from .overrides import as_override, options_and_groups
from .purpose import PATH_PURPOSES, annotation_of, is_ours, marks, purpose_of
from .tree import HYDRA_KEYS, TARGET, flatten
from .types import INT64, Text
from .values import choices_in

_MAX_LEVELS = 16  # levels of a configuration; ours have 4
_MAX_VALUES = 10_000  # values of a configuration; ours have 100
_MAX_CHARACTERS = 4096  # characters of a text, such as a path
_LOCAL_LOGGERS = (
    "batchscope.callbacks.step_file.StepFile",
    "batchscope.callbacks.tensorboard.TensorBoard",
    "lightning.pytorch.loggers.TensorBoardLogger",
)  # files alone
_BLANKS = str.maketrans("\t\n", "  ")  # a text may contain newlines and tabs
_KEY = re.compile(r"\w[\w-]{0,99}", re.ASCII)


def is_value(text: Any) -> TypeGuard[str]:
    """Whether a value is a text that an option may have: without terminal escapes and other control characters."""
    return isinstance(text, str) and is_text(text.translate(_BLANKS))


def copy_plain(node: Any, where: str = "") -> dict[str, Any]:
    """Return a copy of a configuration from the file `where`, in the containers and values that a record can hold.

    Raises:
        UserError: if it has anything but dicts, lists and plain values, an interpolation, or too many values or levels.
    """
    budget = iter(range(_MAX_VALUES))

    def at(option: str) -> str:
        return ": ".join(filter(None, (where, option))) or "config"

    def copy(node: Any, depth: int, option: str) -> Any:
        if depth > _MAX_LEVELS or next(budget, None) is None:
            raise UserError(f"{at('')}: is no configuration of a run: it has too many values or levels")
        if isinstance(node, dict):
            bad_keys = [key for key in node if not isinstance(key, str) or not _KEY.fullmatch(key)]
            if bad_keys:
                raise UserError(f"{at(option)}: got {str(bad_keys[0])[:100]!r}, which cannot be the name of an option")
            return {key: copy(value, depth + 1, f"{option}.{key}".lstrip(".")) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return [copy(value, depth + 1, f"{option}.{index}") for index, value in enumerate(node)]
        is_plain = type(node) in (str, int, float, bool, type(None))
        is_odd = isinstance(node, str) and not (is_value(node) and len(node) <= _MAX_CHARACTERS)
        if not is_plain or is_odd or (isinstance(node, int) and abs(node) > INT64):
            reason = f", with control characters or more than {_MAX_CHARACTERS:,} characters" if is_odd else ""
            raise UserError(f"{at(option)}: holds a value that no option has, of type {type(node).__name__}{reason}")
        if isinstance(node, str) and "${" in node:
            raise UserError(f"{at(option)}: got {node[:100]!r}; an interpolation is for the command line alone")
        return node

    copied = copy(node, 0, "")
    if not isinstance(copied, dict):
        raise UserError(f"{at('')}: holds no configuration")
    return copied


def refuse_unconfirmed(config: dict[str, Any], overrides: Iterable[str], where: str) -> None:
    """Raise UserError, with all words to type, unless everything that the file `where` must not decide is typed.

    `config` is checked, and has the overrides applied.
    """
    options, groups = options_and_groups(overrides)
    groups.discard("trainer")  # a choice keeps most options of the file (compose.apply_overrides)
    values = _values_to_confirm(config)
    untyped = {key: value for key, value in values if key not in options and key.partition(".")[0] not in groups}
    if not untyped:
        return
    key, value = next(iter(untyped.items()))
    is_class = key.endswith(TARGET) and not key.startswith("logger.")
    hint = "add the --config-dir (in Python `config_dir=`) that has its YAML, or " if is_class else ""
    words_to_type = " ".join(as_words(*option) for option in untyped.items())
    raise UserError(
        f"{key}: is {value!r} in {where}, and a file alone does not decide that; to confirm it, {hint}add "
        f"{words_to_type} (in Python to `overrides=[…]`)"
    )


def refuse_differing(a: dict[str, Any], b: dict[str, Any], overrides: Iterable[str]) -> None:
    """Raise UserError for a value to confirm that differs between two files: an override would set both.

    A path that is typed holds for both.
    """
    options, groups = options_and_groups(overrides)
    values_a, values_b = dict(flatten(a)), dict(flatten(b))
    for key, _ in (*_values_to_confirm(a), *_values_to_confirm(b)):
        is_typed = key in options and purpose_of(key, a) in PATH_PURPOSES
        if values_a.get(key) != values_b.get(key) and not is_typed and key.partition(".")[0] not in groups:
            sides = " and ".join(f"{side.get(key)!r} in {name}" for name, side in (("A", values_a), ("B", values_b)))
            raise UserError(
                f"{key}: is {sides}, which files alone cannot decide, and a word on the command line changes both; add "
                "the --config-dir whose YAML files have them"
            )


def as_words(key: str, value: Any) -> str:
    """Return `key=value` as Hydra and a shell read it."""
    return command_line([as_override(key, value)])


def confirming_words(config: dict[str, Any]) -> str:
    """Return the words to type beside the name of a file with this configuration, each after a space; often none."""
    folder = config_dir()
    flag = "" if folder is None else f" {command_line([f'--config-dir={relative(folder)}'])}"
    return flag + "".join(f" {as_words(key, value)}" for key, value in _values_to_confirm(config))


def _values_to_confirm(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the options, with their values, that only the command line may decide."""
    for section in (*SECTIONS, *COLLECTIONS, "search"):
        yield from _values_to_confirm_at(config.get(section), section, None)
    if config.get("init"):
        yield "init", config["init"]


def _values_to_confirm_at(value: Any, option: str, target: Any, ours: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield the same for an option of a node that builds `target`, and below; `ours`: whether this package declares it."""
    if isinstance(value, dict) and option.rpartition(".")[2] not in HYDRA_KEYS:
        for name, child in value.items():
            full = f"{option}.{name}"
            declared = is_ours(full, value[TARGET]) if TARGET in value else ours
            yield from _values_to_confirm_at(child, full, value.get(TARGET), declared)
    elif not _may_set(value, option, target, ours):
        yield option, value


def _may_set(value: Any, option: str, target: Any, ours: bool) -> bool:
    """Whether a file may set an option to this value."""
    path, _, key = option.rpartition(".")
    if key in HYDRA_KEYS:
        is_remote = key == TARGET and path.startswith("logger.") and value not in _LOCAL_LOGGERS
        return not is_remote and _is_in_configs(value, path, key, target)
    if _is_number_or_switch(value):
        return ours or _fits_config_value(value, path, key)
    annotation, texts = annotation_of(option, target), value if isinstance(value, list) else [value]
    takes_choices = Text.CHOICE in marks(annotation)
    is_choice = all(isinstance(text, str) and (takes_choices or text in choices_in(annotation)) for text in texts)
    return is_choice or _is_in_configs(value, path, key, target)


def _is_number_or_switch(value: Any) -> bool:
    """Whether a value is a number, a switch or null, or a list of them."""
    return all(map(_is_number_or_switch, value)) if isinstance(value, list) else not isinstance(value, str | dict)


def _fits_config_value(value: Any, path: str, key: str) -> bool:
    """Whether the configs set this option at `path` to the same switch or null, or to a number if the value is one."""
    config_values = [node[key] for node in nodes_of_configs().get(path, ()) if key in node]
    return any(type(other) is type(value) and other == value for other in config_values) or (
        _is_numeric(value) and any(map(_stands_for_number, config_values))
    )


def _is_numeric(value: Any) -> bool:
    """Whether a value is a number, or a list of numbers."""
    if isinstance(value, list):
        return all(map(_is_numeric, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _stands_for_number(value: Any) -> bool:
    """Whether a value of a YAML file is a number, an interpolation, or `???`."""
    return value == "???" or (isinstance(value, str) and "${" in value) or _is_numeric(value)


def _is_in_configs(value: Any, path: str, key: str, target: Any) -> bool:
    """Whether the configs set this option at `path` to this value, in a node with the same target or with none."""
    nodes = nodes_of_configs().get(path, ())
    return any(key in node and node[key] == value and node.get(TARGET, target) == target for node in nodes)
