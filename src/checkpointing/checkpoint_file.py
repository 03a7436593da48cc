"""Checkpoint files: written atomically, verified when they are read, and never a source of code.

`torch.save` writes a checkpoint as a zip archive with a checksum (CRC-32) of each file in it.
`torch.load(path, weights_only=True)` and every zip program can read the archive.
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
_HYPERPARAMETER_TYPES = ("hparams_type", "datamodule_hparams_type")
_REFUSAL = "holds more than tensors and plain values"
_EXTRA_STATE = "_extra_state"  # torch's suffix for the key of a module's `get_extra_state()` in a `state_dict`


class AtomicCheckpointIO(CheckpointIO):
    """Has a Lightning trainer write and read checkpoints by this module: `Trainer(plugins=[AtomicCheckpointIO()])`.

    Whatever Lightning asks for, checkpoints are loaded on the CPU, and no code in them runs. A value that such a load would
    refuse is detected before a checkpoint is saved: a hyperparameter is left out with a warning, and any other value is a
    UserError, which keeps the previous checkpoint.
    """

    def __init__(self) -> None:
        self._skipped: set[str] = set()  # names of hyperparameters that a warning has named
        self.provenance: Callable[[], dict[str, Any]] | None = None  # returns a run's entry `batchscope`

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if self.provenance is not None:
            checkpoint["batchscope"] = self.provenance()
        # numpy's scalars come from schedules and hyperparameters. A state_dict has attributes that a copy would lose.
        entries = {
            name: entry if name == "state_dict" else tree_map_only(numpy.generic, lambda scalar: scalar.item(), entry)
            for name, entry in checkpoint.items()
            if name not in _HYPERPARAMETER_TYPES
        }
        for name, entry in entries.items():  # at every save: a callback's state may have changed
            if name in _HYPERPARAMETERS:
                entries[name] = {key: value for key, value in dict(entry).items() if _can_be_read(value)}
                if skipped := [key for key in entry if key not in entries[name] and key not in self._skipped]:
                    warn(f"checkpoints leave out the hyperparameters {', '.join(map(str, skipped))}: each {_REFUSAL}")
                self._skipped.update(skipped)
            elif name != "state_dict" and not _can_be_read(entry):
                raise UserError(f"checkpoint: its entry '{name}' could not be read back: it {_REFUSAL}")
        write_checkpoint(entries, Path(path))

    @override
    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return load_checkpoint(Path(path))

    @override
    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


def check_weights(weights: Mapping[str, Any]) -> None:
    """Raise UserError for the first value of a module's `state_dict` that could not be read back from a checkpoint."""
    for name, value in weights.items():
        try:
            is_materialized_later = is_lazy(value) or getattr(value, "is_meta", False)
            is_readable = is_materialized_later or is_weight(name, _saved_and_loaded(value))
        except Exception:  # noqa: BLE001 - of pickle and of anybody's class
            is_readable = False
        if not is_readable:
            problem = "could not be read back from a checkpoint, which holds dense tensors and plain values"
            raise UserError(f"model: '{name}' {problem}; register_buffer(…, persistent=False) leaves a buffer out")


def check_states(trainer: Trainer) -> None:
    """Raise UserError for the first optimizer, schedule or callback of a fit whose state could not be read back."""
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    for parts, section in ((trainer.optimizers, "model"), (schedules, "model"), (callbacks_of(trainer), "callbacks")):
        for part in parts:
            if not _can_be_read(part.state_dict()):
                problem = f"the state_dict of {type(part).__name__} could not be read back from a checkpoint"
                raise UserError(f"{section}: {problem}: it {_REFUSAL}; callbacks.checkpoint=null keeps no checkpoint")


def _saved_and_loaded(value: Any) -> Any:
    """Return what `torch.load(…, weights_only=True)` reads of a value that `torch.save` writes."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def _can_be_read(value: Any) -> bool:
    """Whether `_saved_and_loaded` accepts a value, apart from its tensors and numpy's scalars."""
    try:
        _saved_and_loaded(tree_map_only((Tensor, numpy.generic), lambda leaf: None, value))
    except Exception:  # noqa: BLE001 - of pickle and of anybody's class
        return False
    return True


def write_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint atomically; a WriteError leaves the previous checkpoint unchanged."""
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
    """Copy `source` to `target` atomically; a WriteError leaves a previous `target` unchanged."""
    try:
        with source.open("rb") as source_file, files.atomic_write(target) as target_file:
            shutil.copyfileobj(source_file, target_file)
    except OSError as error:
        size = os.path.getsize(source) if os.path.isfile(source) else None
        raise WriteError(_cannot_write(target, error, size)) from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Load a checkpoint that batchscope wrote, on the CPU; UserError if the file is damaged or holds code."""
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
    """Raise UserError unless every file in the archive has the checksum of what was written."""
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, OSError) as error:  # the end of the archive is missing
        raise UserError(f"{option}: {path} is not a whole checkpoint ({path.stat().st_size:,} bytes)") from error
    if (damaged := archive.testzip()) is not None:
        raise UserError(f"{option}: {path} is damaged: the checksum of {damaged} in it does not match")


def _is_ours(checkpoint: Any) -> bool:
    """Whether a checkpoint holds weights and their provenance; resume_point.py checks what a resume needs besides."""
    if not isinstance(checkpoint, dict):
        return False
    weights, provenance = checkpoint.get("state_dict"), checkpoint.get("batchscope")
    return (
        isinstance(weights, dict)
        and all(isinstance(name, str) and is_weight(name, weight) for name, weight in weights.items())
        and isinstance(provenance, dict)
        and isinstance(run_name := provenance.get("name"), str)
        and run_name.isprintable()
        and isinstance(provenance.get("config"), dict)
    )


def is_weight(name: str, value: Any) -> bool:
    """Whether a value may be in a `state_dict`: a dense tensor, or a module's extra state, whose tensors are dense."""
    if isinstance(value, Tensor):
        return _is_dense(value)
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return name.endswith(_EXTRA_STATE) and all(map(_is_dense, leaves))


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is dense and in host memory, as all tensors of a checkpoint are: not sparse, quantized or meta."""
    return tensor.layout == torch.strided and not tensor.is_quantized and tensor.device.type == "cpu"


def makes_layers(module: LightningModule) -> bool:
    """Whether a module overrides a hook that may make layers, which Lightning calls before it loads weights."""
    hooks = (getattr(type(module), name) for name in ("setup", "configure_model"))
    return any(hook.__module__.partition(".")[0] not in ("lightning", "batchscope") for hook in hooks)


def _cannot_write(path: Path, error: OSError, size: int | None = None) -> str:
    size_words = "" if size is None else f"needs {size:,} bytes and "
    kept_words = f"; the checkpoint before it is kept: {path}" if os.path.isfile(path) else ""
    return f"checkpoint: {path} {size_words}cannot be written: {why(error)}{kept_words}"
