"""Fully sharded training (`trainer=fsdp`) by torch's `fully_shard`: which units are sharded, and this rank's shards."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor


def shard(model: nn.Module, device: torch.device, world_size: int) -> None:
    """Shard a model's parameters over all ranks, in place; a model that is sharded already is left alone.

    A unit's parameters are gathered when its forward begins, and freed when it ends. The units are the modules in the
    outermost `nn.Sequential`s, and the rest of the model: only these are sure to be called as modules.
    """
    if isinstance(model, FSDPModule):
        return
    mesh = init_device_mesh(device.type, (world_size,))
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
    """This rank's shard of a tensor; the tensor itself where it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def from_shard(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor of which `tensor` is this rank's shard, on the device, of the dtype and sharded as `like`, of its shape."""
    shard = tensor.to(like.device, like.dtype)
    if not isinstance(like, DTensor):
        return shard.reshape(like.shape)
    return DTensor.from_local(shard, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
