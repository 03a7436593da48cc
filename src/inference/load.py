"""Load the network of a checkpoint for inference. No code from the file runs."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import LightningModule, Trainer
from torch import nn

from .._lightning import Hooks
from ..checkpointing.checkpoint_file import load_checkpoint, makes_layers
from ..data.plain import Data
from ..data.spec import DataSpec
from ..errors import UserError, in_one_line, is_text
from ..options import CONFIG_DIR, trust
from ..options.check import check_config
from ..options.command_lines import for_evaluation, refuse_not_evaluated
from ..options.compose import apply_overrides, composed
from ..options.groups import nodes_in, use_config_dir
from ..records.terminal import can_redraw
from ..training.build import NoLogger, build, build_data, build_model, lightning_module, loader_switches
from ..training.initial import make_layers
from ..training.run import set_up_process
from ..training.trial import blamed


class DataInfo(NamedTuple):
    """What a checkpoint says of the data that it was trained on, for commands that need no data."""

    spec: DataSpec | None
    name: str
    batch_size: int | None = None


@dataclass(frozen=True)
class Trained:
    """A network, the LightningModule that runs it, and the data that it was trained on, which are not set up."""

    module: LightningModule
    network: nn.Module  # in evaluation mode, on the CPU; the module itself where the model is a LightningModule
    data_info: Data | DataInfo
    name: str  # of the run
    config: dict[str, Any]  # of the run, for its evaluation
    trained_on: str = ""  # the name of the training's data; empty if the checkpoint lacks it
    dtype: torch.dtype | None = None  # of the first input in training; None if the checkpoint lacks it
    load_weights: Callable[[], None] | None = None  # loads the checkpoint's weights into the module; None without one

    @property
    def data(self) -> Data:
        """The data, if the network was restored with data."""
        assert not isinstance(self.data_info, DataInfo), "was restored without data"
        return self.data_info

    @property
    def spec(self) -> DataSpec:
        """The spec of the network's inputs and outputs; UserError if the data have none."""
        if self.data_info.spec is None:
            raise UserError(
                f"data: {self.data_info.name} has no spec, a property that returns a batchscope.data.DataSpec, so nobody "
                "knows what the network reads and answers"
            )
        return self.data_info.spec

    @property
    def example(self) -> Any:
        """The `example_input_array` of a LightningModule, with inputs of its `forward`; None without one."""
        return self.network.example_input_array if isinstance(self.network, LightningModule) else None

    @property
    def needs_data(self) -> bool:
        """Whether only the data know the shapes of the network's inputs."""
        return self.example is None and (self.data_info.spec is None or len(self.data_info.spec.inputs) > 1)


def load_model(
    ckpt: str | os.PathLike[str], config_dir: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()
) -> nn.Module:
    """Return the network of a checkpoint, in evaluation mode on the CPU, with the DataSpec of its data as `spec`.

        network = batchscope.load_model("outputs/runs/<run>/checkpoints/best.ckpt")
        with torch.inference_mode():
            scores = network(x)  # x: (B, *network.spec.input_shape) → (B, num_outputs)

    Args:
        ckpt: a checkpoint that batchscope wrote.
        config_dir: the folder of YAML files that name classes of your own, as `--config-dir` of batchscope train. The
            default is the folder that this process already uses, set by the calling run or by the environment.
        overrides: options as on the command line, such as `data.root=…`.

    Raises:
        UserError: for a checkpoint that cannot be read, that does not fit the model, or that names a class which
            neither the installed configs nor `config_dir` contain.
    """
    old_config_dir = os.environ.get(CONFIG_DIR)
    for cached in (composed, nodes_in):  # in a notebook the files may have changed
        cached.cache_clear()
    try:
        if config_dir is not None:
            use_config_dir(str(config_dir), "config_dir")
        trained = restore(Path(ckpt), list(overrides), with_data=False)
    finally:
        os.environ.pop(CONFIG_DIR, None)
        os.environ |= {} if old_config_dir is None else {CONFIG_DIR: old_config_dir}
    network: Any = trained.network
    if trained.data_info.spec is not None:
        with contextlib.suppress(AttributeError, TypeError):  # the network has a property or a layer of this name
            network.spec = trained.data_info.spec
    return network


