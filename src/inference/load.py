"""From a checkpoint to the network that it holds, ready to answer. No code from the file runs."""

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


class KnownData(NamedTuple):
    """What a checkpoint says of the data that it was trained on, for what needs no data."""

    spec: DataSpec | None
    name: str
    batch_size: int | None = None


@dataclass(frozen=True)
class Trained:
    """A network, the LightningModule that runs it, and the data that it was trained on, which are not loaded."""

    module: LightningModule
    network: nn.Module  # in evaluation mode, on the CPU; the module itself where the model is a LightningModule
    known: Data | KnownData
    name: str  # of the run
    config: dict[str, Any]  # of the run, for its evaluation
    trained_on: str = ""  # the name of the data, as the checkpoint says it; empty where it does not
    dtype: torch.dtype | None = None  # of the first input in training; None where the checkpoint does not say it
    load_weights: Callable[[], None] | None = None  # those of the checkpoint, into the module; None for initial weights

    @property
    def data(self) -> Data:
        """The data, of what was restored with them."""
        assert not isinstance(self.known, KnownData), "was restored without data"
        return self.known

    @property
    def spec(self) -> DataSpec:
        """What the network reads and answers; UserError where the data do not say it."""
        if self.known.spec is None:
            raise UserError(
                f"data: {self.known.name} has no spec, a property that returns a batchscope.data.DataSpec, so nobody "
                "knows what the network reads and answers"
            )
        return self.known.spec

    @property
    def example(self) -> Any:
        """What a LightningModule says that its `forward` takes, its `example_input_array`; None without one."""
        return self.network.example_input_array if isinstance(self.network, LightningModule) else None

    @property
    def needs_data(self) -> bool:
        """Whether only the data know the shapes of what the network takes."""
        return self.example is None and (self.known.spec is None or len(self.known.spec.inputs) > 1)


def load_model(
    ckpt: str | os.PathLike[str], config_dir: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()
) -> nn.Module:
    """The network of a checkpoint, in evaluation mode on the CPU, with the DataSpec of its data as `spec`.

        network = batchscope.load_model("outputs/runs/<run>/checkpoints/best.ckpt")
        with torch.inference_mode():
            scores = network(x)  # x: (B, *network.spec.input_shape) → (B, num_outputs)

    Args:
        ckpt: a checkpoint that batchscope wrote.
        config_dir: the folder of YAML files that names classes of your own, as `--config-dir` of batchscope train. By
            default it is the one that this process uses already: that of the run that calls this, or of the environment.
        overrides: options that the command line would give, such as `data.root=…`.

    Raises:
        UserError: for a checkpoint that cannot be read, that does not fit the model, or that names a class which neither
            the installed configs nor `config_dir` hold.
    """
    before = os.environ.get(CONFIG_DIR)
    for cached in (composed, nodes_in):  # in a notebook the files may be others by now
        cached.cache_clear()
    try:
        if config_dir is not None:
            use_config_dir(str(config_dir), "config_dir")
        trained = restore(Path(ckpt), list(overrides), with_data=False)
    finally:
        os.environ.pop(CONFIG_DIR, None)
        os.environ |= {} if before is None else {CONFIG_DIR: before}
    network: Any = trained.network
    if trained.known.spec is not None:
        with contextlib.suppress(AttributeError, TypeError):  # where the network has a property or a layer of this name
            network.spec = trained.known.spec
    return network


def restore(path: Path, overrides: list[str], with_data: bool) -> Trained:
    """The network of a checkpoint, and its data or what the checkpoint says of them; UserError as `load_model`.

    The overrides change the run's configuration, and say what a file alone must not decide.
    """
    checkpoint = load_checkpoint(path)
    saved = checkpoint["batchscope"]
    name = saved["name"]
    config = _configuration(saved, path, overrides, with_data)
    built = _built(config, name, build_data(config) if with_data else _known(saved, path, config["data"]))
    make_layers(built.module, checkpoint["state_dict"])
    with blamed("model", f"on_load_checkpoint of {type(built.module).__name__} fails"):
        built.module.on_load_checkpoint(checkpoint)  # which may complete the weights
        load_weights = partial(_load_weights, built.module, checkpoint["state_dict"], name, path)
    load_weights()
    built.module.eval()  # the layers made since, too
    trained_on = saved["dataset"] if is_text(saved.get("dataset")) else ""
    found = getattr(torch, str(saved.get("dtype")), None)  # a file may hold anything
    dtype = found if isinstance(found, torch.dtype) else None
    return replace(built, trained_on=trained_on, dtype=dtype, load_weights=load_weights)


