"""The configs: those that are installed and those of `--config-dir`; the groups, and the choices of each."""

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ..errors import UserError
from .purpose import TOP_LEVEL

_HERE = Path(__file__).resolve().parents[1]
# In a checkout the configs lie beside the package's folder, in an installed wheel inside it.
CONFIGS = next(p for p in (_HERE / "configs", _HERE.parent / "configs") if p.is_dir())
GROUPS = sorted(p.name for p in CONFIGS.iterdir() if p.is_dir() and p.name != "__pycache__")
SECTIONS = ("model", "data", "optimizer", "trainer")  # groups whose choice is one object to build
COLLECTIONS = ("callbacks", "logger")  # groups whose choice is a collection of such objects
OPTIONAL_GROUPS = (*COLLECTIONS, "experiment", "debug")  # `group=null` switches them off
_VARIABLE = "BATCHSCOPE_CONFIG_DIR"  # passes the folder on to the processes that this one starts


def use_config_dir(folder: str | None) -> None:
    """Take the YAML files of a folder as well, as of `--config-dir`; with None, the installed ones alone.

    Raises:
        UserError: if it is no folder of config groups, or has a file that an installed one hides.
    """
    os.environ.pop(_VARIABLE, None)
    if folder is None:
        return
    place = Path(folder).absolute()
    if not os.path.isdir(place):
        raise UserError(f"--config-dir: got '{folder}', which is not a folder")
    found = list(_files_of_groups(place))
    if not found:
        raise UserError(
            f"--config-dir: '{folder}' holds no YAML file of a config group, such as {os.path.join(folder, 'model')}/….yaml"
        )
    for file in (*place.glob("*.yaml"), *found):
        name = file.relative_to(place)
        if (CONFIGS / name).exists():
            raise UserError(f"--config-dir: {os.path.relpath(file)} has the name of an installed config; rename it")
    os.environ[_VARIABLE] = str(place)


def config_dir() -> Path | None:
    """The folder of `--config-dir`, absolute."""
    return Path(os.environ[_VARIABLE]) if _VARIABLE in os.environ else None


def choices_of(group: str) -> list[str]:
    """The choices that a config group offers: the names of its YAML files without a leading underscore."""
    return sorted({file.stem for folder in _folders() for file in (folder / group).glob("[!_]*.yaml")})


def file_of(group: str, choice: object) -> Path | None:
    """The YAML file of a choice; None if there is none."""
    files = (folder / group / f"{choice}.yaml" for folder in _folders())
    return next((file for file in files if file.is_file()), None)


def _folders() -> list[Path]:
    own = config_dir()
    return [CONFIGS] if own is None else [CONFIGS, own]


def _files_of_groups(folder: Path) -> Iterator[Path]:
    for group in GROUPS:
        yield from (folder / group).glob("*.yaml")


def top_level_names() -> list[str]:
    """What a command line may set at the top: groups and options."""
    return [g for g in GROUPS if g != "hydra"] + [k for k in TOP_LEVEL if k != "run_dir"] + ["hydra"]


def to_plain(config: DictConfig, resolve: bool = False) -> dict[str, Any]:
    """A configuration in plain containers; interpolations stay texts unless they are to be resolved."""
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=resolve))


def load(file: Path) -> dict[str, Any]:
    """A YAML file, as it stands. Raises UserError for one that cannot be read."""
    try:
        return to_plain(cast(DictConfig, OmegaConf.load(file)))
    except (YAMLError, OmegaConfBaseException, OSError, ValueError, RecursionError) as error:
        raise UserError(f"{os.path.relpath(file)}: cannot be read: {error}") from error


def known_nodes() -> dict[str, dict[str, frozenset[str]]]:
    """The targets that the configs name, and the texts that they give each one's options."""
    return _nodes_in(tuple(_folders()))


@functools.cache
def _nodes_in(folders: tuple[Path, ...]) -> dict[str, dict[str, frozenset[str]]]:
    found: dict[str, dict[str, frozenset[str]]] = {}

    def walk(node: Any) -> None:
        if not isinstance(node, dict):
            return
        if isinstance(node.get("_target_"), str):
            options = found.setdefault(node["_target_"], {})
            for name, value in node.items():
                if isinstance(value, str) and "${" not in value:
                    options[name] = options.get(name, frozenset()) | {value}
        for child in node.values():
            walk(child)

    for folder in folders:
        for file in (*folder.glob("_*.yaml"), *_files_of_groups(folder)):
            if file.parent.name != "hydra":
                with contextlib.suppress(UserError):  # what cannot be read says nothing
                    walk(load(file))
    return found
