"""Signatures and class attributes, read from source text: nothing is imported, so torch stays unloaded.

They serve early error messages, and tell what a class is: a LightningModule, a callback that only observes. What cannot be read here is not checked here: a decorated
class or function, a base class that cannot be found, an annotation of other names than those of `_NAMES`. Of
annotations, only names of `_NAMES` are evaluated: no name with an underscore, and no call of anything but a name. `live_signature`
and `live_parameters` alone ask an object.
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
_OURS = {*_NAMES} - {"Annotated", "Enum", "auto", "dataclass"}
_NAMES |= {"Literal": Literal, "Optional": Optional, "Union": Union}
_NAMES |= {kind.__name__: kind for kind in (int, float, str, bool, list, tuple, dict)}
_IN_ANNOTATIONS = (ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.List, ast.Constant, ast.Call, ast.keyword)
_IN_ANNOTATIONS += (ast.BinOp, ast.BitOr, ast.UnaryOp, ast.USub, ast.Load)


@dataclass(frozen=True)
class Signature:
    """The parameters of a callable: name → annotation (None where unreadable); `open` if it takes any keyword.

    `defaults` has those that are literals.
    """

    parameters: Mapping[str, Any]
    open: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, eq=False)
class _Module:
    """The source text of a module, parsed."""

    name: str
    package: str
    tree: ast.Module


_Definition = tuple[_Module, ast.ClassDef | ast.FunctionDef]


@cache
def signature_of(target: str) -> Signature | None:
    """The signature of a dotted name, with what `**kwargs` passes on to base classes; None if it cannot be read."""
    found = _locate(target)
    if found is None or found[1].decorator_list:
        return None
    if isinstance(found[1], ast.FunctionDef):
        return _read(found[0], found[1].args, skip=0)
    passed_on: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    decided: set[str | None] = set()  # by a class for its base classes, whose defaults do not hold
    for one in _ancestry(found):
        if one is None or one[1].decorator_list:  # a base class that cannot be read may take anything
            return Signature(passed_on, True, defaults)
        inits = [n for n in one[1].body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        if inits:  # the last one is the definition; those above it are overloads
            own = _read(one[0], inits[-1].args, skip=1)
            passed_on = {**own.parameters, **passed_on}
            defaults = {**{name: own.defaults[name] for name in own.defaults.keys() - decided}, **defaults}
            if not own.open or _keeps_keywords(inits[-1]):
                return Signature(passed_on, own.open, defaults)
            decided |= {word.arg for call in _of_bases(inits[-1]) for word in call.keywords}
    return Signature(passed_on, True, defaults)


def live_signature(of: Any) -> inspect.Signature:
    """The signature of a callable, as `inspect` has it. Python 3.14 would look for what annotations name, which may be imported
    for a type checker alone.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(of, annotation_format=Format.FORWARDREF)
    return inspect.signature(of)


def live_parameters(of: Any) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of a callable; None where Python cannot tell: of a class in C, of a scripted network."""
    try:
        return live_signature(of).parameters
    except (TypeError, ValueError):
        return None


@cache
def class_attribute(target: str, name: str) -> Any:
    """The literal value of a class attribute, inherited or not; None if there is none."""
    for one in _ancestry(_locate(target)):
        for node in one[1].body if one else ():
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
    """Whether source text says that a class is the one of this full name, that of its definition, or comes from it."""
    return any(one and f"{one[0].name}.{one[1].name}" == base for one in _ancestry(_locate(target)))


def lacks(target: str, method: str) -> bool:
    """Whether source text says that a class has no method of this name but Lightning's own; False where nobody knows.

    A class has one whose text has the name: it may be made in the constructor.
    """
    for known in _ancestry(_locate(target)):
        if known and known[0].name.startswith("lightning.pytorch.core."):  # of any other class the text is read
            return True
        if known is None or method in ast.unparse(known[1]):
            return False
    return False


def is_installed(package: str) -> bool:
    """Whether a package can be imported. A folder of its name, such as W&B makes, is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _locate(target: str, seen: set[str] | None = None) -> _Definition | None:
    """Find the definition of `package.module.Name`, following re-exports."""
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
    return next(filter(None, (_locate(full, seen) for full in _meant(module, name))), None)


@cache
def _load(name: str) -> _Module | None:
    """Parse a module found by its name, as Python finds it or in the current folder; packages are not imported."""
    top, *rest = name.split(".")
    if not all(part.isidentifier() for part in (top, *rest)):
        return None
    place = _place_of(top)
    if place is None:
        return None
    place = place.joinpath(*rest)
    is_package = (place / "__init__.py").is_file()
    file = place / "__init__.py" if is_package else place.with_suffix(".py")
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return _Module(name, name if is_package else name.rpartition(".")[0], tree)


