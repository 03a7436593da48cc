"""The option `init`: weights to start from, out of a checkpoint or a state_dict. No code from the file runs."""

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
_COMPILED = "_orig_mod."  # of torch.compile, before any name
_STATES = ("state_dict", "model_state_dict", "model")  # where a checkpoint keeps its weights


def start_from(model: nn.Module, path: Path) -> None:
    """Load the weights of a checkpoint or a state_dict into a model.

    All names and shapes have to match, or it is a UserError; the wrappers `model.`, `module.` and `_orig_mod.` count on
    neither side.
    """
    held = _held(path)
    if isinstance(model, LightningModule) and "pytorch-lightning_version" in held:
        with blamed("init", f"on_load_checkpoint of {type(model).__name__} fails"):
            model.on_load_checkpoint(held)  # which may make layers, and complete the weights
    found, names = _weights(held, path, model), _plain(model.state_dict())
    weights = {names.get(plain, plain): found[name] for plain, name in _plain(found).items()}
    try:
        model.load_state_dict(weights, strict=getattr(model, "strict_loading", True))
    except RuntimeError as error:  # all that is missing, unexpected or of another shape
        what = cut(str(error).splitlines()[:2][-1].strip(), 200)  # the first of its complaints
        raise UserError(f"init: {path} does not fit {type(model).__name__}: {what}") from error


def make_layers(module: LightningModule, weights: Collection[str] = ()) -> None:
    """Have a module's hooks make, in Lightning's order, the layers of these weights that its constructor does not make.

    Without weights all hooks are called, and one may fail. UserError if a hook fails without a Trainer, and layers are missing.
    """
    failed: Exception | None = None
    for hook, *arguments in (("setup", "predict"), ("configure_model",), ("setup", "fit"), ("configure_model",)):
        if not makes_layers(module) or (weights and {*weights} <= {*module.state_dict()}):
            return
        try:
            getattr(module, hook)(*arguments)
        except Exception as error:  # noqa: BLE001 - it is raised unless another hook makes the layers
            failed = failed or error
    if failed is not None and not {*weights} <= {*module.state_dict()}:
        raise UserError(
            f"model: {type(module).__name__} makes layers in a hook, which fails without a Trainer "
            f"({in_one_line(failed)}); make them in __init__"
        ) from failed


def weights_in(path: Path, model: nn.Module) -> dict[str, Any]:
    """The dense tensors and extra states of a file by name; UserError where it has none, is damaged, or would run code.

    A checkpoint of a Task has the weights of a loss, too: for a network those below `model.` are taken.
    """
    return _weights(_held(path), path, model)


def _held(path: Path) -> dict[str, Any]:
    """What a file holds; empty where that is no dict. UserError where it is damaged, or would run code."""
    if not os.path.isfile(path):
        raise UserError(f"init: got '{path}', which is not a file")
    try:
        with path.open("rb") as file:
            if zipfile.is_zipfile(file):
                verify(file, path, "init")
            file.seek(0)
            held = torch.load(file, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:  # of zipfile, torch and the system, about any bytes
        makes = "torch.save(module.state_dict(), file) writes such a file"
        if path.suffix == ".safetensors":
            makes = "torch.save(safetensors.torch.load_file(this), file) makes such a file of it"
        raise UserError(
            f"init: {path} holds no weights that can be read without running code; {makes} ({in_one_line(error, 100)})"
        ) from error
    return held if isinstance(held, dict) else {}


def _weights(held: Mapping[str, Any], path: Path, model: nn.Module) -> dict[str, Any]:
    """Those among what a file holds, as `weights_in`."""
    state = next((held[key] for key in _STATES if isinstance(held.get(key), Mapping)), held)
    weights = {name: value for name, value in state.items() if isinstance(name, str) and is_weight(name, value)}
    if not weights:
        raise UserError(f"init: {path} holds no weights: neither a checkpoint nor a state_dict")
    of_network = {name: value for name, value in weights.items() if name.startswith("model.")}
    is_of_task = "batchscope" in held and not isinstance(model, LightningModule)
    return of_network if is_of_task and of_network else weights


def _plain(names: Iterable[str]) -> dict[str, str]:
    """Names without their wrappers → as they are; with them where two would become one."""
    names = list(names)
    found = {_WRAPPERS.sub("", name.replace(_COMPILED, "")): name for name in names}
    return found if len(found) == len(names) else {name: name for name in names}
