"""The objects of all ranks, and the number of batches on which the ranks train at a time."""

from typing import Any

import torch.distributed
from lightning import Trainer


def gather(value: Any, world_size: int) -> list[Any]:
    """Return the values of all ranks, in the order of the ranks; all ranks have to call this function."""
    if world_size == 1:
        return [value]
    values: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(values, value)
    return values


def replica_count(trainer: Trainer) -> int:
    """Return how many batches the ranks train on at a time: one a rank; ranks of a tensor-parallel group share one."""
    sampler = trainer.distributed_sampler_kwargs
    return sampler["num_replicas"] if sampler else 1