def _place_of(top: str) -> Path | None:
    """The folder of a package, or the file of a module without its suffix."""
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
    """The statements of a module, also those under `if` (such as `if TYPE_CHECKING:`) and `try`."""
    for node in nodes:
        if isinstance(node, ast.If | ast.Try):
            yield from _top_level(node.body + node.orelse)
        else:
            yield node


def _imports(module: _Module) -> Iterator[tuple[str, str]]:
    """The names that a module imports, each with its full name; `*` with the module that it stands for."""
    for node in _top_level(module.tree.body):
        if isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.package.split(".")[: 1 - node.level or None] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield alias.asname or alias.name, source if alias.name == "*" else f"{source}.{alias.name}"


def _ancestry(found: _Definition | None, seen: set[str] | None = None) -> Iterator[tuple[_Module, ast.ClassDef] | None]:
    """A class and its base classes, depth first; None in the place of one that cannot be read; a function has none."""
    seen = set() if seen is None else seen
    if found is None:
        return
    module, cls = found
    if not isinstance(cls, ast.ClassDef) or f"{module.name}.{cls.name}" in seen:
        return
    seen.add(f"{module.name}.{cls.name}")
    yield module, cls
    for base in cls.bases:
        name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)  # `Base[int]`
        if name in ("object", "Generic"):
            continue
        meant = (f"{module.name}.{name}", *_meant(module, name), name)
        parent = next(filter(None, map(_locate, meant)), None)
        yield from _ancestry(parent, seen) if parent and isinstance(parent[1], ast.ClassDef) else (None,)


def _meant(module: _Module, written: str) -> Iterator[str]:
    """The full names that a name may stand for by a module's imports: `nn.Module` → `torch.nn.Module`."""
    for known, full in _imports(module):
        if known == "*":
            yield f"{full}.{written}"
        elif written == known or written.startswith(f"{known}."):
            yield full + written.removeprefix(known)


def _read(module: _Module, arguments: ast.arguments, skip: int) -> Signature:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults, *arguments.kw_defaults]
    nodes = [*zip([*positional, *arguments.kwonlyargs], defaults, strict=True)][skip:]
    takes_none = {n.arg: isinstance(default, ast.Constant) and default.value is None for n, default in nodes}
    found = {n.arg: _annotation(module, n.annotation, takes_none[n.arg]) for n, _ in nodes}
    literals = {n.arg: default.value for n, default in nodes if isinstance(default, ast.Constant)}
    return Signature(found, arguments.kwarg is not None, literals)


def _of_bases(init: ast.FunctionDef) -> list[ast.Call]:
    """The calls of other constructors in one."""
    calls = (node for node in ast.walk(init) if isinstance(node, ast.Call))
    return [call for call in calls if ast.unparse(call.func).endswith(".__init__")]


def _keeps_keywords(init: ast.FunctionDef) -> bool:
    """Whether a constructor with `**kwargs` does anything with them but pass them to that of a base class.

    `save_hyperparameters` reads all arguments of the constructor that calls it.
    """
    assert init.args.kwarg is not None
    passed = [word.value for call in _of_bases(init) for word in call.keywords if word.arg is None]
    uses = [node for node in ast.walk(init) if isinstance(node, ast.Name) and node.id == init.args.kwarg.arg]
    calls = [node for node in ast.walk(init) if isinstance(node, ast.Call) and not node.args]
    saves = any(ast.unparse(call.func).endswith(".save_hyperparameters") for call in calls)
    return any(use not in passed for use in uses) or (saves and not passed)


def _annotation(module: _Module, node: ast.expr | None, takes_none: bool) -> Any:
    parts = list(ast.walk(node)) if node is not None else []
    ours = {part.id for part in parts if isinstance(part, ast.Name)} & _OURS
    if any(f"{types.__name__}.{name}" not in _meant(module, name) for name in ours):  # another one of the same name
        return None
    reaches_in = any(isinstance(part, ast.Attribute) and part.attr.startswith("_") for part in parts)
    calls = any(isinstance(part, ast.Call) and not isinstance(part.func, ast.Name) for part in parts)
    if node is None or reaches_in or calls or not all(isinstance(part, _IN_ANNOTATIONS) for part in parts):
        return None
    try:
        found = eval(ast.unparse(node), {"__builtins__": {}}, _NAMES)  # only the names above can be reached
        return Optional[found] if takes_none else found  # noqa: UP045 - it may be anything
    except Exception:  # noqa: BLE001 - an annotation that says more than this file knows
        return None
