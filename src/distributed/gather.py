"""Gathering Python objects from all ranks."""

from typing import Any

import torch.distributed


def gather(value: Any, world_size: int) -> list[Any]:
    """The objects of all ranks, in the order of the ranks; all ranks have to call it."""
    if world_size == 1:
        return [value]
    values: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(values, value)
    return values
