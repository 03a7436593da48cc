"""From a checked config node to the object that it describes, by `hydra.utils.instantiate`.

A configuration of the command line may build any class or function. One from a file has passed `options.trust.confirm`
before anything of it comes here.
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
from ..data.spec import LENGTHS, takes
from ..errors import Interrupted, UserError, place_of
from ..options.purpose import NO_END, OF_TASK, only_observes
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
# Errors of libraries that a wrong value causes, and no bug.
_OF_VALUES = (ValueError, TypeError, MisconfigurationException, ModuleNotFoundError)


def build(node: dict[str, Any], path: str, **arguments: Any) -> Any:
    """Build a checked node's `_target_`, and the nodes within it, with its options and the given arguments.

    A class gets plain lists and dicts. An argument takes the place of an option of the same name, which is not built. A
    package in the current folder is found, after those that are installed. UserError, with the node's full name, where
    something cannot be imported, refuses a value, fails in the user's code, or is of another kind than the section's.
    """
    options = {key: value for key, value in node.items() if key not in arguments}
    nodes = ((name, value) for name, value in walk(options, path) if isinstance(value, dict) and TARGET in value)
    targets = {f"{name}.{TARGET}": node[TARGET] for name, node in nodes}
    for option, target in targets.items():
        import_target(target, option)
    try:
        # As a partial, because instantiate would copy the arguments, and take a dataclass for a configuration.
        built = instantiate({"_convert_": "all", **options, "_partial_": True})(**arguments)
    except Interrupted:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is raised again
        _raise_in_one_line(error, path, targets.values())
    kind, words = _KINDS[path.partition(".")[0]]
    if any(base.__module__.startswith("pytorch_lightning.") for base in type(built).__mro__):
        raise UserError(
            f"{path}: {type(built).__name__} is of the package pytorch_lightning; import lightning.pytorch instead"
        )
    if not isinstance(built, kind):
        raise UserError(f"{path}: got {type(built).__name__}, takes {words}")
    return built


def build_all(nodes: dict[str, Any] | None, section: str) -> list[Any]:
    """Every object of a collection such as `callbacks`; one set to null is left out."""
    return [build(node, f"{section}.{name}") for name, node in (nodes or {}).items() if node]


def build_data(config: dict[str, Any]) -> Data:
    """The data of a configuration, checked as far as they can be before anything is downloaded."""
    data = described(build(config["data"], "data"))
    data.check()
    return data


def build_model(config: dict[str, Any], data: Any) -> nn.Module:
    """The model of a configuration for its data, with their `spec` and `name`; UserError if it cannot read them.

    Its constructor gets `spec` if it has a parameter of this name; a model without one is built from its options alone.
    """
    node, spec = config["model"], data.spec
    takes_spec = "spec" in (live_parameters(import_target(node[TARGET], f"model.{TARGET}")) or {})
    if spec is None:
        model = build(node, "model") if not takes_spec else None
        if isinstance(model, LightningModule):
            return model
        no_spec = f"data: {data.name} has no spec: a property that returns a batchscope.data.DataSpec"
        why = getattr(data, "why_no_spec", "") or no_spec
        raise UserError(f"{why}, which every model but a LightningModule is trained by")
    model = build(node, "model", **({"spec": spec} if takes_spec else {}))
    needs_lengths = spec.variable_length and len(spec.inputs) == 1  # several inputs have a mask among them
    if needs_lengths and not isinstance(model, LightningModule) and not takes(model, LENGTHS):
        raise UserError(
            f"model: {type(model).__name__} reads sequences of one length: its forward takes no `lengths`, and those "
            f"of {data.name} vary"
        )
    return model


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
    mode = "default" if config["compile"] is True else config["compile"] or None
    if isinstance(model, LightningModule):
        module = model
        if mode:
            raise UserError(f"compile: {type(model).__name__} is a LightningModule, which compiles itself")
    else:
        assert data.spec is not None, "build_model has refused it"
        if missing := [option for option in OF_TASK if option not in config]:
            name = type(model).__name__
            raise UserError(
                f"{missing[0]}: is missing, and {name} is no LightningModule, which has {OF_TASK[missing[0]]}"
            )
        if any(map(is_lazy, [*model.parameters(), *model.buffers()])):
            raise UserError(f"model: {type(model).__name__} has lazy layers; give them their sizes, by the data's spec")
        how = {"channels_last": config["channels_last"], "compile_mode": mode}
        optimizer = build_optimizer(config["optimizer"])
        module = build(config["task"], "task", model=model, spec=data.spec, optimizer=optimizer, **how)
    marked: Any = module
    name = facts["choices"].get("model", type(model).__name__)
    marked.batchscope_title = f"{name} · {facts['dataset']}"
    marked.batchscope_config = config  # by which callbacks know that advice can name options
    return module


def build_optimizer(node: dict[str, Any]) -> Optimizer:
    """The optimizer of a configuration: a class of torch's kind, with the options of a schedule beside its own."""
    import_target(node[TARGET], f"optimizer.{TARGET}")
    of_schedule = {*inspect.signature(Optimizer).parameters}
    options = {key: value for key, value in node.items() if key in of_schedule}
    make = {key: value for key, value in node.items() if key not in of_schedule} | {"_partial_": True}
    return build({TARGET: f"{Optimizer.__module__}.Optimizer", **options, "make": make}, "optimizer")


