"""Checkpoint files: written whole or not at all, verified when they are read, and never a source of code.

A checkpoint is what `torch.save` writes, with a checksum as the comment that a zip archive may end with; so
`torch.load(path, weights_only=True)` reads it, and so does every zip program.
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

from .. import files
from ..errors import UserError
from ..files import NO_SPACE, WriteError

_MARK = b"batchscope blake2b "  # then the checksum in hexadecimal digits
_DIGITS = 64
_COMMENT = len(_MARK) + _DIGITS
_END_OF_ARCHIVE = b"PK\x05\x06"  # the last record of a zip archive: 22 bytes, then the comment (APPNOTE 4.3.16)


class AtomicCheckpointIO(CheckpointIO):
    """Has a Lightning trainer write and read its checkpoints by this file: `Trainer(plugins=[AtomicCheckpointIO()])`."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """As `write_checkpoint`."""
        write_checkpoint(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """As `load_checkpoint`: on the CPU, and without code, whatever is asked for."""
        return load_checkpoint(Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        """Delete the file, if it is there."""
        Path(path).unlink(missing_ok=True)


def write_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint atomically: at every moment either it or the one before it is at `path`, and whole.

    Raises:
        WriteError: if it cannot be written, with what is missing; the checkpoint before it is left as it was.
    """
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


def keep_as(source: Path, target: Path) -> None:
    """Let `target` be the checkpoint that `source` now is; a link where the file system has them, or a copy.

    Raises:
        WriteError: if it cannot be written; the checkpoint before it is left as it was.
    """
    try:
        if target.exists() and target.samefile(source):
            return
        temporary = files.temporary_name(target)
        try:
            os.link(source, temporary)
        except OSError:  # a file system without links
            with source.open("rb") as whole, files.atomic_write(target) as file:
                shutil.copyfileobj(whole, file)
        else:
            os.replace(temporary, target)
            files.sync_folder(target.parent)
    except OSError as error:
        raise WriteError(_cannot_write(target, _size(source), error)) from error


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of runs that were killed while they wrote a checkpoint."""
    files.remove_leftovers(folder, "*.ckpt")


def load_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint that batchscope wrote, on the CPU.

    Raises:
        UserError: if it is missing, not whole, holds anything but tensors and plain values, or is somebody else's.
    """
    if not path.is_file():
        near = sorted(path.parent.glob("*.ckpt")) if path.parent.is_dir() else []
        there = f"; in that folder: {', '.join(p.name for p in near)}" if near else ""
        own = next((p for p in (path / "checkpoints" / "best.ckpt", path / "best.ckpt") if p.is_file()), None)
        raise UserError(f"ckpt: got '{path}', which is not a file{f'; write ckpt={own}' if own else there}")
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
    return checkpoint


def _is_ours(checkpoint: Any) -> bool:
    """Whether it holds weights, and says what of; recovery/validate.py has what resuming takes beyond that."""
    if not isinstance(checkpoint, dict):
        return False
    weights, of = checkpoint.get("state_dict"), checkpoint.get("batchscope")
    return (
        isinstance(weights, dict)
        and all(isinstance(name, str) and is_dense(weight) for name, weight in weights.items())
        and isinstance(of, dict)
        and isinstance(of.get("name"), str)
        and isinstance(of.get("config"), dict)
        and isinstance(of.get("choices", {}), dict)
        and isinstance(of.get("fingerprint", ""), str)
    )


def is_dense(value: Any) -> bool:
    """Whether a value is a tensor of numbers in memory, as all of a checkpoint are: not sparse, quantized or empty."""
    return isinstance(value, torch.Tensor) and (value.layout, value.device.type, value.is_quantized) == (
        torch.strided,
        "cpu",
        False,
    )


def _verify(data: bytes, path: Path) -> None:
    """Raise UserError unless the bytes are those that were written."""
    end = data.rfind(_END_OF_ARCHIVE)
    declared = int.from_bytes(data[end + 20 : end + 22], "little")  # the length of the comment
    if not zipfile.is_zipfile(io.BytesIO(data)) or end + 22 + declared != len(data):
        raise UserError(f"ckpt: {path} is not a whole checkpoint ({len(data):,} bytes)")
    body, comment = memoryview(data)[:-_COMMENT], data[-_COMMENT:]
    if comment.startswith(_MARK):
        whole = _checksum(body).encode() == comment[len(_MARK) :]
    else:  # written by torch.save alone: the archive has a checksum of each of its files
        whole = zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    if not whole:
        raise UserError(f"ckpt: {path} is damaged: its bytes are not those that its checksum was taken of")


def _checksum(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=_DIGITS // 2).hexdigest()


def _cannot_write(path: Path, size: int, error: OSError) -> str:
    kept = f"; the checkpoint before it is kept: {path}" if os.path.isfile(path) else ""
    if error.errno in NO_SPACE:
        free = ""
        with contextlib.suppress(OSError):
            free = f" ({shutil.disk_usage(path.parent).free:,} free)"
        return f"checkpoint: {path} needs {size:,} bytes, and the disk takes no more{free}{kept}"
    return f"checkpoint: {path} ({size:,} bytes) cannot be written: {error.strerror or error}{kept}"


def _size(path: Path) -> int:
    return path.stat().st_size if os.path.isfile(path) else 0
