"""From a checked config node to the object that it describes."""

import importlib
import inspect
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from torch import nn

from .._lightning import profiler_of
from ..checkpointing.checkpoint_file import AtomicCheckpointIO
from ..data.plain import Data, PlainData, described
from ..errors import UserError
from ..options.nodes import check_node, role_of
from ..options.purpose import only_observes


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


def build_data(config: dict[str, Any]) -> Data:
    """The data of a configuration, checked as far as they can be before anything is downloaded."""
    data = described(build(config["data"], "data"))
    data.check()
    return data


def build_model(config: dict[str, Any], data: Data) -> nn.Module:
    """The model of a configuration for its data; UserError if the model cannot read them."""
    cls, spec = _class_of(config["model"]["_target_"], "model"), data.spec
    accepts = getattr(cls, "accepts", (spec.kind,))
    if spec.kind not in accepts:  # options.check tells this earlier of data that declare their kind
        raise UserError(
            f"model: {cls.__name__} reads {' or '.join(accepts)} data, and {data.name} has {spec.kind} data"
        )
    if spec.variable_length and "lengths" not in inspect.signature(cls.forward).parameters:
        raise UserError(
            f"model: {cls.__name__} reads sequences of one length: its forward takes no `lengths`, and those of "
            f"{data.name} vary"
        )
    return build(config["model"], "model", spec=spec)


def build_callbacks(config: dict[str, Any]) -> tuple[list[Callback], dict[str, bool]]:
    """The callbacks, and the trainer's switches that have to agree with them.

    `callbacks.progress=null` means no bar rather than Lightning's own, and `trainer.enable_progress_bar=false` leaves
    ours out; the same for checkpoints.
    """
    interval = config["trainer"].get("log_every_n_steps")
    nodes = {name: node and _with_interval(node, interval) for name, node in (config["callbacks"] or {}).items()}
    callbacks = build_all(nodes, "callbacks")
    switches = {}
    for switch, kind in (("enable_progress_bar", ProgressBar), ("enable_checkpointing", Checkpoint)):
        if config["trainer"].get(switch) is False:
            callbacks = [callback for callback in callbacks if not isinstance(callback, kind)]
        switches[switch] = any(isinstance(callback, kind) for callback in callbacks)
    return callbacks, switches


def loader_switches(data: Data) -> dict[str, bool]:
    """The trainer's switches for the loaders: only those of a plain LightningDataModule need Lightning's sampler."""
    return {"use_distributed_sampler": True} if isinstance(data, PlainData) else {}


def _with_interval(node: dict[str, Any], interval: int | None) -> dict[str, Any]:
    """A callback that observes, and has no interval of its own, writes as often as the trainer's loggers."""
    if node.get("every_n_steps", 0) is not None or not only_observes(node["_target_"]):
        return node
    return {**node, "every_n_steps": interval}


def build_trainer(
    config: dict[str, Any], run_dir: Path, callbacks: list[Callback], switches: dict[str, bool]
) -> Trainer:
    """The trainer of a run in its folder; its loggers are set once the run has a name."""
    root = config["trainer"].get("default_root_dir") or run_dir
    parts = {"callbacks": callbacks, "plugins": [AtomicCheckpointIO()], "default_root_dir": root, "logger": False}
    return build(config["trainer"], "trainer", **parts, **switches)


def run_name(config: dict[str, Any], choices: Mapping[str, str], dataset: str, batch_size: int) -> str:
    """A name to read in TensorBoard, `cnn-mnist-bs512`, with the data and the batch that the run really trains on."""
    model = str(choices.get("model", "model"))
    if model == "torchvision":
        model = config["model"]["name"]
    name = f"{model}-{dataset}-bs{batch_size}".replace("_", "-")
    return re.sub(r"[^\w.+-]+|\.\.+", "-", name)[:100]  # it is a folder's name, too: nothing in it leads elsewhere


def folders_written_to(config: dict[str, Any], trainer: Trainer) -> Iterator[tuple[str, str]]:
    """The folders that a trainer, its loggers, callbacks and profiler will write to, each with its option."""
    yield "trainer.default_root_dir", trainer.default_root_dir
    names = [name for name, node in (config["logger"] or {}).items() if node]
    for name, logger in zip(names, trainer.loggers, strict=False):  # a trial run has one logger that writes nothing
        if isinstance(logger, WandbLogger):
            yield f"logger.{name}", str(logger.save_dir)
        if isinstance(logger, CSVLogger | TensorBoardLogger):
            yield from ((f"logger.{name}", str(folder)) for folder in (logger.save_dir, logger.log_dir))
    for name, node in (config["callbacks"] or {}).items():
        if node and node.get("dirpath"):
            yield f"callbacks.{name}", node["dirpath"]
    if profile := getattr(profiler_of(trainer), "dirpath", None):
        yield "trainer.profiler", str(profile)


def _build(node: dict[str, Any], path: str, arguments: dict[str, Any]) -> Any:
    """Build a checked node; an argument takes the place of an option of the same name, which is then not built."""
    try:
        options = {k: _value(v, f"{path}.{k}") for k, v in node.items() if k not in ("_target_", *arguments)}
        return _class_of(node["_target_"], path)(**options, **arguments)
    except (ValueError, TypeError, MisconfigurationException, ModuleNotFoundError) as error:
        raise UserError(f"{path}: {error}{_place(error, node['_target_'])}") from error


def _value(value: Any, path: str) -> Any:
    if isinstance(value, list):
        return [_value(child, f"{path}.{index}") for index, child in enumerate(value)]
    if not isinstance(value, dict):
        return value
    return _build(value, path, {}) if "_target_" in value else {k: _value(v, f"{path}.{k}") for k, v in value.items()}


def _class_of(target: str, path: str) -> type:
    """The class that a checked target names; UserError unless it is what its source text says, of the role's base."""
    role = role_of(path)
    try:
        cls = _imported(target)
    except (Exception, SystemExit) as error:
        if _package_of(target) is None:
            raise
        raise UserError(
            f"{path}._target_: {target} cannot be imported: {type(error).__name__}: {error}{_place(error, target)}"
        ) from error
    trusted = inspect.isclass(cls) and role is not None and role.allows(f"{cls.__module__}.")
    if role is None or not trusted or not issubclass(cls, _imported(role.base)):
        raise UserError(f"{path}._target_: got {target!r}, takes a {role and role.base} class")
    return cls


def _package_of(target: str) -> str | None:
    """The user's own package that a target lies in."""
    package = target.partition(".")[0]
    return None if package in ("batchscope", "lightning") else package


def _place(error: BaseException, target: str) -> str:
    """Where in the user's own package an error was raised, in brackets; empty where it was elsewhere."""
    package = _package_of(target)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if package in Path(frame.filename).parts]
    return f" ({os.path.relpath(frames[-1].filename)}, line {frames[-1].lineno})" if package and frames else ""


def _imported(target: str) -> Any:
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module), name, None)
