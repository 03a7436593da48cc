"""The option `compile`: torch.compile's mode, and where it is refused before anything is written."""

from typing import Any

from lightning import Trainer

from .._torch import why_not_compilable
from ..errors import UserError


def compile_mode(config: dict[str, Any]) -> str | None:
    """The mode of torch.compile that a configuration asks for; None for a network that runs as it is."""
    asked = config["compile"]
    return "default" if asked is True else asked or None


def check_compile(config: dict[str, Any], trainer: Trainer) -> None:
    """Raise UserError if the run is to be compiled, and this machine cannot compile for the trainer's device."""
    if compile_mode(config) and (why := why_not_compilable(trainer.strategy.root_device)):
        raise UserError(f"compile: got {str(config['compile']).lower()}, and {why}; write compile=false")
