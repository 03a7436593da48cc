"""Signatures and class attributes, read from source text: nothing is imported, so torch stays unloaded.

They serve early error messages, and tell what a class is: a LightningModule, a callback that only observes. What cannot be read is not
checked: a decorated class or function, a base class that cannot be found, an annotation with names that are not in `_NAMES`. An annotation
is evaluated with the names of `_NAMES` alone, without attributes that begin with an underscore, and calls nothing but a name. Only
`live_signature` and `live_parameters` inspect an object.
"""

import ast
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, Optional, Union

from . import types

_NAMES = {name: value for name, value in vars(types).items() if not name.startswith("_")}
_TYPE_NAMES = {*_NAMES} - {"Annotated", "Enum", "auto", "dataclass"}
_NAMES |= {"Literal": Literal, "Optional": Optional, "Union": Union}
_NAMES |= {kind.__name__: kind for kind in (int, float, str, bool, list, tuple, dict)}
_ANNOTATION_NODES = (ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.List, ast.Constant, ast.Call, ast.keyword)
_ANNOTATION_NODES += (ast.BinOp, ast.BitOr, ast.UnaryOp, ast.USub, ast.Load)


@dataclass(frozen=True)
class Signature:
    """The parameters of a callable: name → annotation (None where it cannot be read).

    `takes_any` says that it takes any keyword. `defaults` has the defaults that are literals.
    """

    parameters: Mapping[str, Any]
    takes_any: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, eq=False)
class _Module:
    """A module, parsed from its source text."""

    name: str
    package: str
    tree: ast.Module


_Definition = tuple[_Module, ast.ClassDef | ast.FunctionDef]


@cache
def signature_of(target: str) -> Signature | None:
    """Return the signature of a dotted name, with what `**kwargs` passes to base classes; None if it cannot be read."""
    definition = _locate(target)
    if definition is None or definition[1].decorator_list:
        return None
    if isinstance(definition[1], ast.FunctionDef):
        return _read_signature(definition[0], definition[1].args, skip=0)
    parameters: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    preset: set[str | None] = set()  # keywords that a class passes to its base classes, whose defaults do not hold
    for ancestor in _ancestry(definition):
        if ancestor is None or ancestor[1].decorator_list:  # a base class that cannot be read may take anything
            return Signature(parameters, True, defaults)
        inits = [n for n in ancestor[1].body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        if inits:  # the last one is the definition; those above it are overloads
            init = _read_signature(ancestor[0], inits[-1].args, skip=1)
            parameters = {**init.parameters, **parameters}
            defaults = {**{name: init.defaults[name] for name in init.defaults.keys() - preset}, **defaults}
            if not init.takes_any or _keeps_keywords(inits[-1]):
                return Signature(parameters, init.takes_any, defaults)
            preset |= {keyword.arg for call in _base_init_calls(inits[-1]) for keyword in call.keywords}
    return Signature(parameters, True, defaults)


def live_signature(function: Any) -> inspect.Signature:
    """Return the signature of a callable by `inspect`. On Python 3.14 annotations are not evaluated: what they name may be
    imported for a type checker alone.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)


def live_parameters(function: Any) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a callable; None where Python cannot tell: a class in C, a scripted network."""
    try:
        return live_signature(function).parameters
    except (TypeError, ValueError):
        return None


@cache
def class_attribute(target: str, name: str) -> Any:
    """Return the literal value of a class attribute, inherited or not; None if there is none."""
    for ancestor in _ancestry(_locate(target)):
        for node in ancestor[1].body if ancestor else ():
            names = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            value = getattr(node, "value", None)
            if value is not None and any(isinstance(n, ast.Name) and n.id == name for n in names):
                try:
                    return ast.literal_eval(value)
                except ValueError:  # not a literal
                    return None
    return None


@cache
def inherits(target: str, base: str) -> bool:
    """Whether source text says that a class is `base`, the full name of a definition, or a subclass of it."""
    classes = filter(None, _ancestry(_locate(target)))
    return any(f"{module.name}.{definition.name}" == base for module, definition in classes)


def lacks(target: str, method: str) -> bool:
    """Whether source text says that a class inherits this method from Lightning alone; False where that cannot be read.

    The name anywhere in a class's text counts as the method: a constructor may set it.
    """
    for ancestor in _ancestry(_locate(target)):
        if ancestor and ancestor[0].name.startswith("lightning.pytorch.core."):
            return True
        if ancestor is None or method in ast.unparse(ancestor[1]):
            return False
    return False


def is_installed(package: str) -> bool:
    """Whether a package can be imported. A folder with its name, such as W&B makes, is no package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _locate(target: str, seen: set[str] | None = None) -> _Definition | None:
    """Find the definition of `package.module.Name`, through re-exports."""
    seen = set() if seen is None else seen
    module_name, _, name = target.rpartition(".")
    if target in seen or not module_name:  # modules may import a name from each other in a circle
        return None
    seen.add(target)
    module = _load(module_name)
    if module is None:
        return None
    for node in _top_level(module.tree.body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
    return next(filter(None, (_locate(full, seen) for full in _full_names(module, name))), None)


@cache
def _load(name: str) -> _Module | None:
    """Parse a module, found as Python finds it or in the current folder; nothing is imported."""
    top, *rest = name.split(".")
    if not all(part.isidentifier() for part in (top, *rest)):
        return None
    path = _find_package(top)
    if path is None:
        return None
    path = path.joinpath(*rest)
    is_package = (path / "__init__.py").is_file()
    file = path / "__init__.py" if is_package else path.with_suffix(".py")
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return _Module(name, name if is_package else name.rpartition(".")[0], tree)


def _find_package(top: str) -> Path | None:
    """Return the folder of a package, or the file of a module without its suffix; None if there is neither."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return Path.cwd() / top
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin).with_suffix("") if spec.origin else None


