"""What a file may decide: a run's record and a checkpoint are data and may come from anybody.

The command line, the installed configs, and the `--config-dir` that it names describe what is built. A file may

- repeat what those configs hold at the same place: classes and functions (`_target_`), Hydra's other keys, texts,
  lists, but no logger that sends what it logs somewhere;
- set numbers and switches of this package's own options, and choose among the values that an option lists; of any other
  class set only numbers in the place of numbers that those configs hold.

Anything more has to be typed on the command line, and the error has the words for it. `plain` reads, and `confirm`
decides.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

from .._system import command_line, relative
from ..errors import UserError, is_text
from .groups import COLLECTIONS, SECTIONS, config_dir, known_nodes
from .overrides import as_override, set_by
from .purpose import PLACES, annotation_of, is_ours, marks, purpose_of
from .tree import HYDRA_KEYS, TARGET, flatten
from .types import INT64, Text
from .values import choices_in

_DEEPEST = 16  # levels of a configuration; ours have 4
_MOST = 10_000  # values of a configuration; ours have 100
_LONGEST = 4096  # characters of a text, such as a path
_LOCAL_LOGGERS = (
    "batchscope.callbacks.step_file.StepFile",
    "batchscope.callbacks.tensorboard.TensorBoard",
    "lightning.pytorch.loggers.TensorBoardLogger",
)  # files alone
_BLANKS = str.maketrans("\t\n", "  ")  # a text may have several lines, and columns
_KEY = re.compile(r"\w[\w-]{0,99}", re.ASCII)


def is_value(text: Any) -> TypeGuard[str]:
    """Whether a value is a text that an option may have: without terminal escapes and the like."""
    return isinstance(text, str) and is_text(text.translate(_BLANKS))


def plain(node: Any, where: str = "") -> dict[str, Any]:
    """A copy of a configuration, in plain containers, from the file `where`: what a record and a checkpoint can hold.

    Raises:
        UserError: if it holds anything but dicts, lists and plain values, an interpolation, or too much of anything.
    """
    count = iter(range(_MOST))

    def said(option: str) -> str:
        return ": ".join(filter(None, (where, option))) or "config"

    def copy(node: Any, depth: int, option: str) -> Any:
        if depth > _DEEPEST or next(count, None) is None:
            raise UserError(f"{said('')}: is no configuration of a run: it has too many values or levels")
        if isinstance(node, dict):
            wrong = [key for key in node if not isinstance(key, str) or not _KEY.fullmatch(key)]
            if wrong:
                raise UserError(f"{said(option)}: got {str(wrong[0])[:100]!r}, which cannot be the name of an option")
            return {key: copy(value, depth + 1, f"{option}.{key}".lstrip(".")) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return [copy(value, depth + 1, f"{option}.{index}") for index, value in enumerate(node)]
        known = type(node) in (str, int, float, bool, type(None))
        is_odd = isinstance(node, str) and not (is_value(node) and len(node) <= _LONGEST)
        if not known or is_odd or (isinstance(node, int) and abs(node) > INT64):
            why = f", with control characters or more than {_LONGEST:,} characters" if is_odd else ""
            raise UserError(f"{said(option)}: holds a value that no option has, of type {type(node).__name__}{why}")
        if isinstance(node, str) and "${" in node:
            raise UserError(f"{said(option)}: got {node[:100]!r}; an interpolation is for the command line alone")
        return node

    copied = copy(node, 0, "")
    if not isinstance(copied, dict):
        raise UserError(f"{said('')}: holds no configuration")
    return copied


def confirm(config: dict[str, Any], overrides: Iterable[str], where: str) -> None:
    """Raise UserError, with all words to type, for what the file `where` must not decide, unless they are typed.

    `config` is checked, with the overrides applied.
    """
    options, groups = set_by(overrides)
    groups.discard("trainer")  # a choice keeps most options of the file's (compose.apply_overrides)
    outside = _outside(config)
    untyped = {key: held for key, held in outside if key not in options and key.partition(".")[0] not in groups}
    if not untyped:
        return
    key, value = next(iter(untyped.items()))
    is_of_yaml = key.endswith(TARGET) and not key.startswith("logger.")
    of_yaml = "add the --config-dir (in Python `config_dir=`) that has its YAML, or " if is_of_yaml else ""
    typed = " ".join(as_words(*one) for one in untyped.items())
    raise UserError(
        f"{key}: is {value!r} in {where}, which a file alone cannot decide; if you want it, {of_yaml}write (in Python "
        f"`overrides=[…]`) {typed}"
    )


def refuse_differing(a: dict[str, Any], b: dict[str, Any], overrides: Iterable[str]) -> None:
    """Raise UserError for what would have to be typed and differs between two files' configurations: a word changes both.

    A folder that is typed is that of both.
    """
    options, groups = set_by(overrides)
    before, after = dict(flatten(a)), dict(flatten(b))
    for key, _ in (*_outside(a), *_outside(b)):
        is_typed = key in options and purpose_of(key, a) in PLACES
        if before.get(key) != after.get(key) and not is_typed and key.partition(".")[0] not in groups:
            sides = " and ".join(f"{one.get(key)!r} in {side}" for side, one in (("A", before), ("B", after)))
            raise UserError(
                f"{key}: is {sides}, which files alone cannot decide, and a word on the command line changes both; add "
                "the --config-dir whose YAML files have them"
            )


def as_words(key: str, value: Any) -> str:
    """`key=value` as Hydra and a shell read it."""
    return command_line([as_override(key, value)])


def words(config: dict[str, Any]) -> str:
    """What a command line has to hold beside the file's name, each after a space; empty for an ordinary run."""
    folder = config_dir()
    flag = "" if folder is None else f" {command_line([f'--config-dir={relative(folder)}'])}"
    return flag + "".join(f" {as_words(key, value)}" for key, value in _outside(config))


