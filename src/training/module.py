"""From a model to the LightningModule that trains it: the model itself if it is one, or a Task around it."""

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import nn
from typing_extensions import override

from ..data.plain import Data
from ..errors import UserError
from .build import HasSpec, build
from .compiling import compile_mode
from .task import Task, min_samples


class Provenance(Callback):
    """Writes into every checkpoint what it is of, so that the checkpoint can be used by its path alone."""

    def __init__(self) -> None:
        self.facts: dict[
            str, Any
        ] = {}  # plain containers: `config`, `choices`, `name`, `run`, `dataset`, `fingerprint`

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["batchscope"] = self.facts


def is_own(model: nn.Module) -> bool:
    """Whether a model is a LightningModule, which has its own loss, metrics and optimizers."""
    return isinstance(model, LightningModule)


def lightning_module(model: nn.Module, data: HasSpec, config: dict[str, Any], facts: dict[str, Any]) -> LightningModule:
    """What a Trainer trains.

    Args:
        model: an nn.Module, or a LightningModule, which is returned as it is.
        data: that it is trained on.
        config: of the run.
        facts: with the run's `choices` and the name of the `dataset`, for its title.

    Raises:
        UserError: for an option of the configuration that only a Task has.
    """
    if not isinstance(model, LightningModule):
        assert data.spec is not None, "build_model has refused it"
        optimizer = build(config["optimizer"], "optimizer")
        module: LightningModule = Task(model, data.spec, optimizer, config["channels_last"], compile_mode(config))
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


def check_batch(model: nn.Module, data: Data) -> None:
    """Raise UserError if a batch has fewer samples than the model needs in training; a LightningModule says nothing of it."""
    if not is_own(model) and data.spec is not None:
        data.check_batch(min_samples(model, data.spec))
