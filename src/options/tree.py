"""The options of a nested configuration, by their dotted names."""

from collections.abc import Iterator
from typing import Any


def flatten(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The options of a configuration with their dotted names: `data.batch_size`."""
    for key, value in node.items():
        name = f"{path}{key}"
        if isinstance(value, dict):
            yield from flatten(value, f"{name}.")
        else:
            yield name, value