def build_callbacks(config: dict[str, Any]) -> tuple[list[Callback], dict[str, bool]]:
    """The callbacks, and the trainer's switches that have to agree with them.

    `callbacks.progress=null` means no bar rather than Lightning's own, and `trainer.enable_progress_bar=false` leaves
    ours out; the same for checkpoints.
    """
    callbacks: list[Any] = []
    for name, node in (config["callbacks"] or {}).items():
        if not node:
            continue
        if node.get("every_n_steps", 0) is None and only_observes(node[TARGET]):  # it writes as often as the loggers
            node = {**node, "every_n_steps": config["trainer"].get("log_every_n_steps")}
        callbacks.append(build(node, f"callbacks.{name}"))
        callbacks[-1].batchscope_option = f"callbacks.{name}"  # by the name that the user gave
    switches = {}
    for switch, kind in (("enable_progress_bar", ProgressBar), ("enable_checkpointing", Checkpoint)):
        if config["trainer"].get(switch) is False:
            callbacks = [callback for callback in callbacks if not isinstance(callback, kind)]
        switches[switch] = any(isinstance(callback, kind) for callback in callbacks)
    if (number := sum(isinstance(callback, Checkpoints) for callback in callbacks)) > 1:
        raise UserError(f"callbacks: got {number} Checkpoints, takes one: both would write last.ckpt")
    return callbacks, switches


def build_loggers(config: dict[str, Any], run_dir: Path, name: str, run_id: str) -> list[Logger]:
    """The loggers, which write to the run's folder unless an option names another one: the first is a module's `logger`.

    TensorBoard's folder and the run at W&B have the run's name or that of an option. A resumed run continues the run at
    W&B that has its id.
    """
    nodes = {key: dict(node) for key, node in (config["logger"] or {}).items() if node}
    nodes = dict(sorted(nodes.items(), key=lambda item: item[0] in ("tensorboard", "csv")))  # the added ones first
    for key, node in nodes.items():
        if _takes_folder(import_target(node[TARGET], f"logger.{key}.{TARGET}")):
            # TensorBoardLogger takes a `~` at its start for a home folder.
            node.setdefault("save_dir", os.path.join(os.curdir, relative(run_dir)))
        if node[TARGET].endswith((".TensorBoard", ".TensorBoardLogger")):
            node.setdefault("name", name)
        elif node[TARGET].endswith(".WandbLogger"):
            node.update({"name": node.get("name") or name, "id": node.get("id") or run_id})
            node.setdefault("tags", config["tags"])
    return build_all(nodes, "logger")


def _takes_folder(logger: Any) -> bool:
    """Whether a logger needs a `save_dir`, or is one of a kind that writes files below it and takes it."""
    parameters = live_parameters(logger) or {}
    place, is_open = parameters.get("save_dir"), any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    if isinstance(logger, type) and issubclass(logger, TensorBoardLogger | CSVLogger | WandbLogger):
        return place is not None or is_open
    return place is not None and place.default is place.empty


