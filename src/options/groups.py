"""The installed configs: the config groups, the choices of each, and which of them a configuration has to have."""

import functools
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from .purpose import TOP_LEVEL

_HERE = Path(__file__).resolve().parents[1]
# In a checkout the configs lie beside the package's folder, in an installed wheel inside it.
CONFIGS = next(p for p in (_HERE / "configs", _HERE.parent / "configs") if p.is_dir())
GROUPS = sorted(p.name for p in CONFIGS.iterdir() if p.is_dir() and p.name != "__pycache__")
SECTIONS = ("model", "data", "optimizer", "trainer")  # groups whose choice is one object to build
COLLECTIONS = ("callbacks", "logger")  # groups whose choice is a collection of such objects
OPTIONAL_GROUPS = (*COLLECTIONS, "experiment")  # `group=null` switches them off


def choices_of(group: str) -> list[str]:
    """The choices that a config group offers: the names of its YAML files without a leading underscore."""
    return sorted(p.stem for p in (CONFIGS / group).glob("[!_]*.yaml"))


def top_level_names() -> list[str]:
    """What a command line may set at the top: groups and options."""
    return [g for g in GROUPS if g != "hydra"] + [k for k in TOP_LEVEL if k != "run_dir"] + ["hydra"]


def to_plain(config: DictConfig, resolve: bool = False) -> dict[str, Any]:
    """A configuration in plain containers; interpolations stay texts unless they are to be resolved."""
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=resolve))


def load(file: Path) -> dict[str, Any]:
    """One of the installed YAML files, as it stands."""
    return to_plain(cast(DictConfig, OmegaConf.load(file)))


@functools.cache
def installed_nodes() -> dict[str, dict[str, frozenset[str]]]:
    """The targets that the installed configs name, and the texts that they give each one's options."""
    found: dict[str, dict[str, frozenset[str]]] = {}

    def walk(node: Any) -> None:
        if not isinstance(node, dict):
            return
        if "_target_" in node:
            options = found.setdefault(node["_target_"], {})
            for name, value in node.items():
                if isinstance(value, str) and "${" not in value:
                    options[name] = options.get(name, frozenset()) | {value}
        for child in node.values():
            walk(child)

    for file in CONFIGS.glob("*/*.yaml"):
        if file.parent.name != "hydra":
            walk(load(file))
    return found
