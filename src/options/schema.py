"""What an option may be called and may hold, read from the signatures of the code it configures.

A config node with a `_target_` takes what the target's constructor takes. Its signature is read from the source text,
so that a mistake is answered before torch (seconds) has to be imported. Nothing is executed here but annotations made
of the names in `_NAMES`; a signature that cannot be read, or an annotation that says more than this file knows, is
left for the constructor itself to check.
"""

import ast
import importlib.util
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union, get_args, get_origin

from ..errors import UserError, did_you_mean
from . import types as options

_NAMES = {name: value for name, value in vars(options).items() if not name.startswith("_")}
_NAMES |= {"Literal": Literal, "Optional": Optional, "Union": Union}
_NAMES |= {kind.__name__: kind for kind in (int, float, str, bool, list, tuple, dict)}
# Packages whose models, datasets, optimizers and callbacks a `_target_` may name. The one place to trust another.
TRUSTED_PACKAGES = ("batchscope",)
_TARGET = "_target_"


@dataclass(frozen=True)
class Role:
    """What a node may build: a class of one of the packages that is `base` or inherits from it."""

    base: str
    packages: tuple[str, ...]


def _roles() -> dict[str, Role]:
    """The nodes that may have a `_target_`, by their path; `*` is any one name. No other node may."""
    lightning = (*TRUSTED_PACKAGES, "lightning")
    return {
        "model": Role("torch.nn.Module", TRUSTED_PACKAGES),
        "data": Role("batchscope.data.datamodule.TensorDataModule", TRUSTED_PACKAGES),
        "optimizer": Role("batchscope.training.optimizer.Optimizer", TRUSTED_PACKAGES),
        "search": Role("batchscope.sweep.search.BatchSizeSearch", TRUSTED_PACKAGES),
        "trainer": Role("lightning.pytorch.trainer.trainer.Trainer", lightning),
        "trainer.strategy": Role("lightning.pytorch.strategies.strategy.Strategy", lightning),
        "trainer.profiler": Role("lightning.pytorch.profilers.profiler.Profiler", lightning),
        "callbacks.*": Role("lightning.pytorch.callbacks.callback.Callback", lightning),
        "logger.*": Role("lightning.fabric.loggers.logger.Logger", lightning),
    }


def role_of(path: str) -> Role | None:
    """What the node at a path may build; None if it may build nothing."""
    section, *names = path.split(".")
    return _roles().get(path) or (_roles().get(f"{section}.*") if len(names) == 1 else None)


@dataclass(frozen=True)
class Signature:
    """The parameters of a callable: name → annotation (None where unreadable); `open` if it takes any keyword."""

    parameters: Mapping[str, Any]
    open: bool = False


def check(node: Any, path: str) -> None:
    """Raise UserError for the first option under `node` that its target does not take; `path` is its full name.

    A `_target_` is checked wherever it stands: in lists, in dicts, at any depth. It is the only key of Hydra's that is
    taken; `_args_` and the others change what is called, and with what.
    """
    if isinstance(node, list):
        for index, child in enumerate(node):
            check(child, f"{path}.{index}")
    if not isinstance(node, dict):
        return
    signature = None
    if _TARGET in node:
        check_target(node[_TARGET], path)
        signature = signature_of(node[_TARGET])
    for key, value in node.items():
        if key == _TARGET:
            continue
        name = f"{path}.{key}" if path else str(key)
        if isinstance(key, str) and key.startswith("_") and key.endswith("_"):
            raise UserError(f"{name}: no such option; of the keys with underscores around them, only _target_ is taken")
        if signature is not None:
            if key not in signature.parameters and not (signature.open and isinstance(key, str)):
                near = did_you_mean(str(key), signature.parameters)
                raise UserError(f"{name}: no such option.{near}{_takes(node, path)}")
            check_value(name, value, signature.parameters.get(key))
        check(value, name)


