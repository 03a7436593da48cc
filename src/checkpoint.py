"""Reading a checkpoint safely: no code in it is ever run, and what is wrong with it is told in one line."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from .errors import UserError


def load_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint that batchscope wrote, on the CPU.

    Raises:
        UserError: if it is missing, not whole, holds anything but tensors and plain values, or is somebody else's.
    """
    if not path.is_file():
        near = sorted(path.parent.glob("*.ckpt")) if path.parent.is_dir() else []
        there = f"; in that folder: {', '.join(p.name for p in near)}" if near else ""
        raise UserError(f"ckpt: got '{path}', which is not a file{there}")
    if not zipfile.is_zipfile(path):
        raise UserError(f"ckpt: {path} is not a whole checkpoint ({path.stat().st_size:,} bytes)")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(f"ckpt: {path} holds more than tensors and plain values and was not loaded") from error
    except Exception as error:
        raise UserError(f"ckpt: {path} is damaged: {type(error).__name__}: {str(error)[:120]}") from error
    if not isinstance(checkpoint, dict) or not {"state_dict", "batchscope"} <= checkpoint.keys():
        raise UserError(f"ckpt: {path} is not a checkpoint that batchscope wrote")
    return checkpoint
