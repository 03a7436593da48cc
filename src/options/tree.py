"""Traversal of a nested configuration, and the keys by which its nodes say what to build."""

from collections.abc import Iterator
from typing import Any

TARGET = "_target_"
HYDRA_KEYS = (TARGET, "_args_", "_partial_", "_convert_", "_recursive_")  # what hydra.utils.instantiate reads


def flatten(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the options of a configuration with their dotted names: `data.batch_size`."""
    for key, value in node.items():
        name = f"{path}{key}"
        if isinstance(value, dict):
            yield from flatten(value, f"{name}.")
        else:
            yield name, value


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a value, and every value below it in dicts and lists, each with its dotted name."""
    yield path, value
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from walk(child, f"{path}.{key}" if path else str(key))