def _top_level(nodes: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those under `if` (such as `if TYPE_CHECKING:`) and `try`."""
    for node in nodes:
        if isinstance(node, ast.If | ast.Try):
            yield from _top_level(node.body + node.orelse)
        else:
            yield node


def _imported_names(module: _Module) -> Iterator[tuple[str, str]]:
    """Yield each name that a module imports with its full name; `*` with the module that it imports from."""
    for node in _top_level(module.tree.body):
        if isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.package.split(".")[: 1 - node.level or None] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield alias.asname or alias.name, source if alias.name == "*" else f"{source}.{alias.name}"


def _ancestry(root: _Definition | None, seen: set[str] | None = None) -> Iterator[tuple[_Module, ast.ClassDef] | None]:
    """Yield a class and its base classes, depth first; None for one that cannot be read; nothing for a function."""
    seen = set() if seen is None else seen
    if root is None:
        return
    module, cls = root
    if not isinstance(cls, ast.ClassDef) or f"{module.name}.{cls.name}" in seen:
        return
    seen.add(f"{module.name}.{cls.name}")
    yield module, cls
    for base in cls.bases:
        name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)  # `Base[int]`
        if name in ("object", "Generic"):
            continue
        candidates = (f"{module.name}.{name}", *_full_names(module, name), name)
        parent = next(filter(None, map(_locate, candidates)), None)
        yield from _ancestry(parent, seen) if parent and isinstance(parent[1], ast.ClassDef) else (None,)


def _full_names(module: _Module, name: str) -> Iterator[str]:
    """Yield the full names that a name may stand for by a module's imports: `nn.Module` → `torch.nn.Module`."""
    for imported, full in _imported_names(module):
        if imported == "*":
            yield f"{full}.{name}"
        elif name == imported or name.startswith(f"{imported}."):
            yield full + name.removeprefix(imported)


def _read_signature(module: _Module, arguments: ast.arguments, skip: int) -> Signature:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults, *arguments.kw_defaults]
    nodes = [*zip([*positional, *arguments.kwonlyargs], defaults, strict=True)][skip:]
    takes_none = {n.arg: isinstance(default, ast.Constant) and default.value is None for n, default in nodes}
    parameters = {n.arg: _evaluate_annotation(module, n.annotation, takes_none[n.arg]) for n, _ in nodes}
    literals = {n.arg: default.value for n, default in nodes if isinstance(default, ast.Constant)}
    return Signature(parameters, arguments.kwarg is not None, literals)


def _base_init_calls(init: ast.FunctionDef) -> list[ast.Call]:
    """Return the calls of base-class constructors in a constructor."""
    calls = (node for node in ast.walk(init) if isinstance(node, ast.Call))
    return [call for call in calls if ast.unparse(call.func).endswith(".__init__")]


def _keeps_keywords(init: ast.FunctionDef) -> bool:
    """Whether a constructor uses its `**kwargs` for anything but the call of a base-class constructor.

    `save_hyperparameters` reads all arguments of the constructor that calls it.
    """
    assert init.args.kwarg is not None
    passed = [keyword.value for call in _base_init_calls(init) for keyword in call.keywords if keyword.arg is None]
    uses = [node for node in ast.walk(init) if isinstance(node, ast.Name) and node.id == init.args.kwarg.arg]
    calls = [node for node in ast.walk(init) if isinstance(node, ast.Call) and not node.args]
    saves = any(ast.unparse(call.func).endswith(".save_hyperparameters") for call in calls)
    return any(use not in passed for use in uses) or (saves and not passed)


def _evaluate_annotation(module: _Module, node: ast.expr | None, takes_none: bool) -> Any:
    parts = list(ast.walk(node)) if node is not None else []
    type_names = {part.id for part in parts if isinstance(part, ast.Name)} & _TYPE_NAMES
    if any(f"{types.__name__}.{name}" not in _full_names(module, name) for name in type_names):  # a namesake
        return None
    has_private = any(isinstance(part, ast.Attribute) and part.attr.startswith("_") for part in parts)
    calls = any(isinstance(part, ast.Call) and not isinstance(part.func, ast.Name) for part in parts)
    if node is None or has_private or calls or not all(isinstance(part, _ANNOTATION_NODES) for part in parts):
        return None
    try:
        annotation = eval(ast.unparse(node), {"__builtins__": {}}, _NAMES)  # only the names above can be reached
        return Optional[annotation] if takes_none else annotation  # noqa: UP045 - it may be anything
    except Exception:  # noqa: BLE001 - an annotation that says more than this file knows
        return None
