"""From a checked config node to the object that it describes."""

from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar

from .errors import UserError


def build(node: dict[str, Any], section: str, **arguments: Any) -> Any:
    """Build a node's `_target_` with its options and the given arguments.

    Raises:
        UserError: if the target refuses an option's value; the line begins with the section.
    """
    try:
        # Partial first: as arguments of `instantiate`, dataclasses such as DataSpec would arrive as dicts.
        return instantiate(node, _partial_=True, _convert_="all")(**arguments)
    except UserError:
        raise
    except (ValueError, TypeError, MisconfigurationException, InstantiationException) as error:
        raise UserError(f"{section}: {error}") from error


def build_all(nodes: dict[str, Any] | None, section: str) -> list[Any]:
    """Every object of a collection such as `callbacks`; one set to null is left out."""
    return [build(node, f"{section}.{name}") for name, node in (nodes or {}).items() if node]


def build_callbacks(config: dict[str, Any]) -> tuple[list[Callback], dict[str, bool]]:
    """The callbacks, and the trainer's switches that have to agree with them.

    `callbacks.progress=null` means no bar rather than Lightning's own, and `trainer.enable_progress_bar=false` leaves
    ours out; the same for checkpoints.
    """
    callbacks = build_all(config["callbacks"], "callbacks")
    flags = {}
    for switch, kind in (("enable_progress_bar", ProgressBar), ("enable_checkpointing", Checkpoint)):
        if config["trainer"].get(switch) is False:
            callbacks = [callback for callback in callbacks if not isinstance(callback, kind)]
        flags[switch] = any(isinstance(callback, kind) for callback in callbacks)
    return callbacks, flags
