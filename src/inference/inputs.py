"""Inputs for predictions from a user's own files: a folder of images, or the array of an `.npz` file."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from ..data.spec import LENGTHS, DataSpec
from ..errors import UserError, in_one_line, printable

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"})
_MODES = {1: "L", 3: "RGB"}  # of Pillow, by the number of channels


def read_inputs(source: Path, spec: DataSpec, dtype: torch.dtype | None = None) -> tuple[Sequence[str], Dataset]:
    """The names and samples of a file or folder, as a network of one input for `spec` reads them.

    An item is `(x,)`, or `(x, length)` where sequences vary in length.

    `source` is a folder with images at any depth, one image, or an `.npz` file with an array `x: (N, *input_shape)`. Images
    and arrays of their bytes are scaled to [0, 1] and normalised as the training data, unless the network was trained on
    bytes, a `dtype` of uint8; of other arrays integers become int64, and floats float32. UserError if nothing is there, or
    a sample does not have the shape that the network reads.
    """
    refuse_input(source)
    if len(spec.inputs) > 1:
        raise UserError(
            f"input: got '{source}', and the network reads {', '.join(spec.inputs)}: takes test, val or predict"
        )
    if source.suffix == ".npz":
        return _of_array(source, spec, dtype)
    if spec.kind != "image":
        raise UserError(
            f"input: got '{source}', and the network reads {spec.kind} data: takes an .npz file with an array x"
        )
    files = [source]
    if source.is_dir():
        below = sorted(source.rglob("*"))
        files = [path for path in below if path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()]
        files = [path for path in files if not path.name.startswith("._")]  # what macOS writes beside a file
    if not files:
        raise UserError(f"input: no image below '{source}'; takes {', '.join(sorted(IMAGE_SUFFIXES))}")
    names = [str(file.relative_to(source)) if source.is_dir() else file.name for file in files]
    return names, _Images(files, spec, dtype)


def refuse_input(source: Path) -> None:
    """UserError for a file or folder that is not there."""
    if not os.path.exists(source):
        raise UserError(
            f"input: got '{source}', takes test, val, predict, a folder of images, an image or an .npz file"
        )


class _Images(Dataset):
    """Image files, of which each is read when it is asked for."""

    def __init__(self, files: Sequence[Path], spec: DataSpec, dtype: torch.dtype | None):
        self.files, self.spec, self.dtype = files, spec, dtype
        if spec.input_shape[0] not in _MODES:
            raise UserError(f"input: the network reads {spec.input_shape[0]} channels: takes an .npz file, not images")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor]:
        channels, height, width = self.spec.input_shape
        file = self.files[index]
        try:
            with Image.open(file) as opened:
                if opened.mode.startswith(("I", "F")):  # Pillow would cut their values off at 255
                    raise ValueError(f"its values are of mode {opened.mode}, takes 8 bits a channel")
                image = opened.convert(_MODES[channels])
        except Exception as error:  # any failure of a decoder on a damaged file
            why = f"input: '{file}' cannot be read as an image: {in_one_line(error, 120)}"
            raise UserError(printable(why)) from error
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        pixels = torch.from_numpy(np.asarray(image).reshape(height, width, channels).copy())
        return (_as_trained(pixels.permute(2, 0, 1), self.spec, self.dtype),)


def _as_trained(pixels: Tensor, spec: DataSpec, dtype: torch.dtype | None) -> Tensor:
    """Bytes `(…, C, H, W)` as the inputs of a network: floats, unless it was trained on bytes."""
    if dtype == torch.uint8:
        return pixels
    x = pixels.float() / 255
    if not spec.mean:
        return x
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (spec.mean, spec.std))
    return (x - mean) / std


def _of_array(source: Path, spec: DataSpec, dtype: torch.dtype | None) -> tuple[Sequence[str], Dataset]:
    try:
        with np.load(source, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in ("x", LENGTHS) if name in arrays}
    except Exception as error:  # any failure of a decoder on a damaged file
        raise UserError(f"input: '{source}' cannot be read: {in_one_line(error, 120)}") from error
    if "x" not in found:
        raise UserError(f"input: '{source}' has no array x")
    x, shape = found["x"], spec.input_shape
    if spec.variable_length and x.ndim > 1 and 0 < x.shape[1] < shape[0]:
        shape = (x.shape[1], *shape[1:])  # a sequence may have fewer steps
    if x.dtype.kind not in "fiu" or x.shape[1:] != shape or not len(x):
        takes = f"(N, {', '.join(map(str, spec.input_shape))})"
        raise UserError(f"input: x in '{source}' has values {x.dtype} of shape {x.shape}, takes numbers {takes}")
    if x.dtype == np.uint8 and spec.kind == "image":
        tensor = _as_trained(torch.from_numpy(x), spec, dtype)
    else:
        tensor = torch.from_numpy(x.astype(np.float32 if x.dtype.kind == "f" else np.int64))
    names = [str(i) for i in range(len(x))]
    if not spec.variable_length:
        return names, TensorDataset(tensor)
    lengths = found.get(LENGTHS, np.full(len(x), x.shape[1]))
    right = lengths.shape == (len(x),) and lengths.dtype.kind in "iu"
    if not right or lengths.min() < 1 or lengths.max() > x.shape[1]:
        raise UserError(f"input: lengths in '{source}' takes {len(x)} integers from 1 to {x.shape[1]}")
    return names, TensorDataset(tensor, torch.from_numpy(lengths.astype(np.int64)))
