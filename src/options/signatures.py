"""Signatures, class attributes and base classes, read from source text: nothing is imported, so torch stays unloaded.

Only annotations are evaluated, and only names of `_NAMES` can be reached in them: no name with an underscore, and no call
of anything but a name. A signature or an annotation that this file cannot read is left for the constructor itself to check.
"""

import ast
import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Optional, Union

from . import types

_NAMES = {name: value for name, value in vars(types).items() if not name.startswith("_")}
_NAMES |= {"Literal": Literal, "Optional": Optional, "Union": Union}
_NAMES |= {kind.__name__: kind for kind in (int, float, str, bool, list, tuple, dict)}
_IN_ANNOTATIONS = (ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.List, ast.Constant, ast.Call, ast.keyword)
_IN_ANNOTATIONS += (ast.BinOp, ast.BitOr, ast.UnaryOp, ast.USub, ast.Load)

_problems: dict[str, str] = {}  # module → why its source text cannot be read


@dataclass(frozen=True)
class Signature:
    """The parameters of a callable: name → annotation (None where unreadable); `open` if it takes any keyword."""

    parameters: Mapping[str, Any]
    open: bool = False


@dataclass(frozen=True, eq=False)
class Module:
    """The source text of a module, parsed."""

    name: str
    package: str
    tree: ast.Module


Definition = tuple[Module, ast.ClassDef | ast.FunctionDef]
ClassDefinition = tuple[Module, ast.ClassDef]


def parameters_of(target: Any) -> list[str]:
    """The options that a target takes; an empty list where they cannot be read."""
    signature = signature_of(target) if isinstance(target, str) else None
    return list(signature.parameters) if signature else []


@cache
def signature_of(target: str) -> Signature | None:
    """The signature of a dotted name, with what `**kwargs` passes on to base classes; None if it cannot be read."""
    found = locate(target)
    if found is None:
        return None
    if isinstance(found[1], ast.FunctionDef):
        return _read(found[1].args, skip=0)
    for module, cls in _ancestry(found):
        init = next((n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        if init is None:
            continue
        own = _read(init.args, skip=1)
        if not own.open:
            return own
        inherited = next((signature_of(f"{m.name}.{c.name}") for m, c in _parents(module, cls)), None)
        base = inherited or Signature({}, open=True)
        return Signature({**base.parameters, **own.parameters}, base.open)
    return None


@cache
def class_attribute(target: str, name: str) -> Any:
    """The literal value of a class attribute, inherited or not; None if there is none."""
    for _, cls in _ancestry(locate(target)):
        for node in cls.body:
            names = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            if value is not None and any(isinstance(n, ast.Name) and n.id == name for n in names):
                try:
                    return ast.literal_eval(value)
                except ValueError:  # not a literal
                    return None
    return None


def locate(target: str) -> Definition | None:
    """Find the definition of `package.module.Name`, following re-exports."""
    module_name, _, name = target.rpartition(".")
    module = _load(module_name) if module_name else None
    return _find(module, name) if module else None


def is_installed(package: str) -> bool:
    """Whether a package can be imported. A folder of its name, such as W&B makes, is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def ancestors(found: Definition) -> set[str]:
    """The full names of a class and of all its base classes, as far as they can be read; nothing for a function."""
    module, node = found
    if not isinstance(node, ast.ClassDef):
        return set()
    names = {f"{module.name}.{node.name}"}
    for base in node.bases:
        dotted = _dotted(module, base)
        parent = locate(dotted)
        names |= ancestors(parent) if parent else {dotted}
    return names


@cache
def _load(name: str) -> Module | None:
    """Parse a module found by its name; only its top-level package is looked up."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations or not all(map(str.isidentifier, rest)):
        return None
    folder = Path(next(iter(spec.submodule_search_locations))).joinpath(*rest)
    is_package = (folder / "__init__.py").is_file()
    file = folder / "__init__.py" if is_package else folder.with_suffix(".py")
    if not file.is_file():
        return None
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        _problems[name] = f"{os.path.relpath(file)}{line}: {getattr(error, 'msg', None) or type(error).__name__}"
        return None
    return Module(name, name if is_package else name.rpartition(".")[0], tree)


def problem_in(package: str) -> str:
    """Why a module of a package cannot be read, of those that were looked up; empty if all could."""
    return next((why for name, why in _problems.items() if name.partition(".")[0] == package), "")


def _top_level(nodes: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, also those under `if` (such as `if TYPE_CHECKING:`) and `try`."""
    for node in nodes:
        if isinstance(node, ast.If | ast.Try):
            yield from _top_level(node.body + node.orelse)
        else:
            yield node


def _find(module: Module, name: str) -> Definition | None:
    for node in _top_level(module.tree.body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return locate(f"{_source_of(module, node)}.{alias.name}")
    return None


def _source_of(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.package.split(".")
    return ".".join(package[: len(package) - node.level + 1] + ([node.module] if node.module else []))


def _parents(module: Module, cls: ast.ClassDef) -> Iterator[ClassDefinition]:
    for base in cls.bases:
        found = locate(_dotted(module, base))
        if found and isinstance(found[1], ast.ClassDef):
            yield found[0], found[1]


def _dotted(module: Module, base: ast.expr) -> str:
    """The full name of a base class by the module's imports: `nn.Module` → `torch.nn.Module`."""
    plain = base.value if isinstance(base, ast.Subscript) else base  # `Base[int]`
    first, _, rest = ast.unparse(plain).partition(".")
    if any(isinstance(node, ast.ClassDef) and node.name == first for node in _top_level(module.tree.body)):
        return f"{module.name}.{first}"
    for node in _top_level(module.tree.body):
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            if (alias.asname or alias.name) == first:
                source = f"{_source_of(module, node)}." if isinstance(node, ast.ImportFrom) else ""
                return f"{source}{alias.name}.{rest}".rstrip(".")
    return first


def _ancestry(found: Definition | None) -> Iterator[ClassDefinition]:
    """The class and its base classes, as far as they can be read, depth first."""
    if found and isinstance(found[1], ast.ClassDef):
        yield found[0], found[1]
        for parent in _parents(found[0], found[1]):
            yield from _ancestry(parent)


def _read(arguments: ast.arguments, skip: int) -> Signature:
    nodes = [*arguments.posonlyargs, *arguments.args][skip:] + arguments.kwonlyargs
    return Signature({n.arg: _annotation(n.annotation) for n in nodes}, open=arguments.kwarg is not None)


def _annotation(node: ast.expr | None) -> Any:
    parts = list(ast.walk(node)) if node is not None else []
    reaches_in = any(isinstance(part, ast.Attribute) and part.attr.startswith("_") for part in parts)
    calls = any(isinstance(part, ast.Call) and not isinstance(part.func, ast.Name) for part in parts)
    if node is None or reaches_in or calls or not all(isinstance(part, _IN_ANNOTATIONS) for part in parts):
        return None
    try:
        return eval(ast.unparse(node), {"__builtins__": {}}, _NAMES)  # only the names above can be reached
    except Exception:  # noqa: BLE001 - an annotation that says more than this file knows
        return None
