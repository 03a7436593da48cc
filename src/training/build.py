"""Builds the objects that checked config nodes describe, by `hydra.utils.instantiate`.

A configuration of the command line may build any class or function. `options.trust.refuse_unconfirmed` has checked a configuration
from a file before anything of it is built here.
"""

import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning import LightningDataModule, LightningModule, Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from .._system import relative
from ..checkpointing.callback import Checkpoints
from ..checkpointing.checkpoint_file import AtomicCheckpointIO
from ..data.plain import Data, PlainData, described
from ..data.spec import LENGTHS, accepts_argument
from ..errors import Interrupted, UserError, location_of
from ..options.purpose import NO_END, TASK_OPTIONS, only_observes
from ..options.signatures import live_parameters
from ..options.tree import TARGET, walk
from .optimizer import Optimizer
from .task import Task
from .trial import is_own

_KINDS: dict[str, tuple[type, str]] = {  # what each section builds
    "model": (nn.Module, "an nn.Module"),
    "data": (LightningDataModule, "a LightningDataModule"),
    "task": (Task, "a batchscope.training.task.Task"),
    "optimizer": (Optimizer, "a torch.optim.Optimizer"),
    "trainer": (Trainer, "a lightning.Trainer"),
    "callbacks": (Callback, "a Callback of Lightning"),
    "logger": (Logger, "a Logger of Lightning"),
}
# Errors of libraries that a wrong value of an option causes, and not a bug.
_VALUE_ERRORS = (ValueError, TypeError, MisconfigurationException, ModuleNotFoundError)


def build(node: dict[str, Any], path: str, **arguments: Any) -> Any:
    """Build a checked node's `_target_`, and the nodes within the node, with the node's options and the arguments.

    A class gets plain lists and dicts. An argument replaces an option of the same name, which is not built. Installed
    packages take precedence over a package in the current folder. UserError, with the node's full name, if something cannot
    be imported, refuses a value, fails in the user's code, or is of another kind than the section's.
    """
    options = {key: value for key, value in node.items() if key not in arguments}
    nodes = ((name, value) for name, value in walk(options, path) if isinstance(value, dict) and TARGET in value)
    targets = {f"{name}.{TARGET}": node[TARGET] for name, node in nodes}
    for option, target in targets.items():
        import_target(target, option)
    try:
        # As a partial, because `instantiate` would copy the arguments, and treat a dataclass as a configuration.
        built = instantiate({"_convert_": "all", **options, "_partial_": True})(**arguments)
    except Interrupted:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is raised again
        _raise_in_one_line(error, path, targets.values())
    kind, kind_words = _KINDS[path.partition(".")[0]]
    if any(base.__module__.startswith("pytorch_lightning.") for base in type(built).__mro__):
        raise UserError(
            f"{path}: {type(built).__name__} is of the package pytorch_lightning; import lightning.pytorch instead"
        )
    if not isinstance(built, kind):
        raise UserError(f"{path}: got {type(built).__name__}, takes {kind_words}")
    return built


def build_all(nodes: dict[str, Any] | None, section: str) -> list[Any]:
    """Build every node of a collection such as `callbacks`, except those set to null."""
    return [build(node, f"{section}.{name}") for name, node in (nodes or {}).items() if node]


def build_data(config: dict[str, Any]) -> Data:
    """Build the data of a configuration, and check what can be checked before a download."""
    data = described(build(config["data"], "data"))
    data.check()
    return data


def build_model(config: dict[str, Any], data: Any) -> nn.Module:
    """Build the model of a configuration for data with a `spec` and a `name`; UserError if the model cannot read them.

    The model's constructor gets the spec if it has a parameter `spec`; another one gets the options alone.
    """
    node, spec = config["model"], data.spec
    takes_spec = "spec" in (live_parameters(import_target(node[TARGET], f"model.{TARGET}")) or {})
    if spec is None:
        model = build(node, "model") if not takes_spec else None
        if isinstance(model, LightningModule):
            return model
        no_spec = f"data: {data.name} has no spec: a property that returns a batchscope.data.DataSpec"
        reason = getattr(data, "why_no_spec", "") or no_spec
        raise UserError(f"{reason}, which every model but a LightningModule needs")
    model = build(node, "model", **({"spec": spec} if takes_spec else {}))
    needs_lengths = spec.variable_length and len(spec.inputs) == 1  # several inputs include a mask
    if needs_lengths and not isinstance(model, LightningModule) and not accepts_argument(model, LENGTHS):
        raise UserError(
            f"model: {type(model).__name__} reads sequences of one length: its forward takes no `lengths`, and those "
            f"of {data.name} vary"
        )
    return model


