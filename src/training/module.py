"""From a model to the LightningModule that trains it: the model itself if it is one, or a Task around it."""

import inspect
from collections.abc import Iterable
from typing import Any

from lightning import LightningModule, Trainer
from torch import nn

from ..errors import UserError
from ..options.purpose import OF_TASK, lightning_module_of, why_unread
from ..options.tree import TARGET
from .build import build, build_optimizer, compile_mode, import_target
from .task import Task


def _task(node: dict[str, Any], **arguments: Any) -> Task:
    """The Task of a configuration, with the network and the optimizer that it trains.

    A loss may be a class, which is built, or a function of `(output, target)`, which is not called here.
    """
    loss = node.get("loss")
    if isinstance(loss, dict) and (target := loss.get(TARGET)):
        is_class = inspect.isclass(import_target(target, f"task.loss.{TARGET}"))
        node = {**node, "loss": loss if is_class else {"_partial_": True, **loss}}
    return build(node, "task", **arguments)


def lightning_module(model: nn.Module, data: Any, config: dict[str, Any], facts: dict[str, Any]) -> LightningModule:
    """What a Trainer trains: the model if it is a LightningModule, else a Task around it for data with a `spec`.

    `facts` has the run's `choices` and the name of the `dataset`, for its title. UserError for a network without an
    optimizer, and a LightningModule that is to be compiled.
    """
    if not isinstance(model, LightningModule):
        assert data.spec is not None, "build_model has refused it"
        if "optimizer" not in config:
            raise UserError(f"optimizer: is missing, and {type(model).__name__} is no LightningModule that has its own")
        how = {"channels_last": config["channels_last"], "compile_mode": compile_mode(config)}
        optimizer = build_optimizer(config["optimizer"])
        module: LightningModule = _task(config["task"], model=model, spec=data.spec, optimizer=optimizer, **how)
    else:
        module = model
        if compile_mode(config):
            raise UserError(f"compile: {type(model).__name__} is a LightningModule, which compiles itself")
    marked: Any = module
    name = facts["choices"].get("model", type(model).__name__)
    if not hasattr(module, "title"):
        marked.title = f"{name} · {facts['dataset']}"
    marked.batchscope_config = config  # by which callbacks know that advice can name options
    return module


def check_by_hand(module: LightningModule, trainer: Trainer, config: dict[str, Any]) -> None:
    """Raise UserError for what a module that optimises by hand does itself; Lightning refuses it once it trains."""
    if module.automatic_optimization:
        return
    name = type(module).__name__
    if trainer.gradient_clip_val:
        raise UserError(f"trainer.gradient_clip_val: {name} optimises by hand; let it call self.clip_gradients itself")
    if trainer.accumulate_grad_batches > 1:
        option = "global_batch_size" if config.get("global_batch_size") else "trainer.accumulate_grad_batches"
        raise UserError(f"{option}: {name} optimises by hand, and says itself how many batches make an update")


def read_by(model: nn.Module, config: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """The configuration without what a model does not read: of a LightningModule, what only a Task reads.

    UserError if a word of the command line sets such an option; where source text says of a class that it is a
    LightningModule, the command line was checked before.
    """
    if not isinstance(model, LightningModule) or lightning_module_of(config):
        return config
    for option in (word.lstrip("+~").partition("=")[0] for word in overrides):
        if option.partition(".")[0] in OF_TASK:
            raise UserError(f"{option}: {why_unread(option, config, type(model).__name__)}")
    return {key: value for key, value in config.items() if key not in OF_TASK}
