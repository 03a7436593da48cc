"""Checkpoint files: written atomically, verified when they are read, and never a source of code.

A checkpoint is what `torch.save` writes: a zip archive with a checksum (CRC-32) of each file in it. So
`torch.load(path, weights_only=True)` and every zip program can read it.
"""

import contextlib
import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from typing_extensions import override

from .. import files
from ..errors import UserError, cut
from ..files import NO_SPACE, WriteError, why


class AtomicCheckpointIO(CheckpointIO):
    """Has a Lightning trainer write and read checkpoints by this module: `Trainer(plugins=[AtomicCheckpointIO()])`.

    Whatever Lightning asks for, checkpoints are loaded on the CPU, and no code in them runs.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_checkpoint(checkpoint, Path(path))

    @override
    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return load_checkpoint(Path(path))

    @override
    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


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
        raise WriteError(_cannot_write(path, len(data), error)) from error


def link_checkpoint(source: Path, target: Path) -> None:
    """Make `target` the checkpoint that `source` is now: a hard link, or a copy where the file system has no links.

    After a WriteError the checkpoint before it is as it was.
    """
    try:
        if target.exists() and target.samefile(source):
            return
        temporary = files.temporary_name(target)
        try:
            os.link(source, temporary)
        except OSError:
            with source.open("rb") as original, files.atomic_write(target) as file:
                shutil.copyfileobj(original, file)
        else:
            os.replace(temporary, target)
            files.sync_folder(target.parent)
    except OSError as error:
        size = source.stat().st_size if source.is_file() else 0
        raise WriteError(_cannot_write(target, size, error)) from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Load a checkpoint that batchscope wrote, on the CPU.

    Raises:
        UserError: if the file is missing or damaged, holds anything but tensors and plain values, or is no checkpoint of
            batchscope.
    """
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
    """Whether a checkpoint holds weights, and says of what; validate.py checks what resuming takes beyond that."""
    if not isinstance(checkpoint, dict):
        return False
    weights, of = checkpoint.get("state_dict"), checkpoint.get("batchscope")
    return (
        isinstance(weights, dict)
        and all(isinstance(name, str) and is_dense(weight) for name, weight in weights.items())
        and isinstance(of, dict)
        and isinstance(of.get("name"), str)
        and isinstance(of.get("config"), dict)
    )


def is_dense(value: Any) -> bool:
    """Whether a value is a dense tensor in memory, as all of a checkpoint's are: not sparse, quantized or meta."""
    is_plain = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized
    return is_plain and value.device.type == "cpu"


def complex_in_place_of_real(weights: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> str:
    """That a file has complex numbers for a real parameter, of which torch would drop the imaginary part; empty if not."""
    names = (
        name for name, weight in weights.items() if name in own and weight.is_complex() and not own[name].is_complex()
    )
    name = next(names, None)
    return "" if name is None else f"{name} is of {weights[name].dtype} there and of {own[name].dtype} here"


def _cannot_write(path: Path, size: int, error: OSError) -> str:
    kept = f"; the checkpoint before it is kept: {path}" if os.path.isfile(path) else ""
    free = ""
    if error.errno in NO_SPACE:
        with contextlib.suppress(OSError):
            free = f"; {shutil.disk_usage(path.parent).free:,} bytes are free"
    return f"checkpoint: {path} needs {size:,} bytes and cannot be written: {why(error)}{free}{kept}"
