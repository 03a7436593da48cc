"""Checkpoint files: written atomically, verified when they are read, and never a source of code.

A checkpoint is what `torch.save` writes, with a checksum as the zip archive's comment. So
`torch.load(path, weights_only=True)` and every zip program can read it.
"""

import contextlib
import hashlib
import io
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO
from typing_extensions import override

from .. import files
from ..errors import UserError
from ..files import NO_SPACE, WriteError, why

_MARK = b"batchscope blake2b "  # then the checksum in hexadecimal digits
_DIGITS = 64
_COMMENT = len(_MARK) + _DIGITS
_END_OF_ARCHIVE = b"PK\x05\x06"  # the last record of a zip archive: 22 bytes, then the comment (APPNOTE 4.3.16)
_PROVENANCE = {"name": str, "config": dict, "choices": dict, "fingerprint": str}  # under `batchscope`
_RENAMED = {"curves": "log_positions"}  # in an older checkpoint's `position`, which is `loop_state` now


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
    assert data[-22:-18] == _END_OF_ARCHIVE, "torch.save wrote a comment of its own"
    data[-2:] = _COMMENT.to_bytes(2, "little")  # the length of the comment is the archive's last field
    comment = _MARK + _checksum(data).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.atomic_write(path) as file:
            file.write(data)
            file.write(comment)
    except OSError as error:
        raise WriteError(_cannot_write(path, len(data) + len(comment), error)) from error


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
    if not path.is_file():
        raise UserError(f"ckpt: got '{path}', which is not a file")
    try:
        data = path.read_bytes()
        _verify(data, path)
        checkpoint = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except UserError:
        raise
    except pickle.UnpicklingError as error:
        raise UserError(f"ckpt: {path} holds more than tensors and plain values and was not loaded") from error
    except Exception as error:
        raise UserError(f"ckpt: {path} is damaged: {type(error).__name__}: {str(error)[:120]}") from error
    if not _is_ours(checkpoint):
        raise UserError(f"ckpt: {path} is not a checkpoint that batchscope wrote")
    if isinstance(old := checkpoint.pop("position", None), dict):
        checkpoint["loop_state"] = {_RENAMED.get(key, key): value for key, value in old.items()}
    return checkpoint


def _is_ours(checkpoint: Any) -> bool:
    """Whether a checkpoint holds weights and their provenance; validate.py checks what resuming takes beyond that."""
    if not isinstance(checkpoint, dict):
        return False
    weights, of = checkpoint.get("state_dict"), checkpoint.get("batchscope")
    return (
        isinstance(weights, dict)
        and all(isinstance(name, str) and is_dense(weight) for name, weight in weights.items())
        and isinstance(of, dict)
        and {"name", "config"} <= of.keys()
        and all(isinstance(of.get(key, kind()), kind) for key, kind in _PROVENANCE.items())
    )


def is_dense(value: Any) -> bool:
    """Whether a value is a dense tensor in memory, as all of a checkpoint's are: not sparse, quantized or meta."""
    is_plain = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized
    return is_plain and value.device.type == "cpu"


def _verify(data: bytes, path: Path) -> None:
    """Raise UserError unless the bytes are those that were written."""
    end = data.rfind(_END_OF_ARCHIVE)
    declared = int.from_bytes(data[end + 20 : end + 22], "little")  # the length of the comment
    if not zipfile.is_zipfile(io.BytesIO(data)) or end + 22 + declared != len(data):
        raise UserError(f"ckpt: {path} is not a whole checkpoint ({len(data):,} bytes)")
    body, comment = memoryview(data)[:-_COMMENT], data[-_COMMENT:]
    if comment.startswith(_MARK):
        intact = _checksum(body).encode() == comment[len(_MARK) :]
    else:  # written by torch.save alone: the archive has a checksum of each of its files
        intact = zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    if not intact:
        raise UserError(f"ckpt: {path} is damaged: its checksum does not match")


def _checksum(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=_DIGITS // 2).hexdigest()


def _cannot_write(path: Path, size: int, error: OSError) -> str:
    kept = f"; the checkpoint before it is kept: {path}" if os.path.isfile(path) else ""
    free = ""
    if error.errno in NO_SPACE:
        with contextlib.suppress(OSError):
            free = f"; {shutil.disk_usage(path.parent).free:,} bytes are free"
    return f"checkpoint: {path} needs {size:,} bytes and cannot be written: {why(error)}{free}{kept}"