def restore(path: Path, overrides: list[str], with_data: bool) -> Trained:
    """Return the network of a checkpoint with its data, or with the checkpoint's DataInfo; UserError as `load_model`.

    The overrides change the run's configuration, and confirm what a file alone must not decide.
    """
    checkpoint = load_checkpoint(path)
    saved = checkpoint["batchscope"]
    name = saved["name"]
    config = _configuration(saved, path, overrides, with_data)
    trained = _build_trained(config, name, build_data(config) if with_data else _read_info(saved, path, config["data"]))
    make_layers(trained.module, checkpoint["state_dict"])
    with blamed("model", f"on_load_checkpoint of {type(trained.module).__name__} fails"):
        trained.module.on_load_checkpoint(checkpoint)  # the hook may complete the weights
        load_weights = partial(_load_weights, trained.module, checkpoint["state_dict"], name, path)
    load_weights()
    trained.module.eval()  # make_layers may have added layers
    trained_on = saved["dataset"] if is_text(saved.get("dataset")) else ""
    dtype = getattr(torch, str(saved.get("dtype")), None)  # a file may hold anything
    dtype = dtype if isinstance(dtype, torch.dtype) else None
    return replace(trained, trained_on=trained_on, dtype=dtype, load_weights=load_weights)


def untrained(config: dict[str, Any]) -> Trained:
    """Return the network of a checked configuration with its initial weights."""
    trained = _build_trained(config, "", build_data(config))
    make_layers(trained.module)
    trained.module.eval()  # make_layers may have added layers
    return trained


def trainer_for(trained: Trained) -> Trainer:
    """Return the Trainer of the configuration, without the run's callbacks and loggers. It writes no files."""
    config, load_weights = trained.config, trained.load_weights
    set_up_process(config)
    options: dict[str, Any] = {"logger": NoLogger(os.getcwd()), "callbacks": [], "enable_checkpointing": False}
    options["enable_autolog_hparams"] = False  # Lightning would merge hparams of module and data, which may conflict
    if load_weights is not None and makes_layers(trained.module):  # new ones, when Lightning calls its hooks again
        hooks = ("on_test_start", "on_validation_start", "on_predict_start")
        options["callbacks"] = [Hooks(**dict.fromkeys(hooks, lambda trainer, module: load_weights()))]
    options["enable_progress_bar"] = config["trainer"].get("enable_progress_bar", True) and can_redraw()
    trainer = build(config["trainer"], "trainer", **options, **loader_switches(config, trained.data_info))
    trainer.strategy.connect(trained.module)  # the data's `setup` may read the module before the trainer runs
    return trainer


def _build_trained(config: dict[str, Any], name: str, data: Data | DataInfo) -> Trained:
    model = build_model(config, data)
    module = lightning_module(model, data, config, {"choices": {}, "dataset": data.name})
    return Trained(module.eval(), model.eval(), data, name or type(model).__name__, config)


def _configuration(saved: dict[str, Any], path: Path, overrides: list[str], with_data: bool) -> dict[str, Any]:
    """Return the configuration of the run that wrote a checkpoint, for an evaluation, with the overrides."""
    saved_config = trust.copy_plain(saved.get("config"), f"ckpt: {path}")
    recorded = for_evaluation(check_config({**saved_config, "callbacks": {}, "logger": {}}))  # it needs neither
    refuse_not_evaluated(overrides, recorded)
    config = check_config(apply_overrides(recorded, overrides))
    if config["init"]:
        raise UserError("init: an evaluation has the weights of ckpt")
    if config["compile"]:
        raise UserError("compile: only training steps are compiled; an evaluation runs the network as it is")
    trust.refuse_unconfirmed(config if with_data else {**config, "data": {}}, overrides, str(path))
    return config


def _read_info(saved: dict[str, Any], path: Path, options: Mapping[str, Any]) -> DataInfo:
    """Return what a checkpoint and the options of its data say of the data."""
    fields, name = saved.get("spec"), str(saved["dataset"]) if is_text(saved.get("dataset")) else "the data"
    size = options.get("batch_size")
    try:
        spec = None if fields is None else DataSpec(**fields)
        return DataInfo(spec, name, size if type(size) is int and size > 0 else None)
    except Exception as error:  # a file may hold anything
        raise UserError(f"ckpt: {path} is not a checkpoint that batchscope wrote: its spec is damaged") from error


def _load_weights(module: LightningModule, weights: Any, name: str, path: Path) -> None:
    """Load a checkpoint's weights; UserError if they do not fit."""
    try:
        module.load_state_dict(weights, strict=module.strict_loading)
    except (RuntimeError, TypeError, AttributeError) as error:  # the last two: the file has no weights at all
        model = type(getattr(module, "model", module)).__name__
        fault = f"{path} holds the weights of {name}, which do not fit {model}"
        raise UserError(f"ckpt: {fault}: {in_one_line(error)}") from error
