"""The YAML files, installed and of `--config-dir`: their groups, the choices of each group, and their nodes."""

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
SEARCHES = "hparams_search"  # a group of lightning-hydra-template, empty here: a --config-dir may fill it
GROUPS = sorted([SEARCHES, *(p.name for p in CONFIGS.iterdir() if p.is_dir() and p.name != "__pycache__")])
DEFAULT_DATA = "mnist"  # as train.yaml has it
SECTIONS = ("model", "data", "task", "optimizer", "trainer")  # groups whose choice is one object to build
COLLECTIONS = ("callbacks", "logger")  # groups whose choice is a collection of such objects
OPTIONAL_GROUPS = ("experiment", SEARCHES, "debug")  # `group=null` switches them off
# The header `# @package`, which Hydra reads above the first line that is no comment.
_PACKAGE_HEADER = re.compile(r"(?:\s*#.*\n)*?\s*#\s*@package\s+(\S+)")
_INHERITED = re.compile(r"/(_\w+)@_here_")


def use_config_dir(folder: str | None, option: str = "--config-dir") -> None:
    """Use the YAML files of a folder beside the installed ones, as `--config-dir` does; with None, only the installed ones.

    Raises UserError if the folder, which `option` names, has no config group, or has a file that an installed one hides.
    """
    os.environ.pop(CONFIG_DIR, None)
    if folder is None:
        return
    root = Path(folder).absolute()
    if not os.path.isdir(root):
        raise UserError(f"{option}: got '{folder}', which is not a folder")
    group_files = [file for group in GROUPS for file in (root / group).rglob("*.yaml")]
    if not group_files:
        raise UserError(
            f"{option}: '{folder}' holds no YAML file of a config group, such as {os.path.join(folder, 'model')}/….yaml"
        )
    for file in (*root.glob("*.yaml"), *group_files):
        name = file.relative_to(root)
        if (CONFIGS / name).exists():
            raise UserError(f"{option}: {relative(file)} has the name of an installed config; rename it")
    os.environ[CONFIG_DIR] = str(root)


def config_dir() -> Path | None:
    """Return the absolute path of `--config-dir`, or of BATCHSCOPE_CONFIG_DIR in the environment; None without either."""
    folder = os.environ.get(CONFIG_DIR)
    return Path(folder).absolute() if folder else None


def choices_of(group: str) -> list[str]:
    """Return the choices of a config group: the names of its YAML files that begin with no underscore."""
    return sorted({file.stem for folder in _config_folders() for file in (folder / group).glob("[!_.]*.yaml")})


def _config_folders() -> list[Path]:
    folder = config_dir()
    return [CONFIGS] if folder is None else [CONFIGS, folder]


def to_plain(config: DictConfig, resolve: bool = False) -> dict[str, Any]:
    """Return a configuration in plain containers; interpolations stay texts without `resolve`."""
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=resolve))


def load(file: Path) -> dict[str, Any]:
    """Return the content of a YAML file. Raises UserError, with the line if it is known, for a file that cannot be read."""
    try:
        return to_plain(cast(DictConfig, OmegaConf.load(file)))
    except MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{relative(file)}{line}: cannot be read: {error.problem or error}") from error
    except (YAMLError, OmegaConfBaseException, OSError, ValueError, RecursionError) as error:
        raise UserError(f"{relative(file)}: cannot be read: {error}") from error


def refuse_unreadable() -> None:
    """Raise UserError, as `load`, for the first YAML file of `--config-dir` that cannot be read."""
    for folder in _config_folders()[1:]:
        group_files = (file for group in GROUPS for file in sorted((folder / group).rglob("[!.]*.yaml")))
        for file in (*sorted(folder.glob("[!.]*.yaml")), *group_files):
            load(file)


def nodes_of_configs() -> dict[str, list[dict[str, Any]]]:
    """Return the nodes of all YAML files, unresolved, by their dotted paths: `callbacks.checkpoint`.

    The path of a file's node is that of its folder, or that of its `# @package` line. A file that it inherits by
    `/_name@_here_` counts as a part of it. A file that cannot be read is left out.
    """
    return nodes_in(tuple(_config_folders()))


@functools.cache
def nodes_in(folders: tuple[Path, ...]) -> dict[str, list[dict[str, Any]]]:
    """Return `nodes_of_configs` of these folders; a process reads them once."""
    nodes: dict[str, list[dict[str, Any]]] = {}

    def read(file: Path, path: str) -> None:
        with contextlib.suppress(UserError):
            node = load(file)
            for name, part in walk(node, path):
                if isinstance(part, dict):
                    nodes.setdefault(name, []).append(part)
            for entry in node.get("defaults") or () if isinstance(node, dict) else ():
                if inherited := _INHERITED.fullmatch(str(entry)):
                    for folder in folders:
                        read(folder / f"{inherited[1]}.yaml", path)

    for folder in folders:
        for group in GROUPS:
            for file in (folder / group).rglob("*.yaml") if group != "hydra" else ():
                with contextlib.suppress(OSError):  # as an editor's dangling link
                    read(file, _node_path(file, folder))
    return nodes


def _node_path(file: Path, folder: Path) -> str:
    """Return the dotted path of the node that a YAML file of a group holds; empty for `# @package _global_`."""
    header = _PACKAGE_HEADER.match(file.read_text(encoding="utf-8", errors="replace"))
    if header is None or header[1] == "_group_":
        return ".".join(file.parent.relative_to(folder).parts)
    return "" if header[1] == "_global_" else header[1]