class NoLogger(DummyLogger):
    """Takes what a module gives its logger, and keeps nothing. Its folders are where a module may write by itself."""

    def __init__(self, save_dir: str) -> None:
        super().__init__()
        self._save_dir = save_dir

    @property
    @override
    def save_dir(self) -> str:
        return self._save_dir

    root_dir = log_dir = save_dir


def loader_switches(config: dict[str, Any], data: object) -> dict[str, bool]:
    """The trainer's switch for Lightning's sampler: by an option, else a plain LightningDataModule alone has it."""
    asked = config["trainer"].get("use_distributed_sampler")
    return {"use_distributed_sampler": isinstance(data, PlainData) if asked is None else asked}


def build_trainer(config: dict[str, Any], run_dir: Path, callbacks: list[Callback], **switches: Any) -> Trainer:
    """The trainer of a run in its folder, with a plugin for checkpoints; its loggers are set once the run has a name."""
    node = config["trainer"]
    plugins = node.get("plugins") or []
    ours = {TARGET: f"{AtomicCheckpointIO.__module__}.AtomicCheckpointIO"}
    node = {**node, "plugins": [*(plugins if isinstance(plugins, list) else [plugins]), ours]}
    here = os.path.join(os.curdir, run_dir)  # Lightning takes a `~` at its start for a home folder
    parts = {"callbacks": callbacks, "default_root_dir": here, "logger": False}
    trainer = build(node, "trainer", **parts, **switches)
    if (node.get("max_epochs"), node.get("max_steps")) == (-1, NO_END):  # a number for a schedule that plans by epochs
        trainer.fit_loop.max_epochs = NO_END
    return trainer


def run_name(config: dict[str, Any], choices: Mapping[str, str], dataset: str, batch_size: int | None) -> str:
    """A name to read in TensorBoard, `cnn-mnist-bs512`, with the data and the batch that the run really trains on."""
    model = str(choices.get("model") or config["model"][TARGET].rpartition(".")[2])
    if model == "torchvision":
        model = str(config["model"].get("name", model))
    held = "" if batch_size is None else f"-bs{batch_size}"
    name = f"{model}-{dataset}{held}".replace("_", "-")
    return re.sub(r"[^\w.+-]+|\.\.+", "-", name)[:100]  # it is a folder's name, too: nothing in it leads elsewhere


def import_target(target: str, option: str) -> Any:
    """What a target names. Its package may lie in the current folder, which becomes the last place to look for it."""
    here = str(Path.cwd())
    if not {here, ""} & {*sys.path}:
        sys.path.append(here)
        importlib.invalidate_caches()
    try:
        return _object(target)
    except Interrupted:
        raise
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}{_place(error, [target])}"
        raise UserError(f"{option}: {target} cannot be imported: {said}") from error


def _object(target: str) -> Any:
    names = target.split(".")
    for length in range(len(names) - 1, 0, -1):
        module = ".".join(names[:length])
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module or length == 1:
                raise
        else:
            return functools.reduce(getattr, names[length:], found)
    raise ImportError("it has no module")


def _raise_in_one_line(error: BaseException, path: str, targets: Iterable[str]) -> NoReturn:
    """Raise a constructor's exception as a UserError with its place; what may be a bug of ours as it is."""
    if isinstance(error, InstantiationException):  # of a node within this one, or of a target that Hydra refuses
        message, _, key = str(error).partition("\nfull_key: ")
        path = f"{path}.{key}" if key else path
        refused = ValueError(" ".join(message.split()))  # by Hydra, in several lines
        error = error.__cause__ if isinstance(error.__cause__, Exception) else refused
    place = _place(error, targets)
    if isinstance(error, UserError) or not (place or isinstance(error, _OF_VALUES)):
        raise error
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    raise UserError(f"{path}: {f'{type(error).__name__}: ' if place else ''}{first}{place}") from error


def _place(error: BaseException, targets: Iterable[str]) -> str:
    """Where in the packages of these targets an error was raised; empty where they are libraries."""
    named = {target.partition(".")[0] for target in targets}
    return place_of(error, lambda package: package in named and is_own(package))
