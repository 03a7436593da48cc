"""The packages whose classes a configuration may build, beside batchscope's own: what the user says by one of two words.

- An installed package with an entry point of the group `batchscope`: installing it was the word.
- `trust=mynet` on the command line, or in a YAML file that the command line names (`--config-dir`). Such a package may
  also lie in the current folder.

A file of results never decides it: trust.py takes the option out of what it reads. Nothing is imported here.
"""

import importlib
import importlib.util
import os
import sys
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import distributions
from pathlib import Path

from ..errors import UserError, did_you_mean

OWN = "batchscope"
GROUP = "batchscope"  # of entry points
_LIBRARIES = (OWN, "torch", "torchvision", "torchmetrics", "lightning", "hydra", "omegaconf", "numpy")

_typed: tuple[str, ...] = ()  # the packages that the configuration of this process names


def trusts(name: str) -> bool:
    """Whether a dotted name lies in a package that may be built from."""
    package, dot, _ = name.partition(".")
    return bool(dot) and (package == OWN or package in _typed or package in _installed())


def trust(names: list[str] | str | None) -> None:
    """Trust the packages that the option `trust` of a configuration names, and none that another one named.

    A package in the current folder becomes importable: the folder is appended to `sys.path`, so that it shadows nothing.

    Raises:
        UserError: for a name that is not that of a package of the user's own, or that cannot be found.
    """
    global _typed
    found = [names] if isinstance(names, str) else list(names or ())
    for name in found:
        _check_name(name)
        _find(name)
    _typed = tuple(found)


def may_be_own(package: str) -> bool:
    """Whether `trust=` with this name would be taken: it is no library's, and it is installed or in the current folder."""
    try:
        _check_name(package)
    except UserError:
        return False
    return _spec(package) is not None or (Path.cwd() / package / "__init__.py").is_file()


def _check_name(name: str) -> None:
    if not name.isidentifier() or name.startswith("_"):
        raise UserError(
            f"trust: got {name!r}, takes names of packages, without dots: trust=mynet or trust=[mynet,other]"
        )
    if _is_library(name):
        raise UserError(f"trust: got {name!r}, takes packages of your own: {name} is a library that needs no trust")


def _is_library(name: str) -> bool:
    return name in sys.stdlib_module_names or name in _LIBRARIES


def _find(name: str) -> None:
    here = Path.cwd()
    spec = _spec(name)
    if spec is None and (here / name / "__init__.py").is_file():
        sys.path.append(str(here))
        importlib.invalidate_caches()
        spec = _spec(name)
    if spec is None:
        near = did_you_mean(name, [file.parent.name for file in here.glob("*/__init__.py")])
        raise UserError(
            f"trust: {name} is not installed, and no folder of this name with an __init__.py is here.{near}"
        )
    if not spec.submodule_search_locations or not spec.origin:
        raise UserError(f"trust: {name} is no package: a package is a folder with an __init__.py")


def _spec(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None


@cache
def _installed() -> frozenset[str]:
    """The packages of the entry points. The current folder installs nothing: anybody may have filled it."""
    here = os.getcwd()
    path = [entry for entry in sys.path if entry and os.path.realpath(entry) != os.path.realpath(here)]
    points = (point for one in distributions(path=path) for point in one.entry_points if point.group == GROUP)
    names = {point.value for point in points}
    return frozenset(name for name in names if name.isidentifier() and not _is_library(name))
