"""From a model to the LightningModule that trains it: the model itself if it is one, or a Task around it."""

from typing import Any

from lightning import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import UserError
from .build import build, build_optimizer, compile_mode


def refuse_own_loaders(model: nn.Module) -> None:
    """Raise UserError for a LightningModule with loaders of its own, which a run does not read."""
    if isinstance(model, LightningModule) and is_overridden("train_dataloader", model):
        raise UserError(
            f"data: {type(model).__name__} has a train_dataloader of its own, and a run trains on data=…; move its loaders "
            "to a LightningDataModule, and write data=<its config>, or name the data to train on, such as data=mnist"
        )


def lightning_module(model: nn.Module, data: Any, config: dict[str, Any], facts: dict[str, Any]) -> LightningModule:
    """What a Trainer trains: the model if it is a LightningModule, else a Task around it for data with a `spec`.

    `facts` has the run's `choices` and the name of the `dataset`, for its title. UserError for a network without an
    optimizer or with lazy layers, and a LightningModule that is to be compiled.
    """
    if not isinstance(model, LightningModule):
        assert data.spec is not None, "build_model has refused it"
        if "optimizer" not in config:
            raise UserError(f"optimizer: is missing, and {type(model).__name__} is no LightningModule that has its own")
        if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
            raise UserError(f"model: {type(model).__name__} has lazy layers; give them their sizes, by the data's spec")
        how = {"channels_last": config["channels_last"], "compile_mode": compile_mode(config)}
        optimizer = build_optimizer(config["optimizer"])
        module: LightningModule = build(config["task"], "task", model=model, spec=data.spec, optimizer=optimizer, **how)
    else:
        module = model
        if compile_mode(config):
            raise UserError(f"compile: {type(model).__name__} is a LightningModule, which compiles itself")
    marked: Any = module
    name = facts["choices"].get("model", type(model).__name__)
    marked.batchscope_title = f"{name} · {facts['dataset']}"
    marked.batchscope_config = config  # by which callbacks know that advice can name options
    return module
