"""Fully sharded training (`trainer=fsdp`) by torch's `fully_shard`: what is gathered at a time, and what is whole."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(model: nn.Module, device: torch.device, processes: int) -> None:
    """Divide a model's parameters among all processes, in place; nothing is done to one that is.

    A unit is gathered when its forward begins and let go of when it ends. The units are what the outermost
    `nn.Sequential`s run one after the other, and the rest of the model: only those are sure to be called as modules.
    """
    if isinstance(model, FSDPModule):
        return
    mesh = init_device_mesh(device.type, (processes,))
    for unit in _units(model):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _units(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.Sequential):
            yield from (step for step in child if next(step.parameters(), None) is not None)
        else:
            yield from _units(child)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor; the tensor itself where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All parts of a tensor together; all processes have to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, sharded as another one is, and on its device."""
    tensor = tensor.to(other.device)
    return distribute_tensor(tensor, other.device_mesh, other.placements) if isinstance(other, DTensor) else tensor
