"""Public names that are imported when they are first used (PEP 562), so that importing a package costs nothing.

A package lists its names once, as imports under `if TYPE_CHECKING:`. Type checkers read that block, and `lazy_names`
parses its source text: the imports themselves never run.
"""

import ast
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_names(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package, given its `__name__`."""
    module = sys.modules[package]
    tree = ast.parse(inspect.getsource(module))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    modules = {alias.name: f".{node.module}" for node in imports for alias in node.names}  # public name → module

    def get_attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name], package), name)
        setattr(module, name, value)
        return value

    return sorted(modules), get_attribute, lambda: sorted({*vars(module), *modules})
