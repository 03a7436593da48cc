"""Checkpoint files: written atomically, verified when they are read, and never a source of code.

A checkpoint is what `torch.save` writes: a zip archive with a checksum (CRC-32) of each file in it. So
`torch.load(path, weights_only=True)` and every zip program can read it.
"""

import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from .. import files
from .._lightning import callbacks_of
from ..errors import UserError, cut, warn
from ..files import WriteError, why

# Entries for people: nothing is restored from hyperparameters.
_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_THEIR_TYPES = ("hparams_type", "datamodule_hparams_type")
_ONLY = "holds more than tensors and plain values"
_EXTRA_STATE = "_extra_state"  # how torch ends the name of what a module's `get_extra_state` returns


class AtomicCheckpointIO(CheckpointIO):
    """Has a Lightning trainer write and read checkpoints by this module: `Trainer(plugins=[AtomicCheckpointIO()])`.

    Whatever Lightning asks for, checkpoints are loaded on the CPU, and no code in them runs. What could not be read back
    so is found before it is saved: hyperparameters are left out with a warning, and anything else is a UserError, which
    leaves the checkpoint before it.
    """

    def __init__(self) -> None:
        self._left_out: set[str] = set()  # the names of hyperparameters
        self.provenance: Callable[[], dict[str, Any]] | None = None  # a run's, for the entry `batchscope`

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if self.provenance is not None:
            checkpoint["batchscope"] = self.provenance()
        # numpy's scalars come from schedules and hyperparameters. A state_dict has attributes that a copy would lose.
        plain = {
            key: value if key == "state_dict" else tree_map_only(numpy.generic, lambda one: one.item(), value)
            for key, value in checkpoint.items()
            if key not in _THEIR_TYPES
        }
        for entry, value in plain.items():  # at every save: a callback's state may have changed
            if entry in _HYPERPARAMETERS:
                plain[entry] = {key: one for key, one in dict(value).items() if _can_be_read(one)}
                if left_out := [key for key in value if key not in plain[entry] and key not in self._left_out]:
                    warn(f"checkpoints leave out the hyperparameters {', '.join(map(str, left_out))}: each {_ONLY}")
                self._left_out.update(left_out)
            elif entry != "state_dict" and not _can_be_read(value):
                raise UserError(f"checkpoint: its entry '{entry}' could not be read back: it {_ONLY}")
        write_checkpoint(plain, Path(path))

    @override
    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return load_checkpoint(Path(path))

    @override
    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


def check_weights(weights: Mapping[str, Any]) -> None:
    """Raise UserError for the first part of a module's `state_dict` that could not be read back from a checkpoint."""
    for name, value in weights.items():
        try:
            is_made_later = is_lazy(value) or getattr(value, "is_meta", False)
            fits = is_made_later or is_weight(name, _read_back(value))
        except Exception:  # noqa: BLE001 - of pickle and of anybody's class
            fits = False
        if not fits:
            said = "could not be read back from a checkpoint, which holds dense tensors and plain values"
            raise UserError(f"model: '{name}' {said}; register_buffer(…, persistent=False) leaves a buffer out")


def check_states(trainer: Trainer) -> None:
    """Raise UserError for the first optimizer, schedule or callback of a fit whose state could not be read back."""
    schedules = [each.scheduler for each in trainer.lr_scheduler_configs]
    for of, section in ((trainer.optimizers, "model"), (schedules, "model"), (callbacks_of(trainer), "callbacks")):
        for each in of:
            if not _can_be_read(each.state_dict()):
                what = f"the state_dict of {type(each).__name__} could not be read back from a checkpoint: it {_ONLY}"
                raise UserError(f"{section}: {what}; callbacks.checkpoint=null keeps no checkpoint")


def _read_back(value: Any) -> Any:
    """What a checkpoint would hold of a value."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def _can_be_read(value: Any) -> bool:
    """Whether `torch.load(…, weights_only=True)` reads what `torch.save` writes of a value, apart from its tensors and numpy's scalars."""
    try:
        _read_back(tree_map_only((Tensor, numpy.generic), lambda one: None, value))
    except Exception:  # noqa: BLE001 - of pickle and of anybody's class
        return False
    return True


def write_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint atomically; after a WriteError the one before it is as it was."""
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    data = buffer.getbuffer()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic_write(path) as file:
            file.write(data)
    except OSError as error:
        raise WriteError(_cannot_write(path, error, len(data))) from error


def copy_checkpoint(source: Path, target: Path) -> None:
    """As `write_checkpoint`, make `target` a copy of `source`."""
    try:
        with source.open("rb") as one, files.atomic_write(target) as file:
            shutil.copyfileobj(one, file)
    except OSError as error:
        size = os.path.getsize(source) if os.path.isfile(source) else None
        raise WriteError(_cannot_write(target, error, size)) from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Load a checkpoint that batchscope wrote, on the CPU; UserError if it is damaged or holds code."""
    if not os.path.isfile(path):
        raise UserError(f"ckpt: got '{path}', which is not a file")
    try:
        with path.open("rb") as file:
            verify(file, path)
            file.seek(0)
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except pickle.UnpicklingError as error:
        raise UserError(f"ckpt: {path} holds more than tensors and plain values and was not loaded") from error
    except Exception as error:  # of zipfile, torch and the system, about any bytes
        raise UserError(f"ckpt: {path} is damaged: {type(error).__name__}: {cut(str(error), 120)}") from error
    if not _is_ours(checkpoint):
        raise UserError(f"ckpt: {path} is not a checkpoint that batchscope wrote")
    return checkpoint


def verify(file: BinaryIO, path: Path, option: str = "ckpt") -> None:
    """Raise UserError unless the bytes of every file in the archive are those that were written."""
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, OSError) as error:  # its end is not there
        raise UserError(f"{option}: {path} is not a whole checkpoint ({path.stat().st_size:,} bytes)") from error
    if (damaged := archive.testzip()) is not None:
        raise UserError(f"{option}: {path} is damaged: the checksum of {damaged} in it does not match")


def _is_ours(checkpoint: Any) -> bool:
    """Whether a checkpoint holds weights, and says of what; resume_point.py checks what resuming takes beyond that."""
    if not isinstance(checkpoint, dict):
        return False
    weights, of = checkpoint.get("state_dict"), checkpoint.get("batchscope")
    return (
        isinstance(weights, dict)
        and all(isinstance(name, str) and is_weight(name, weight) for name, weight in weights.items())
        and isinstance(of, dict)
        and isinstance(name := of.get("name"), str)
        and name.isprintable()
        and isinstance(of.get("config"), dict)
    )


def is_weight(name: str, value: Any) -> bool:
    """Whether a value may be in a `state_dict`: a dense tensor, or a module's extra state, whose tensors are dense."""
    if isinstance(value, Tensor):
        return _is_dense(value)
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return name.endswith(_EXTRA_STATE) and all(map(_is_dense, leaves))


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is in memory, as all of a checkpoint's are: not sparse, quantized or meta."""
    return tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"


def makes_layers(module: LightningModule) -> bool:
    """Whether a module may make layers in a hook of its own, which Lightning calls before it loads weights."""
    hooks = (getattr(type(module), name) for name in ("setup", "configure_model"))
    return any(hook.__module__.partition(".")[0] not in ("lightning", "batchscope") for hook in hooks)


def _cannot_write(path: Path, error: OSError, size: int | None = None) -> str:
    needs = "" if size is None else f"needs {size:,} bytes and "
    kept = f"; the checkpoint before it is kept: {path}" if os.path.isfile(path) else ""
    return f"checkpoint: {path} {needs}cannot be written: {why(error)}{kept}"