def untrained(config: dict[str, Any]) -> Trained:
    """The network of a checked configuration with its initial weights."""
    built = _built(config, "", build_data(config))
    make_layers(built.module)
    built.module.eval()  # the layers made since, too
    return built


def trainer_for(trained: Trained) -> Trainer:
    """The Trainer of the configuration, which runs the network with no callbacks of the run and keeps nothing."""
    config, load_weights = trained.config, trained.load_weights
    set_up_process(config)
    alone: dict[str, Any] = {"logger": NoLogger(os.getcwd()), "callbacks": [], "enable_checkpointing": False}
    alone["enable_autolog_hparams"] = False  # Lightning would merge those of module and data, which may differ
    if load_weights is not None and makes_layers(trained.module):  # anew, in hooks that Lightning calls once more
        hooks = ("on_test_start", "on_validation_start", "on_predict_start")
        alone["callbacks"] = [Hooks(**dict.fromkeys(hooks, lambda trainer, module: load_weights()))]
    alone["enable_progress_bar"] = config["trainer"].get("enable_progress_bar", True) and can_redraw()
    trainer = build(config["trainer"], "trainer", **alone, **loader_switches(config, trained.known))
    trainer.strategy.connect(trained.module)  # for a `setup` of the data that asks for it before the trainer runs
    return trainer


def _built(config: dict[str, Any], name: str, data: Data | KnownData) -> Trained:
    model = build_model(config, data)
    module = lightning_module(model, data, config, {"choices": {}, "dataset": data.name})
    return Trained(module.eval(), model.eval(), data, name or type(model).__name__, config)


def _configuration(saved: dict[str, Any], path: Path, overrides: list[str], with_data: bool) -> dict[str, Any]:
    """The configuration of the run that wrote a checkpoint, for an evaluation, with the overrides."""
    plain = trust.plain(saved.get("config"), f"ckpt: {path}")
    recorded = for_evaluation(check_config({**plain, "callbacks": {}, "logger": {}}))  # which it has no use for
    refuse_not_evaluated(overrides, recorded)
    config = check_config(apply_overrides(recorded, overrides))
    if config["init"]:
        raise UserError("init: an evaluation has the weights of ckpt")
    if config["compile"]:
        raise UserError("compile: only training steps are compiled; an evaluation runs the network as it is")
    built = config if with_data else {**config, "data": {}}
    trust.confirm(built, overrides, str(path))
    return config


def _known(saved: dict[str, Any], path: Path, options: Mapping[str, Any]) -> KnownData:
    """What a checkpoint and the options of its data say of them; a file may hold anything."""
    spec, name = saved.get("spec"), str(saved["dataset"]) if is_text(saved.get("dataset")) else "the data"
    size = options.get("batch_size")
    try:
        known = None if spec is None else DataSpec(**spec)
        return KnownData(known, name, size if type(size) is int and size > 0 else None)
    except Exception as error:  # a file may hold anything
        raise UserError(f"ckpt: {path} is not a checkpoint that batchscope wrote: its spec is damaged") from error


def _load_weights(module: LightningModule, weights: Any, name: str, path: Path) -> None:
    """Load a checkpoint's weights; UserError where they do not fit."""
    try:
        module.load_state_dict(weights, strict=module.strict_loading)
    except (RuntimeError, TypeError, AttributeError) as error:  # the last two where there are no weights at all
        fits = f"{path} holds the weights of {name}, which do not fit {type(getattr(module, 'model', module)).__name__}"
        raise UserError(f"ckpt: {fits}: {in_one_line(error)}") from error
