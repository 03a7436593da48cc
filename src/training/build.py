"""From a checked config node to the object that it describes."""

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from ..errors import UserError
from ..options.nodes import check_node, role_of


def build(node: dict[str, Any], section: str, **arguments: Any) -> Any:
    """Build a node's `_target_` with its options and the given arguments.

    This is `hydra.utils.instantiate` without what a configuration from a file must not do: call a function, pass
    positional arguments, or resolve an interpolation.

    Raises:
        UserError: if the target may not be built here, or refuses an option's value; the line begins with the section.
    """
    check_node(node, section)
    return _build(node, section, arguments)


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


def places(config: dict[str, Any], loggers: list[Any], trainer: Trainer) -> Iterator[tuple[str, str]]:
    """The folders that a run's objects write to, each with the option that its object was built from.

    Args:
        config: of the run.
        loggers: as `build_all` built them of it.
        trainer: of the run, not yet used.
    """
    yield "trainer.default_root_dir", trainer.default_root_dir
    names = [name for name, node in (config["logger"] or {}).items() if node]
    for name, logger in zip(names, loggers, strict=True):
        found = (logger.save_dir, logger.log_dir) if isinstance(logger, CSVLogger | TensorBoardLogger) else ()
        yield from ((f"logger.{name}", str(place)) for place in found)
    for name, node in (config["callbacks"] or {}).items():
        if node and node.get("dirpath"):
            yield f"callbacks.{name}", node["dirpath"]
    if getattr(trainer.profiler, "dirpath", None):
        yield "trainer.profiler", str(trainer.profiler.dirpath)


def _build(node: dict[str, Any], path: str, arguments: dict[str, Any]) -> Any:
    """Build a checked node; an argument takes the place of an option of the same name, which is then not built."""
    try:
        options = {k: _value(v, f"{path}.{k}") for k, v in node.items() if k not in ("_target_", *arguments)}
        return _class_of(node["_target_"], path)(**options, **arguments)
    except (ValueError, TypeError, MisconfigurationException, ModuleNotFoundError) as error:
        raise UserError(f"{path}: {error}") from error


def _value(value: Any, path: str) -> Any:
    """An option's value, with every node in it built."""
    if isinstance(value, list):
        return [_value(child, f"{path}.{index}") for index, child in enumerate(value)]
    if not isinstance(value, dict):
        return value
    return _build(value, path, {}) if "_target_" in value else {k: _value(v, f"{path}.{k}") for k, v in value.items()}


def _class_of(target: str, path: str) -> type:
    """The class that a checked target names.

    Raises:
        UserError: if what stands under that name is not what the source text says: a subclass of the role's base.
    """
    role = role_of(path)
    cls, base = _named(target), role and _named(role.base)
    trusted = inspect.isclass(cls) and role is not None and cls.__module__.partition(".")[0] in role.packages
    if not trusted or not issubclass(cls, base):
        raise UserError(f"{path}._target_: got {target!r}, takes a {role and role.base} class")
    return cls


def _named(target: str) -> Any:
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module), name, None)