def refuse_own_loaders(model: nn.Module) -> None:
    """Raise UserError for a LightningModule with its own `train_dataloader`, which a run does not use."""
    if isinstance(model, LightningModule) and is_overridden("train_dataloader", model):
        raise UserError(
            f"data: {type(model).__name__} has a train_dataloader of its own, and a run trains on data=…; move its loaders "
            "to a LightningDataModule, and write data=<its config>, or name the data to train on, such as data=mnist"
        )


def lightning_module(model: nn.Module, data: Any, config: dict[str, Any], facts: dict[str, Any]) -> LightningModule:
    """Return the module that a Trainer trains: the model if it is a LightningModule, else a Task with the model.

    The title is made of the `choices` and `dataset` in `facts`. UserError for a network without an optimizer or with lazy
    layers, and for a LightningModule with the option `compile`.
    """
    mode = "default" if config["compile"] is True else config["compile"] or None
    if isinstance(model, LightningModule):
        module = model
        if mode:
            raise UserError(f"compile: {type(model).__name__} is a LightningModule, which compiles itself")
    else:
        assert data.spec is not None, "build_model has refused data without a spec"
        if missing := [option for option in TASK_OPTIONS if option not in config]:
            name = type(model).__name__
            raise UserError(
                f"{missing[0]}: is missing, and {name} is no LightningModule, which has {TASK_OPTIONS[missing[0]]}"
            )
        if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
            raise UserError(f"model: {type(model).__name__} has lazy layers; give them their sizes, by the data's spec")
        switches = {"channels_last": config["channels_last"], "compile_mode": mode}
        optimizer = build_optimizer(config["optimizer"])
        module = build(config["task"], "task", model=model, spec=data.spec, optimizer=optimizer, **switches)
    any_module: Any = module  # which may get attributes
    name = facts["choices"].get("model", type(model).__name__)
    any_module.batchscope_title = f"{name} · {facts['dataset']}"
    any_module.batchscope_config = config  # if it is there, the advice of callbacks names options
    return module


def build_optimizer(node: dict[str, Any]) -> Optimizer:
    """Build the optimizer of a configuration: a class like torch's, with its own options and those of a schedule."""
    import_target(node[TARGET], f"optimizer.{TARGET}")
    our_keys = {*inspect.signature(Optimizer).parameters}
    options = {key: value for key, value in node.items() if key in our_keys}
    make = {key: value for key, value in node.items() if key not in our_keys} | {"_partial_": True}
    return build({TARGET: f"{Optimizer.__module__}.Optimizer", **options, "make": make}, "optimizer")


def build_callbacks(config: dict[str, Any]) -> tuple[list[Callback], dict[str, bool]]:
    """Build the callbacks, and the trainer's switches that have to agree with them.

    `callbacks.progress=null` means no bar rather than Lightning's own, and `trainer.enable_progress_bar=false` leaves
    out our bar. The same holds for checkpoints.
    """
    callbacks: list[Any] = []
    for name, node in (config["callbacks"] or {}).items():
        if not node:
            continue
        if node.get("every_n_steps", 0) is None and only_observes(node[TARGET]):  # as often as the loggers write
            node = {**node, "every_n_steps": config["trainer"].get("log_every_n_steps")}
        callbacks.append(build(node, f"callbacks.{name}"))
        callbacks[-1].batchscope_option = f"callbacks.{name}"  # the option's name as the user knows it
    switches = {}
    for switch, kind in (("enable_progress_bar", ProgressBar), ("enable_checkpointing", Checkpoint)):
        if config["trainer"].get(switch) is False:
            callbacks = [callback for callback in callbacks if not isinstance(callback, kind)]
        switches[switch] = any(isinstance(callback, kind) for callback in callbacks)
    if (number := sum(isinstance(callback, Checkpoints) for callback in callbacks)) > 1:
        raise UserError(f"callbacks: got {number} Checkpoints, takes one: both would write last.ckpt")
    return callbacks, switches


def build_loggers(config: dict[str, Any], run_dir: Path, name: str, run_id: str) -> list[Logger]:
    """Build the loggers, which write to the run's folder unless an option names another; `module.logger` is the first.

    TensorBoard's folder and the run at W&B have the run's name or that of an option. A resumed run continues the run at
    W&B that has the same id.
    """
    nodes = {key: dict(node) for key, node in (config["logger"] or {}).items() if node}
    nodes = dict(sorted(nodes.items(), key=lambda item: item[0] in ("tensorboard", "csv")))  # the user's loggers first
    for key, node in nodes.items():
        if _needs_save_dir(import_target(node[TARGET], f"logger.{key}.{TARGET}")):
            # TensorBoardLogger expands a leading `~` to a home folder.
            node.setdefault("save_dir", os.path.join(os.curdir, relative(run_dir)))
        if node[TARGET].endswith((".TensorBoard", ".TensorBoardLogger")):
            node.setdefault("name", name)
        elif node[TARGET].endswith(".WandbLogger"):
            node.update({"name": node.get("name") or name, "id": node.get("id") or run_id})
            node.setdefault("tags", config["tags"])
    return build_all(nodes, "logger")


