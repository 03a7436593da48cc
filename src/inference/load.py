"""From a checkpoint to the network that it holds, ready to answer. No code from the file runs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning import LightningModule
from torch import nn

from ..checkpointing.checkpoint_file import load_checkpoint
from ..data.plain import Data
from ..data.spec import DataSpec
from ..errors import UserError
from ..options import trust
from ..options.check import check_config
from ..options.command_lines import for_evaluation
from ..options.compose import apply_overrides
from ..options.groups import use_config_dir
from ..training.build import build_data, build_model
from ..training.module import lightning_module
from ..training.quiet import quiet_libraries


@dataclass(frozen=True)
class Trained:
    """A network, the LightningModule that runs it, and the data that it was trained on, which are not loaded."""

    module: LightningModule
    network: nn.Module  # in evaluation mode, on the CPU; the module itself where the model is a LightningModule
    data: Data
    name: str  # of the run
    config: dict[str, Any]  # of the run, for its evaluation

    @property
    def spec(self) -> DataSpec:
        """What the network reads and answers.

        Raises:
            UserError: where the data do not say it.
        """
        if self.data.spec is None:
            raise UserError(f"data: {self.data.name} has no spec, so nobody knows what the network reads and answers")
        return self.data.spec


def load_model(
    ckpt: str | os.PathLike[str], config_dir: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()
) -> nn.Module:
    """The network of a checkpoint, in evaluation mode on the CPU, with the DataSpec of its data as `spec`.

        network = batchscope.load_model("outputs/runs/<run>/checkpoints/best.ckpt")
        with torch.inference_mode():
            scores = network(x)  # x: (B, *network.spec.input_shape) → (B, num_outputs)

    Args:
        ckpt: a checkpoint that batchscope wrote.
        config_dir: the folder of YAML files that names classes of your own, as `--config-dir` of batchscope train.
        overrides: options that the command line would give, such as `data.root=…`.

    Raises:
        UserError: for a checkpoint that cannot be read, that does not fit the model, or that names a class which neither
            the installed configs nor `config_dir` hold.
    """
    use_config_dir(None if config_dir is None else str(config_dir))
    trained = restore(Path(ckpt), list(overrides))
    network: Any = trained.network
    if trained.data.spec is not None:
        network.spec = trained.data.spec
    return network


def restore(path: Path, overrides: list[str]) -> Trained:
    """The network of a checkpoint with its data, which are not loaded.

    Args:
        path: of the checkpoint.
        overrides: options that change the run's configuration, and say what a file alone must not decide.

    Raises:
        UserError: as `load_model`.
    """
    quiet_libraries()
    checkpoint = load_checkpoint(path)
    name, config = described(checkpoint, path, overrides)
    trained = untrained(config, name)
    _load_weights(trained.module, checkpoint["state_dict"], name, path)
    return trained


def untrained(config: dict[str, Any], name: str = "") -> Trained:
    """The network of a checked configuration with its initial weights."""
    quiet_libraries()
    data = build_data(config)
    model = build_model(config, data)
    name = name or type(model).__name__
    module = lightning_module(model, data, config, {"choices": {}, "dataset": data.name})
    return Trained(module.eval(), model.eval(), data, name, config)


def described(checkpoint: dict[str, Any], path: Path, overrides: list[str]) -> tuple[str, dict[str, Any]]:
    """The name of the run that wrote a checkpoint, and its configuration for an evaluation, with the overrides."""
    saved = checkpoint["batchscope"]
    if not isinstance(saved, dict) or not isinstance(name := saved.get("name"), str) or not name.isprintable():
        raise UserError(f"ckpt: {path} is not a checkpoint that batchscope wrote")
    recorded = for_evaluation(check_config(trust.plain(saved.get("config"), f"ckpt: {path}")))
    config = check_config(apply_overrides(recorded, overrides))
    if config["compile"]:
        raise UserError("compile: only training steps are compiled; an evaluation runs the network as it is")
    trust.confirm(config, overrides, str(path), run_dir=None)
    return name, config


def _load_weights(module: LightningModule, weights: Any, name: str, path: Path) -> None:
    """Load a checkpoint's weights; UserError with the first that does not fit."""
    try:
        module.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as error:  # the last two where there are no weights at all
        lines = str(error).splitlines()
        fits = type(getattr(module, "model", module)).__name__
        first = lines[min(1, len(lines) - 1)].strip() if lines else type(error).__name__
        raise UserError(f"ckpt: {path} holds the weights of {name}, which do not fit {fits}: {first}") from error
