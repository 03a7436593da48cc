"""What the ranks are together: the objects of all, and how many batches they train on."""

from typing import Any

import torch.distributed
from lightning import Trainer


def gather(value: Any, world_size: int) -> list[Any]:
    """The objects of all ranks, in the order of the ranks; all ranks have to call it."""
    if world_size == 1:
        return [value]
    values: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(values, value)
    return values


def replicas(trainer: Trainer) -> int:
    """How many batches the ranks train on at a time: one each, but for the ranks of a tensor-parallel group, which share one."""
    sampler = trainer.distributed_sampler_kwargs
    return sampler["num_replicas"] if sampler else 1