def _outside(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What only the command line may decide: the options with their values."""
    for section in (*SECTIONS, *COLLECTIONS, "search"):
        yield from _outside_at(config.get(section), section, None)
    if config.get("init"):
        yield "init", config["init"]


def _outside_at(value: Any, option: str, target: Any, ours: bool = True) -> Iterator[tuple[str, Any]]:
    """The same at and below an option of a node that builds `target`; `ours` is whether this package declares it."""
    if isinstance(value, dict) and option.rpartition(".")[2] not in HYDRA_KEYS:
        for name, child in value.items():
            full = f"{option}.{name}"
            declared = is_ours(full, value[TARGET]) if TARGET in value else ours
            yield from _outside_at(child, full, value.get(TARGET), declared)
    elif not _may_say(value, option, target, ours):
        yield option, value


def _may_say(value: Any, option: str, target: Any, ours: bool) -> bool:
    """Whether a file may give an option this value."""
    place, _, key = option.rpartition(".")
    if key in HYDRA_KEYS:
        is_away = key == TARGET and place.startswith("logger.") and value not in _LOCAL_LOGGERS
        return not is_away and _is_held(value, place, key, target)
    if _is_number(value):
        return ours or _stands_for_held(value, place, key)
    takes, texts = annotation_of(option, target), value if isinstance(value, list) else [value]
    is_choice = Text.CHOICE in marks(takes)
    is_chosen = all(isinstance(text, str) and (is_choice or text in choices_in(takes)) for text in texts)
    return is_chosen or _is_held(value, place, key, target)


def _is_number(value: Any) -> bool:
    """Whether a value is a number, a switch or null, or a list of them."""
    return all(map(_is_number, value)) if isinstance(value, list) else not isinstance(value, str | dict)


def _stands_for_held(value: Any, place: str, key: str) -> bool:
    """Whether the configs give an option at this place this switch or null, or a number where a number stands."""
    held = [node[key] for node in known_nodes().get(place, ()) if key in node]
    return any(type(one) is type(value) and one == value for one in held) or (
        _is_quantity(value) and any(map(_takes_quantity, held))
    )


def _is_quantity(value: Any) -> bool:
    """Whether a value is a number, or a list of numbers."""
    if isinstance(value, list):
        return all(map(_is_quantity, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _takes_quantity(held: Any) -> bool:
    """Whether a YAML file has a number for an option, that of another option, or none yet."""
    return held == "???" or (isinstance(held, str) and "${" in held) or _is_quantity(held)


def _is_held(value: Any, place: str, key: str, target: Any) -> bool:
    """Whether the configs give an option this value, in a node here that builds the same, or leave it out."""
    nodes = known_nodes().get(place, ())
    return any(key in node and node[key] == value and node.get(TARGET, target) == target for node in nodes)
