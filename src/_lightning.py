"""What is private in Lightning, as read in lightning 2.6.6."""

from typing import Any

from lightning import LightningModule, Trainer


def trainer_of(module: LightningModule) -> Trainer | None:
    """The trainer that a module is attached to; `module.trainer` raises an error where there is none."""
    return module._trainer


def compiler_context(module: LightningModule) -> dict[str, Any] | None:
    """What `from_compiled(torch.compile(module))` keeps in the module; None if the module is not compiled."""
    return getattr(module, "_compiler_ctx", None)
