"""Whether a node of a configuration (`_target_` and options) has options that its target takes: nothing is imported."""

from collections.abc import Iterator
from typing import Any

from ..errors import UserError
from .explain import no_such_option
from .groups import known_nodes
from .purpose import annotation_of, signature_at
from .signatures import Signature
from .values import check_value

TARGET = "_target_"
HYDRA_KEYS = (TARGET, "_args_", "_partial_", "_convert_", "_recursive_")  # what hydra.utils.instantiate reads


def check_node(node: Any, path: str) -> None:
    """Raise UserError for the first option under `node` that its target does not take; `path` is its full name.

    Nodes are checked wherever they stand: in lists, in dicts, at any depth. What a target takes is read from its source
    text. A target whose source text cannot be read is not checked here.
    """
    if isinstance(node, list):
        for index, child in enumerate(node):
            check_node(child, f"{path}.{index}")
    if not isinstance(node, dict):
        return
    signature = _signature(node[TARGET], path) if TARGET in node else None
    for key, value in node.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(key, str) and key.startswith("_") and key.endswith("_"):
            if key not in HYDRA_KEYS:
                raise UserError(
                    f"{name}: no such option; of the keys with underscores, Hydra has {', '.join(HYDRA_KEYS)}"
                )
        elif signature is not None:
            _check_option(name, key, signature, node, path)
        check_node(value, name)


def targets_in(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every `_target_` at and below a value, with its full name."""
    if isinstance(value, list):
        for index, child in enumerate(value):
            yield from targets_in(child, f"{path}.{index}")
    elif isinstance(value, dict):
        if TARGET in value:
            yield f"{path}.{TARGET}", value[TARGET]
        for key, child in value.items():
            yield from targets_in(child, f"{path}.{key}")


def _signature(target: Any, path: str) -> Signature | None:
    if not isinstance(target, str) or "." not in target.strip("."):
        raise UserError(
            f"{path}.{TARGET}: got {target!r}, takes the full name of a class or function: package.module.Name"
        )
    return signature_at(path, target)


def _check_option(name: str, key: Any, signature: Signature, node: dict[str, Any], path: str) -> None:
    value = node[key]
    if key not in signature.parameters and not (signature.open and isinstance(key, str)):
        error = no_such_option(name, value, signature.parameters, path, {path: node})
        is_of_config = any(key in one for one in known_nodes().get(path, ()))
        raise UserError(f"{error} ~{name} leaves out what a config sets for another class.") if is_of_config else error
    check_value(name, value, annotation_of(name, node[TARGET]))
