"""A nested configuration: its options by their dotted names, and what its nodes build."""

from collections.abc import Iterator
from typing import Any

TARGET = "_target_"
HYDRA_KEYS = (TARGET, "_args_", "_partial_", "_convert_", "_recursive_")  # what hydra.utils.instantiate reads


def flatten(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The options of a configuration with their dotted names: `data.batch_size`."""
    for key, value in node.items():
        name = f"{path}{key}"
        if isinstance(value, dict):
            yield from flatten(value, f"{name}.")
        else:
            yield name, value


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
