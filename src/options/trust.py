"""What a file may say: a run's record and a checkpoint are data, and may come from anybody.

The command line and the installed configs decide what is built, where files are read and written, and what is
downloaded. A file may repeat what they say, set numbers and switches, and name places inside the run's own folder.
Anything more has to be said again on the command line, and the error has the words for it.
"""

import functools
import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from ..errors import UserError
from ..files import is_inside
from . import schema
from .config import COLLECTIONS, CONFIGS, SECTIONS, as_override, spelled_out

_DEEPEST = 16  # levels of a configuration; ours have 4
_MOST = 10_000  # values of a configuration; ours have 100
_KEY = re.compile(r"\w[\w-]{0,99}", re.ASCII)
# Texts that only choose among what the libraries have, or name a metric.
_WORDS = re.compile(
    r"model\.name|callbacks\.[\w-]+\.monitor"
    r"|trainer\.(accelerator|strategy|precision|devices|profiler|gradient_clip_algorithm|deterministic)"
    r"|trainer\.(max_time|val_check_interval)"
)
# Names of files below a logger's own folder.
_NAMES = re.compile(r"logger\.[\w-]+\.(name|version|prefix|sub_dir)")
_NAME = re.compile(r"|[\w-][\w.-]*")
# Folders that their readers look up from the working directory; any other text may be joined to something else.
_FOLDERS = re.compile(r"callbacks\.[\w-]+\.dirpath|logger\.[\w-]+\.save_dir|trainer\.default_root_dir|data\.root")
# What some reader of a path replaces: variables, home folders, URLs, parents.
_EXPANDED = re.compile(r"[$:%]|(^|[/\\])(~|\.\.([/\\]|$))")


def plain(node: Any, where: str) -> Any:
    """A copy of what a file holds as a configuration, in plain containers.

    Args:
        node: a configuration from a file.
        where: what it is of, for the error.

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
    return copied


def is_text(value: Any) -> bool:
    """Whether a value from a file is a text without the characters that no option has, such as a terminal's escapes."""
    return isinstance(value, str) and value.isprintable()


def confirm(config: dict[str, Any], overrides: Iterable[str], where: str, run_dir: Path | None) -> None:
    """Refuse what a file must not decide, unless the command line says it, too.

    Args:
        config: checked; from a file, with the overrides applied.
        overrides: the command line, without what names the file.
        where: what the file is, for the error.
        run_dir: the folder that the run may write to; None if it writes nothing.

    Raises:
        UserError: with the words that confirm the first such option.
    """
    options, groups = spelled_out(overrides)
    for key, value in outside(config, run_dir):
        if key not in options and key.partition(".")[0] not in groups:
            raise UserError(
                f"{key}: is {value!r} in {where}, which a file alone cannot decide; if you want it, write "
                f"{as_words(key, value)}"
            )


def outside(config: dict[str, Any], run_dir: Path | None) -> Iterator[tuple[str, Any]]:
    """The options of a checked configuration that the command line has to say, whatever a file says, and their values."""
    for section in (*SECTIONS, *COLLECTIONS, "search"):
        yield from _outside(config.get(section), section, None, run_dir)


def as_words(key: str, value: Any) -> str:
    """`key=value` as Hydra and a shell read it."""
    return shlex.quote(as_override(key, value))


def words(config: dict[str, Any], run_dir: Path | None) -> str:
    """What a command line has to say beside the file's name, each with a space before it; empty for an ordinary run."""
    return "".join(f" {as_words(key, value)}" for key, value in outside(config, run_dir))


def refuse_outside(config: dict[str, Any], run_dir: Path, places: Iterable[tuple[str, str | os.PathLike[str]]]) -> None:
    """Refuse a folder out of the run's, where an object that was built would write, unless the command line has said it.

    `confirm` judges texts; what a library makes of them is judged here.

    Args:
        config: confirmed: what it says of places outside, the command line has said.
        run_dir: the run's folder.
        places: the option that an object was built from, and the folder that it writes to.

    Raises:
        UserError: for the first such folder.
    """
    said = [key for key, _ in outside(config, run_dir)]
    for option, place in places:
        if any(key == option or key.startswith(f"{option}.") for key in said):
            continue
        is_url = "://" in str(place) or "::" in str(place)
        if is_url or not is_inside(Path(place), run_dir):
            raise UserError(f"{option}: would write to {str(place)!r}, which is not in the run's folder {run_dir}")


def digest(config: dict[str, Any]) -> str:
    """A checksum of a configuration, by which a process knows in a file what another has checked."""
    same = {key: value for key, value in config.items() if key != "resume"}
    read = json.loads(json.dumps(same, default=str))  # as from a file: every key is a text, and can be sorted
    text = json.dumps(read, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _outside(node: Any, key: str, annotation: Any, run_dir: Path | None, known: frozenset = frozenset()) -> Iterator:
    if isinstance(node, dict):
        target = node.get("_target_")
        signature = schema.signature_of(target) if target else None
        for name, value in node.items():
            if name == "_target_":
                if target not in _installed():
                    yield f"{key}._target_", target
            else:
                takes = signature.parameters.get(name) if signature else None
                said = _installed().get(target, {}).get(name, frozenset())
                yield from _outside(value, f"{key}.{name}", takes, run_dir, said)
    elif isinstance(node, list):
        if any(True for value in node for _ in _outside(value, key, None, run_dir)):
            yield key, node
    elif isinstance(node, str) and not _is_harmless(key, node, annotation, run_dir) and node not in known:
        yield key, node


def _is_harmless(key: str, text: str, annotation: Any, run_dir: Path | None) -> bool:
    """Whether a text can only choose among what is installed, or lies inside the run's folder."""
    if schema.is_choice(annotation) or _WORDS.fullmatch(key):
        return True
    if _NAMES.fullmatch(key) and _NAME.fullmatch(text):
        return True
    return run_dir is not None and _FOLDERS.fullmatch(key) is not None and _is_own_folder(text, run_dir)


def is_written_to(key: str) -> bool:
    """Whether an option names a folder that a run writes to."""
    return key == "run_dir" or (key != "data.root" and _FOLDERS.fullmatch(key) is not None)


def _is_own_folder(text: str, run_dir: Path) -> bool:
    """Whether a text names a run's folder or one in it, whoever reads it: as a path, a pattern with variables or a URL."""
    here = os.path.relpath(run_dir)  # which the command line has said, and may hold `..`
    below = text[len(here) :] if text == here or text.startswith(here + os.sep) else text
    return bool(text) and not _EXPANDED.search(below) and is_inside(Path(text), run_dir)


@functools.cache
def _installed() -> dict[str, dict[str, frozenset[str]]]:
    """The targets that the installed configs name, and the texts that they give each one's options."""
    found: dict[str, dict[str, frozenset[str]]] = {}

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if "_target_" in node:
                options = found.setdefault(node["_target_"], {})
                for name, value in node.items():
                    if isinstance(value, str) and "${" not in value:
                        options[name] = options.get(name, frozenset()) | {value}
            for child in node.values():
                walk(child)

    for file in CONFIGS.glob("*/*.yaml"):
        if file.parent.name != "hydra":
            walk(OmegaConf.to_container(OmegaConf.load(file), resolve=False))
    return found
