"""What a file may decide: a run's record and a checkpoint are data and may come from anybody.

The command line, and the configs that are installed or that it names, decide what is built, where files are read and
written, and what is downloaded. A file may repeat them, set numbers and switches, and name places inside the run's own folder. Anything more
has to be typed on the command line, and the error has the words for it.
"""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import is_inside
from .groups import COLLECTIONS, SECTIONS, config_dir, known_nodes
from .overrides import as_override, set_by, value_of
from .purpose import PLACES, annotation_of, marks
from .types import Text
from .values import choices_in

_DEEPEST = 16  # levels of a configuration; ours have 4
_MOST = 10_000  # values of a configuration; ours have 100
_KEY = re.compile(r"\w[\w-]{0,99}", re.ASCII)
_NAME = re.compile(r"|[\w-][\w.-]*")  # of a file or folder
# What a reader of a path may replace: variables, home folders, URLs, parents.
_EXPANDED = re.compile(r"[$:%]|(^|[/\\])(~|\.\.([/\\]|$))")


def plain(node: Any, where: str, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """A copy of a configuration, in plain containers, from the file `where`.

    The packages that it trusts are those that the overrides of the command line name; what the file says is dropped.

    Raises:
        UserError: if it holds anything but dicts, lists and plain values, an interpolation, or too much of anything.
    """
    count = iter(range(_MOST))

    def copy(node: Any, depth: int) -> Any:
        if depth > _DEEPEST or next(count, None) is None:
            raise UserError(f"{where}: is no configuration of a run: it has too many values or levels")
        if isinstance(node, dict):
            wrong = [key for key in node if not isinstance(key, str) or not _KEY.fullmatch(key)]
            if wrong:
                raise UserError(f"{where}: got {str(wrong[0])[:100]!r}, which cannot be the name of an option")
            return {key: copy(value, depth + 1) for key, value in node.items()}
        if isinstance(node, list | tuple):
            return [copy(value, depth + 1) for value in node]
        if type(node) not in (str, int, float, bool, type(None)):
            raise UserError(f"{where}: got a {type(node).__name__}, which cannot be the value of an option")
        if isinstance(node, str) and not is_text(node):
            raise UserError(f"{where}: got {node[:100]!r}, which has characters that no option has")
        if isinstance(node, str) and "${" in node:
            raise UserError(f"{where}: got {node[:100]!r}; an interpolation is for the command line alone")
        return node

    copied = copy(node, 0)
    if not isinstance(copied, dict):
        raise UserError(f"{where}: holds no configuration")
    return {**copied, "trust": value_of("trust", overrides)}


def is_text(value: Any) -> bool:
    """Whether a value from a file is a text without the characters that no option has, such as a terminal's escapes."""
    return isinstance(value, str) and value.isprintable()


def confirm(config: dict[str, Any], overrides: Iterable[str], where: str, run_dir: Path | None) -> None:
    """Refuse what a file must not decide, unless the command line says it as well.

    Args:
        config: the checked configuration of the file `where`, with the overrides applied.
        overrides: the command line, without the option that names the file.
        run_dir: the folder that the run may write to; None if it writes nothing.

    Raises:
        UserError: for the first such option, with the words that confirm it.
    """
    options, groups = set_by(overrides)
    for key, value in outside(config, run_dir):
        if key not in options and key.partition(".")[0] not in groups:
            of_yaml = "add the --config-dir that has its YAML, or " if key.endswith("_target_") else ""
            raise UserError(
                f"{key}: is {value!r} in {where}, which a file alone cannot decide; if you want it, {of_yaml}write "
                f"{as_words(key, value)}"
            )


def outside(config: dict[str, Any], run_dir: Path | None) -> Iterator[tuple[str, Any]]:
    """The options of a checked configuration that only the command line may decide, with their values."""
    for section in (*SECTIONS, *COLLECTIONS, "search"):
        yield from _outside(config.get(section), section, None, run_dir)
    if config.get("trust"):
        yield "trust", config["trust"]


def as_words(key: str, value: Any) -> str:
    """`key=value` as Hydra and a shell read it."""
    return shlex.quote(as_override(key, value))


def words(config: dict[str, Any], run_dir: Path | None) -> str:
    """What a command line has to hold beside the file's name, each with a space before it; empty for an ordinary run."""
    folder = config_dir()
    flag = "" if folder is None else f" --config-dir={shlex.quote(os.path.relpath(folder))}"
    return flag + "".join(f" {as_words(key, value)}" for key, value in outside(config, run_dir))


def refuse_outside(config: dict[str, Any], run_dir: Path, places: Iterable[tuple[str, str | os.PathLike[str]]]) -> None:
    """Refuse an object that would write outside the run's folder, unless the command line says so.

    `confirm` judges texts; this function judges the folders that libraries make of them.

    Args:
        config: as confirmed: the command line has said all that leads outside.
        places: the option that an object was built from, and the folder that the object writes to.
    """
    said = [key for key, _ in outside(config, run_dir)]
    for option, place in places:
        confirmed = any(key == option or key.startswith(f"{option}.") for key in said)
        is_url = "://" in str(place) or "::" in str(place)
        if not confirmed and (is_url or not is_inside(Path(place), run_dir)):
            raise UserError(f"{option}: would write to {str(place)!r}, which is not in the run's folder {run_dir}")


def digest(config: dict[str, Any]) -> str:
    """A checksum by which a process recognizes, in a file, the configuration that another process has checked."""
    same = {key: value for key, value in config.items() if key != "resume"}
    read = json.loads(json.dumps(same, default=str))  # as from a file: every key is a text and can be sorted
    return hashlib.blake2b(json.dumps(read, sort_keys=True).encode(), digest_size=16).hexdigest()


def _outside(node: Any, key: str, takes: Any, run_dir: Path | None, known: frozenset = frozenset()) -> Iterator:
    """The options at and below a node; `takes` is its annotation, `known` holds the texts of the configs."""
    if isinstance(node, dict):
        target = node.get("_target_")
        for name, value in node.items():
            option = f"{key}.{name}"
            if name != "_target_":
                texts = known_nodes().get(target or "", {}).get(name, frozenset())
                yield from _outside(value, option, annotation_of(option, target), run_dir, texts)
            elif target not in known_nodes():
                yield option, target
    elif isinstance(node, list):
        if any(True for value in node for _ in _outside(value, key, None, run_dir)):
            yield key, node
    elif isinstance(node, str) and not _is_harmless(node, takes, run_dir) and node not in known:
        yield key, node


def _is_harmless(text: str, takes: Any, run_dir: Path | None) -> bool:
    """Whether a text can only choose among what is installed, or lies inside the run's folder."""
    declared = marks(takes)
    if Text.CHOICE in declared or text in choices_in(takes):
        return True
    if Text.FILE_NAME in declared and _NAME.fullmatch(text):
        return True
    return run_dir is not None and not declared.isdisjoint(PLACES) and _is_own_folder(text, run_dir)


def _is_own_folder(text: str, run_dir: Path) -> bool:
    """Whether every reader of a text (as a path, a pattern with variables, a URL) finds a run's folder or one in it."""
    here = os.path.relpath(run_dir)  # from the command line; it may hold `..`
    below = text[len(here) :] if text == here or text.startswith(here + os.sep) else text
    return bool(text) and not _EXPANDED.search(below) and is_inside(Path(text), run_dir)