def check_value(name: str, value: Any, annotation: Any) -> None:
    """Raise UserError if the value is not what the annotation takes; None as annotation takes anything."""
    if annotation is not None and not _fits(value, annotation):
        shown = {None: "null", "": "nothing"}.get(value, repr(value)) if isinstance(value, str | None) else repr(value)
        near = did_you_mean(str(value), [str(c) for c in _choices(annotation)])
        too_large = isinstance(value, int) and value > options.INT64 and _fits(options.INT64, annotation)
        most = f", up to {options.INT64:,}" if too_large else ""
        raise UserError(f"{name}: got {shown}, takes {_describe(annotation)}{most}.{near}")


def is_choice(annotation: Any) -> bool:
    """Whether an annotation lists all that it takes."""
    return all(get_origin(option) is Literal or option is type(None) for option in _options_of(annotation))


def parameters_of(target: Any) -> list[str]:
    """The options that a target takes, or an empty list where they cannot be read."""
    signature = signature_of(target) if isinstance(target, str) else None
    return list(signature.parameters) if signature else []


@cache
def signature_of(target: str) -> Signature | None:
    """The signature of a dotted name, with what `**kwargs` passes on to base classes; None if it cannot be read."""
    found = _locate(target)
    if found is None:
        return None
    module, node = found
    if isinstance(node, ast.FunctionDef):
        return _read(node.args, skip=0)
    for cls_module, cls in _ancestry(module, node):
        init = next((n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        if init is None:
            continue
        own = _read(init.args, skip=1)
        if not own.open:
            return own
        inherited = [signature_of(f"{m.name}.{c.name}") for m, c in _parents(cls_module, cls)]
        base = inherited[0] if inherited and inherited[0] else Signature({}, open=True)
        return Signature({**base.parameters, **own.parameters}, base.open)
    return None


@cache
def class_attribute(target: str, name: str) -> Any:
    """The literal value of a class attribute, inherited or not, without importing the class; None if there is none."""
    found = _locate(target)
    if found is None or not isinstance(found[1], ast.ClassDef):
        return None
    for _, cls in _ancestry(*found):
        for node in cls.body:
            names = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(n, ast.Name) and n.id == name for n in names) and getattr(node, "value", None):
                try:
                    return ast.literal_eval(node.value)
                except ValueError:  # not a literal
                    return None
    return None


def check_target(target: Any, path: str) -> None:
    """Raise UserError unless the target is, by its source text, a public class of the kind that `path` builds."""
    role = role_of(path)
    if role is None:
        raise UserError(f"{path}.{_TARGET}: got {target!r}, and nothing is built here")
    packages = tuple(f"{package}." for package in role.packages)
    found = _locate(target) if isinstance(target, str) and target.startswith(packages) else None
    public = found is not None and not any(part.startswith("_") for part in target.split("."))
    if not public or not found[0].name.startswith(packages) or role.base not in ancestors(*found):
        kind, allowed = role.base.rpartition(".")[2], " or ".join(role.packages)
        raise UserError(f"{path}.{_TARGET}: got {target!r}, takes a {kind} class of {allowed}")


def ancestors(module: "_Module", node: ast.ClassDef | ast.FunctionDef) -> set[str]:
    """The full names of a class and of all its base classes, as far as they can be read; nothing for a function."""
    if not isinstance(node, ast.ClassDef):
        return set()
    names = {f"{module.name}.{node.name}"}
    for base in node.bases:
        dotted = _dotted(module, base)
        found = _locate(dotted)
        names |= ancestors(*found) if found else {dotted}
    return names


# --- annotations -----------------------------------------------------------------------------------------------------


def _options_of(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, or the annotation alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _fits(value: Any, annotation: Any) -> bool:
    return any(_fits_one(value, option) for option in _options_of(annotation))


def _fits_one(value: Any, kind: Any) -> bool:
    if isinstance(value, int) and abs(value) > options.INT64:
        return False
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _fits_one(value, args[0]) and all(not isinstance(a, options.Range) or a.holds(value) for a in args[1:])
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in args)
    if kind is type(None):
        return value is None
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    if origin in (list, tuple):
        return isinstance(value, list) and all(_fits(item, args[0]) for item in value)
    kind = origin or kind
    return not isinstance(kind, type) or isinstance(value, kind)  # a name in quotes cannot be looked up: not checked


def _choices(annotation: Any) -> list[Any]:
    return [c for option in _options_of(annotation) if get_origin(option) is Literal for c in get_args(option)]


def _describe(annotation: Any) -> str:
    return " or ".join(dict.fromkeys(_describe_one(option) for option in _options_of(annotation)))


def _describe_one(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return f"{_describe_one(args[0])} {args[1]}"
    if origin is Literal:
        choices = list(dict.fromkeys(str(choice) for choice in args))
        return " or ".join(choices) if len(choices) < 4 else ", ".join(choices)
    if origin in (list, tuple):
        return f"a list, each item {_describe(args[0])}"
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    return words.get(origin or kind, getattr(kind, "__name__", str(kind)))


def _takes(node: dict[str, Any], path: str) -> str:
    names = [key for key in node if key != _TARGET and key in parameters_of(node[_TARGET])]
    return f" {path} takes {', '.join(names)}." if 0 < len(names) <= 12 else ""


# --- source text -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Module:
    name: str
    package: str
    tree: ast.Module


@cache
def _load(name: str) -> _Module | None:
    """Parse a module found by name; only its top-level package is looked up, none is imported."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))).joinpath(*rest)
    is_package = (folder / "__init__.py").is_file()
    file = folder / "__init__.py" if is_package else folder.with_suffix(".py")
    if not file.is_file():
        return None
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return _Module(name, name if is_package else name.rpartition(".")[0], tree)


def _locate(target: str) -> tuple[_Module, ast.ClassDef | ast.FunctionDef] | None:
    """Find the definition of `package.module.Name`, following re-exports."""
    module_name, _, name = target.rpartition(".")
    module = _load(module_name) if module_name else None
    return _find(module, name) if module else None


def _find(module: _Module, name: str) -> tuple[_Module, ast.ClassDef | ast.FunctionDef] | None:
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _locate(f"{_source_of(module, node)}.{alias.name}")
    return None


def _source_of(module: _Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.package.split(".")
    return ".".join(package[: len(package) - node.level + 1] + ([node.module] if node.module else []))


def _parents(module: _Module, cls: ast.ClassDef) -> Iterator[tuple[_Module, ast.ClassDef]]:
    for base in cls.bases:
        found = _find(module, base.id) if isinstance(base, ast.Name) else None
        if found and isinstance(found[1], ast.ClassDef):
            yield found


def _dotted(module: _Module, base: ast.expr) -> str:
    """The full name of a base class as an import in the module gives it: `nn.Module` → `torch.nn.Module`."""
    first, _, rest = ast.unparse(base).partition(".")
    if any(isinstance(node, ast.ClassDef) and node.name == first for node in module.tree.body):
        return f"{module.name}.{first}"
    for node in module.tree.body:
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            if (alias.asname or alias.name) == first:
                source = f"{_source_of(module, node)}." if isinstance(node, ast.ImportFrom) else ""
                return f"{source}{alias.name}.{rest}".rstrip(".")
    return first


def _ancestry(module: _Module, cls: ast.ClassDef) -> Iterator[tuple[_Module, ast.ClassDef]]:
    """The class and its ancestors, as far as they can be read, depth first."""
    yield module, cls
    for parent in _parents(module, cls):
        yield from _ancestry(*parent)


def _read(arguments: ast.arguments, skip: int) -> Signature:
    nodes = [*arguments.posonlyargs, *arguments.args][skip:] + arguments.kwonlyargs
    return Signature({n.arg: _annotation(n.annotation) for n in nodes}, open=arguments.kwarg is not None)


def _annotation(node: ast.expr | None) -> Any:
    if node is None:
        return None
    try:
        return eval(ast.unparse(node), {"__builtins__": {}}, _NAMES)  # only the names above can be reached
    except Exception:  # noqa: BLE001 - an annotation that says more than this file knows
        return None
