"""The configs: those that are installed and those of `--config-dir`; the groups, and the choices of each."""

import contextlib
import functools
import os
import re
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError

from .._system import relative
from ..errors import UserError
from . import CONFIG_DIR
from .tree import walk

_HERE = Path(__file__).resolve().parents[1]
# In a checkout the configs lie beside the package's folder, in an installed wheel inside it.
CONFIGS = next(p for p in (_HERE / "configs", _HERE.parent / "configs") if p.is_dir())
SEARCHES = "hparams_search"  # a group of users alone: lightning-hydra-template has it
GROUPS = sorted([SEARCHES, *(p.name for p in CONFIGS.iterdir() if p.is_dir() and p.name != "__pycache__")])
DEFAULT_DATA = "mnist"  # as train.yaml has it
SECTIONS = ("model", "data", "task", "optimizer", "trainer")  # groups whose choice is one object to build
COLLECTIONS = ("callbacks", "logger")  # groups whose choice is a collection of such objects
OPTIONAL_GROUPS = ("experiment", SEARCHES, "debug")  # `group=null` switches them off
# Hydra reads it above the first line that is no comment.
_PACKAGE = re.compile(r"(?:\s*#.*\n)*?\s*#\s*@package\s+(\S+)")
_HERE_TOO = re.compile(r"/(_\w+)@_here_")


def use_config_dir(folder: str | None, option: str = "--config-dir") -> None:
    """Take the YAML files of a folder as well, as of `--config-dir`; with None, the installed ones alone.

    UserError if the folder that `option` names is none of config groups, or has a file that an installed one hides.
    """
    os.environ.pop(CONFIG_DIR, None)
    if folder is None:
        return
    place = Path(folder).absolute()
    if not os.path.isdir(place):
        raise UserError(f"{option}: got '{folder}', which is not a folder")
    found = [file for group in GROUPS for file in (place / group).rglob("*.yaml")]
    if not found:
        raise UserError(
            f"{option}: '{folder}' holds no YAML file of a config group, such as {os.path.join(folder, 'model')}/….yaml"
        )
    for file in (*place.glob("*.yaml"), *found):
        name = file.relative_to(place)
        if (CONFIGS / name).exists():
            raise UserError(f"{option}: {relative(file)} has the name of an installed config; rename it")
    os.environ[CONFIG_DIR] = str(place)


def config_dir() -> Path | None:
    """The folder of `--config-dir`, or of BATCHSCOPE_CONFIG_DIR in the environment; absolute."""
    folder = os.environ.get(CONFIG_DIR)
    return Path(folder).absolute() if folder else None


def choices_of(group: str) -> list[str]:
    """The choices that a config group offers: the names of its YAML files without a leading underscore."""
    return sorted({file.stem for folder in _folders() for file in (folder / group).glob("[!_.]*.yaml")})


def _folders() -> list[Path]:
    own = config_dir()
    return [CONFIGS] if own is None else [CONFIGS, own]


def to_plain(config: DictConfig, resolve: bool = False) -> dict[str, Any]:
    """A configuration in plain containers; interpolations stay texts unless they are to be resolved."""
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=resolve))


def load(file: Path) -> dict[str, Any]:
    """A YAML file, as it stands. Raises UserError, with the line if one is known, for a file that cannot be read."""
    try:
        return to_plain(cast(DictConfig, OmegaConf.load(file)))
    except MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{relative(file)}{line}: cannot be read: {error.problem or error}") from error
    except (YAMLError, OmegaConfBaseException, OSError, ValueError, RecursionError) as error:
        raise UserError(f"{relative(file)}: cannot be read: {error}") from error


def refuse_unreadable() -> None:
    """Raise UserError, as `load`, for the first YAML file of `--config-dir` that cannot be read."""
    for folder in _folders()[1:]:
        of_groups = (file for group in GROUPS for file in sorted((folder / group).rglob("[!.]*.yaml")))
        for file in (*sorted(folder.glob("[!.]*.yaml")), *of_groups):
            load(file)


def known_nodes() -> dict[str, list[dict[str, Any]]]:
    """The sections that the configs hold, as their YAML files spell them, by their places: `callbacks.checkpoint`.

    The place of a file is its folder's, or that of its `# @package` line. A file that it inherits by `/_name@_here_`
    counts as a part of it. A file that cannot be read says nothing.
    """
    return nodes_in(tuple(_folders()))


@functools.cache
def nodes_in(folders: tuple[Path, ...]) -> dict[str, list[dict[str, Any]]]:
    """`known_nodes` of these folders, read once."""
    found: dict[str, list[dict[str, Any]]] = {}

    def read(file: Path, place: str) -> None:
        with contextlib.suppress(UserError):
            node = load(file)
            for name, part in walk(node, place):
                if isinstance(part, dict):
                    found.setdefault(name, []).append(part)
            for entry in node.get("defaults") or () if isinstance(node, dict) else ():
                if inherited := _HERE_TOO.fullmatch(str(entry)):
                    for folder in folders:
                        read(folder / f"{inherited[1]}.yaml", place)

    for folder in folders:
        for group in GROUPS:
            for file in (folder / group).rglob("*.yaml") if group != "hydra" else ():
                with contextlib.suppress(OSError):  # as an editor's dangling link
                    read(file, _place_of(file, folder))
    return found


def _place_of(file: Path, folder: Path) -> str:
    """The section that a YAML file of a group is about; empty for `# @package _global_`."""
    header = _PACKAGE.match(file.read_text(encoding="utf-8", errors="replace"))
    if header is None or header[1] == "_group_":
        return ".".join(file.parent.relative_to(folder).parts)
    return "" if header[1] == "_global_" else header[1]
