"""The option `init`: initial weights from a checkpoint or a state_dict. No code from the file runs."""

import os
import re
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule
from torch import nn

from ..checkpointing.checkpoint_file import is_weight, makes_layers, verify
from ..errors import UserError, cut, in_one_line
from .trial import blamed

_WRAPPERS = re.compile(r"^((model|module)\.)+")  # of a LightningModule, of DataParallel
_COMPILED = "_orig_mod."  # torch.compile's, in front of any part of a name
_STATE_KEYS = ("state_dict", "model_state_dict", "model")  # keys under which a checkpoint may have its weights


def start_from(model: nn.Module, path: Path) -> None:
    """Load the weights of a checkpoint or a state_dict into a model.

    UserError unless all names and shapes match. The wrappers `model.`, `module.` and `_orig_mod.` are ignored in the names
    of both sides.
    """
    content = _load_file(path)
    if isinstance(model, LightningModule) and "pytorch-lightning_version" in content:
        with blamed("init", f"on_load_checkpoint of {type(model).__name__} fails"):
            model.on_load_checkpoint(content)  # this hook may make layers, and complete the weights
    weights, model_names = _select_weights(content, path, model), _unwrapped_names(model.state_dict())
    renamed = {model_names.get(bare, bare): weights[name] for bare, name in _unwrapped_names(weights).items()}
    try:
        model.load_state_dict(renamed, strict=getattr(model, "strict_loading", True))
    except RuntimeError as error:  # lists what is missing, unexpected or of another shape
        first_problem = cut(str(error).splitlines()[:2][-1].strip(), 200)
        raise UserError(f"init: {path} does not fit {type(model).__name__}: {first_problem}") from error


def make_layers(module: LightningModule, weights: Collection[str] = ()) -> None:
    """Call a module's hooks, in Lightning's order, until the layers of these weights exist; the constructor may lack some.

    Without weights all hooks are called, and may fail. UserError if a hook fails without a Trainer, and layers are missing.
    """
    first_error: Exception | None = None
    for hook, *arguments in (("setup", "predict"), ("configure_model",), ("setup", "fit"), ("configure_model",)):
        if not makes_layers(module) or (weights and {*weights} <= {*module.state_dict()}):
            return
        try:
            getattr(module, hook)(*arguments)
        except Exception as error:  # noqa: BLE001 - it is raised unless another hook makes the layers
            first_error = first_error or error
    if first_error is not None and not {*weights} <= {*module.state_dict()}:
        raise UserError(
            f"model: {type(module).__name__} makes layers in a hook, which fails without a Trainer "
            f"({in_one_line(first_error)}); make them in __init__"
        ) from first_error


def weights_in(path: Path, model: nn.Module) -> dict[str, Any]:
    """Return a file's dense tensors and extra states by name; UserError if it has none, is damaged, or would run code.

    A checkpoint of a Task may hold weights of a loss, too: a network gets only the weights below `model.`.
    """
    return _select_weights(_load_file(path), path, model)


def _load_file(path: Path) -> dict[str, Any]:
    """Return the content of a file; empty if it is no dict. UserError if the file is damaged, or would run code."""
    if not os.path.isfile(path):
        raise UserError(f"init: got '{path}', which is not a file")
    try:
        with path.open("rb") as file:
            if zipfile.is_zipfile(file):
                verify(file, path, "init")
            file.seek(0)
            content = torch.load(file, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # of zipfile, torch and the system, about any bytes
        hint = "torch.save(module.state_dict(), file) writes such a file"
        if path.suffix == ".safetensors":
            hint = "torch.save(safetensors.torch.load_file(this), file) makes such a file of it"
        raise UserError(
            f"init: {path} holds no weights that can be read without running code; {hint} ({in_one_line(error, 100)})"
        ) from error
    return content if isinstance(content, dict) else {}


def _select_weights(content: Mapping[str, Any], path: Path, model: nn.Module) -> dict[str, Any]:
    """Return the weights for a model in the content of a file, as `weights_in` does."""
    state = next((content[key] for key in _STATE_KEYS if isinstance(content.get(key), Mapping)), content)
    weights = {name: value for name, value in state.items() if isinstance(name, str) and is_weight(name, value)}
    if not weights:
        raise UserError(f"init: {path} holds no weights: neither a checkpoint nor a state_dict")
    network_weights = {name: value for name, value in weights.items() if name.startswith("model.")}
    is_task_checkpoint = "batchscope" in content and not isinstance(model, LightningModule)
    return network_weights if is_task_checkpoint and network_weights else weights


def _unwrapped_names(names: Iterable[str]) -> dict[str, str]:
    """Map each name without its wrappers to the name; map each name to itself if two would become equal."""
    names = list(names)
    unwrapped = {_WRAPPERS.sub("", name.replace(_COMPILED, "")): name for name in names}
    return unwrapped if len(unwrapped) == len(names) else {name: name for name in names}