def _needs_save_dir(logger: Any) -> bool:
    """Whether a logger requires a `save_dir`, or is of a class that writes files there and accepts a `save_dir`."""
    parameters = live_parameters(logger) or {}
    save_dir, takes_any = parameters.get("save_dir"), any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if isinstance(logger, type) and issubclass(logger, TensorBoardLogger | CSVLogger | WandbLogger):
        return save_dir is not None or takes_any
    return save_dir is not None and save_dir.default is save_dir.empty


class NoLogger(DummyLogger):
    """Discards everything that is logged. A module may write files of its own to the logger's folders."""

    def __init__(self, save_dir: str) -> None:
        super().__init__()
        self._save_dir = save_dir

    @property
    @override
    def save_dir(self) -> str:
        return self._save_dir

    root_dir = log_dir = save_dir


def loader_switches(config: dict[str, Any], data: object) -> dict[str, bool]:
    """Return the trainer's switch for Lightning's sampler: the option, else True for a plain LightningDataModule alone."""
    switch = config["trainer"].get("use_distributed_sampler")
    return {"use_distributed_sampler": isinstance(data, PlainData) if switch is None else switch}


def build_trainer(config: dict[str, Any], run_dir: Path, callbacks: list[Callback], **switches: Any) -> Trainer:
    """Build the trainer of a run, with our checkpoint plugin; its loggers are set once the run has a name."""
    node = config["trainer"]
    plugins = node.get("plugins") or []
    checkpoint_io = {TARGET: f"{AtomicCheckpointIO.__module__}.AtomicCheckpointIO"}
    node = {**node, "plugins": [*(plugins if isinstance(plugins, list) else [plugins]), checkpoint_io]}
    root_dir = os.path.join(os.curdir, run_dir)  # Lightning expands a leading `~` to a home folder
    arguments = {"callbacks": callbacks, "default_root_dir": root_dir, "logger": False}
    trainer = build(node, "trainer", **arguments, **switches)
    if (node.get("max_epochs"), node.get("max_steps")) == (-1, NO_END):  # a schedule by epochs needs a finite number
        trainer.fit_loop.max_epochs = NO_END
    return trainer


def run_name(config: dict[str, Any], choices: Mapping[str, str], dataset: str, batch_size: int | None) -> str:
    """Return a name such as `cnn-mnist-bs512`, with the dataset and batch size that the run really trains on."""
    model = str(choices.get("model") or config["model"][TARGET].rpartition(".")[2])
    if model == "torchvision":
        model = str(config["model"].get("name", model))
    batch_suffix = "" if batch_size is None else f"-bs{batch_size}"
    name = f"{model}-{dataset}{batch_suffix}".replace("_", "-")
    return re.sub(r"[^\w.+-]+|\.\.+", "-", name)[:100]  # the name of a folder, too, and no path that leads elsewhere


def import_target(target: str, option: str) -> Any:
    """Import the object that a target names; the current folder becomes the last entry of `sys.path`."""
    cwd = str(Path.cwd())
    if not {cwd, ""} & {*sys.path}:
        sys.path.append(cwd)
        importlib.invalidate_caches()
    try:
        return _import_object(target)
    except Interrupted:
        raise
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}{_place(error, [target])}"
        raise UserError(f"{option}: {target} cannot be imported: {reason}") from error


def _import_object(target: str) -> Any:
    names = target.split(".")
    for length in range(len(names) - 1, 0, -1):
        module_name = ".".join(names[:length])
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name != module_name or length == 1:
                raise
        else:
            return functools.reduce(getattr, names[length:], module)
    raise ImportError("it has no module")


def _raise_in_one_line(error: BaseException, path: str, targets: Iterable[str]) -> NoReturn:
    """Raise a constructor's exception as a UserError with its place in the code; raise a possible bug of ours unchanged."""
    if isinstance(error, InstantiationException):  # from a node within this node, or for a target that Hydra refuses
        message, _, key = str(error).partition("\nfull_key: ")
        path = f"{path}.{key}" if key else path
        hydra_error = ValueError(" ".join(message.split()))  # Hydra's message has several lines
        error = error.__cause__ if isinstance(error.__cause__, Exception) else hydra_error
    place = _place(error, targets)
    if isinstance(error, UserError) or not (place or isinstance(error, _VALUE_ERRORS)):
        raise error
    first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    raise UserError(f"{path}: {f'{type(error).__name__}: ' if place else ''}{first_line}{place}") from error


def _place(error: BaseException, targets: Iterable[str]) -> str:
    """Return where in the packages of these targets an error was raised; empty if the packages are libraries."""
    packages = {target.partition(".")[0] for target in targets}
    return location_of(error, lambda package: package in packages and is_own(package))
