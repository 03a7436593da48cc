"""How many processes a configuration asks for."""

from collections.abc import Mapping
from typing import Any


def ranks_asked(config: Mapping[str, Any]) -> int | None:
    """Return the number of processes (ranks) that a configuration asks for; None where the machine decides."""
    devices, nodes = config["trainer"].get("devices"), config["trainer"].get("num_nodes") or 1
    count = len(devices) if isinstance(devices, list) else devices
    return count * nodes if isinstance(count, int) and count > 0 else None
