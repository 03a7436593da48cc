"""Old names of options, metrics and classes: each is answered with its new name in one line."""

from collections.abc import Mapping
from typing import Any

from ..errors import UserError
from .tree import flatten

# Old name → new name. An option stands for everything below it, and a module for everything in it.
OPTIONS = {"callbacks.pictures": "callbacks.prediction_images"}
METRICS = {"samples_per_sec_median": "samples_per_sec"}
TARGETS = {
    "batchscope.callbacks.checkpoint": "batchscope.checkpointing.callback",
    "batchscope.callbacks.curve_files.WholeCSVLogger": "batchscope.checkpointing.csv_logger.AtomicCSVLogger",
    "batchscope.callbacks.interrupt.Interrupts": "batchscope.checkpointing.graceful_shutdown.GracefulShutdown",
    "batchscope.callbacks.pictures.TestPictures": "batchscope.callbacks.prediction_images.PredictionImages",
    "batchscope.data.official.OfficialImages": "batchscope.data.torchvision_images.TorchvisionImages",
    "batchscope.launch.search": "batchscope.sweep.search",
    "batchscope.optimizer": "batchscope.training.optimizer",
    "batchscope.spec": "batchscope.data.spec",
    "batchscope.task": "batchscope.training.task",
}


def new_name(name: str, names: Mapping[str, str]) -> str | None:
    """The present name of what had another name; None if the name is not an old one."""
    for old, new in names.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


def refuse_old_name(option: str, value: object, names: Mapping[str, str]) -> None:
    """Raise UserError if an option's value is an old name."""
    new = new_name(value, names) if isinstance(value, str) else None
    if new:
        raise UserError(f"{option}: {value} is called {new} now")


def refuse_older_version(config: dict[str, Any], file: str, version: object = None) -> None:
    """Raise UserError if a recorded configuration has an old `_target_`: only an older version can have written it."""
    for key, value in flatten(config):
        if key.endswith("_target_") and isinstance(value, str) and new_name(value, TARGETS):
            writer = f"batchscope {version}" if version else "an older batchscope"
            raise UserError(
                f"{file}: was written by {writer}, whose names differ; use that version, or start another run"
            )
